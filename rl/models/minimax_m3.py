"""MiniMax-M3 (text): sigmoid-routed experts with a shared one, and block-sparse attention (MSA) chosen by an indexer.

Registered with transformers as `minimax_m3_text` (importing this module does it), since transformers 5.10 lacks it and
later releases round elsewhere than the engine. Modules have the released checkpoint's names; experts are stacked as
transformers' experts interface wants them. The rounding points are vLLM's (docs/numerics.md): norm and rotary
embedding of q, k and the index branch in float32 with one rounding; the residual sum rounded to be kept, and normalised
unrounded; router in float32; the gated activation rounded twice. For training and scoring: there is no KV cache.

Shape suffixes: B rows, T tokens of a row, H hidden, D head dimension, Hq/Hkv/Hi query, key/value and index heads, E
experts, I intermediate.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from kernels import msa
from rl.block_replay import BlockReplay
from rl.models.minimax_m3_config import MODEL_TYPE, MiniMaxM3Config
from rl.sequences import Place, sequences_of
from rl.shared_prompts import SharedRows


def norm_float32(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Gemma RMSNorm of float32 `x` over its last dimension, unrounded: x / rms * (1 + weight)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())


class GemmaNorm(nn.Module):
    """RMSNorm with weight 1 + `weight`; `residual` as FlashInfer's fused kernel takes it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, that sum), each rounded once; the norm is of the sum before it was rounded."""
        total = x.float() if residual is None else x.float() + residual.float()
        kept = x if residual is None else total.to(x.dtype)
        return norm_float32(total, self.weight, self.eps).to(x.dtype), kept


