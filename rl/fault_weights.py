"""Faults of base and adapter, for `rl.faults`: each context makes the two sides differ and takes it back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rl import lora
from rl.in_process import InProcessPair


def on_worker(pair: InProcessPair, function: Callable) -> object:
    """`function(worker)` in the engine."""
    return pair.engine.llm.collective_rpc(function)[0]


def engine_model(pair: InProcessPair) -> nn.Module:
    """The engine's model."""
    return on_worker(pair, lambda worker: worker.model_runner.model)


def expert_layers(pair: InProcessPair) -> list[nn.Module]:
    """The engine's layers of experts."""
    return [module for module in engine_model(pair).modules() if hasattr(module, "w13_weight")]


def lora_layers(pair: InProcessPair) -> dict[str, nn.Module]:
    """Name -> LoRA layer of the engine."""
    return on_worker(pair, lambda worker: worker.model_runner.lora_manager._adapter_manager.modules)


@contextmanager
def changed(*tensors: torch.Tensor) -> Iterator[None]:
    """Let the body change the tensors in place, and take it back."""
    kept = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """An attribute with another value for a while."""
    own, kept = name in vars(owner) | getattr(owner, "_parameters", {}), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept) if own else delattr(owner, name)


# ---- base ----------------------------------------------------------------------------------------------------------


@contextmanager
def flipped_bit(pair):
    """One bit of one byte of packed codes."""
    weight = expert_layers(pair)[1].w13_weight.data
    with changed(weight):
        weight[3, 5, 7] ^= 1
        yield


@contextmanager
def swapped_gate_and_up(pair):
    """Gate and up halves in the other order."""
    tensors = [
        getattr(layer, name).data for layer in expert_layers(pair) for name in ("w13_weight", "w13_weight_scale")
    ]
    with changed(*tensors):
        for tensor in tensors:
            tensor.copy_(torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1))
        yield


@contextmanager
def inverted_global_scales(pair):
    """Reciprocals of all global scales."""
    scales = [getattr(layer, f"{name}_weight_scale_2").data for layer in expert_layers(pair) for name in ("w13", "w2")]
    with changed(*scales):
        for scale in scales:
            scale.reciprocal_()
        yield


@contextmanager
def permuted_experts(pair):
    """One layer's experts renamed."""
    layer = expert_layers(pair)[0]
    parts = ("weight", "weight_scale", "weight_scale_2")
    tensors = [getattr(layer, f"{name}_{part}").data for name in ("w13", "w2") for part in parts]
    with changed(*tensors):
        for tensor in tensors:
            tensor.copy_(tensor.roll(1, 0))
        yield


@contextmanager
def head_of_another_dtype(pair):
    """lm_head converted to float32."""
    head = engine_model(pair).lm_head
    head = getattr(head, "base_layer", head)
    with replaced(head, "weight", nn.Parameter(head.weight.data.float(), requires_grad=False)):
        yield


@contextmanager
def stale_base(pair):
    """Other values in every quantised matrix."""
    tensors = [
        parameter.data
        for name, parameter in engine_model(pair).named_parameters()
        if ("proj" in name and name.endswith("weight")) or "w13" in name or "w2" in name
    ]
    with changed(*tensors):
        for tensor in tensors:
            tensor.copy_(tensor.roll(1, -1))
        yield


# ---- adapter -------------------------------------------------------------------------------------------------------


@contextmanager
def missing_expert_adapter(pair):
    """One expert's B never arrived."""
    layer = next(layer for layer in lora_layers(pair).values() if hasattr(layer, "w13_lora_b_stacked"))
    tensors = [b[0, 2] for b in layer.w13_lora_b_stacked]
    with changed(*tensors):
        for tensor in tensors:
            tensor.zero_()
        yield


@contextmanager
def adapter_of_the_previous_step(pair, distance: float = 2e-3):
    """The trainer took a step that was not sent."""
    masters = [
        parameter.to_local()
        for adapter in lora.adapters(pair.trainer_model.model).values()
        for parameter in adapter.parameters(recurse=False)
    ]
    with changed(*masters), torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for master in masters:
            master += distance * torch.randn(master.shape, generator=generator)
        yield


@contextmanager
def scaling_applied_twice(pair):
    """Every B of the engine doubled."""
    tensors = []
    for layer in lora_layers(pair).values():
        experts = hasattr(layer, "w13_lora_b_stacked")  # which show slices of their stacks as lora_b_stacked too
        names = ("w13_lora_b_stacked", "w2_lora_b_stacked") if experts else ("lora_b_stacked",)
        tensors += [tensor for name in names for tensor in getattr(layer, name)]
    with changed(*tensors):
        for tensor in tensors:
            tensor *= 2
        yield


@contextmanager
def unbound_module(pair):
    """No module of the engine took the o_proj part."""
    loras = on_worker(pair, lambda worker: worker.model_runner.lora_manager._adapter_manager.list_adapters())
    adapter = next(iter(loras.values()))
    kept = dict(adapter.loras)
    try:
        for name in [name for name in kept if name.endswith("o_proj")]:
            del adapter.loras[name]
        yield
    finally:
        adapter.loras.clear()
        adapter.loras.update(kept)


@contextmanager
def truncated_rank(pair):
    """The engine got half of the ranks."""
    spec, model = pair.trainer_model.spec, pair.trainer_model
    half = spec.rank // 2
    wire = {
        name: (tensor[:half] if "lora_A" in name else tensor[:, :half]).contiguous()
        for name, tensor in lora.wire_tensors(lora.engine_tensors(model.model)).items()
    }
    pair.engine.sync_adapter(wire, lora.wire_config(spec, model.adapted) | {"r": half, "lora_alpha": half})
    try:
        yield
    finally:
        pair.engine_side.sync()


@contextmanager
def ignored_by_the_kernel(pair):
    """The adapter lies in the engine's buffers, and the kernel does not look at it (one kind of module)."""
    layers = [layer for name, layer in lora_layers(pair).items() if name.endswith("o_proj")]
    kept = [layer.apply for layer in layers]
    try:
        for layer in layers:
            layer.apply = lambda x, bias=None, base=layer.base_layer: base.quant_method.apply(base, x, bias)
        yield
    finally:
        for layer, apply in zip(layers, kept, strict=True):
            layer.apply = apply


@contextmanager
def prefix_cache_not_reset(pair):
    """Keys and values of the prompts are cached under one adapter and used under the next."""
    side, generate = pair.engine_side, pair.engine_side.generate

    def stale(prompts, max_tokens):
        with adapter_of_the_previous_step(pair, 0.02), replaced(pair.engine.llm, "reset_prefix_cache", lambda: True):
            side.sync()
            generate(prompts, 1)
        with replaced(pair.engine.llm, "reset_prefix_cache", lambda: True):
            side.sync()
        return generate(prompts, max_tokens)

    with replaced(side, "generate", stale):
        yield
