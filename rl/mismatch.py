"""Numbers of a consistency report: how trainer and engine log-probs differ, over all tokens and in detail.

Every function takes log-probs as one list of response tokens a sequence, trainer and engine in the same order;
delta = trainer - engine.
"""

from collections.abc import Sequence as Several

import numpy as np

from rollout.sampling import Sequence

LogProbs = list[list[float]]
POSITION_BUCKETS = 16
WORST_TOKENS = 8
PLOT_POINTS = 500


def flat_delta(trainer: LogProbs, engine: LogProbs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(trainer, engine, delta) float64 [N] of all tokens; ValueError if the sequences do not fit."""
    lengths = [[len(sequence) for sequence in side] for side in (trainer, engine)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"log-probs of {lengths[0]} tokens a sequence cannot be compared with those of {lengths[1]}")
    a = np.concatenate([np.asarray(x, dtype=np.float64) for x in trainer])
    b = np.concatenate([np.asarray(x, dtype=np.float64) for x in engine])
    return a, b, a - b


def logprob_stats(trainer: LogProbs, engine: LogProbs) -> dict[str, float]:
    """Mismatch over all tokens: k1 = -mean d, k3 = mean(exp d - 1 - d), |d|, Pearson, the worst sequence's mean |d|.

    `one_sign`: of the tokens with |d| above its mean, the share of the more frequent sign (0.5 for none).
    """
    a, b, delta = flat_delta(trainer, engine)
    absolute = np.abs(delta)
    positive = delta[(absolute >= absolute.mean()) & (absolute > 0)] > 0
    share = float(positive.mean()) if positive.size else 0.5
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
        "one_sign": max(share, 1 - share),
    }


def by_position(trainer: LogProbs, engine: LogProbs) -> list[dict]:
    """Mean delta and |delta| of response positions, in at most POSITION_BUCKETS buckets of equal width."""
    longest = max(len(sequence) for sequence in engine)
    width = -(-longest // POSITION_BUCKETS)
    rows = []
    for first in range(0, longest, width):
        deltas = [
            np.subtract(x[first : first + width], y[first : first + width])
            for x, y in zip(trainer, engine, strict=True)
            if len(x) > first
        ]
        delta = np.concatenate(deltas)
        rows.append(
            {
                "first": first,
                "last": min(first + width, longest) - 1,
                "tokens": int(delta.size),
                "mean": float(delta.mean()),
                "mean_abs": float(np.abs(delta).mean()),
            }
        )
    return rows


def worst_tokens(trainer: LogProbs, engine: LogProbs, sequences: Several[Sequence]) -> list[dict]:
    """The tokens with the largest |delta|: where they stand, their ids, and both log-probs."""
    found = [
        (abs(x - y), number, position, x, y)
        for number, (own, other) in enumerate(zip(trainer, engine, strict=True))
        for position, (x, y) in enumerate(zip(own, other, strict=True))
    ]
    found.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    return [
        {
            "sequence": number,
            "position": position,
            "token": sequences[number].response_ids[position],
            "trainer": x,
            "engine": y,
        }
        for _, number, position, x, y in found[:WORST_TOKENS]
    ]


def sequence_tail(trainer: LogProbs, engine: LogProbs) -> dict[str, float]:
    """Quantiles over sequences of the summed delta, which is the log of a sequence-level importance weight."""
    totals = np.array([np.subtract(x, y).sum() for x, y in zip(trainer, engine, strict=True)])
    return {f"p{q:02d}": float(np.quantile(totals, q / 100)) for q in (1, 50, 99)}


def plot_points(trainer: LogProbs, engine: LogProbs) -> list[list[float]]:
    """At most PLOT_POINTS pairs [engine, trainer], evenly spread over the tokens."""
    a, b, _ = flat_delta(trainer, engine)
    step = -(-a.size // PLOT_POINTS)
    return [[round(float(y), 4), round(float(x), 4)] for x, y in zip(a[::step], b[::step], strict=True)]
