"""What a consistency check is told and what it tells: the trainer's scores, the thresholds, the report.

The report's JSON is versioned (docs/consistency.md).
"""

import math
from dataclasses import asdict, dataclass, field, replace

import numpy as np

SCHEMA = 1


@dataclass
class TrainerScore:
    """The trainer's view of probe sequences.

    `free` and `replayed`: response log-probs a sequence, routing by itself and with the engine's ids. `agreement` and
    `agreement_replayed`: a layer's share of known rows on which the used expert sets equal the engine's; `tokens` known
    rows of one layer; `not_replayed` rows that the engine did not route; `details` a layer's `probe.routing_details`;
    `selected` a layer's `BlockReplay.compare` and `flipped`, a sequence, which response tokens it says disagree (both
    empty for a model without sparse attention).
    """

    free: list[list[float]]
    replayed: list[list[float]]
    agreement: dict[int, float]
    agreement_replayed: dict[int, float]
    tokens: int
    not_replayed: int
    details: dict[int, dict]
    selected: dict[int, dict] = field(default_factory=dict)
    flipped: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """Thresholds of a check, all given; the fields are those of the recipe's `consistency.thresholds`."""

    kl_k3: float
    max_abs_logp: float
    mean_abs_logp: float
    routing_replayed: float = 1.0
    routing_free: float = 0.9
    selection: float = 0.98
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
    selection: dict = field(default_factory=dict)
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
