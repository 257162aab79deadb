"""The objective that a recipe trains, through verl's own loss: loss and gradient against sums written out by hand."""

import copy
import functools
import math

import pytest
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss
from verl_batches import PROMPTS, RESPONSES, jagged, make, micro_batch

from rl.config import load_recipe
from rl.verl_config import to_verl

ROWS = [0, 1, 2, 3]
CAP = 2.0


def actor_config(*overrides: str):
    """verl's ActorConfig for recipes/tiny_math.yaml, as its workers build it."""
    return copy.deepcopy(_actor_config(overrides))


@functools.cache
def _actor_config(overrides: tuple[str, ...]):
    folders = {"run_dir": "runs/x", "ray_tmp": "/tmp/x", "train_file": "train.parquet", "val_file": "val.parquet"}
    config = to_verl(load_recipe("tiny_math.yaml", overrides), backend="emulation", cuda=False, **folders)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def run(config, batch: dict, split: list[list[int]], workers: int = 1) -> tuple[float, list[torch.Tensor], list[dict]]:
    """(loss, gradient with respect to every log-prob of prompt and response, metrics of each micro-batch)."""
    leaves = [row.clone().requires_grad_() for row in batch["log_probs"]]
    total, metrics = 0.0, []
    for rows in split:
        output = {"log_probs": jagged([leaves[row] for row in rows])}
        loss, logged = ppo_loss(config, output, micro_batch(batch, rows, workers))
        loss.backward()
        total += loss.item()
        metrics.append(logged)
    return total, [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves], metrics


def oracle(batch: dict, weight, kept=lambda _row, _ratios: True) -> tuple[float, list[list[float]]]:
    """-mean(weight(ratio, sequence ratio) * A * logp) over response tokens, and its gradient with constant weights."""
    tokens = int(sum(mask.sum() for mask in batch["response_mask"]))
    loss, grads = 0.0, []
    for row in ROWS:
        own = batch["log_probs"][row].tolist()
        grads.append([0.0] * len(own))
        mask, rollout = batch["response_mask"][row].tolist(), batch["old_log_probs"][row].tolist()
        places = [len(own) - RESPONSES[row] - 1 + t for t in range(RESPONSES[row])]  # position t holds token t + 1
        ratios = [math.exp(own[p] - other) for p, other, m in zip(places, rollout, mask, strict=True) if m]
        if not kept(row, ratios):
            continue
        for t, place in enumerate(places):
            if mask[t]:
                factor = weight(math.exp(own[place] - rollout[t]), math.prod(ratios)) * float(
                    batch["advantages"][row][t]
                )
                loss -= factor * own[place] / tokens
                grads[row][place] = -factor / tokens
    return loss, grads


def capped(ratio: float, _sequence: float) -> float:
    return min(ratio, CAP)


def assert_equals(result, expected, rel: float = 1e-5) -> None:
    loss, grads, _ = result
    assert loss == pytest.approx(expected[0], rel=rel, abs=1e-7)
    for row, grad in enumerate(grads):
        assert grad.tolist() == pytest.approx(expected[1][row], rel=rel, abs=1e-7), row


def test_recipe_trains_capped_importance_sampling_applied_once():
    batch = make(spread=1.0)
    flat = [
        math.exp(d)
        for row in ROWS
        for d in (batch["log_probs"][row][-RESPONSES[row] - 1 : -1] - batch["old_log_probs"][row])
    ]
    assert max(flat) > CAP > 1 > min(flat), "the batch must have weights on both sides of the cap"
    assert_equals(run(actor_config(), batch, [ROWS]), oracle(batch, capped))


@pytest.mark.parametrize(
    "wrong",
    [lambda r, _s: 1.0, lambda r, _s: min(r, CAP) ** 2, lambda r, _s: r, lambda r, _s: min(r, CAP) * r],
    ids=["not applied", "applied twice", "not capped", "applied by the ratio too"],
)
def test_the_oracle_tells_other_objectives_apart(wrong):
    batch = make(spread=1.0)
    with pytest.raises(AssertionError):
        assert_equals(run(actor_config(), batch, [ROWS]), oracle(batch, wrong))


