"""Metrics of trainer/engine mismatch, as sums and extremes, so that they do not depend on micro-batch size.

verl averages metrics over micro-batches; a mean of means is wrong when they differ in tokens. These are emitted as
verl `Metric`s that add up (or take the extreme), and turned into rates once a step by `finish`.
"""

import torch
from verl.utils.metric import Metric

PREFIX = "lockstep"


def _response_tokens(log_probs: torch.Tensor, micro_batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(trainer, rollout) log-probs float32 [N] of the response tokens that count, in the same order.

    verl gives log-probs as a jagged tensor over prompt + response, where position t holds the log-prob of token t + 1;
    rollout log-probs and the response mask are jagged over the response alone.
    """
    trainer, rollout = [], []
    for own, other, mask in zip(
        log_probs.unbind(), micro_batch["old_log_probs"].unbind(), micro_batch["response_mask"].unbind(), strict=True
    ):
        count = mask.shape[0]
        keep = mask.bool()
        trainer.append(own[-count - 1 : -1][keep])
        rollout.append(other[:count][keep])
    return torch.cat(trainer).float(), torch.cat(rollout).float()


@torch.no_grad()
def mismatch_metrics(log_probs: torch.Tensor, micro_batch) -> dict[str, Metric]:
    """k1, k3, |delta logp| and IS-ratio sums and extremes of one micro-batch (ratio = trainer / rollout)."""
    if "old_log_probs" not in micro_batch.keys():  # noqa: SIM118 - a TensorDict iterates over its batch
        return {}
    trainer, rollout = _response_tokens(log_probs, micro_batch)
    delta = trainer - rollout
    ratio = delta.exp()
    sums = {
        "tokens": torch.tensor(float(delta.numel())),
        "k1": -delta.sum(),
        "k3": (ratio - 1 - delta).sum(),
        "abs": delta.abs().sum(),
        "ratio": ratio.sum(),
        "rollout_logp": rollout.sum(),
    }
    metrics = {f"{PREFIX}/sum/{name}": Metric("sum", value) for name, value in sums.items()}
    if delta.numel():
        metrics[f"{PREFIX}/max/abs"] = Metric("max", delta.abs().max())
        metrics[f"{PREFIX}/max/ratio"] = Metric("max", ratio.max())
        metrics[f"{PREFIX}/min/ratio"] = Metric("min", ratio.min())
    return metrics


def routing_metrics(routing, micro_batch) -> dict[str, Metric]:
    """Rows replayed, rows in all and free agreement a layer of one micro-batch."""
    counts = routing.take_counts()
    if not counts:
        return {}
    rows = micro_batch["input_ids"].values().numel() * len(counts)
    metrics = {
        f"{PREFIX}/sum/rows": Metric("sum", float(rows)),
        f"{PREFIX}/sum/replayed": Metric(
            "sum", float(sum(c.rows for c in counts.values())) if routing.enabled else 0.0
        ),
        f"{PREFIX}/sum/known": Metric("sum", float(sum(c.rows for c in counts.values()))),
        f"{PREFIX}/sum/agree": Metric("sum", float(sum(c.agree for c in counts.values()))),
    }
    return metrics


def finish(raw: dict[str, float]) -> dict[str, float]:
    """Step metrics from the aggregated sums: kl_k1, kl_k3, logp_diff_mean/max, is_ratio_mean/min/max, replay shares."""

    def get(name: str) -> float | None:
        return raw.get(f"actor/{PREFIX}/{name}", raw.get(f"{PREFIX}/{name}"))

    out: dict[str, float] = {}
    tokens = get("sum/tokens")
    if tokens:
        out["kl_k1"] = get("sum/k1") / tokens
        out["kl_k3"] = get("sum/k3") / tokens
        out["logp_diff_mean"] = get("sum/abs") / tokens
        out["logp_diff_max"] = get("max/abs")
        out["is_ratio_mean"] = get("sum/ratio") / tokens
        out["is_ratio_min"] = get("min/ratio")
        out["is_ratio_max"] = get("max/ratio")
        out["entropy"] = -get("sum/rollout_logp") / tokens
        out["tokens"] = tokens
    if get("sum/rows"):
        out["replayed_fraction"] = get("sum/replayed") / get("sum/rows")
        if get("sum/known"):
            out["routing_free_agreement"] = get("sum/agree") / get("sum/known")
    return out
