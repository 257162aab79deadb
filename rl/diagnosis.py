"""What a failed check means: for each kind of failure the likely cause, and the setting or file to look at.

Pure functions on the numbers of a report. A sentence names the most specific cause that fits the evidence; where two
causes look alike from here, it names both.
"""

import math
from statistics import fmean, pstdev

LACKS = " lacks it)"
ONE_SIGN = 0.8
"""Share of the large differences that have the same sign: an offset above it, noise (one half) below."""


def explain_selection(per_layer: list[dict]) -> str:
    """Rows of the report's selection, a layer each."""
    wrong = [row["layer"] for row in per_layer if row["disagree"] > row["near_ties"]]
    if len(wrong) < len(per_layer):
        return (
            f"the indexer differs in layer{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))} only: look at "
            "index_q_proj, index_k_proj and their norms in the tensors that differ"
        )
    return (
        "every layer selects other blocks: compare sparse_attention_config on both sides (block size, top-k, init and "
        "local blocks), the dtype of the index cache, and whether blocks count from each sequence's start"
    )


def explain_base(trainer: dict[str, dict], engine: dict[str, dict], mismatched: list[str]) -> str:
    """Digests with details of one worker against the trainer's, and the names that differ."""
    names = [name for name in mismatched if not name.endswith(LACKS)]
    if not names:
        return (
            f"one side does not have {mismatched[0].partition(' (')[0]}: the checkpoints differ in layers or names "
            "(config.json, model.safetensors.index.json), or the engine's layout is not known to rollout/worker.py"
        )
    pairs = [(name, trainer[name], engine[name]) for name in names]
    for name, ours, theirs in pairs:
        if ours["bytes"] != theirs["bytes"] and ours["dtype"] == theirs["dtype"]:
            return (
                f"{name} is {ours['shape']} in the trainer and {theirs['shape']} in the engine: the checkpoints are of "
                "other sizes, or one side pads the vocabulary"
            )
        if ours["bytes"] != theirs["bytes"]:
            return (
                f"{name} is {ours['dtype']} in the trainer and {theirs['dtype']} in the engine: one side converted it "
                "at load; set model.dtype for both and look at the checkpoint's ignore list"
            )
    if all(name.endswith("#global_scale") for name in names):
        return _explain_global_scales(pairs)
    stacked = [(ours["parts"], theirs["parts"]) for _, ours, theirs in pairs if "parts" in ours]
    if stacked and any(sorted(a) == sorted(b) for a, b in stacked):
        same = [(a, b) for a, b in stacked if sorted(a) == sorted(b)]
        if all(a[::2] == b[1::2] and a[1::2] == b[::2] for a, b in same):
            return "gate and up are swapped in one side (w13 order): look at the expert names of the checkpoint's keys"
        return "the experts stand in another order in one side: look at the expert numbering of the checkpoint's keys"
    if len(names) <= 2:
        return (
            f"only {' and '.join(names)} differ{'s' if len(names) == 1 else ''}: bytes of one copy are damaged or "
            "edited; compare the checksums of the two checkpoints' files and copy them again"
        )
    if all(".experts." in name for name in names):
        return (
            "only expert tensors differ: they were quantised by another encoder or policy; quantise once, use it twice"
        )
    return (
        f"{len(names)} of {len(trainer)} tensors differ: the engine holds another base (another checkpoint or "
        "revision, or one that was not restored after sleep); compare model.path with what the engine loaded"
    )


def _explain_global_scales(pairs: list[tuple[str, dict, dict]]) -> str:
    products = [a * b for _, ours, theirs in pairs for a, b in zip(ours["head"], theirs["head"], strict=True)]
    if all(abs(product - 1) < 1e-3 for product in products):
        return (
            "only global scales differ, and one side holds the reciprocals: compressed-tensors stores the divisor "
            "(weight_global_scale), ModelOpt the multiplier (weight_scale_2); look at quant/reader.py and the config"
        )
    return "only global scales differ: gate and up of an expert must share one; quantise the checkpoint again"


def explain_adapter(trainer: dict[str, dict], engine: dict[str, dict], mismatched: list[str]) -> str:
    """Digests with details of one worker against the trainer's, and the names that differ."""
    names = [name for name in mismatched if not name.endswith(LACKS)]
    lacks = {side: [n for n in mismatched if n.endswith(f"({side} lacks it)")] for side in ("engine", "trainer")}
    if lacks["trainer"]:
        name = lacks["trainer"][0].partition(" (")[0]
        return f"the engine holds {name}, which the trainer does not adapt: other targets (model.lora_targets)"
    if lacks["engine"]:
        return (
            f"the engine has no module for {lacks['engine'][0].partition(' (')[0]}: the adapter is not bound there; "
            "compare model.lora_targets with the modules that vLLM can adapt in this model"
        )
    for name in names:
        if trainer[name]["shape"] != engine[name]["shape"]:
            return (
                f"{name} is {trainer[name]['shape']} in the trainer and {engine[name]['shape']} in the engine: the "
                "rank was cut, or the adapter on disk has another; max_lora_rank must be model.lora_rank"
            )
    for name in names:
        ours, theirs = trainer[name].get("parts"), engine[name].get("parts")
        if ours and 0 < sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 2 and len(ours) > 2:
            expert = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b) // 2
            return (
                f"in {name} only expert {expert} differs: its adapter was not sent or not bound; look at the names of "
                "the expert tensors on the wire (rl/lora.py: wire_tensors)"
            )
    ratios = [engine[name]["norm"] / trainer[name]["norm"] for name in names if trainer[name]["norm"] > 0]
    if not all(math.isfinite(ratio) for ratio in ratios):
        return "an adapter tensor is not finite on one side: look at the steps before this sync"
    if ratios and _is_scaled([(trainer[name]["head"], engine[name]["head"]) for name in names], ratios):
        return (
            f"every differing tensor is {fmean(ratios):.3g} times as large in the engine: the scaling alpha / rank is "
            "applied twice or not at all; it belongs into B once (rl/lora.py)"
        )
    return (
        f"{len(names)} of {len(trainer)} adapter tensors differ without a pattern: the engine serves the adapter of "
        "another step; a sync was lost or came too late"
    )