def test_weights_carry_no_gradient():
    """With A = 1 and a ratio below the cap, -w logp has the gradient -w; through w it would be -w (1 + logp)."""
    batch = make(spread=0.0)
    for row in ROWS:
        batch["old_log_probs"][row] = batch["log_probs"][row][-RESPONSES[row] - 1 : -1] - math.log(1.5)
        batch["advantages"][row][:] = 1.0
    _, grads, _ = run(actor_config(), batch, [ROWS])
    for row in ROWS:
        expected = -1.5 / 13 * batch["response_mask"][row]
        torch.testing.assert_close(grads[row][-RESPONSES[row] - 1 : -1], expected, rtol=1e-5, atol=1e-7)
        assert not grads[row][: PROMPTS[row] - 1].any() and grads[row][-1] == 0


def test_ppo_clip_of_verl_would_not_apply_the_weights():
    """Why loss_type must be reinforce: with verl's default the cap has no effect on the loss."""
    batch, losses = make(spread=1.0), []
    for cap in (2.0, 1.01):
        config = actor_config(f"algorithm.rollout_is_threshold={cap}")
        reinforce = run(config, batch, [ROWS])[0]
        config.policy_loss.rollout_correction["loss_type"] = "ppo_clip"
        losses.append((reinforce, run(config, batch, [ROWS])[0]))
    assert losses[0][1] == losses[1][1] and losses[0][0] != losses[1][0]


@pytest.mark.parametrize("split", [[[0], [1], [2], [3]], [[2, 0], [3, 1]], [[1], [0, 2, 3]]], ids=str)
def test_gradient_does_not_depend_on_the_micro_batch_size(split):
    batch = make(spread=1.0)
    assert_equals(run(actor_config(), batch, split), oracle(batch, capped))


def test_two_workers_together_have_the_gradient_of_one():
    """Each worker scales its loss by the number of workers, because FSDP averages their gradients."""
    batch = make(spread=1.0)
    first, second = (run(actor_config(), batch, split, workers=2) for split in ([[0, 3]], [[1], [2]]))
    grads = [(a + b) / 2 for a, b in zip(first[1], second[1], strict=True)]
    assert_equals(((first[0] + second[0]) / 2, grads, []), oracle(batch, capped))


def test_observation_tokens_and_padding_have_no_say():
    batch = make(spread=1.0)
    changed = copy.deepcopy(batch)
    changed["old_log_probs"][2][1], changed["advantages"][2][1] = 0.0, 1e3  # response_mask is 0 there
    for row in ROWS:
        changed["log_probs"][row][-1] = -30.0  # what follows the last token
        changed["log_probs"][row][: PROMPTS[row] - 1] = -30.0  # tokens of the prompt
    (loss, grads, _), (loss_changed, grads_changed, _) = (run(actor_config(), b, [ROWS]) for b in (batch, changed))
    assert loss == loss_changed
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_changed, strict=True))


@pytest.mark.parametrize("fill", [0.0, -7.0, 5.0])
def test_values_in_the_padding_of_a_padded_batch_have_no_say(fill):
    from verl.trainer.ppo.core_algos import compute_policy_loss_bypass_mode

    batch, config, width = make(spread=1.0), actor_config(), max(RESPONSES) + 2
    fields = {name: torch.full((len(ROWS), width), fill) for name in ("log_prob", "old_log_prob", "advantages")}
    mask = torch.zeros(len(ROWS), width, dtype=torch.bool)
    for row, count in enumerate(RESPONSES):
        fields["log_prob"][row, :count] = batch["log_probs"][row][-count - 1 : -1]
        fields["old_log_prob"][row, :count] = batch["old_log_probs"][row]
        fields["advantages"][row, :count] = batch["advantages"][row]
        mask[row, :count] = batch["response_mask"][row].bool()
    log_prob = fields.pop("log_prob").requires_grad_()
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=len(ROWS))
    loss, _ = compute_policy_loss_bypass_mode(
        log_prob=log_prob, response_mask=mask, loss_agg_mode=config.loss_agg_mode, config=config, **fields
    )
    loss.backward()
    expected, grads = oracle(batch, capped)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for row, count in enumerate(RESPONSES):
        assert log_prob.grad[row, :count].tolist() == pytest.approx(grads[row][-count - 1 : -1], rel=1e-5, abs=1e-7)
    assert not log_prob.grad[~mask].any()


