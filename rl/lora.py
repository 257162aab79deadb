"""LoRA over a frozen base: attention and MLP projections and routed experts, in the engine's order of roundings.

The delta of a linear layer is bf16(bf16(x A^T) (s B)^T), added to the rounded output of the base, which is what vLLM
computes with s = alpha / rank folded into B. Experts have an A and a B each; their deltas enter before the activation
and after the down projection (`quant.modules.ExpertDelta`). Masters are float32; FSDP2 casts them to bfloat16 for the
forward. Legend: r rank, E experts, H hidden, I intermediate, S rows sorted by expert.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from kernels.linear import grouped_linear, linear
from quant.experts import RoutedExperts, Routes
from quant.layers import QuantLinear

TARGET_GROUPS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "dense_mlp": ("gate_proj", "up_proj", "down_proj"),
    "shared_experts": ("gate_proj", "up_proj", "down_proj"),
    "index": ("index_q_proj", "index_k_proj"),
}
PEFT_PREFIX = "base_model.model."
# transformers renamed modules of these models; vLLM keeps the checkpoint's names. Ours -> the engine's.
ENGINE_PATHS = {
    "mixtral": {".mlp.": ".block_sparse_moe."},
    "minimax_m3_text": {".gate.e_score_correction_bias": ".e_score_correction_bias"},
}


class AdapterError(ValueError):
    """An adapter does not fit the model or the recipe; the message names the file or module and the remedy."""


@dataclass(frozen=True)
class LoRASpec:
    """What the recipe says of the adapter: `rank`, `alpha`, `targets` (groups or module names), `share_gate_up_a`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    share_gate_up_a: bool = True
    seed: int = 0

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


