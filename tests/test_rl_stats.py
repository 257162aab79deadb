"""Mismatch metrics: the same for any split into micro-batches and workers, over response tokens, at the right token."""

import copy
import math

import pytest
import torch
from tiny_model import build, logits, token_ids
from verl.utils.metric import Metric
from verl.utils.py_functional import append_to_dict
from verl_batches import RESPONSES, jagged, make, micro_batch

from rl import stats
from rl.probe import TrainerProbe
from rl.replay import LayerCount, RoutingReplay
from rollout.sampling import Sequence

SPLITS = {
    "one": [[[0, 1, 2, 3]]],
    "each": [[[0], [1], [2], [3]]],
    "uneven": [[[2], [0, 3, 1]]],
    "two workers": [[[0, 1]], [[2, 3]]],
    "two workers, two each": [[[3], [1]], [[0], [2]]],
    "four workers": [[[0]], [[1]], [[2]], [[3]]],
}
"""Rows of each micro-batch of each worker."""


def log_probs(batch: dict, rows: list[int]) -> torch.Tensor:
    return jagged([batch["log_probs"][row] for row in rows])


def step(batch: dict, split: list[list[list[int]]]) -> dict[str, float]:
    """Metrics of a step as verl adds them up: over the micro-batches of a worker, then over workers."""
    workers = []
    for micro_batches in split:
        collected: dict[str, Metric] = {}
        for rows in micro_batches:
            data = micro_batch(batch, rows, workers=len(split))
            append_to_dict(collected, stats.mismatch_metrics(log_probs(batch, rows), data))
            counts = {0: LayerCount(rows=sum(rows) + len(rows), agree=len(rows))}
            routing = RoutingReplay(tokens=data["input_ids"].values().numel(), counts=counts)
            append_to_dict(collected, stats.routing_metrics(routing, data))
        workers.append(collected)
    out = stats.finish({key: Metric.aggregate_dp([worker[key] for worker in workers]) for key in workers[0]})
    assert out.pop("routing_free_agreement_by_layer") == {"0": out["routing_free_agreement"]}
    return out


def expected(batch: dict) -> dict[str, float]:
    """The same from plain sums over the tokens that count."""
    pairs = [
        (float(own[-count - 1 + t]), float(other[t]))
        for own, other, mask, count in zip(
            batch["log_probs"], batch["old_log_probs"], batch["response_mask"], RESPONSES, strict=True
        )
        for t in range(count)
        if mask[t]
    ]
    delta = [own - other for own, other in pairs]
    ratio = [math.exp(d) for d in delta]
    count = len(pairs)
    return {
        "kl_k1": -sum(delta) / count,
        "kl_k3": sum(r - 1 - d for r, d in zip(ratio, delta, strict=True)) / count,
        "logp_diff_mean": sum(map(abs, delta)) / count,
        "logp_diff_max": max(map(abs, delta)),
        "is_ratio_mean": sum(ratio) / count,
        "is_ratio_min": min(ratio),
        "is_ratio_max": max(ratio),
        "entropy": -sum(other for _, other in pairs) / count,
        "tokens": count,
        "replayed_fraction": 10 / 24,
        "routing_free_agreement": 4 / 10,
    }


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_metrics_do_not_depend_on_micro_batches_or_workers(split):
    batch = make()
    assert step(batch, split) == pytest.approx(expected(batch), rel=1e-9)


def test_tokens_outside_the_response_mask_do_not_count():
    batch = make()
    changed = copy.deepcopy(batch)
    changed["old_log_probs"][2][1] = 0.0  # the observation token, as agent loops fill it in
    for row in changed["log_probs"]:
        row[-1] = -50.0  # the position after the last token: what follows the response
        row[: -max(RESPONSES) - 1] = -50.0  # and those inside the prompt
    assert step(changed, SPLITS["one"]) == step(batch, SPLITS["one"])
    batch["response_mask"][2][1] = 1
    assert step(batch, SPLITS["one"])["tokens"] == sum(RESPONSES)