def _is_scaled(heads: list[tuple[list[float], list[float]]], ratios: list[float]) -> bool:
    """Whether norms have one ratio that is not 1, and first values have it too: any change of large tensors may give
    their norms one ratio. 2 %: both are rounded to bfloat16."""
    ratio = fmean(ratios)
    if abs(ratio - 1) < 1e-2 or pstdev(ratios) > 1e-2 * ratio:
        return False
    return all(abs(b - ratio * a) <= 0.02 * abs(ratio * a) for pair in heads for a, b in zip(*pair, strict=True))


def explain_routing(per_layer: list[dict], replayed: bool, numbers_agree: bool) -> str:
    """Entries of routing.per_layer; `replayed`: agreement with replay is below its threshold; `numbers_agree`: with
    replay the log-probs are within theirs, so that the hidden states are the same."""
    if replayed:
        layers = [entry["layer"] for entry in per_layer if entry["replayed"] < 1]
        return (
            f"the routers of layers {layers} do not use the ids they are given: algorithm.routing_replay, rl/replay.py"
        )
    low = [entry["layer"] for entry in per_layer if entry["free"] < 0.9]
    ties = sum(entry["near_ties"] for entry in per_layer) / max(1, sum(entry["disagree"] for entry in per_layer))
    if ties > 0.5:
        return f"{ties:.0%} of the disagreements are near-ties: rounding before the router (model.backend)"
    if numbers_agree:
        return (
            f"layers {low} choose other experts by a clear margin, and agree once told: a selection bias "
            "(e_score_correction_bias) is missing or has another value on one side, or the router has another dtype"
        )
    free, later, earlier = (fmean(entry[key] for entry in per_layer) for key in ("free", "later", "earlier"))
    if max(later, earlier) > free + 0.2:
        row = "later" if later > earlier else "earlier"
        return (
            f"the ids fit the rows one token {row}: they are shifted by one; look at how prompt and response are joined"
        )
    if any(entry["renamed"] > entry["free"] + 0.2 for entry in per_layer):
        return "the ids fit after renaming the experts: router rows or experts stand in another order in one side"
    if free < 0.7:
        return "the ids belong to other sequences: look at how they are joined with their samples"
    return f"layers {low} choose other experts because their inputs differ: see the log-probs"


def explain_logprobs(logprobs: dict, limits: dict) -> str:
    """The block `logprobs` of a report whose replayed numbers fail, with its thresholds."""
    replayed, decode, prefill = (logprobs[key] for key in ("replayed", "decode_prefill", "prefill"))
    fails = {"kl_k3": "kl_k3", "mean_abs": "mean_abs_logp", "max_abs": "max_abs_logp"}
    if any(decode[key] > limits[limit] for key, limit in fails.items()):
        where = ", and the trainer agrees with its prefill" if prefill["mean_abs"] < decode["mean_abs"] / 3 else ""
        if decode["one_sign"] > ONE_SIGN:
            return (
                f"the engine's decode differs from its own prefill by an offset of one sign{where}: the log-probs "
                "are of a distribution at another temperature, top_p or top_k; look at rollout.temperature"
            )
        return (
            f"the engine's decode differs from its own prefill{where}: the decode path is wrong, not the trainer: "
            "rollout.kv_cache_dtype, a prefix cache that was not reset after a sync, or the attention backend"
        )
    for whose, block in (("engine's own", decode), ("trainer's", replayed)):
        if any(not math.isfinite(block[key]) for key in fails):
            return f"the {whose} log-probs are not finite: look at its log"
    if replayed["one_sign"] > ONE_SIGN:
        return (
            "one side is lower by an offset of one sign at every position: it counts logits that the other does not; "
            "vocab_size and the tokenizer (model.padded_vocab), or a temperature"
        )
    first, last = logprobs["by_position"][0], logprobs["by_position"][-1]
    if (
        last["mean_abs"] > max(5 * first["mean_abs"], limits["mean_abs_logp"])
        and first["mean_abs"] < limits["mean_abs_logp"]
    ):
        return (
            f"the error starts after position {first['last']} and grows: rope parameters, KV cache dtype or block "
            "selection"
        )
    if logprobs["free"]["kl_k3"] <= limits["kl_k3"]:
        return "without replay both sides agree: the replayed ids are not those of these tokens"
    return (
        "all weights are equal and both of the engine's paths agree, so one side computes otherwise throughout: "
        "model.backend must be that of the engine's kernels; then rollout.kv_cache_dtype, rope parameters, "
        "model.attn_implementation, and the dtype of rotary frequencies and router"
    )


def explain_probe(by_kind: dict[str, float], threshold: float) -> str:
    """Effects of a random adapter by kind of module."""
    dead = [kind for kind, effect in by_kind.items() if not effect >= threshold]
    return (
        f"adapters on {', '.join(dead)} change nothing in the engine: they are loaded and not applied there; look at "
        "vLLM's LoRA support for these modules and at the request's lora_request"
    )
