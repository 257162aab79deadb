"""The part of the recipe that says what is trained: objective, importance weights, sampling of groups, reward.

Imports pydantic only, as `rl.schema`, which these sections belong to.
"""

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from rl.schema_base import NonNegativeFloat, PositiveFloat, Section

Objective = Literal["reinforce_tis", "ppo_clip"]
OBJECTIVES = {
    "reinforce_tis": "policy gradient, group-relative advantages, each token weighted once by "
    "min(exp(logp_train - logp_rollout), cap), detached; one optimizer step a batch",
    "ppo_clip": "clipped policy gradient, group-relative advantages, ratio r = exp(logp_train - logp_rollout), "
    "max(-r A, -clip(r, 1 - low, 1 + high) A) and at most c |A| for A < 0; the clipped ratio is the only correction, "
    "no importance weights; one optimizer step a batch",
}
"""What each value of `algorithm.objective` trains, in a sentence that the run prints."""


class AlgorithmConfig(Section):
    """The objective. Rollout log-probabilities are the old log-probabilities ("bypass")."""

    objective: Objective = "reinforce_tis"
    """reinforce_tis: policy gradient with truncated importance sampling, applied exactly once (verl: bypass mode with
    loss_type reinforce). ppo_clip: DAPO's clip-higher, the ratio to the rollout clipped (verl: bypass mode with
    loss_type ppo_clip, which applies no importance weights); needs rollout_is=null."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """ppo_clip: the ratio is clipped below at 1 - this."""
    clip_ratio_high: PositiveFloat = 0.28
    """ppo_clip: the ratio is clipped above at 1 + this; larger than clip_ratio_low is clip-higher."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 10.0
    """ppo_clip: with a negative advantage A the loss of a token is at most this times -A (dual clip)."""
    advantage: Literal["grpo"] = "grpo"
    """grpo: reward minus the mean of its group."""
    norm_adv_by_std: bool = True
    """Divide the advantage by the group's standard deviation; false is Dr. GRPO."""
    rollout_is: Literal["token", "sequence"] | None = "token"
    """Level of the importance weights; null applies none (with ppo_clip, or to measure what they do)."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Cap of the importance weights."""
    icepop_low: PositiveFloat | None = None
    """IcePop: tokens whose weight is below this are masked. Given together with icepop_high, replaces the cap."""
    icepop_high: PositiveFloat | None = None
    """IcePop: tokens whose weight is above this are masked."""
    sequence_mask: Literal["seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k3"] | None = None
    """Divergence by which whole samples are masked (verl's rollout_rs); null masks none."""
    sequence_mask_low: PositiveFloat | None = None
    """Lower ratio bound of the k1 masks."""
    sequence_mask_high: PositiveFloat | None = None
    """Upper ratio bound of the k1 masks; largest divergence of the k3 masks."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses become one number."""
    filter_groups: bool = False
    """Dynamic sampling: groups whose samples are all right or all wrong give no gradient; they are dropped, and more
    prompts are sampled until the batch is full. Each step shows how many were kept and how much was sampled."""
    max_gen_batches: Annotated[int, Field(ge=2)] = 10
    """filter_groups: a step that would have to sample more than this many times data.batch_size prompts stops the run
    and says so; these problems are too easy or too hard."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of an entropy bonus."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of a KL penalty against the base model."""
    routing_replay: bool = True
    """The trainer's routers take the expert ids that the engine used."""
    index_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that teaches the indexer of block-sparse attention what attention looks at: the KL divergence
    of its scores from the attention probabilities over the selected blocks, a mean over index heads and, as the policy
    loss, over response tokens (the sum is over all tokens). Needs `index` in model.lora_targets."""

    @model_validator(mode="after")
    def _corrects_once(self) -> "AlgorithmConfig":
        if self.objective == "ppo_clip" and self.rollout_is is not None:
            raise ValueError(
                f"algorithm.rollout_is = {self.rollout_is} with objective = ppo_clip: its clipped ratio corrects "
                "already, weights would apply the ratio twice; set algorithm.rollout_is=null"
            )
        return self

    @model_validator(mode="after")
    def _masks_are_complete(self) -> "AlgorithmConfig":
        if (self.icepop_low is None) != (self.icepop_high is None):
            missing = "icepop_low" if self.icepop_low is None else "icepop_high"
            raise ValueError(f"algorithm.{missing} = null: IcePop needs both bounds; set algorithm.{missing} too")
        if self.icepop_low is not None:
            if not self.icepop_low < 1 < self.icepop_high:
                raise ValueError(
                    f"algorithm.icepop_low = {self.icepop_low}, icepop_high = {self.icepop_high}: a weight of 1 must "
                    "lie between them; take e.g. 0.5 and 5"
                )
            if self.rollout_is != "token":
                raise ValueError("algorithm.icepop_low is set: IcePop masks tokens; set algorithm.rollout_is=token")
        bounds = {"sequence_mask_low": self.sequence_mask_low, "sequence_mask_high": self.sequence_mask_high}
        needed = [] if self.sequence_mask is None else ["sequence_mask_high"]
        if self.sequence_mask and self.sequence_mask.endswith("k1"):
            needed.append("sequence_mask_low")
        for key, value in bounds.items():
            if (key in needed) != (value is not None):
                remedy = "set a bound" if key in needed else "leave it null"
                raise ValueError(f"algorithm.{key} = {value} with sequence_mask = {self.sequence_mask}: {remedy}")
        return self


class RewardConfig(Section):
    """+1 for a right answer, -1 for any other (rl/reward.py), less what a too long one costs."""

    overlong_buffer: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """DAPO's soft overlong punishment: over this last share of data.max_response_length a growing part of
    overlong_penalty is taken off (0.2: over the last 4096 of 20480 tokens); 0 takes nothing off."""
    overlong_penalty: PositiveFloat = 1.0
    """What a response of data.max_response_length tokens loses."""


assert set(get_args(Objective)) == set(OBJECTIVES), "every objective needs its sentence"
