"""A training step in numbers: one row of metrics.jsonl, and the same under verl's names for wandb and TensorBoard."""

from collections import Counter
from collections.abc import Iterable

from rl import stats

# Column of metrics.jsonl -> verl's name for it.
VERL_COLUMNS = {
    "reward": "critic/score/mean",
    "response_length": "response_length/mean",
    "clip_ratio": "response_length/clip_ratio",
    "grad_norm": "actor/grad_norm",
    "loss": "actor/pg_loss",
    "pg_clipfrac": "actor/pg_clipfrac",
    "lr": "actor/lr",
    "trainer_memory_gb": "actor/perf/max_memory_allocated_gb",
}
# Column -> the name of verl's timer, seconds.
TIMINGS = {
    "time_generate": "gen",
    "time_advantage": "adv",
    "time_update": "update_actor",
    "time_sync": "update_weights",
    "time_wake": "wake",
    "time_gate": "gate",
    "time_save": "save_checkpoint",
    "time_validate": "testing",
    "time_step": "step",
}
# Column that we compute -> the name under which verl users look for it. verl averages its own over micro-batches.
LOGGED_AS = {
    "kl_k1": "rollout_corr/kl",
    "kl_k3": "rollout_corr/k3_kl",
    "is_ratio_mean": "rollout_corr/rollout_is_mean",
    "is_ratio_min": "rollout_corr/rollout_is_min",
    "is_ratio_max": "rollout_corr/rollout_is_max",
    "entropy": "actor/entropy",
    "gen_batches": "train/num_gen_batches",
    "time_reward": "timing_s/reward",
}


def reward_metrics(tags: Iterable[dict]) -> dict[str, float]:
    """Columns from the tags that `rl.group_rollout` gives every sample; padding does not count.

    accuracy; no_answer: share of samples without a readable answer; reward_errors and reward_timeouts: samples that
    could not be judged, which are not wrong answers; overlong: share of samples with a penalty on length;
    overlong_penalty: its mean over all samples; time_reward: mean seconds that a group waited for its rewards.
    """
    judged = [tag for tag in tags if not tag.get("is_padding", False) and "correct" in tag]
    if not judged:
        return {}
    penalties = [tag["overlong_penalty"] for tag in judged]
    return {
        "accuracy": sum(tag["correct"] for tag in judged) / len(judged),
        "no_answer": sum(not tag["answered"] for tag in judged) / len(judged),
        **{key: float(number) for key, number in _not_judged(tag["reward_error"] for tag in judged).items()},
        "overlong": sum(penalty < 0 for penalty in penalties) / len(judged),
        "overlong_penalty": sum(penalties) / len(judged),
        "time_reward": sum(tag["reward_s"] for tag in judged) / len(judged),
    }


def _not_judged(errors: Iterable[str | None]) -> dict[str, int]:
    """Time-outs, and what else kept the reward from judging a sample; without an error its text is empty."""
    found = [error for error in errors if error]
    timeouts = found.count("timeout")
    return {"reward_errors": len(found) - timeouts, "reward_timeouts": timeouts}


def held_out(metrics: dict, sources: Iterable[str], errors: Iterable[str | None]) -> dict:
    """What `rl.events.EventLog.validation` takes, from verl's validation metrics.

    Args:
        metrics: verl's, with val-core/SOURCE/acc/mean@N.
        sources: the data source of every problem; the accuracy is the mean over problems, whatever their source.
        errors: the reward's "error" of every sample.

    Raises:
        RuntimeError: verl has no accuracy of a source.
    """
    problems = Counter(sources)
    shares = {}
    for source in problems:
        found = [float(v) for k, v in metrics.items() if k.startswith(f"val-core/{source}/acc/mean@")]
        if len(found) != 1:
            raise RuntimeError(f"verl reported {len(found)} held-out accuracies of {source} among {sorted(metrics)}")
        shares[source] = found[0]
    accuracy = sum(shares[source] * number for source, number in problems.items()) / problems.total()
    return {"accuracy": accuracy, "by_set": shares if len(shares) > 1 else {}, **_not_judged(errors)}


def row(metrics: dict, timing: dict[str, float], more: dict[str, float]) -> dict:
    """One row of metrics.jsonl from verl's metrics and timings (seconds) and the columns in `more`."""
    out = stats.finish({key: float(value) for key, value in metrics.items() if _is_raw(key)})
    out |= {name: float(metrics[key]) for name, key in VERL_COLUMNS.items() if key in metrics}
    out |= {name: float(timing[key]) for name, key in TIMINGS.items() if key in timing} | more
    if out.get("tokens") and out.get("time_step"):
        out["tokens_per_s"] = out["tokens"] / out["time_step"]
    return out


def logged(metrics: dict, out: dict) -> dict:
    """What wandb and TensorBoard get: verl's metrics without our raw sums, and the columns of `out` that verl lacks."""
    result = {key: value for key, value in metrics.items() if not _is_raw(key)}
    for name, value in out.items():
        if name == "routing_free_agreement_by_layer":
            result |= {f"lockstep/routing_free_agreement/layer_{layer}": share for layer, share in value.items()}
        elif name not in VERL_COLUMNS and (name not in TIMINGS):
            result.setdefault(LOGGED_AS.get(name, f"lockstep/{name}"), value)  # verl's own, where it has one
    return result


def _is_raw(key: str) -> bool:
    return key.startswith(("actor/lockstep", "lockstep/sum", "lockstep/max", "lockstep/min"))