def norm_and_rotate(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rotary: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Per-head norm, then rotation of the first dimensions (NeoX halves), in float32 with one rounding.

    x [B, T, heads, D]; `rotary`: cos and sin, float32 [B, T, 1, rotary_dim / 2].
    """
    cos, sin = rotary
    y = norm_float32(x.float(), weight, eps)
    first, second, rest = y.split((cos.shape[-1], cos.shape[-1], y.shape[-1] - 2 * cos.shape[-1]), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1).to(x.dtype)


def swigluoai(gate_up: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    """[..., 2I] ([gate; up] halves) -> [..., I]: round(g * sigmoid(alpha g)), times (up + beta), rounded again."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    glu = (gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)
    return (glu.float() * (up + beta)).to(gate_up.dtype)


class MiniMaxM3MLP(nn.Module):
    """Dense layers' MLP and the shared expert."""

    def __init__(self, config: MiniMaxM3Config, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.constants = (config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = torch.cat((self.gate_proj(x), self.up_proj(x)), -1)
        return self.down_proj(swigluoai(gate_up, *self.constants))


class MiniMaxM3Experts(nn.Module):
    """Stacked experts `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]; quant.modules replaces this for training."""

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.constants = (config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return swigluoai(gate_up, *self.constants)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], ids and float32 weights [T, K] -> [T, H]: rows sorted by expert, one product an expert."""
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.gate_up_proj.shape[0]).tolist()
        parts = [
            F.linear(self._apply_gate(F.linear(rows, self.gate_up_proj[expert])), self.down_proj[expert])
            for expert, rows in enumerate(hidden[order // ids.shape[1]].split(counts))
        ]
        out = torch.cat(parts)[order.argsort()].view(*ids.shape, -1)
        return (out.float() * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


class MiniMaxM3TopKRouter(nn.Module):
    """Sigmoid scores in float32; the bias moves the choice only; weights renormalised, times the routed scale."""

    scoring_func = "sigmoid"

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size, dtype=torch.float32))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_local_experts, dtype=torch.float32))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden [T, H] -> float32 logits [T, E], weights [T, K], ids [T, K]."""
        logits = F.linear(hidden.float(), self.weight.float())
        scores = logits.sigmoid()
        ids = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        return logits, weights / weights.sum(-1, keepdim=True) * self.routed_scaling_factor, ids


class MiniMaxM3SparseMoeBlock(nn.Module):
    """Routed experts plus the shared one, each rounded before they are added."""

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        self.gate = MiniMaxM3TopKRouter(config)
        self.experts = MiniMaxM3Experts(config)
        self.shared_experts = MiniMaxM3MLP(config, config.shared_intermediate_size * config.n_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        _, weights, ids = self.gate(rows)
        return (self.shared_experts(rows) + self.experts(rows, ids, weights)).view_as(x)


class MiniMaxM3Attention(nn.Module):
    """Causal attention over everything, or over the blocks that the indexer chooses for each key/value head."""

    def __init__(self, config: MiniMaxM3Config, layer: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.layer, self.head_dim, self.eps = layer, dim, config.rms_norm_eps
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = GemmaNorm(dim, self.eps), GemmaNorm(dim, self.eps)
        self.selection = config.selection if layer in config.sparse_layers else None
        self.block_replay: BlockReplay | None = None
        self.index_loss_weight, self.index_loss_dense = 0.0, False
        self.index_losses: dict[int | None, torch.Tensor] = {}  # a sequence each; recomputation writes it again
        if self.selection is not None:
            index_dim = config.sparse_attention_config["sparse_index_dim"]
            self.index_dim, self.index_heads = index_dim, config.num_key_value_heads
            self.index_q_proj = nn.Linear(hidden, config.num_key_value_heads * index_dim, bias=False)
            self.index_k_proj = nn.Linear(hidden, index_dim, bias=False)
            self.index_q_norm, self.index_k_norm = GemmaNorm(index_dim, self.eps), GemmaNorm(index_dim, self.eps)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], sequences: list[Place]
    ) -> torch.Tensor:
        """x [B, T, H]; `sequences`: where they are in it. Padding gets zeros."""
        q, k = (
            norm_and_rotate(project(x).unflatten(-1, (-1, self.head_dim)), norm.weight, self.eps, rotary)
            for project, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm))
        )
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        index = None if self.selection is None else self._index(x, rotary)
        whole_rows = len(sequences) == x.shape[0] and all(
            place.before is None and place.own.stop - place.own.start == x.shape[1] for place in sequences
        )
        if whole_rows and self._is_dense(x.shape[1]):
            out = self._attend(q, k, v, index, None)
        else:
            out = torch.zeros_like(q)
            for number, place in enumerate(sequences):
                part = None if index is None else (place.queries(index[0]), place.keys(index[1]))
                out[place.row, place.own] = self._attend(place.queries(q), place.keys(k), place.keys(v), part, number)
        return self.o_proj(out.flatten(-2))

    def _is_dense(self, length: int) -> bool:
        """Whether every block of a sequence is selected, and nobody wants to know which."""
        if self.selection is None:
            return True
        watched = self.block_replay is not None and self.block_replay.active
        return length <= self.selection.top_k * self.selection.block_size and not watched

    def _index(self, x: torch.Tensor, rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [B, T, Hi, D] and keys [B, T, D]; the indexer's loss does not reach the hidden states."""
        x = x.detach()
        q = self.index_q_proj(x).unflatten(-1, (-1, self.index_dim))
        k = self.index_k_proj(x).unsqueeze(-2)
        q = norm_and_rotate(q, self.index_q_norm.weight, self.eps, rotary)
        return q, norm_and_rotate(k, self.index_k_norm.weight, self.eps, rotary).squeeze(-2)

    def _attend(self, q, k, v, index, number: int | None) -> torch.Tensor:
        """Of sequence `number` (or of its end), or of a batch of which no block is dropped (None)."""
        scale = self.head_dim**-0.5
        if self.selection is None:
            return msa.attend(q, k, v, None, scale)
        blocks, size = None, self.selection.block_size
        if number is not None:
            positions = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)
            blocks, margin = self.selection.choose(*index, positions)
            if self.block_replay is not None:
                if self.block_replay.active and q.shape[0] != k.shape[0]:
                    raise ValueError("blocks are recorded and replayed of whole sequences, without shared prompts")
                blocks = self.block_replay.choose(self.layer, number, blocks, margin)
        out = msa.attend(q, k, v, blocks, scale, size)
        if self.index_loss_weight and self.training:
            over = None if self.index_loss_dense else blocks
            loss = msa.index_loss(*index, q, k, over, scale, self.index_dim**-0.5, size)
            self.index_losses[number] = loss.detach()
            out = msa.AddLoss.apply(out, self.index_loss_weight * loss)
        return out


class MiniMaxM3DecoderLayer(GradientCheckpointingLayer):
    """One layer; takes and gives (output of the last sublayer, residual), as the engine's fused norms do."""

    def __init__(self, config: MiniMaxM3Config, layer: int) -> None:
        super().__init__()
        self.self_attn = MiniMaxM3Attention(config, layer)
        if config.moe_layer_freq[layer]:
            self.block_sparse_moe = MiniMaxM3SparseMoeBlock(config)
        else:
            self.mlp = MiniMaxM3MLP(config, config.dense_intermediate_size)
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden, residual, rotary, sequences) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, rotary, sequences)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        feed_forward = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return feed_forward(hidden), residual