# ---- other corrections ---------------------------------------------------------------------------------------------


def test_no_correction_is_plain_policy_gradient():
    batch = make(spread=1.0)
    config = actor_config("algorithm.rollout_is=null")
    assert_equals(run(config, batch, [ROWS]), oracle(batch, lambda _r, _s: 1.0))


def test_sequence_weights_are_the_product_of_the_tokens_ratios():
    """Why they are not the default: with the length, exp(sum) leaves 1 while the mean gap of a token stays."""
    batch = make(spread=0.3)
    config = actor_config("algorithm.rollout_is=sequence")
    assert_equals(run(config, batch, [ROWS]), oracle(batch, lambda _r, s: min(s, CAP)))
    for row in ROWS:
        batch["old_log_probs"][row] = batch["log_probs"][row][-RESPONSES[row] - 1 : -1] + 0.1
    assert_equals(run(config, batch, [ROWS]), oracle(batch, lambda _r, s: s))
    ratio = {4: math.exp(-0.4), 2: math.exp(-0.2), 5: math.exp(-0.4), 3: math.exp(-0.3)}  # of 5 tokens 4 count
    _, grads, _ = run(config, batch, [ROWS])
    for row, count in enumerate(RESPONSES):
        assert grads[row][-2].item() == pytest.approx(-ratio[count] * float(batch["advantages"][row][0]) / 13, rel=1e-4)


def test_icepop_masks_tokens_outside_its_bounds():
    batch = make(spread=1.0)
    config = actor_config("algorithm.icepop_low=0.5", "algorithm.icepop_high=3")
    assert config.policy_loss.rollout_correction["rollout_is_threshold"] == "0.5_3.0"
    assert_equals(run(config, batch, [ROWS]), oracle(batch, lambda r, _s: r if 0.5 <= r <= 3 else 0.0))


def divergence(kind: str, ratios: list[float]) -> float:
    """k1 (mean of -log r, or its sum) or k3 (r - 1 - log r) of a sequence."""
    logs = [math.log(r) for r in ratios]
    k3 = [r - 1 - log for r, log in zip(ratios, logs, strict=True)]
    return {
        "seq_sum_k1": -sum(logs),
        "seq_mean_k1": -sum(logs) / len(logs),
        "seq_mean_k3": sum(k3) / len(k3),
        "seq_max_k3": max(k3),
    }[kind]


@pytest.mark.parametrize("kind", ["seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k3"])
def test_sequence_mask_drops_whole_samples(kind):
    batch = make(spread=1.0)
    values = []
    oracle(batch, capped, lambda _row, ratios: values.append(divergence(kind, ratios)) or True)
    ordered = sorted(values)
    overrides = [f"algorithm.sequence_mask={kind}"]
    if kind.endswith("k1"):
        low, high = math.exp((ordered[0] + ordered[1]) / 2), math.exp((ordered[2] + ordered[3]) / 2)
        overrides += [f"algorithm.sequence_mask_low={low}", f"algorithm.sequence_mask_high={high}"]
        expected = [math.log(low) <= value <= math.log(high) for value in values]
    else:
        high = (ordered[1] + ordered[2]) / 2
        overrides += [f"algorithm.sequence_mask_high={high}"]
        expected = [value <= high for value in values]
    assert sum(expected) == 2, "two of four samples must go"
    config = actor_config(*overrides)
    assert config.policy_loss.rollout_correction["rollout_rs"] == kind
    assert_equals(run(config, batch, [ROWS]), oracle(batch, capped, lambda row, _ratios: expected[row]))


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_aggregation_of_the_recipe_is_verls(mode):
    batch = make(spread=1.0)
    _, grads = oracle(batch, capped)
    counts = [int(mask.sum()) for mask in batch["response_mask"]]
    scale = [13 / 4 / (count if mode.endswith("mean") else 1) for count in counts]
    for split in ([ROWS], [[0, 2], [1], [3]]):
        _, actual, _ = run(actor_config(f"algorithm.loss_agg_mode={mode}"), batch, split)
        for row, grad in enumerate(actual):
            assert grad.tolist() == pytest.approx([g * scale[row] for g in grads[row]], rel=1e-4, abs=1e-7)
