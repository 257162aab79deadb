"""Metrics of trainer/engine mismatch, as sums and extremes, so that they do not depend on micro-batch size.

verl averages metrics over micro-batches; a mean of means is wrong when they differ in tokens. These are emitted as
verl `Metric`s that add up (or take the extreme), and turned into rates once a step by `finish`. verl adds a sum up over
micro-batches but averages it over workers, so sums are multiplied by the number of workers here, as verl's losses are.
"""

import torch
from verl.utils.metric import Metric
from verl.utils.tensordict_utils import get_non_tensor_data

PREFIX = "lockstep"


def _response_tokens(log_probs: torch.Tensor, micro_batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(trainer, rollout) log-probs float64 [N] of the response tokens that count, in the same order.

    verl gives log-probs as a jagged tensor over prompt + response, where position t holds the log-prob of token t + 1;
    rollout log-probs and the response mask are jagged over the response alone.
    """
    trainer, rollout = [], []
    for own, other, mask in zip(
        log_probs.unbind(), micro_batch["old_log_probs"].unbind(), micro_batch["response_mask"].unbind(), strict=True
    ):
        count = mask.shape[0]
        keep = mask.bool().to(own.device)
        trainer.append(own[-count - 1 : -1][keep])
        rollout.append(other[:count].to(own.device)[keep])
    return torch.cat(trainer).double(), torch.cat(rollout).double()


def _sums(micro_batch, values: dict[str, torch.Tensor | float]) -> dict[str, Metric]:
    workers = get_non_tensor_data(micro_batch, "dp_size", 1)
    return {f"{PREFIX}/sum/{name}": Metric("sum", float(value) * workers) for name, value in values.items()}


@torch.no_grad()
def mismatch_metrics(log_probs: torch.Tensor, micro_batch) -> dict[str, Metric]:
    """k1, k3, |delta logp| and IS-ratio sums and extremes of one micro-batch (ratio = trainer / rollout)."""
    if "old_log_probs" not in micro_batch.keys():  # noqa: SIM118 - a TensorDict iterates over its batch
        return {}
    trainer, rollout = _response_tokens(log_probs, micro_batch)
    delta = trainer - rollout
    ratio = delta.exp()
    metrics = _sums(
        micro_batch,
        {
            "tokens": delta.numel(),
            "k1": -delta.sum(),
            "k3": (ratio - 1 - delta).sum(),
            "abs": delta.abs().sum(),
            "ratio": ratio.sum(),
            "rollout_logp": rollout.sum(),
        },
    )
    # Every micro-batch emits every extreme (verl wants as many from each worker), one without tokens the neutral one.
    none = delta.new_zeros(1)
    metrics[f"{PREFIX}/max/abs"] = Metric("max", torch.cat([delta.abs(), none]).max())
    metrics[f"{PREFIX}/max/ratio"] = Metric("max", torch.cat([ratio, none]).max())
    metrics[f"{PREFIX}/min/ratio"] = Metric("min", torch.cat([ratio, none + torch.inf]).min())
    return metrics


def routing_metrics(routing, micro_batch) -> dict[str, Metric]:
    """Rows in all, rows replayed, and of each layer the rows that the engine routed and those that agree with it."""
    counts = routing.take_counts()
    if not counts:
        return {}
    known = sum(count.rows for count in counts.values())
    sums = {
        "rows": routing.tokens * len(counts),
        "replayed": known if routing.enabled else 0,
    }
    for layer, count in counts.items():
        sums |= {f"known/{layer}": count.rows, f"agree/{layer}": count.agree}
    return _sums(micro_batch, sums)


def index_metrics(losses: list[torch.Tensor], layers: int, heads: int, micro_batch) -> dict[str, Metric]:
    """The indexer's losses of a micro-batch (sums over tokens and heads of `layers` layers), and its tokens."""
    tokens = int(micro_batch["input_ids"].offsets()[-1])
    return _sums(micro_batch, {"index_kl": sum(losses) / heads, "index_tokens": tokens * layers})


def finish(raw: dict[str, float]) -> dict:
    """Step metrics from the aggregated sums: kl_k1, kl_k3, logp_diff_mean/max, is_ratio_mean/min/max, replay shares.

    `routing_free_agreement_by_layer` maps the number of a layer (as text, for JSON) to its share; the rest are floats.
    """
    raw = {name.removeprefix("actor/").removeprefix(f"{PREFIX}/"): value for name, value in raw.items()}
    get = raw.get

    out: dict = {}
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
    if get("sum/index_tokens"):
        out["index_kl"] = get("sum/index_kl") / get("sum/index_tokens")
    if get("sum/rows"):
        out["replayed_fraction"] = get("sum/replayed") / get("sum/rows")
        known = {name.rpartition("/")[2]: rows for name, rows in raw.items() if name.startswith("sum/known/") and rows}
        if known:
            agree = {layer: raw[f"sum/agree/{layer}"] for layer in known}
            out["routing_free_agreement"] = sum(agree.values()) / sum(known.values())
            out["routing_free_agreement_by_layer"] = {layer: agree[layer] / known[layer] for layer in known}
    return out