class LoRALinear(nn.Module):
    """y = base(x) + bf16(bf16(x A^T) (s B)^T); `lora_A` [r, in] and `lora_B` [out, r] float32, B zero at first."""

    def __init__(self, base: nn.Module, spec: LoRASpec, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer = base
        self.scaling = spec.scaling
        self.dropout = spec.dropout
        self.enabled = True
        self.lora_A = nn.Parameter(_uniform((spec.rank, base.in_features), base.in_features, generator))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, spec.rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        if not self.enabled:
            return y
        x = nn.functional.dropout(x, self.dropout, self.training)
        return y + linear(linear(x, self.lora_A.to(x.dtype)), _scaled(self.lora_B, self.scaling, x.dtype))

    def engine_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Canonical name -> tensor as the engine holds it: bf16 A, and bf16 B with the scaling folded in."""
        return {
            f"{name}.lora_A": whole(self.lora_A).bfloat16(),
            f"{name}.lora_B": _scaled(whole(self.lora_B), self.scaling, torch.bfloat16),
        }


class LoRAExperts(nn.Module):
    """Per-expert adapters, an `ExpertDelta`.

    `gate_up_A` [E, 1 or 2, r, H] (1: gate and up share A), `gate_up_B` [E, 2, I, r], `down_A` [E, r, I],
    `down_B` [E, H, r]; float32.
    """

    def __init__(self, experts: RoutedExperts, spec: LoRASpec, generator: torch.Generator) -> None:
        super().__init__()
        count, hidden, inner, rank = experts.num_experts, experts.hidden_dim, experts.intermediate_dim, spec.rank
        self.scaling = spec.scaling
        slices = 1 if spec.share_gate_up_a else 2
        self.gate_up_A = nn.Parameter(_uniform((count, slices, rank, hidden), hidden, generator))
        self.gate_up_B = nn.Parameter(torch.zeros(count, 2, inner, rank))
        self.down_A = nn.Parameter(_uniform((count, rank, inner), inner, generator))
        self.down_B = nn.Parameter(torch.zeros(count, hidden, rank))

    def gate_up_delta(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[S, H] -> [S, 2I]."""
        b = _scaled(self.gate_up_B, self.scaling, rows.dtype)
        a = self.gate_up_A.to(rows.dtype)
        down = [grouped_linear(rows, a[:, i], routes.offsets) for i in range(a.shape[1])]
        return torch.cat([grouped_linear(down[min(i, len(down) - 1)], b[:, i], routes.offsets) for i in (0, 1)], dim=-1)

    def down_delta(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[S, I] -> [S, H]."""
        down = grouped_linear(rows, self.down_A.to(rows.dtype), routes.offsets)
        return grouped_linear(down, _scaled(self.down_B, self.scaling, rows.dtype), routes.offsets)

    def engine_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Canonical name -> stacked tensor [E, ...] as the engine holds it, gate and up apart."""
        a, b = whole(self.gate_up_A).bfloat16(), _scaled(whole(self.gate_up_B), self.scaling, torch.bfloat16)
        return {
            f"{name}.gate_proj.lora_A": a[:, 0],
            f"{name}.gate_proj.lora_B": b[:, 0],
            f"{name}.up_proj.lora_A": a[:, -1],
            f"{name}.up_proj.lora_B": b[:, 1],
            f"{name}.down_proj.lora_A": whole(self.down_A).bfloat16(),
            f"{name}.down_proj.lora_B": _scaled(whole(self.down_B), self.scaling, torch.bfloat16),
        }


def _uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> torch.Tensor:
    """kaiming_uniform(a=sqrt(5)), PEFT's initialisation of A: uniform in +-1/sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _scaled(b: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """B in `dtype`, then times the scaling in `dtype`: vLLM casts B to bf16 and folds the scaling in afterwards."""
    b = b.to(dtype)
    return b if scaling == 1.0 else b * scaling


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """The whole tensor of an FSDP2 shard (collective), detached."""
    tensor = parameter.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _wanted(name: str, targets: tuple[str, ...]) -> bool:
    """Whether the linear module `name` is a target: by its own name, or by a group that its path belongs to."""
    leaf = name.rpartition(".")[2]
    if leaf in targets:
        return True
    in_shared = "shared_expert" in name
    in_attention = ".self_attn." in name
    return any(
        leaf in TARGET_GROUPS[group]
        and {"attention": in_attention, "index": in_attention, "shared_experts": in_shared}.get(
            group, not in_shared and not in_attention
        )
        for group in targets
        if group in TARGET_GROUPS
    )


def inject(model: nn.Module, spec: LoRASpec) -> list[str]:
    """Wrap the target modules of `model` in place, in module order; returns their names.

    Raises:
        AdapterError: a target matches nothing in the model, or experts are to have dropout.
    """
    if spec.dropout and "experts" in spec.targets:
        raise AdapterError(
            f"model.lora_dropout = {spec.dropout}: adapters of experts have no dropout (nor in PEFT); set it to 0"
        )
    generator = torch.Generator().manual_seed(spec.seed)
    adapted: list[str] = []
    for name, module in list(model.named_modules()):
        if isinstance(module, RoutedExperts) and "experts" in spec.targets:
            module.adapter = LoRAExperts(module, spec, generator)
            adapted.append(name)
        elif isinstance(module, QuantLinear | nn.Linear) and _wanted(name, spec.targets):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, LoRALinear(module, spec, generator))
            adapted.append(name)
    for target in spec.targets:
        if not any(_wanted(name, (target,)) or (target == "experts" and name.endswith("experts")) for name in adapted):
            raise AdapterError(f"model.lora_targets: {target!r} matches no module of {type(model).__name__}")
    return adapted


def adapters(model: nn.Module) -> dict[str, "LoRALinear | LoRAExperts"]:
    """Name of each adapted module of the base -> its adapter."""
    found: dict[str, LoRALinear | LoRAExperts] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            found[name] = module
        elif isinstance(module, RoutedExperts) and module.adapter is not None:
            found[name] = module.adapter
    return found


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Within it the model is its base alone (the reference of a KL penalty)."""
    linears = [module for module in model.modules() if isinstance(module, LoRALinear)]
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    kept = [module.adapter for module in experts]
    try:
        for module in linears:
            module.enabled = False
        for module in experts:
            module.adapter = None
        yield
    finally:
        for module in linears:
            module.enabled = True
        for module, adapter in zip(experts, kept, strict=True):
            module.adapter = adapter


def engine_name(model: nn.Module, name: str) -> str:
    """The canonical name, which is the engine's, of the trainer's module or tensor `name`."""
    for ours, theirs in ENGINE_PATHS.get(getattr(getattr(model, "config", None), "model_type", ""), {}).items():
        name = name.replace(ours, theirs)
    return name


def engine_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every adapter tensor under its canonical name, as the engine must hold it (bf16, scaling folded into B).

    Collective under FSDP2: call it on all ranks.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, adapter in adapters(model).items():
        tensors.update(adapter.engine_tensors(engine_name(model, name)))
    return tensors


def wire_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Canonical tensors -> the names and 2-D shapes that vLLM loads an adapter from, one pair an expert."""
    wire: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module, _, factor = name.rpartition(".")
        if tensor.dim() == 2:
            wire[f"{PEFT_PREFIX}{module}.{factor}.weight"] = tensor
            continue
        experts, _, projection = module.rpartition(".")
        for expert in range(tensor.shape[0]):
            wire[f"{PEFT_PREFIX}{experts}.{expert}.{projection}.{factor}.weight"] = tensor[expert].contiguous()
    return wire


def wire_config(spec: LoRASpec, adapted: list[str]) -> dict:
    """PEFT configuration that goes with `wire_tensors`: the scaling is already in B, so alpha equals the rank."""
    modules = {name.rpartition(".")[2] for name in adapted if not name.endswith("experts")}
    if any(name.endswith("experts") for name in adapted):
        modules |= {"gate_proj", "up_proj", "down_proj"}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": spec.rank,
        "lora_alpha": spec.rank,
        "target_modules": sorted(modules),
        "bias": "none",
    }
