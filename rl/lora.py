"""LoRA over a frozen base: attention and MLP projections and routed experts, in the engine's order of roundings.

The delta of a linear layer is bf16(bf16(x A^T) (s B)^T), added to the rounded output of the base, which is what vLLM
computes with s = alpha / rank folded into B. Experts have an A and a B each; their deltas enter before the activation
and after the down projection (`quant.modules.ExpertDelta`). Masters are float32; FSDP2 casts them to bfloat16 for the
forward. Legend: r rank, E experts, H hidden, I intermediate, S rows sorted by expert.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
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
            f"{name}.lora_A": _full(self.lora_A).bfloat16(),
            f"{name}.lora_B": _scaled(_full(self.lora_B), self.scaling, torch.bfloat16),
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
        a, b = _full(self.gate_up_A).bfloat16(), _scaled(_full(self.gate_up_B), self.scaling, torch.bfloat16)
        return {
            f"{name}.gate_proj.lora_A": a[:, 0],
            f"{name}.gate_proj.lora_B": b[:, 0],
            f"{name}.up_proj.lora_A": a[:, -1],
            f"{name}.up_proj.lora_B": b[:, 1],
            f"{name}.down_proj.lora_A": _full(self.down_A).bfloat16(),
            f"{name}.down_proj.lora_B": _scaled(_full(self.down_B), self.scaling, torch.bfloat16),
        }


def _uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> torch.Tensor:
    """kaiming_uniform(a=sqrt(5)), PEFT's initialisation of A: uniform in +-1/sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _scaled(b: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """B in `dtype`, then times the scaling in `dtype`: vLLM casts B to bf16 and folds the scaling in afterwards."""
    b = b.to(dtype)
    return b if scaling == 1.0 else b * scaling


def _full(parameter: torch.Tensor) -> torch.Tensor:
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


def engine_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every adapter tensor under its canonical name, as the engine must hold it (bf16, scaling folded into B).

    Collective under FSDP2: call it on all ranks.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, adapter in adapters(model).items():
        tensors.update(adapter.engine_tensors(name))
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


def save_peft(model: nn.Module, spec: LoRASpec, folder: Path, base: str) -> None:
    """Write adapter_model.safetensors and adapter_config.json in PEFT's format (collective; rank 0 writes).

    Linear layers keep PEFT's names. Experts with a shared A are PEFT `target_parameters` on the fused 3-D weights;
    with an A each for gate and up they have no fused form and are written one pair an expert, as vLLM loads them.
    """
    tensors, expert_names = {}, []
    for name, adapter in adapters(model).items():
        if isinstance(adapter, LoRALinear):
            tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = _full(adapter.lora_A)
            tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = _full(adapter.lora_B)
        else:
            expert_names.append(name)
            tensors.update(_expert_peft_tensors(name, adapter))
    shared = spec.share_gate_up_a
    linear_modules = sorted({n.rpartition(".")[2] for n, a in adapters(model).items() if isinstance(a, LoRALinear)})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "bias": "none",
        "inference_mode": True,
        "target_modules": linear_modules
        + ([] if shared or not expert_names else ["gate_proj", "up_proj", "down_proj"]),
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if shared and expert_names else None,
    }
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, folder / "adapter_model.safetensors.part")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    # The weights appear last and at once, so that a folder with them is complete.
    (folder / "adapter_model.safetensors.part").rename(folder / "adapter_model.safetensors")


def _expert_peft_tensors(name: str, adapter: LoRAExperts) -> dict[str, torch.Tensor]:
    a, b = _full(adapter.gate_up_A), _full(adapter.gate_up_B)
    down_a, down_b = _full(adapter.down_A), _full(adapter.down_B)
    if a.shape[1] == 2:
        split = {
            f"{name}.gate_proj.lora_A": a[:, 0],
            f"{name}.gate_proj.lora_B": b[:, 0],
            f"{name}.up_proj.lora_A": a[:, 1],
            f"{name}.up_proj.lora_B": b[:, 1],
            f"{name}.down_proj.lora_A": down_a,
            f"{name}.down_proj.lora_B": down_b,
        }
        return wire_tensors(split)
    # PEFT's ParamWrapper: A is [E * r, in] and B is [out, r * E] with the expert as the fastest index of B's columns;
    # the first target parameter (gate_up) is the inner wrapper and is named base_layer.
    fused_b = b.flatten(1, 2)
    return {
        f"{PEFT_PREFIX}{name}.base_layer.lora_A.weight": a[:, 0].flatten(0, 1),
        f"{PEFT_PREFIX}{name}.base_layer.lora_B.weight": fused_b.permute(1, 2, 0).flatten(1),
        f"{PEFT_PREFIX}{name}.lora_A.weight": down_a.flatten(0, 1),
        f"{PEFT_PREFIX}{name}.lora_B.weight": down_b.permute(1, 2, 0).flatten(1),
    }


