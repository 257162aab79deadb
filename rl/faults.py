"""Faults that a consistency check must catch, injected into an in-process pair one at a time and taken back.

Each is something that has happened to users of such systems. Used by scripts/bench_consistency.py; a fault
says which check must fail and which words its diagnosis must have.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rl import lora
from rl.in_process import InProcessPair
from rl.replay import ReplayRouter
from rollout.patching import patch_target
from rollout.sampling import Sequence, sampling_params

Injection = Callable[[InProcessPair], AbstractContextManager]


@dataclass(frozen=True)
class Fault:
    """`check` begins the reason that must appear, `words` stand in its diagnosis; `probe`: only the probe sees it."""

    name: str
    inject: Injection
    check: str
    words: str
    probe: bool = False


def on_worker(pair: InProcessPair, function: Callable) -> object:
    """`function(worker)` in the engine."""
    return pair.engine.llm.collective_rpc(function)[0]


def engine_model(pair: InProcessPair) -> nn.Module:
    return on_worker(pair, lambda worker: worker.model_runner.model)


def expert_layers(pair: InProcessPair) -> list[nn.Module]:
    return [module for module in engine_model(pair).modules() if hasattr(module, "w13_weight")]


def lora_layers(pair: InProcessPair) -> dict[str, nn.Module]:
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
    weight = expert_layers(pair)[1].w13_weight.data
    with changed(weight):
        weight[3, 5, 7] ^= 1
        yield


@contextmanager
def swapped_gate_and_up(pair):
    tensors = [
        getattr(layer, name).data for layer in expert_layers(pair) for name in ("w13_weight", "w13_weight_scale")
    ]
    with changed(*tensors):
        for tensor in tensors:
            tensor.copy_(torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1))
        yield


@contextmanager
def inverted_global_scales(pair):
    scales = [getattr(layer, f"{name}_weight_scale_2").data for layer in expert_layers(pair) for name in ("w13", "w2")]
    with changed(*scales):
        for scale in scales:
            scale.reciprocal_()
        yield


@contextmanager
def permuted_experts(pair):
    layer = expert_layers(pair)[0]
    parts = ("weight", "weight_scale", "weight_scale_2")
    tensors = [getattr(layer, f"{name}_{part}").data for name in ("w13", "w2") for part in parts]
    with changed(*tensors):
        for tensor in tensors:
            tensor.copy_(tensor.roll(1, 0))
        yield


@contextmanager
def head_of_another_dtype(pair):
    head = engine_model(pair).lm_head
    head = getattr(head, "base_layer", head)
    with replaced(head, "weight", nn.Parameter(head.weight.data.float(), requires_grad=False)):
        yield


@contextmanager
def stale_base(pair):
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
    layer = next(layer for layer in lora_layers(pair).values() if hasattr(layer, "w13_lora_b_stacked"))
    tensors = [b[0, 2] for b in layer.w13_lora_b_stacked]
    with changed(*tensors):
        for tensor in tensors:
            tensor.zero_()
        yield


@contextmanager
def adapter_of_the_previous_step(pair):
    masters = [
        parameter.to_local()
        for adapter in lora.adapters(pair.trainer_model.model).values()
        for parameter in adapter.parameters(recurse=False)
    ]
    with changed(*masters), torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for master in masters:
            master += 2e-3 * torch.randn(master.shape, generator=generator)
        yield


@contextmanager
def scaling_applied_twice(pair):
    tensors = [
        tensor
        for layer in lora_layers(pair).values()
        for name in ("lora_b_stacked", "w13_lora_b_stacked", "w2_lora_b_stacked")
        for tensor in getattr(layer, name, ())
    ]
    with changed(*tensors):
        for tensor in tensors:
            tensor *= 2
        yield


@contextmanager
def unbound_module(pair):
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
        with adapter_of_the_previous_step(pair), replaced(pair.engine.llm, "reset_prefix_cache", lambda: True):
            side.sync()
            generate(prompts, 1)
        with replaced(pair.engine.llm, "reset_prefix_cache", lambda: True):
            side.sync()
        return generate(prompts, max_tokens)

    with replaced(side, "generate", stale):
        yield


# ---- routing -------------------------------------------------------------------------------------------------------


@contextmanager
def _routes(pair, change: Callable[[list[Sequence]], None]):
    side, generate = pair.engine_side, pair.engine_side.generate

    def generated(prompts, max_tokens):
        sequences = generate(prompts, max_tokens)
        change(sequences)
        return sequences

    with replaced(side, "generate", generated):
        yield


def _shift(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        sequence.routed_experts = np.roll(sequence.routed_experts, 1, axis=0)


def _of_another(sequences: list[Sequence]) -> None:
    everything = np.concatenate([sequence.routed_experts for sequence in sequences])[::-1]
    start = 0
    for sequence in sequences:
        length = len(sequence.routed_experts)
        sequence.routed_experts = everything[start : start + length].copy()
        start += length


def shifted_routes(pair):
    return _routes(pair, _shift)


def routes_of_another_sequence(pair):
    return _routes(pair, _of_another)


@contextmanager
def dropped_router_bias(pair):
    """One side selects by score plus a bias, which the other does not have."""
    routers = [module for module in pair.trainer_model.model.modules() if isinstance(module, ReplayRouter)]
    bias = torch.zeros(routers[0].weight.shape[0])
    bias[::2] = 1.5

    def biased(router):
        plain = router.matmul
        return lambda x, weight: plain(x, weight) + bias.to(x.dtype)

    kept = [router.matmul for router in routers]
    try:
        for router in routers:
            router.matmul = biased(router)
        yield
    finally:
        for router, matmul in zip(routers, kept, strict=True):
            router.matmul = matmul


# ---- numbers -------------------------------------------------------------------------------------------------------


def _sampled_with(pair, **settings):
    engine = patch_target("rollout.engine")
    return replaced(
        engine, "sampling_params", lambda **given: sampling_params(**(given | _if_sampled(given, settings)))
    )


def _if_sampled(given: dict, settings: dict) -> dict:
    return {} if "prompt_logprobs" in given else settings


def other_temperature(pair):
    return _sampled_with(pair, temperature=0.7)


def other_top_p(pair):
    return _sampled_with(pair, top_p=0.8)


@contextmanager
def padding_counted(pair):
    head = pair.trainer_model.model.lm_head
    forward = head.forward
    with replaced(head, "forward", lambda x: torch.cat([y := forward(x), y[..., :64]], dim=-1)):
        yield


@contextmanager
def fp8_keys_and_values(pair):
    impl = patch_target("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl")
    update = impl.do_kv_cache_update

    def rounded(self, layer, key, value, *rest):
        key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
        update(self, layer, key, value, *rest)

    with replaced(impl, "do_kv_cache_update", rounded):
        yield


@contextmanager
def other_rope(pair):
    rotary = pair.trainer_model.model.model.rotary_emb
    with changed(rotary.inv_freq):
        rotary.inv_freq *= 1.02
        yield


FAULTS = (
    Fault("one bit of a packed weight", flipped_bit, "weights: 1 base", "damaged or edited"),
    Fault("gate and up swapped", swapped_gate_and_up, "weights: 8 base", "gate and up are swapped"),
    Fault("global scales inverted", inverted_global_scales, "weights: 8 base", "reciprocals"),
    Fault("experts permuted", permuted_experts, "weights: 6 base", "another order"),
    Fault("lm_head in another dtype", head_of_another_dtype, "weights: 1 base", "float32 in the engine"),
    Fault("stale base after wake", stale_base, "weights: ", "holds another base"),
    Fault("adapter of one expert missing", missing_expert_adapter, "weights: 2 adapter", "only expert 2 differs"),
    Fault("adapter of the previous step", adapter_of_the_previous_step, "weights: ", "another step"),
    Fault("alpha / rank applied twice", scaling_applied_twice, "weights: ", "2 times as large"),
    Fault("adapter bound to nothing", unbound_module, "weights: ", "not bound"),
    Fault("rank truncated", truncated_rank, "weights: ", "rank was cut"),
    Fault("adapter ignored by the kernel", ignored_by_the_kernel, "probe: ", "o_proj change nothing", probe=True),
    Fault("prefix cache not reset", prefix_cache_not_reset, "log-probs: ", "prefix cache"),
    Fault("routes shifted by one token", shifted_routes, "routing: ", "shifted by one"),
    Fault("routes of another sequence", routes_of_another_sequence, "routing: ", "other sequences"),
    Fault("router bias dropped", dropped_router_bias, "routing: ", "selection bias"),
    Fault("temperature 0.7 on one side", other_temperature, "log-probs: ", "temperature"),
    Fault("top_p 0.8 on one side", other_top_p, "log-probs: ", "top_p"),
    Fault("logits of padding counted", padding_counted, "log-probs: ", "counts logits"),
    Fault("keys and values in fp8", fp8_keys_and_values, "log-probs: ", "kv_cache_dtype"),
    Fault("other rope frequencies", other_rope, "log-probs: ", "rope"),
)