class MiniMaxM3PreTrainedModel(PreTrainedModel):
    """What transformers wants to know."""

    config_class = MiniMaxM3Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MiniMaxM3DecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    # The whole router, whose module is `gate`; gate_proj is another word.
    _keep_in_fp32_modules_strict = ["block_sparse_moe.gate.weight"]
    _keys_to_ignore_on_load_unexpected = [
        r"(^|\.)mtp\..*",
        r"^vision_tower\.",
        r"^multi_modal_projector\.",
        r"^patch_merge_mlp\.",
    ]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, MiniMaxM3Experts):
            nn.init.normal_(module.gate_up_proj, std=std)
            nn.init.normal_(module.down_proj, std=std)
        elif isinstance(module, MiniMaxM3TopKRouter):
            nn.init.normal_(module.weight, std=std)
            nn.init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, GemmaNorm):
            nn.init.zeros_(module.weight)


class MiniMaxM3Model(MiniMaxM3PreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MiniMaxM3DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, shared: SharedRows | None = None, **_kwargs
    ) -> BaseModelOutputWithPast:
        """With `shared` the input is [1, N] in its layout, and the hidden states are those of its rows [B, T]."""
        hidden, residual = self.embed_tokens(input_ids), None
        if shared is None:
            sequences, positions = sequences_of(input_ids, attention_mask, position_ids)
        else:
            sequences, positions = shared.parts, shared.positions[None]
        rotary = self._rotary(positions, hidden.dtype)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotary, sequences)
        hidden = self.norm(hidden, residual)[0]
        return BaseModelOutputWithPast(last_hidden_state=hidden if shared is None else shared.spread(hidden))

    @torch.no_grad()
    def _rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [B, T, 1, rotary_dim / 2]: the engine's table, which has the model's dtype, as float32."""
        half = torch.arange(0, self.config.rotary_dim, 2, dtype=torch.float, device=positions.device)
        frequencies = 1.0 / (self.config.rope_theta ** (half / self.config.rotary_dim))
        angles = positions.float().unsqueeze(-1) * frequencies
        return tuple(table.to(dtype).float().unsqueeze(-2) for table in (angles.cos(), angles.sin()))


class MiniMaxM3SparseForCausalLM(MiniMaxM3PreTrainedModel):
    """The language model; `logits_to_keep` > 0 keeps that many of each row's last positions."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__(config)
        self.model = MiniMaxM3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        logits_to_keep: int = 0,
        use_cache=False,
        shared: SharedRows | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        if use_cache or kwargs.get("past_key_values") is not None or kwargs.get("inputs_embeds") is not None:
            raise ValueError(f"{MODEL_TYPE} is for training and scoring: it has no KV cache and takes token ids only")
        hidden = self.model(input_ids, attention_mask, position_ids, shared).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, -logits_to_keep:]))


def train_indexer(model: nn.Module, weight: float, dense: bool = False) -> None:
    """Add `weight` times the indexer's loss (`msa.index_loss`, a sum over tokens and heads) to every backward pass.

    `dense`: over all visible keys instead of those of the selected blocks, to warm up an untrained indexer. 0 ends it.
    """
    for module in model.modules():
        if isinstance(module, MiniMaxM3Attention):
            module.index_loss_weight, module.index_loss_dense, module.index_losses = weight, dense, {}


def index_losses(model: nn.Module) -> list[torch.Tensor]:
    """The indexer's losses (sums over tokens and heads) of every layer and sequence since `train_indexer`."""
    layers = [module for module in model.modules() if isinstance(module, MiniMaxM3Attention)]
    return [loss for layer in layers for loss in layer.index_losses.values()]


CONVERSIONS = [
    WeightRenaming(r"block_sparse_moe\.e_score_correction_bias", "block_sparse_moe.gate.e_score_correction_bias"),
    WeightConverter(
        source_patterns=[r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
        target_patterns=r"\.experts.gate_up_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
    ),
    WeightConverter(
        source_patterns=r"\.experts.*.w2.weight",
        target_patterns=r"\.experts.down_proj",
        operations=[MergeModulelist(dim=0)],
    ),
]
"""Released names -> module names, for loading, and backwards for saving."""

register_checkpoint_conversion_mapping(MODEL_TYPE, CONVERSIONS, overwrite=True)
AutoConfig.register(MODEL_TYPE, MiniMaxM3Config, exist_ok=True)
AutoModelForCausalLM.register(MiniMaxM3Config, MiniMaxM3SparseForCausalLM, exist_ok=True)
