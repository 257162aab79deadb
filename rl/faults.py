"""Faults that a consistency check must catch, injected into an in-process pair one at a time and taken back.

Each is something that has happened to users of such systems. Used by scripts/bench_consistency.py; a fault
says which check must fail and which words its diagnosis must have.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from rl.fault_weights import (
    adapter_of_the_previous_step,
    changed,
    flipped_bit,
    head_of_another_dtype,
    ignored_by_the_kernel,
    inverted_global_scales,
    missing_expert_adapter,
    permuted_experts,
    prefix_cache_not_reset,
    replaced,
    scaling_applied_twice,
    stale_base,
    swapped_gate_and_up,
    truncated_rank,
    unbound_module,
)
from rl.in_process import InProcessPair
from rl.replay import ReplayRouter
from rollout import engine
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
    long: bool = False
    """Takes prompts of several problems, so that whole blocks of them are cached."""


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
    """Expert ids one row late."""
    return _routes(pair, _shift)


def routes_of_another_sequence(pair):
    """Expert ids of other samples."""
    return _routes(pair, _of_another)


@contextmanager
def dropped_router_bias(pair):
    """The trainer selects by logits plus a bias, which the engine does not have; gate weights are without it."""
    routers = [module for module in pair.trainer_model.model.modules() if isinstance(module, ReplayRouter)]
    bias = torch.zeros(routers[0].weight.shape[0])
    bias[::2] = 1.5
    choose = pair.trainer_model.routing.choose
    logits = {}

    def watched(router):
        plain = router.matmul

        def matmul(x, weight):
            logits[router.layer] = plain(x, weight)
            return logits[router.layer]

        return matmul

    def biased(layer, own):
        return choose(layer, (logits[layer].float() + bias).topk(own.shape[-1], dim=-1).indices)

    with ExitStack() as stack:
        for router in routers:
            stack.enter_context(replaced(router, "matmul", watched(router)))
        stack.enter_context(replaced(pair.trainer_model.routing, "choose", biased))
        yield


# ---- numbers -------------------------------------------------------------------------------------------------------


def _sampled_with(pair, **settings):
    return replaced(
        engine, "sampling_params", lambda **given: sampling_params(**(given | _if_sampled(given, settings)))
    )


def _if_sampled(given: dict, settings: dict) -> dict:
    return {} if "prompt_logprobs" in given else settings


def other_temperature(pair):
    """The engine samples at 0.7."""
    return _sampled_with(pair, temperature=0.7)


def other_top_p(pair):
    """The engine renormalises over the nucleus."""
    return _sampled_with(pair, top_p=0.8)


@contextmanager
def padding_counted(pair):
    """The trainer's softmax runs over 64 logits more."""
    head = pair.trainer_model.model.lm_head
    forward = head.forward
    with replaced(head, "forward", lambda x: torch.cat([y := forward(x), y[..., :64]], dim=-1)):
        yield


@contextmanager
def fp8_keys_and_values(pair):
    """The engine's KV cache rounds to e4m3."""
    impl = patch_target("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl")
    update = impl.do_kv_cache_update

    def rounded(self, layer, key, value, *rest):
        key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
        update(self, layer, key, value, *rest)

    with replaced(impl, "do_kv_cache_update", rounded):
        yield


@contextmanager
def other_rope(pair):
    """The trainer's rotary frequencies are 10 % off."""
    rotary = pair.trainer_model.model.model.rotary_emb
    with changed(rotary.inv_freq):
        rotary.inv_freq *= 1.1
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
    Fault("prefix cache not reset", prefix_cache_not_reset, "log-probs: ", "prefix cache", long=True),
    Fault("routes shifted by one token", shifted_routes, "routing: ", "shifted by one"),
    Fault("routes of another sequence", routes_of_another_sequence, "routing: ", "other sequences"),
    Fault("router bias dropped", dropped_router_bias, "routing: ", "selection bias"),
    Fault("temperature 0.7 on one side", other_temperature, "log-probs: ", "temperature"),
    Fault("top_p 0.8 on one side", other_top_p, "log-probs: ", "top_p"),
    Fault("logits of padding counted", padding_counted, "log-probs: ", "counts logits"),
    Fault("keys and values in fp8", fp8_keys_and_values, "log-probs: ", "kv_cache_dtype", long=True),
    Fault("other rope frequencies", other_rope, "log-probs: ", "rope"),
)
