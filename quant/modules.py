"""Swap a Hugging Face model's linears and routed experts for the frozen packed ones, and fill them; strict both ways.

No list of models or names: an experts module is one that has 3-D `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]
parameters (transformers' experts interface: Qwen3-MoE, Mixtral, MiniMax-M2, ...), a linear is `torch.nn.Linear`; what
the checkpoint holds packed for them decides. Everything else of it fills the parameter or buffer of its name.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quant.experts import PlainExperts, QuantExperts, RoutedExperts
from quant.layers import QuantLinear
from quant.nvfp4 import NVFP4Tensor
from quant.reader import Packed, packed_items
from quant.shards import CheckpointError


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is a routed-experts module of transformers' interface (stacked gate_up_proj and down_proj)."""
    stacks = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return not isinstance(module, RoutedExperts) and all(
        isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks
    )


def swap_modules(
    model: nn.Module,
    packed_state: Mapping[str, Packed] | Iterable[tuple[str, Packed]],
    backend: str = "emulation",
) -> nn.Module:
    """Fill `model` (its parameters may be on the meta device) from a packed state, swapping modules where it is packed.

    `packed_state`: names and values as `quant.reader.packed_items` yields them; names of the file's layout are renamed
    by transformers' own conversion mapping where the model has one. In place; every filled parameter is frozen. Raises
    CheckpointError naming the first tensor that the model has no place for, that fits it not, or that is missing, and a
    module that is packed in part. Plain parameters take the dtype of the one they fill, buffers keep the stored one.
    """
    rename = _renamer(model)
    # What the model says it has no use for, such as the image tower beside a text model.
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    expected = {name for name, _ in _named_tensors(model)}
    used: dict[str, str] = {}
    halves: dict[str, dict[str, NVFP4Tensor]] = {}
    items = packed_state.items() if isinstance(packed_state, Mapping) else packed_state
    for source, value in items:
        name = rename(source, expected)
        if name not in expected and any(re.search(pattern, source) for pattern in ignored):
            continue
        if name in used:
            raise CheckpointError(f"tensors {used[name]} and {source} both fill {name}")
        if name not in expected:
            raise CheckpointError(f"tensor {source} has no place in {type(model).__name__}")
        used[name] = source
        if isinstance(value, torch.Tensor):
            _fill(model, name, value)
        else:
            _swap(model, name, value, backend, halves)
    if halves:
        name = next(iter(halves))
        raise CheckpointError(f"module {name} is packed in part: only {', '.join(halves[name])} is NVFP4")
    _check_complete(model, expected, set(used))
    return model


def _swap(model: nn.Module, name: str, value: Packed, backend: str, halves: dict) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    old = getattr(module, leaf)
    if tuple(old.shape) != tuple(value.shape):
        raise CheckpointError(f"tensor {name} is {list(value.shape)} in the checkpoint, {list(old.shape)} in the model")
    if is_experts(module) and isinstance(value, NVFP4Tensor):
        parts = halves.setdefault(path, {})
        parts[leaf] = value
        if len(parts) == 2:
            del halves[path]
            gate = _gate_of(path, module)
            _replace(model, path, QuantExperts(parts["gate_up_proj"], parts["down_proj"], gate, backend))
    elif type(module) is nn.Linear and leaf == "weight":
        bias = None if module.bias is None else module.bias.data
        _replace(model, path, QuantLinear(value, bias, backend))
    else:
        kind = "NVFP4" if isinstance(value, NVFP4Tensor) else "MXFP8"
        raise CheckpointError(f"tensor {name} is {kind}, which {type(module).__name__} cannot hold")


def swap_plain_experts(model: nn.Module, backend: str = "emulation") -> nn.Module:
    """Put `PlainExperts` in place of every unquantised experts module; CheckpointError for one that has no gate."""
    for path, module in list(model.named_modules()):
        if is_experts(module):
            stacks = module.gate_up_proj.data, module.down_proj.data
            _replace(model, path, PlainExperts(*stacks, _gate_of(path, module), backend))
    return model


def _gate_of(path: str, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module's own gated activation [S, 2I] -> [S, I]; it keeps the module (without weights) for its constants."""
    if getattr(module, "has_bias", False) or getattr(module, "is_transposed", False):
        raise CheckpointError(f"module {path}: experts with biases or transposed stacks are not supported")
    gate = getattr(type(module), "_apply_gate", None) or getattr(type(module), "apply_gate", None)
    if gate is None and hasattr(module, "act_fn"):
        return partial(_silu_like_gate, module.act_fn)
    if gate is None or not getattr(module, "is_concatenated", True):
        raise CheckpointError(f"module {path}: {type(module).__name__} has no gate on [gate; up] halves to call")
    for leaf in ("gate_up_proj", "down_proj"):
        delattr(module, leaf)
    return partial(gate, module)


def _silu_like_gate(act_fn: Callable, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return act_fn(gate) * up


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _fill(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    old = getattr(module, leaf)
    if old.shape != value.shape:
        raise CheckpointError(f"tensor {name} is {list(value.shape)} in the checkpoint, {list(old.shape)} in the model")
    if isinstance(module, QuantLinear) or isinstance(old, nn.Parameter):
        value = value.to(old.dtype) if value.is_floating_point() else value
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    else:  # a buffer such as a router's float32 selection bias: rounding it would move tokens to other experts
        module.register_buffer(leaf, value)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.state_dict(keep_vars=True).items()


def _check_complete(model: nn.Module, expected: set[str], used: set[str]) -> None:
    """Nothing may stay unfilled except a tensor that is tied to one that is filled."""
    tie_weights = getattr(model, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()
    missing = expected - used
    filled = {id(tensor) for name, tensor in _named_tensors(model) if name in used}
    unfilled = [name for name, tensor in _named_tensors(model) if name in missing and id(tensor) not in filled]
    if unfilled:
        raise CheckpointError(f"tensor {unfilled[0]} of the model is not in the checkpoint ({len(unfilled)} missing)")


def _renamer(model: nn.Module) -> Callable[[str, set[str]], str]:
    """Checkpoint name -> module name: itself where the model has it, else by transformers' renamings for this model."""
    renamings = []
    if hasattr(model, "base_model_prefix"):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        mapping = get_model_conversion_mapping(model, add_legacy=False)
        renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]

    def rename(name: str, known: set[str]) -> str:
        name = name.removeprefix("language_model.")  # the text model inside a multimodal checkpoint
        if name in known:
            return name
        renamed = name
        for transform in renamings:
            renamed, _ = transform.rename_source_key(renamed)
        return renamed

    return rename


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters without memory; buffers (rotary frequencies) stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = meta

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def load_model(
    path: str | Path,
    config=None,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str = "sdpa",
    backend: str = "emulation",
) -> nn.Module:
    """The causal language model of a quantised checkpoint, its base frozen in the checkpoint's bytes.

    Parameters are never materialised unpacked: the model is built without memory and filled one tensor at a time. Plain
    tensors take `dtype` (those that transformers keeps in float32 keep it), buffers such as rotary frequencies are as
    the model computes them. `config`: transformers' configuration, by default the one that AutoConfig reads from
    `path`. CheckpointError as `packed_items` and `swap_modules` raise it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path) if config is None else config
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    swap_modules(model, packed_items(path), backend)
    return model.eval()
