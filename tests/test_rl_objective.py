"""Clip-higher PPO through verl's own loss against sums written out by hand, and the proof of which objective runs."""

import math

import pytest
from test_rl_correction import ROWS, actor_config, assert_equals, run
from verl_batches import RESPONSES, make

from rl.config import ConfigError, load_recipe
from rl.objective import effective_objective

PPO = ("algorithm.objective=ppo_clip", "algorithm.rollout_is=null")
LOW, HIGH, C = 0.2, 0.28, 10.0


def clipped(ratio: float, advantage: float, low: float = LOW, high: float = HIGH, c: float = C) -> tuple[float, float]:
    """(loss, gradient with respect to logp) of one token: max(-r A, -clip(r) A), at most -c A for a negative A."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    loss = max(-ratio * advantage, -bounded * advantage)
    if advantage < 0 and loss > -c * advantage:
        return -c * advantage, 0.0
    return loss, -ratio * advantage if loss == -ratio * advantage else 0.0


def oracle(batch: dict, token=clipped) -> tuple[float, list[list[float]]]:
    """Mean of `token` over the response tokens that count, and its gradient; verl's layout of positions."""
    tokens = int(sum(mask.sum() for mask in batch["response_mask"]))
    loss, grads = 0.0, []
    for row in ROWS:
        own = batch["log_probs"][row].tolist()
        grads.append([0.0] * len(own))
        for t in range(RESPONSES[row]):
            if batch["response_mask"][row][t]:
                place = len(own) - RESPONSES[row] - 1 + t
                ratio = math.exp(own[place] - float(batch["old_log_probs"][row][t]))
                value, slope = token(ratio, float(batch["advantages"][row][t]))
                loss += value / tokens
                grads[row][place] = slope / tokens
    return loss, grads


def ratios(batch: dict) -> list[tuple[float, float]]:
    """(ratio, advantage) of every token that counts."""
    return [
        (math.exp(float(d)), float(a))
        for row in ROWS
        for d, a, m in zip(
            batch["log_probs"][row][-RESPONSES[row] - 1 : -1] - batch["old_log_probs"][row],
            batch["advantages"][row],
            batch["response_mask"][row],
            strict=True,
        )
        if m
    ]


@pytest.fixture(scope="module")
def batch():
    """Tokens in each of the regions: free and clipped, for both signs of the advantage, and beyond the dual clip."""
    batch = make(seed=3, spread=1.0)
    batch["old_log_probs"][0][0] = batch["log_probs"][0][-RESPONSES[0] - 1] - math.log(30)
    batch["advantages"][0][:] = -0.7
    for place, ratio in enumerate((0.5, 2.0)):
        batch["old_log_probs"][1][place] = batch["log_probs"][1][place - RESPONSES[1] - 1] - math.log(ratio)
    batch["advantages"][1][:] = 0.9
    tokens = ratios(batch)
    assert any(a > 0 and r > 1 + HIGH for r, a in tokens) and any(a < 0 and r < 1 - LOW for r, a in tokens)
    assert any(a < 0 and r > C for r, a in tokens) and any(a < 0 and 1 < r < C for r, a in tokens)
    assert any(a > 0 and r < 1 - LOW for r, a in tokens)
    return batch


def test_clip_higher_is_the_recipes(batch):
    assert_equals(run(actor_config(*PPO), batch, [ROWS]), oracle(batch))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda r, a: clipped(r, a, high=LOW),
        lambda r, a: clipped(r, a, c=3.0),
        lambda r, a: tuple(min(r, 2.0) * x for x in clipped(r, a)),
        lambda r, a: (-min(r, 2.0) * a, -min(r, 2.0) * a),
    ],
    ids=["clipped at 1.2", "verl's default dual clip", "importance weights on top", "reinforce"],
)
def test_the_oracle_tells_other_objectives_apart(batch, wrong):
    with pytest.raises(AssertionError):
        assert_equals(run(actor_config(*PPO), batch, [ROWS]), oracle(batch, wrong))


@pytest.mark.parametrize("split", [[[0], [1], [2], [3]], [[2, 0], [3, 1]]], ids=str)
def test_gradient_does_not_depend_on_the_micro_batch_size(batch, split):
    assert_equals(run(actor_config(*PPO), batch, split), oracle(batch))


def test_bounds_are_those_of_the_recipe(batch):
    bounds = ("algorithm.clip_ratio_low=0.1", "algorithm.clip_ratio_high=0.5", "algorithm.clip_ratio_c=3")
    expected = oracle(batch, lambda r, a: clipped(r, a, 0.1, 0.5, 3.0))
    assert_equals(run(actor_config(*PPO, *bounds), batch, [ROWS]), expected)


def test_importance_weights_would_be_applied_twice_and_are_refused():
    for override in ("algorithm.rollout_is=token", "algorithm.rollout_is=sequence"):
        with pytest.raises(ConfigError, match=r"set algorithm\.rollout_is=null"):
            load_recipe("tiny_math.yaml", ["algorithm.objective=ppo_clip", override])


# ---- what verl really does -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "objective"),
    [
        ((), "reinforce_tis"),
        (("algorithm.rollout_is=null",), "reinforce_tis"),
        (("algorithm.rollout_is=sequence", "algorithm.rollout_is_threshold=5"), "reinforce_tis"),
        (("algorithm.icepop_low=0.5", "algorithm.icepop_high=5"), "reinforce_tis"),
        (("algorithm.sequence_mask=seq_max_k3", "algorithm.sequence_mask_high=0.1"), "reinforce_tis"),
        (("algorithm.loss_agg_mode=seq-mean-token-sum",), "reinforce_tis"),
        (PPO, "ppo_clip"),
        ((*PPO, "algorithm.clip_ratio_high=0.4", "algorithm.loss_agg_mode=seq-mean-token-mean"), "ppo_clip"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "default",
)
def test_the_effective_objective_is_found(overrides, objective):
    config = actor_config(*overrides)
    before = str(config.policy_loss)
    assert effective_objective(config) == objective
    assert str(config.policy_loss) == before, "the probe must leave the configuration as it is"


def test_a_configuration_that_verl_would_not_follow_is_refused(monkeypatch):
    config = actor_config()
    config.policy_loss.rollout_correction["loss_type"] = "ppo_clip"  # what verl takes when the key gets lost
    assert effective_objective(config) == "ppo_clip"
    config = actor_config()
    config.policy_loss.rollout_correction["bypass_mode"] = False
    with pytest.raises(RuntimeError, match="would not correct against the rollout"):
        effective_objective(config)
    config = actor_config()
    object.__setattr__(config.policy_loss, "loss_mode", "vanilla")
    with pytest.raises(RuntimeError, match="would not correct against the rollout"):
        effective_objective(config)
    config = actor_config()
    config.policy_loss.rollout_correction["rollout_is_batch_normalize"] = True  # another objective than ours
    with pytest.raises(RuntimeError, match="no objective of a recipe"):
        effective_objective(config)
