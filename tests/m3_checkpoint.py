"""A tiny random MiniMax-M3 with the released names on disk, and its forward in torch at the CPU rounding points."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from kernels import msa

LIMIT, ALPHA, BETA, EPS, SCALE = 7.0, 1.702, 1.0, 1e-6, 2.0


@dataclass(frozen=True)
class Sizes:
    """Layer 0 is dense; the others have sparse attention and experts."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    rotary: int = 64
    experts: int = 16
    top_k: int = 2
    inner: int = 192
    dense: int = 512
    vocabulary: int = 640
    blocks: int = 2
    init_blocks: int = 0

    def config(self) -> dict:
        sparse = [0] + [1] * (self.layers - 1)
        return {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "model_type": "minimax_m3_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "shared_intermediate_size": self.inner,
            "dense_intermediate_size": self.dense,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary,
            "partial_rotary_factor": self.rotary / self.head_dim,
            "rope_theta": 5000000,
            "max_position_embeddings": 4096,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "n_shared_experts": 1,
            "routed_scaling_factor": SCALE,
            "num_mtp_modules": 0,
            "moe_layer_freq": sparse,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_index_dim": self.head_dim,
                "sparse_num_index_heads": self.kv_heads,
                "sparse_topk_blocks": self.blocks,
                "sparse_block_size": msa.BLOCK_SIZE,
                "sparse_disable_index_value": sparse,
                "sparse_score_type": "max",
                "sparse_init_block": self.init_blocks,
                "sparse_local_block": 1,
                "sparse_attention_freq": sparse,
            },
            "eos_token_id": None,
            "bos_token_id": None,
        }

    def linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of every linear of a layer that an adapter may target, under its wire name."""
        path, h, d = f"model.layers.{layer}", self.hidden, self.head_dim
        shapes = {
            f"{path}.self_attn.q_proj": (self.heads * d, h),
            f"{path}.self_attn.k_proj": (self.kv_heads * d, h),
            f"{path}.self_attn.v_proj": (self.kv_heads * d, h),
            f"{path}.self_attn.o_proj": (h, self.heads * d),
        }
        if layer:
            shapes[f"{path}.self_attn.index_q_proj"] = (self.kv_heads * d, h)
            shapes[f"{path}.self_attn.index_k_proj"] = (d, h)
        moe = f"{path}.block_sparse_moe"
        owners = [moe + ".shared_experts", *(f"{moe}.experts.{e}" for e in range(self.experts))]
        for owner in owners if layer else [f"{path}.mlp"]:
            inner = self.inner if layer else self.dense
            shapes |= {
                f"{owner}.gate_proj": (inner, h),
                f"{owner}.up_proj": (inner, h),
                f"{owner}.down_proj": (h, inner),
            }
        return shapes


DISK = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def weights(sizes: Sizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under the names of the adapter's wire (experts as gate_proj, up_proj, down_proj)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    out = {
        "model.embed_tokens.weight": normal(sizes.vocabulary, sizes.hidden, std=1.0),
        "lm_head.weight": normal(sizes.vocabulary, sizes.hidden, std=0.03),
        "model.norm.weight": normal(sizes.hidden, std=0.1),
    }
    for layer in range(sizes.layers):
        path = f"model.layers.{layer}"
        for name, (rows, columns) in sizes.linears(layer).items():
            out[f"{name}.weight"] = normal(rows, columns, std=columns**-0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{path}.{norm}.weight"] = normal(sizes.hidden, std=0.1)
        for norm in ("q_norm", "k_norm", *(("index_q_norm", "index_k_norm") if layer else ())):
            out[f"{path}.self_attn.{norm}.weight"] = normal(sizes.head_dim, std=0.1)
        if layer:
            moe = f"{path}.block_sparse_moe"
            out[f"{moe}.gate.weight"] = normal(sizes.experts, sizes.hidden, std=0.15, dtype=torch.float32)
            out[f"{moe}.e_score_correction_bias"] = normal(sizes.experts, std=0.05, dtype=torch.float32)
    return out


def disk_name(name: str) -> str:
    """The released name of a tensor: routed experts are w1, w2 and w3."""
    if ".block_sparse_moe.experts." not in name:
        return name
    parent, part, leaf = name.rsplit(".", 2)
    return f"{parent}.{DISK[part]}.{leaf}"


def stacked(tensors: dict[str, torch.Tensor], leaf: str) -> dict[str, torch.Tensor]:
    """`tensors` with the experts of a layer as one tensor "experts.PART" + leaf, as fingerprints name them."""
    plain = {name: tensor for name, tensor in tensors.items() if ".block_sparse_moe.experts." not in name}
    groups: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name not in plain and name.endswith(leaf):
            path, _, part = name.removesuffix(leaf).rpartition(".")
            groups.setdefault(f"{path.rpartition('.')[0]}.{part}{leaf}", []).append(tensor)
    return plain | {name: torch.stack(group) for name, group in groups.items()}


def save(folder: Path, sizes: Sizes, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(sizes.config()))
    save_file({disk_name(name): t for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def adapter(sizes: Sizes, rank: int = 8, std: float = 0.05, seed: int = 1, keep: str = "") -> dict[str, torch.Tensor]:
    """Random factors "NAME.lora_A" [rank, in] and "NAME.lora_B" [out, rank] of every linear whose name has `keep`."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for layer in range(sizes.layers):
        for name, (rows, columns) in sizes.linears(layer).items():
            a = torch.randn(rank, columns, generator=generator) * columns**-0.5
            b = torch.randn(rows, rank, generator=generator) * std
            if keep in name:
                out[f"{name}.lora_A"], out[f"{name}.lora_B"] = a.bfloat16(), b.bfloat16()
    return out


