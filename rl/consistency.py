"""The consistency check: is the trainer the model that the engine serves? Weights, routing, log-probs, and a probe.

`check` talks to two sides through small protocols, so that the same code judges an in-process pair and a live trainer
and engine inside a verl run. The report's JSON is versioned (docs/consistency.md).
"""

from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np

from rl.schema import Thresholds
from rollout.sampling import Sequence

SCHEMA = 1


@dataclass
class TrainerScore:
    """The trainer's view of probe sequences.

    `free` and `replayed`: response log-probs a sequence, routing by itself and with the engine's ids. `agreement` and
    `agreement_replayed`: a layer's share of known rows on which the used expert sets equal the engine's; `tokens` known
    rows of one layer; `not_replayed` rows that the engine did not route.
    """

    free: list[list[float]]
    replayed: list[list[float]]
    agreement: dict[int, float]
    agreement_replayed: dict[int, float]
    tokens: int
    not_replayed: int


class TrainerSide(Protocol):
    """What the check asks of the trainer."""

    def base_digests(self) -> dict[str, dict]: ...

    def adapter_digests(self) -> dict[str, dict]: ...

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

    def base_digests(self) -> list[dict[str, dict]]: ...

    def adapter_digests(self) -> list[dict[str, dict]]: ...

    def sync(self) -> None:
        """Send the trainer's adapter as it is now."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Sequence]: ...

    def score(self, sequences: list[list[int]], adapter: bool) -> list[list[float]]: ...


@dataclass
class ConsistencyReport:
    """Outcome of a check; `as_dict` is the JSON of design section 5."""

    verdict: str = "pass"
    reasons: list[str] = field(default_factory=list)
    weights: dict = field(default_factory=dict)
    routing: dict = field(default_factory=dict)
    logprobs: dict = field(default_factory=dict)
    probe: dict = field(default_factory=dict)
    thresholds: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    recipe: dict = field(default_factory=dict)
    step: int = 0

    def as_dict(self) -> dict:
        return {"schema": SCHEMA, **asdict(self)}

    def fail(self, reason: str) -> None:
        self.verdict = "fail"
        self.reasons.append(reason)

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


def logprob_stats(trainer: list[list[float]], engine: list[list[float]]) -> dict[str, float]:
    """Mismatch over all tokens: k1 = -mean d, k3 = mean(exp d - 1 - d), |d|, Pearson; d = trainer - engine."""
    lengths = [[len(sequence) for sequence in side] for side in (trainer, engine)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"log-probs of {lengths[0]} tokens a sequence cannot be compared with those of {lengths[1]}")
    a = np.concatenate([np.asarray(x, dtype=np.float64) for x in trainer])
    b = np.concatenate([np.asarray(x, dtype=np.float64) for x in engine])
    delta = a - b
    absolute = np.abs(delta)
    varied = a.size > 1 and a.std() > 0 and b.std() > 0
    worst = [
        float(np.abs(np.asarray(x) - np.asarray(y)).mean()) for x, y in zip(trainer, engine, strict=True) if len(x)
    ]
    return {
        "mean_abs": float(absolute.mean()),
        "p99_abs": float(np.quantile(absolute, 0.99)),
        "max_abs": float(absolute.max()),
        "kl_k1": float(-delta.mean()),
        "kl_k3": float((np.exp(delta) - 1 - delta).mean()),
        "pearson": float(np.corrcoef(a, b)[0, 1]) if varied else 1.0,
        "sequence_worst": max(worst, default=0.0),
    }


def _check_weights(report: ConsistencyReport, trainer: TrainerSide, engine: EngineSide, base: bool) -> None:
    kinds = [("base", trainer.base_digests, engine.base_digests)] if base else []
    kinds.append(("adapter", trainer.adapter_digests, engine.adapter_digests))
    for kind, of_trainer, of_engine in kinds:
        ours, workers = of_trainer(), of_engine()
        if not ours or not workers:
            report.fail(f"weights: nothing to compare ({len(ours)} {kind} tensors, {len(workers)} engine workers)")
        mismatched = sorted({name for worker in workers for name in compare_digests(ours, worker)})
        report.weights[kind] = {
            "tensors": len(ours),
            "bytes": sum(entry["bytes"] for entry in ours.values()),
            "mismatched": mismatched,
        }
        if kind == "adapter":
            report.weights[kind]["unbound"] = [name for name in mismatched if "engine lacks" in name]
        if mismatched:
            report.fail(f"weights: {len(mismatched)} {kind} tensors differ, first {mismatched[0]}")


def _check_numbers(
    report: ConsistencyReport, sequences: list[Sequence], score: TrainerScore, limits: Thresholds
) -> None:
    engine = [sequence.logprobs for sequence in sequences]
    report.logprobs = {
        "tokens": sum(len(x) for x in engine),
        "free": logprob_stats(score.free, engine),
        "replayed": logprob_stats(score.replayed, engine),
    }
    layers = sorted(score.agreement)

    def mean(values: dict[int, float]) -> float:
        return float(np.mean([values[layer] for layer in layers])) if layers else 1.0

    report.routing = {
        "tokens": score.tokens,
        "free_agreement": mean(score.agreement),
        "replayed_agreement": mean(score.agreement_replayed),
        "per_layer": [
            {"layer": layer, "free": score.agreement[layer], "replayed": score.agreement_replayed[layer]}
            for layer in layers
        ],
        "not_replayed": score.not_replayed,
    }
    # A comparison written as `not value >= limit` fails a NaN too.
    for layer in layers:
        if not score.agreement_replayed[layer] >= limits.routing_replayed:
            report.fail(
                f"routing: layer {layer} agrees on {score.agreement_replayed[layer]:.4f} of tokens with replay "
                f"(threshold routing_replayed {limits.routing_replayed})"
            )
        if not score.agreement[layer] >= limits.routing_free:
            report.fail(
                f"routing: layer {layer} agrees on {score.agreement[layer]:.4f} of tokens without replay "
                f"(threshold routing_free {limits.routing_free})"
            )
    replayed = report.logprobs["replayed"]
    for name, limit in (("kl_k3", limits.kl_k3), ("max_abs", limits.max_abs_logp), ("mean_abs", limits.mean_abs_logp)):
        if not replayed[name] <= limit:
            report.fail(f"log-probs: replayed {name} {replayed[name]:.3e} is above {limit:.1e}")


def _effect(a: list[list[float]], b: list[list[float]]) -> float:
    return float(np.mean(np.abs(np.concatenate([np.subtract(x, y) for x, y in zip(a, b, strict=True)]))))


def check(
    trainer: TrainerSide,
    engine: EngineSide,
    prompts: list[list[int]],
    max_tokens: int,
    thresholds: Thresholds,
    *,
    probe: bool = True,
    step: int = 0,
) -> ConsistencyReport:
    """Run the three checks with the adapter as it is, then the probe.

    With `probe` the adapter is replaced by test adapters for a moment: zero B must change nothing, random B in one kind
    of module after the other must move the engine's log-probs, and with all of them random both sides must still agree.
    Without it the trained adapter itself must move them.
    """
    report = ConsistencyReport(thresholds=thresholds.model_dump(), step=step)
    _check_weights(report, trainer, engine, base=True)
    if report.verdict == "fail":
        return report  # numbers of two different models would explain nothing more
    sequences = engine.generate(prompts, max_tokens)
    _check_numbers(report, sequences, trainer.score(sequences), thresholds)
    ids = [sequence.ids for sequence in sequences]
    base = engine.score(ids, adapter=False)
    if not probe:
        effect = _effect(engine.score(ids, adapter=True), base)
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


def _probe(report, trainer, engine, prompts, ids, base, max_tokens: int, limits: Thresholds) -> None:
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
                f"{limits.adapter_effect}): the engine does not apply it"
            )
    if not report.probe["zero_adapter_effect"] <= limits.mean_abs_logp:
        report.fail(f"probe: a zero adapter moves log-probs by {report.probe['zero_adapter_effect']:.2e}")
    if not perturbed["kl_k3"] <= limits.kl_k3:
        report.fail(
            f"probe: with a random adapter replayed kl_k3 is {perturbed['kl_k3']:.2e}, above {limits.kl_k3:.1e}"
        )
