"""Which objective verl's policy loss really computes, found out by asking it for gradients.

verl accepts settings that its loss never looks at (a rollout_correction outside `bypass_mode`, importance weights with
loss_type ppo_clip), so a configuration that reads right proves nothing: what is trained has to be what the recipe says.
"""

import copy

import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn

RATIOS = (0.4, 1.0, 1.1, 4.0, 50.0)
"""trainer / rollout of the probe's tokens: inside and outside of any sensible cap and clip range."""


def effective_objective(config) -> str:
    """The name in `rl.schema.OBJECTIVES` of what verl's loss does with `config` (verl's ActorConfig).

    Samples of one token each, once with the advantage 1 and once with -1, so that token and sequence weights are the
    same; masks of whole samples are left out. The gradients are compared with those of each objective.

    Raises:
        RuntimeError: the loss computes neither; the message has the first gradient that differs.
    """
    config = copy.deepcopy(config)
    if config.policy_loss.loss_mode != "bypass_mode" or not config.policy_loss.rollout_correction["bypass_mode"]:
        raise RuntimeError(f"verl would not correct against the rollout: {config.policy_loss}")
    config.policy_loss.rollout_correction["rollout_rs"] = None
    ratios = [ratio for ratio in RATIOS for _ in (1, -1)]
    advantages = [1.0, -1.0] * len(RATIOS)
    actual = _gradients(config, ratios, advantages)
    differences = []
    for name, gradient in (("reinforce_tis", _reinforce), ("ppo_clip", _clipped)):
        expected = [gradient(config, r, a) / len(ratios) for r, a in zip(ratios, advantages, strict=True)]
        wrong = [row for row in zip(ratios, advantages, expected, actual, strict=True) if abs(row[2] - row[3]) > 1e-4]
        if not wrong:
            return name
        differences.append(f"{name}: ratio {wrong[0][0]}, advantage {wrong[0][1]}: gradient {wrong[0][3]:.4f}")
    raise RuntimeError(f"verl's loss is no objective of a recipe ({'; '.join(differences)}): {config.policy_loss}")


def _gradients(config, ratios: list[float], advantages: list[float]) -> list[float]:
    """d loss / d logp of one-token samples by verl's own loss function."""
    count = len(ratios)
    old = torch.full((count, 1), -1.0)
    own = (old + torch.tensor(ratios).log()[:, None]).requires_grad_()
    config.global_batch_info.update(dp_size=1, batch_num_tokens=count, global_batch_size=count, loss_scale_factor=None)
    loss, _ = get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=old,
        log_prob=own,
        advantages=torch.tensor(advantages)[:, None],
        response_mask=torch.ones(count, 1, dtype=torch.bool),
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None,
    )
    loss.backward()
    return own.grad[:, 0].tolist()


def _reinforce(config, ratio: float, advantage: float) -> float:
    """Of -w A logp with the detached weight w = min(ratio, cap), IcePop's band, or 1 without weights."""
    correction = config.policy_loss.rollout_correction
    threshold = correction["rollout_is_threshold"]
    if correction["rollout_is"] is None:
        return -advantage
    if isinstance(threshold, str):
        low, high = (float(bound) for bound in threshold.split("_"))
        return -ratio * advantage if low <= ratio <= high else 0.0
    return -min(ratio, threshold) * advantage


def _clipped(config, ratio: float, advantage: float) -> float:
    """Of max(-r A, -clip(r) A), at most c |A| for A < 0: -r A where nothing is clipped, else 0."""
    if advantage > 0:
        free = ratio <= 1 + config.clip_ratio_high
    else:
        free = 1 - config.clip_ratio_low <= ratio <= config.clip_ratio_c
    return -ratio * advantage if free else 0.0