def wire(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names that vLLM loads an adapter from."""
    return {f"base_model.model.{name}.weight": tensor for name, tensor in factors.items()}


# ---- the forward ---------------------------------------------------------------------------------------------------


class Reference:
    """One sequence at a time; every intermediate that the engine keeps in bf16 is rounded there and nowhere else."""

    def __init__(self, sizes: Sizes, tensors: dict[str, torch.Tensor], factors: dict[str, torch.Tensor] | None = None):
        self.sizes, self.tensors, self.factors = sizes, tensors, factors or {}
        inverse = 5000000 ** -(torch.arange(0, sizes.rotary, 2).float() / sizes.rotary)
        angles = torch.arange(4096).float().unsqueeze(1) * inverse
        self.cos, self.sin = (f.bfloat16().float().unsqueeze(1) for f in (angles.cos(), angles.sin()))
        self.blocks: list[torch.Tensor] = []
        self.routes: list[torch.Tensor] = []
        self.replay: dict[str, list[torch.Tensor]] = {}

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """bf16(x W^T), plus bf16(bf16(x A^T) B^T) where the adapter has the module, rounded again."""
        y = (x.float() @ self.tensors[f"{name}.weight"].float().T).bfloat16()
        if f"{name}.lora_A" in self.factors:
            a, b = self.factors[f"{name}.lora_A"], self.factors[f"{name}.lora_B"]
            y = y + ((x.float() @ a.float().T).bfloat16().float() @ b.float().T).bfloat16()
        return y

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """float32 x -> float32 x / rms(x) * (1 + w)."""
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * (1 + self.tensors[f"{name}.weight"].float())

    def head(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """bf16 [T, H * D] -> normalised and rotated, [T, H, D], rounded once."""
        x = self.norm(x.float().unflatten(-1, (-1, self.sizes.head_dim)), name)
        half, cos, sin = self.sizes.rotary // 2, self.cos[: len(x)], self.sin[: len(x)]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).bfloat16()

    def attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        path, sizes = f"model.layers.{layer}.self_attn", self.sizes
        q = self.head(self.linear(x, f"{path}.q_proj"), f"{path}.q_norm")
        k = self.head(self.linear(x, f"{path}.k_proj"), f"{path}.k_norm")
        v = self.linear(x, f"{path}.v_proj").unflatten(-1, (-1, sizes.head_dim))
        positions = torch.arange(len(x))
        if layer:
            index_q = self.head(self.linear(x, f"{path}.index_q_proj"), f"{path}.index_q_norm")
            index_k = self.head(self.linear(x, f"{path}.index_k_proj"), f"{path}.index_k_norm")[:, 0]
            scores = msa.index_scores(index_q, index_k, positions)
            blocks = msa.select_blocks(scores, positions, top_k=sizes.blocks, init_blocks=sizes.init_blocks)
            self.blocks.append(blocks)
            blocks = self.replay["blocks"][layer - 1] if self.replay else blocks
        else:
            blocks = torch.arange(-(-len(x) // msa.BLOCK_SIZE)).expand(len(x), sizes.kv_heads, -1)
        out = msa.sparse_attention(q, k, v, blocks, positions, sizes.head_dim**-0.5)[0]
        return self.linear(out.flatten(1), f"{path}.o_proj")

    def mlp(self, x: torch.Tensor, path: str) -> torch.Tensor:
        gate = self.linear(x, f"{path}.gate_proj").float().clamp(max=LIMIT)
        up = self.linear(x, f"{path}.up_proj").float().clamp(-LIMIT, LIMIT)
        gated = (gate * torch.sigmoid(ALPHA * gate)).bfloat16().float()
        return self.linear((gated * (up + BETA)).bfloat16(), f"{path}.down_proj")

    def moe(self, x: torch.Tensor, path: str) -> torch.Tensor:
        scores = (x.float() @ self.tensors[f"{path}.gate.weight"].T).sigmoid()
        ids = (scores + self.tensors[f"{path}.e_score_correction_bias"]).topk(self.sizes.top_k, dim=-1).indices
        self.routes.append(ids)
        ids = self.replay["routes"][len(self.routes) - 1] if self.replay else ids
        gates = scores.gather(-1, ids)
        gates = gates / gates.sum(-1, keepdim=True) * SCALE
        routed = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            out = self.mlp(x[rows], f"{path}.experts.{expert}").float()
            routed.index_add_(0, rows, out * gates[rows, slots].unsqueeze(1))
        return routed.bfloat16() + self.mlp(x, f"{path}.shared_experts")

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 [T, V]; afterwards `blocks` and `routes` hold a tensor a sparse layer."""
        self.blocks, self.routes = [], []
        residual = self.tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        total = residual.float()
        for layer in range(self.sizes.layers):
            path = f"model.layers.{layer}"
            out = self.attention(self.norm(total, f"{path}.input_layernorm").bfloat16(), layer)
            total = out.float() + residual.float()
            residual = total.bfloat16()
            x = self.norm(total, f"{path}.post_attention_layernorm").bfloat16()
            out = self.moe(x, f"{path}.block_sparse_moe") if layer else self.mlp(x, f"{path}.mlp")
            total = out.float() + residual.float()
            residual = total.bfloat16()
        return self.linear(self.norm(total, "model.norm").bfloat16(), "lm_head").float()

    def score(self, ids: list[int], blocks=None, routes=None) -> torch.Tensor:
        """Log-probs of ids[1:], float32; with the engine's own choices, [T, layers, ...] each, where given."""
        if blocks is not None:
            choices = {"blocks": torch.as_tensor(blocks), "routes": torch.as_tensor(routes)[:, 1:].long()}
            self.replay = {name: list(choice.unbind(1)) for name, choice in choices.items()}
        logprobs = self.logits(ids).log_softmax(-1)
        self.replay = {}
        return logprobs[:-1].gather(-1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
