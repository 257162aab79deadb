"""Adapters as files: PEFT's format (saved and loaded bit for bit), and the one that vLLM reads from disk."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rl.lora import (
    PEFT_PREFIX,
    AdapterError,
    LoRAExperts,
    LoRALinear,
    LoRASpec,
    adapters,
    whole,
    wire_config,
    wire_tensors,
)


def save_peft(model: nn.Module, spec: LoRASpec, folder: Path, base: str) -> None:
    """Write adapter_model.safetensors and adapter_config.json in PEFT's format (collective; rank 0 writes).

    Linear layers keep PEFT's names. Experts with a shared A are PEFT `target_parameters` on the fused 3-D weights;
    with an A each for gate and up they have no fused form and are written one pair an expert, as vLLM loads them.
    """
    tensors, expert_names = {}, []
    for name, adapter in adapters(model).items():
        if isinstance(adapter, LoRALinear):
            tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = whole(adapter.lora_A)
            tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = whole(adapter.lora_B)
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
    _write({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, config, folder)


def save_engine_format(wire: dict[str, torch.Tensor], spec: LoRASpec, adapted: list[str], folder: Path) -> None:
    """Write an adapter as vLLM reads it from disk: bf16, one pair an expert, the scaling folded into B.

    `wire` are those of `wire_tensors`; PEFT's names of fused experts are not read by vLLM 0.30.
    """
    # Gate and up may share A: safetensors wants each tensor to have memory of its own.
    own = {name: tensor.cpu().clone() for name, tensor in wire.items()}
    _write(own, wire_config(spec, adapted), folder)


def _write(tensors: dict[str, torch.Tensor], config: dict, folder: Path) -> None:
    """The two files of an adapter; the weights appear last and at once, so that a folder with them is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors.part")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "adapter_model.safetensors.part").rename(folder / "adapter_model.safetensors")


def _expert_peft_tensors(name: str, adapter: LoRAExperts) -> dict[str, torch.Tensor]:
    a, b = whole(adapter.gate_up_A), whole(adapter.gate_up_B)
    down_a, down_b = whole(adapter.down_A), whole(adapter.down_B)
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
