"""The consistency check: is the trainer the model that the engine serves? Weights, routing, log-probs, and a probe.

`check` talks to two sides through small protocols, so that the same code judges an in-process pair and a live trainer
and engine inside a verl run. The report's JSON is versioned (docs/consistency.md).
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import numpy as np

from rl import diagnosis, mismatch
from rl.mismatch import logprob_stats
from rollout.sampling import Sequence

SCHEMA = 1


@dataclass
class TrainerScore:
    """The trainer's view of probe sequences.

    `free` and `replayed`: response log-probs a sequence, routing by itself and with the engine's ids. `agreement` and
    `agreement_replayed`: a layer's share of known rows on which the used expert sets equal the engine's; `tokens` known
    rows of one layer; `not_replayed` rows that the engine did not route; `details` a layer's `probe.routing_details`.
    """

    free: list[list[float]]
    replayed: list[list[float]]
    agreement: dict[int, float]
    agreement_replayed: dict[int, float]
    tokens: int
    not_replayed: int
    details: dict[int, dict]


@dataclass(frozen=True)
class Limits:
    """Thresholds of a check, all given; the fields are those of the recipe's `consistency.thresholds`."""

    kl_k3: float
    max_abs_logp: float
    mean_abs_logp: float
    routing_replayed: float = 1.0
    routing_free: float = 0.9
    adapter_effect: float = 1e-3
    zero_adapter_effect: float = 0.0


# Above what was measured on agreeing pairs (docs/consistency.md). The CPU repeats bit for bit; the engine's GPU kernels
# do not, and W4A4 activations are modelled, not reproduced.
DEFAULTS = {
    "emulation": Limits(kl_k3=2e-4, max_abs_logp=0.3, mean_abs_logp=0.01),
    "marlin": Limits(kl_k3=1e-3, max_abs_logp=1.0, mean_abs_logp=0.03, zero_adapter_effect=5e-3),
    "flashinfer_w4a4": Limits(kl_k3=1e-2, max_abs_logp=2.0, mean_abs_logp=0.1, zero_adapter_effect=2e-2),
}


def resolve_limits(thresholds: dict, backend: str) -> Limits:
    """The recipe's thresholds (a dict of the schema's section), and the defaults of `backend` where they are None."""
    return replace(DEFAULTS[backend], **{key: value for key, value in thresholds.items() if value is not None})


class TrainerSide(Protocol):
    """What the check asks of the trainer."""

    def base_digests(self, detail: bool = False, shards: dict[str, dict] | None = None) -> dict[str, dict]:
        """`fingerprint.digests` of every base tensor."""

    def adapter_digests(self, detail: bool = False, shards: dict[str, dict] | None = None) -> dict[str, dict]:
        """`fingerprint.digests` of every adapter tensor as the engine must hold it."""

    def score(self, sequences: list[Sequence]) -> TrainerScore: ...

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


def finite(value):
    """A copy of nested dicts and lists in which NaN and infinities are None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class ConsistencyReport:
    """Outcome of a check; `as_dict` is the JSON of docs/consistency.md."""

    verdict: str = "pass"
    reasons: list[str] = field(default_factory=list)
    diagnosis: list[str] = field(default_factory=list)
    weights: dict = field(default_factory=dict)
    routing: dict = field(default_factory=dict)
    logprobs: dict = field(default_factory=dict)
    probe: dict = field(default_factory=dict)
    thresholds: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    recipe: dict = field(default_factory=dict)
    step: int = 0

    def as_dict(self) -> dict:
        """The report as JSON holds it: a number that is not finite is null."""
        return {"schema": SCHEMA, **finite(asdict(self))}

    def fail(self, reason: str, cause: str | None = None) -> None:
        self.verdict = "fail"
        self.reasons.append(reason)
        if cause is not None and cause not in self.diagnosis:
            self.diagnosis.append(cause)

    def summary(self) -> str:
        """One line for the console."""
        base, adapter = self.weights.get("base", {}), self.weights.get("adapter", {})
        routing, replayed = self.routing, self.logprobs.get("replayed", {})
        return (
            f"{self.verdict}: {base.get('tensors', 0)} base and {adapter.get('tensors', 0)} adapter tensors, "
            f"routing {routing.get('free_agreement', 1):.4f} free / {routing.get('replayed_agreement', 1):.4f} "
            f"replayed, k3 {replayed.get('kl_k3', 0):.2e}, worst |delta logp| {replayed.get('max_abs', 0):.2e}"
        )


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


def _effect(a: list[list[float]], b: list[list[float]]) -> float:
    return float(np.mean(np.abs(np.concatenate([np.subtract(x, y) for x, y in zip(a, b, strict=True)]))))


def check(
    trainer: TrainerSide,
    engine: EngineSide,
    prompts: list[list[int]],
    max_tokens: int,
    thresholds: Limits,
    *,
    probe: bool = True,
    step: int = 0,
) -> ConsistencyReport:
    """Run the three checks with the adapter as it is, then the probe.

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
    _check_numbers(report, sequences, trainer.score(sequences), response_part(sequences, adapted), thresholds)
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
    if not report.probe["zero_adapter_effect"] <= limits.zero_adapter_effect:
        report.fail(
            f"probe: a zero adapter moves log-probs by {report.probe['zero_adapter_effect']:.2e} (threshold "
            f"zero_adapter_effect {limits.zero_adapter_effect})"
        )
    if not perturbed["kl_k3"] <= limits.kl_k3:
        report.fail(
            f"probe: with a random adapter replayed kl_k3 is {perturbed['kl_k3']:.2e}, above {limits.kl_k3:.1e}"
        )