def load_peft(model: nn.Module, folder: Path) -> None:
    """Load an adapter that `save_peft` wrote into the injected (not yet sharded) modules of `model`.

    Raises:
        AdapterError: missing or left-over tensors, another rank, scaling or shape, or an initialisation that changed
            the base.
    """
    _check_config(json.loads((folder / "adapter_config.json").read_text()), model, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, adapter in adapters(model).items():
        if isinstance(adapter, LoRALinear):
            for factor in ("lora_A", "lora_B"):
                _assign(
                    getattr(adapter, factor), tensors.pop(f"{PEFT_PREFIX}{name}.{factor}.weight", None), name, folder
                )
        else:
            _load_experts(adapter, name, tensors, folder)
    if tensors:
        raise AdapterError(
            f"{folder}: {len(tensors)} tensors match no adapted module, for example {next(iter(tensors))}"
        )


def _check_config(config: dict, model: nn.Module, folder: Path) -> None:
    """Refuse what the tensors do not show: a changed base, another scaling, a rank or scaling of a module's own."""
    if config.get("init_lora_weights") not in (None, True, False, "gaussian"):
        raise AdapterError(
            f"{folder}: init_lora_weights={config['init_lora_weights']!r} changed the base weights; convert it "
            "with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise AdapterError(
                f"{folder}: {key}={config[key]!r} is another adapter than the recipe's; only plain LoRA loads"
            )
    rank, alpha = config["r"], config["lora_alpha"]
    for adapter in adapters(model).values():
        own = (adapter.lora_A if isinstance(adapter, LoRALinear) else adapter.down_A).shape[-2]
        if rank != own:
            raise AdapterError(f"{folder}: the adapter has rank {rank}, the recipe {own}; set model.lora_rank={rank}")
        if not math.isclose(alpha / rank, adapter.scaling):
            raise AdapterError(
                f"{folder}: the adapter's scaling is {alpha}/{rank}, the recipe's {adapter.scaling}; "
                f"set model.lora_alpha={alpha}"
            )


def _load_experts(adapter: LoRAExperts, name: str, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    count, slices = adapter.gate_up_A.shape[:2]
    if slices == 1:
        rank = adapter.down_A.shape[1]
        prefix = f"{PEFT_PREFIX}{name}"
        a, b = (
            tensors.pop(f"{prefix}.base_layer.lora_A.weight", None),
            tensors.pop(f"{prefix}.base_layer.lora_B.weight", None),
        )
        down_a, down_b = tensors.pop(f"{prefix}.lora_A.weight", None), tensors.pop(f"{prefix}.lora_B.weight", None)
        if any(t is None for t in (a, b, down_a, down_b)):
            raise AdapterError(f"{folder}: {name} lacks fused expert tensors; check share_gate_up_a and lora_targets")
        _assign(adapter.gate_up_A, a.view(count, 1, rank, -1), name, folder)
        _assign(adapter.gate_up_B, b.view(-1, rank, count).permute(2, 0, 1).reshape(count, 2, -1, rank), name, folder)
        _assign(adapter.down_A, down_a.view(count, rank, -1), name, folder)
        _assign(adapter.down_B, down_b.view(-1, rank, count).permute(2, 0, 1), name, folder)
        return
    for slot, projection in enumerate(("gate_proj", "up_proj", "down_proj")):
        for factor in ("A", "B"):
            keys = [f"{PEFT_PREFIX}{name}.{e}.{projection}.lora_{factor}.weight" for e in range(count)]
            if any(key not in tensors for key in keys):
                raise AdapterError(f"{folder}: {name} lacks {projection} of some experts; check share_gate_up_a")
            stacked = torch.stack([tensors.pop(key) for key in keys])
            if projection == "down_proj":
                _assign(getattr(adapter, f"down_{factor}"), stacked, name, folder)
            else:
                _assign(getattr(adapter, f"gate_up_{factor}")[:, slot], stacked, name, folder)


def _assign(parameter: torch.Tensor, value: torch.Tensor | None, name: str, folder: Path) -> None:
    if value is None:
        raise AdapterError(f"{folder}: no tensor for {name}; the recipe's lora_targets differ from the adapter's")
    if value.shape != parameter.shape:
        raise AdapterError(
            f"{folder}: {name} has shape {tuple(value.shape)}, the recipe needs {tuple(parameter.shape)}; see lora_rank"
        )
    with torch.no_grad():
        parameter.copy_(value)