def test_micro_batch_without_tokens_changes_nothing():
    batch = make()
    batch["response_mask"][3][:] = 0
    for split in (SPLITS["each"], SPLITS["four workers"]):
        assert step(batch, split) == pytest.approx(expected(batch), rel=1e-9)
    for mask in batch["response_mask"]:
        mask[:] = 0
    assert "tokens" not in step(batch, SPLITS["each"])


def test_small_gaps_are_not_lost_in_rounding():
    """k3 is quadratic: at |delta| = 1e-4 it is 5e-9, below what float32 resolves next to 1."""
    batch = make(spread=1e-4)
    actual, whole = step(batch, SPLITS["one"]), expected(batch)
    assert whole["kl_k3"] < 2e-8 and actual["kl_k3"] == pytest.approx(whole["kl_k3"], rel=1e-6)


def test_free_agreement_is_reported_when_nothing_is_replayed():
    batch = make()
    routing = RoutingReplay(enabled=False, tokens=24, counts={0: LayerCount(10, 4), 3: LayerCount(10, 9)})
    metrics = stats.routing_metrics(routing, micro_batch(batch, [0, 1, 2, 3]))
    values = stats.finish({key: metric.aggregate() for key, metric in metrics.items()})
    assert values == {
        "replayed_fraction": 0.0,
        "routing_free_agreement": 13 / 20,
        "routing_free_agreement_by_layer": {"0": 4 / 10, "3": 9 / 10},
    }
    assert stats.routing_metrics(routing, micro_batch(batch, [0])) == {}


def test_a_step_without_rollout_log_probs_has_no_mismatch():
    data = micro_batch(make(), [0]).exclude("old_log_probs")
    assert stats.mismatch_metrics(log_probs(make(), [0]), data) == {} == stats.finish({})


# ---- alignment -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
@torch.no_grad()
def scored():
    """(trainer model, ids, log-prob of every token from 1 on): each asked for after exactly the tokens before it."""
    trainer_model = build(None, dtype=torch.float32)
    ids = token_ids(1, 9)[0]
    return (
        trainer_model,
        ids,
        [float(logits(trainer_model, ids[None, :t])[0, -1].log_softmax(-1)[ids[t]]) for t in range(1, len(ids))],
    )


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_metrics_see_a_shift_by_one_position(scored, shift):
    trainer_model, ids, known = scored
    with torch.no_grad():
        out = logits(trainer_model, ids[None])[0].log_softmax(-1)
    own = out.gather(-1, ids.roll(-1)[:, None]).squeeze(-1)  # as verl does it: position t holds token t + 1
    count = 5
    rollout = torch.tensor(known[-count - shift :][:count] if shift >= 0 else [*known[-count + 1 :], known[-1]])
    data = {"old_log_probs": jagged([rollout]), "response_mask": jagged([torch.ones(count, dtype=torch.long)])}
    metrics = stats.mismatch_metrics(jagged([own]), data)
    worst = stats.finish({key: metric.aggregate() for key, metric in metrics.items()})["logp_diff_max"]
    assert worst < 1e-4 if shift == 0 else worst > 0.1


def test_probe_scores_each_response_token_after_the_tokens_before_it(scored):
    trainer_model, ids, known = scored
    sequences = [
        Sequence(ids[:prompt].tolist(), ids[prompt:end].tolist(), [], engine_ids(end))
        for prompt, end in ((4, 9), (2, 6))
    ]
    score = TrainerProbe(trainer_model).score(sequences)
    assert score.free[0] == pytest.approx(known[3:8], abs=1e-4)
    assert score.free[1] == pytest.approx(known[1:5], abs=1e-4)
    assert score.free[0] != pytest.approx(known[2:7], abs=0.1)


def engine_ids(length: int) -> list:
    """Expert ids of a sequence, any."""
    return [[[0, 1]] * 4] * (length - 1)
