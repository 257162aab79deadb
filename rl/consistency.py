"""The consistency check: is the trainer the model that the engine serves? Weights, routing, log-probs, and a probe.

`check` talks to two sides through small protocols, so that the same code judges an in-process pair and a live trainer
and engine inside a verl run.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

import numpy as np

from rl import diagnosis, mismatch
from rl.consistency_report import ConsistencyReport, Limits, TrainerScore
from rl.mismatch import logprob_stats
from rollout.sampling import Sequence


class TrainerSide(Protocol):
    """What the check asks of the trainer."""

    def base_digests(self, detail: bool = False, shards: dict[str, dict] | None = None) -> dict[str, dict]:
        """`fingerprint.digests` of every base tensor."""

    def adapter_digests(self, detail: bool = False, shards: dict[str, dict] | None = None) -> dict[str, dict]:
        """`fingerprint.digests` of every adapter tensor as the engine must hold it."""

    def selects_blocks(self) -> bool:
        """Whether the model has sparse attention."""

    def score(
        self, sequences: list[Sequence], blocks: list[np.ndarray] | None = None, replay_blocks: bool = False
    ) -> TrainerScore: ...

    def adapter_kinds(self) -> list[str]:
        """Kinds of adapted modules: q_proj, o_proj, experts, ..."""

    def set_test_adapter(self, kind: str | None, seed: int) -> None:
        """Make B random in the modules of `kind` ("all": in all) and zero elsewhere; None makes it zero everywhere."""

    def restore_adapter(self) -> None:
        """Put the trained adapter back."""

    def adapter_is_zero(self) -> bool:
        """Whether the adapter changes nothing (every B is zero)."""


class EngineSide(Protocol):
    """What the check asks of the engine."""

    def base_digests(self, detail: bool = False) -> list[dict[str, dict]]:
        """Of every worker."""

    def adapter_digests(self, detail: bool = False) -> list[dict[str, dict]]:
        """Of every worker."""

    def sync(self) -> None:
        """Send the trainer's adapter as it is now."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Sequence]: ...

    def score(self, sequences: list[list[int]], adapter: bool) -> list[list[float]]: ...

    def selected_blocks(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Blocks that sparse attention selects in a prefill, int32 [tokens, layers, heads, top_k] a sequence."""


def compare_digests(trainer: dict[str, dict], engine: dict[str, dict]) -> list[str]:
    """Names whose bytes differ, or that one side lacks ("name (engine lacks it)")."""
    lacking = [f"{name} (engine lacks it)" for name in sorted(trainer.keys() - engine.keys())]
    lacking += [f"{name} (trainer lacks it)" for name in sorted(engine.keys() - trainer.keys())]
    both = trainer.keys() & engine.keys()
    return lacking + sorted(name for name in both if trainer[name]["sha256"] != engine[name]["sha256"])


def matching_digests(of_trainer: Callable, workers: list[dict[str, dict]], detail: bool = False) -> list[dict]:
    """The trainer's digests for each engine worker: of the parts that it holds where the engine is tensor-parallel."""
    known: dict[str, dict] = {}  # replicas hold the same parts
    ours = []
    for worker in workers:
        shards = {name: entry["shard"] for name, entry in worker.items() if "shard" in entry}
        key = repr(shards)
        if key not in known:
            known[key] = of_trainer(detail=detail, shards=shards)
        ours.append(known[key])
    return ours


def _check_weights(report: ConsistencyReport, trainer: TrainerSide, engine: EngineSide, base: bool) -> None:
    kinds = [("base", trainer.base_digests, engine.base_digests)] if base else []
    kinds.append(("adapter", trainer.adapter_digests, engine.adapter_digests))
    for kind, of_trainer, of_engine in kinds:
        workers = of_engine()
        matching = matching_digests(of_trainer, workers)
        ours = matching[0] if matching else {}
        if not ours:
            report.fail(f"weights: no {kind} tensors from {len(workers)} engine workers")
        differing = [compare_digests(own, worker) for own, worker in zip(matching, workers, strict=True)]
        mismatched = sorted({name for names in differing for name in names})
        report.weights[kind] = {
            "tensors": len(ours),
            "workers": len(workers),
            "bytes": sum(entry["bytes"] for entry in ours.values()),
            "mismatched": mismatched,
        }
        if kind == "adapter":
            report.weights[kind]["unbound"] = [name for name in mismatched if "engine lacks" in name]
        if mismatched:
            worker = next(number for number, names in enumerate(differing) if names)
            explain = diagnosis.explain_base if kind == "base" else diagnosis.explain_adapter
            theirs = of_engine(detail=True)[worker]
            cause = explain(matching_digests(of_trainer, [theirs], detail=True)[0], theirs, differing[worker])
            report.fail(f"weights: {len(mismatched)} {kind} tensors differ, first {mismatched[0]}", cause)


def response_part(sequences: list[Sequence], scored: list[list[float]]) -> list[list[float]]:
    """Log-probs of the response tokens from those of tokens 1.. of whole sequences."""
    return [scores[len(sequence.prompt_ids) - 1 :] for sequence, scores in zip(sequences, scored, strict=True)]


def _check_numbers(
    report: ConsistencyReport,
    sequences: list[Sequence],
    score: TrainerScore,
    prefill: list[list[float]],
    limits: Limits,
) -> None:
    """`prefill`: the engine's own log-probs of the response tokens, by prefill."""
    engine = [sequence.logprobs for sequence in sequences]
    report.logprobs = {
        "tokens": sum(len(x) for x in engine),
        "free": logprob_stats(score.free, engine),
        "replayed": logprob_stats(score.replayed, engine),
        "decode_prefill": logprob_stats(engine, prefill),
        "prefill": logprob_stats(score.replayed, prefill),
        "by_position": mismatch.by_position(score.replayed, engine),
        "sequence_tail": mismatch.sequence_tail(score.replayed, engine),
        "worst": mismatch.worst_tokens(score.replayed, engine, sequences),
        "points": mismatch.plot_points(score.replayed, engine),
    }
    failing = {"kl_k3": limits.kl_k3, "max_abs": limits.max_abs_logp, "mean_abs": limits.mean_abs_logp}
    replayed = report.logprobs["replayed"]
    # A comparison written as `not value <= limit` fails a NaN too.
    above = {name: limit for name, limit in failing.items() if not replayed[name] <= limit}
    layers = sorted(score.agreement)

    def mean(values: dict[int, float]) -> float:
        return float(np.mean([values[layer] for layer in layers])) if layers else 1.0

    report.routing = {
        "tokens": score.tokens,
        "free_agreement": mean(score.agreement),
        "replayed_agreement": mean(score.agreement_replayed),
        "per_layer": [
            {"layer": layer, "free": score.agreement[layer], "replayed": score.agreement_replayed[layer]}
            | score.details[layer]
            for layer in layers
        ],
        "not_replayed": score.not_replayed,
    }
    for layer in layers:
        if not score.agreement_replayed[layer] >= limits.routing_replayed:
            report.fail(
                f"routing: layer {layer} agrees on {score.agreement_replayed[layer]:.4f} of tokens with replay "
                f"(threshold routing_replayed {limits.routing_replayed})",
                diagnosis.explain_routing(report.routing["per_layer"], replayed=True, numbers_agree=not above),
            )
        if not score.agreement[layer] >= limits.routing_free:
            report.fail(
                f"routing: layer {layer} agrees on {score.agreement[layer]:.4f} of tokens without replay "
                f"(threshold routing_free {limits.routing_free})",
                diagnosis.explain_routing(report.routing["per_layer"], replayed=False, numbers_agree=not above),
            )
    for name, limit in above.items():
        cause = diagnosis.explain_logprobs(report.logprobs, asdict(limits))
        report.fail(f"log-probs: replayed {name} {replayed[name]:.3e} is above {limit:.1e}", cause)
    decode = report.logprobs["decode_prefill"]
    if not decode["kl_k3"] <= limits.kl_k3:
        cause = diagnosis.explain_logprobs(report.logprobs, asdict(limits))
        report.fail(f"log-probs: the engine's decode and prefill differ, kl_k3 {decode['kl_k3']:.3e}", cause)


def _check_selection(
    report: ConsistencyReport, score: TrainerScore, prefill: list[list[float]], limits: Limits, replayed: bool
) -> None:
    """Blocks of sparse attention: the share of (token, head) with the same set on both sides, near-ties apart."""
    total = {
        key: sum(entry[key] for entry in score.selected.values()) for key in ("selections", "disagree", "near_ties")
    }

    def gap(trainer: list[list[float]]) -> float:
        gaps = [np.abs(np.subtract(a, b))[f] for a, b, f in zip(trainer, prefill, score.flipped, strict=True)]
        gaps = np.concatenate(gaps)
        return float(gaps.mean()) if gaps.size else 0.0

    report.selection = {
        **total,
        "agreement": 1 - total["disagree"] / max(total["selections"], 1),
        "per_layer": [{"layer": layer, **entry} for layer, entry in sorted(score.selected.items())],
        "replayed": replayed,
        "flipped": {
            "tokens": int(sum(flips.sum() for flips in score.flipped)),
            "free": gap(score.free),
            "replayed": gap(score.replayed),
        },
    }
    if not total["selections"]:
        report.fail("selection: the engine's blocks are of no token")
    real = 1 - (total["disagree"] - total["near_ties"]) / max(total["selections"], 1)
    if not real >= limits.selection:
        report.fail(
            f"selection: {real:.4f} of (token, head) attend to the same blocks on both sides, near-ties left out "
            f"(threshold selection {limits.selection})",
            diagnosis.explain_selection(report.selection["per_layer"]),
        )


def _effect(a: list[list[float]], b: list[list[float]], summary=np.mean) -> float:
    return float(summary(np.abs(np.concatenate([np.subtract(x, y) for x, y in zip(a, b, strict=True)]))))


def check(
    trainer: TrainerSide,
    engine: EngineSide,
    prompts: list[list[int]],
    max_tokens: int,
    thresholds: Limits,
    *,
    probe: bool = True,
    replay_blocks: bool = False,
    step: int = 0,
) -> ConsistencyReport:
    """Run the three checks with the adapter as it is, then the probe.

    `replay_blocks`: the replayed log-probs are with the engine's blocks of sparse attention too, where there are any.

    With `probe` the adapter is replaced by test adapters for a moment: zero B must change nothing, random B in one kind
    of module after the other must move the engine's log-probs, and with all of them random both sides must still agree.
    Without it the trained adapter itself must move them.
    """
    report = ConsistencyReport(thresholds=asdict(thresholds), step=step)
    _check_weights(report, trainer, engine, base=True)
    if report.verdict == "fail":
        return report  # numbers of two different models would explain nothing more
    sequences = engine.generate(prompts, max_tokens)
    ids = [sequence.ids for sequence in sequences]
    adapted = engine.score(ids, adapter=True)
    blocks = engine.selected_blocks(ids) if trainer.selects_blocks() else None
    score, prefill = trainer.score(sequences, blocks, replay_blocks), response_part(sequences, adapted)
    _check_numbers(report, sequences, score, prefill, thresholds)
    if blocks is not None:
        _check_selection(report, score, prefill, thresholds, replay_blocks)
    base = engine.score(ids, adapter=False)
    if not probe:
        effect = _effect(adapted, base)
        report.probe = {"adapter_effect": effect, "zero_adapter_effect": None}
        if not effect > 0.0 and not trainer.adapter_is_zero():
            report.fail("probe: the trained adapter does not change the engine's log-probs; is it bound?")
        return report
    try:
        _probe(report, trainer, engine, prompts, ids, base, max_tokens, thresholds)
    finally:
        trainer.restore_adapter()
        engine.sync()
    _check_weights(report, trainer, engine, base=False)
    return report


def _probe(report, trainer, engine, prompts, ids, base, max_tokens: int, limits: Limits) -> None:
    trainer.set_test_adapter(None, seed=0)
    engine.sync()
    zero = engine.score(ids, adapter=True)
    effects = {}
    for seed, kind in enumerate(trainer.adapter_kinds(), start=1):
        trainer.set_test_adapter(kind, seed)
        engine.sync()
        effects[kind] = _effect(engine.score(ids, adapter=True), zero)
    trainer.set_test_adapter("all", seed=0)
    engine.sync()
    sequences = engine.generate(prompts, max_tokens)
    score = trainer.score(sequences)
    perturbed = logprob_stats(score.replayed, [sequence.logprobs for sequence in sequences])
    report.probe = {
        "adapter_effect": min(effects.values(), default=0.0),
        "zero_adapter_effect": _effect(zero, base),
        "zero_adapter_median": _effect(zero, base, np.median),
        "by_kind": effects,
        "perturbed": perturbed,
    }
    for kind, effect in effects.items():
        if not effect >= limits.adapter_effect:
            report.fail(
                f"probe: a random adapter on {kind} moves log-probs by {effect:.2e} (threshold adapter_effect "
                f"{limits.adapter_effect}): the engine does not apply it",
                diagnosis.explain_probe(effects, limits.adapter_effect),
            )
    # An engine whose kernels differ with an adapter flips an expert or block of a few tokens: there the typical token
    # is held to the threshold, and the mean to that of two sides. One that repeats bit for bit has no such excuse.
    repeats = limits.zero_adapter_effect == 0
    for name, limit in (
        ("zero_adapter_median", limits.zero_adapter_effect),
        ("zero_adapter_effect", 0.0 if repeats else limits.mean_abs_logp),
    ):
        if not report.probe[name] <= limit:
            report.fail(
                f"probe: a zero adapter moves log-probs by {report.probe[name]:.2e} ({name}, threshold "
                f"zero_adapter_effect {limits.zero_adapter_effect})"
            )
            break
    if not perturbed["kl_k3"] <= limits.kl_k3:
        report.fail(
            f"probe: with a random adapter replayed kl_k3 is {perturbed['kl_k3']:.2e}, above {limits.kl_k3:.1e}"
        )
