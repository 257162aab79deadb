"""Dynamic sampling (DAPO): how much a step samples until its batch is full, and an end to it.

verl's replay buffer does the work (`algorithm.filter_groups`): it drops groups whose samples are all right or all wrong
and asks for more prompts. It has no upper limit and shows no ratio; both are here.
"""

from collections.abc import Callable
from typing import Any

EVICTED = "training/filter_groups/evicted_samples"
SURPLUS = "training/filter_groups/discarded_surplus_samples"
VALUES = "_dapo_filtered_reward_counts"
"""verl's names: groups dropped without a signal, groups with one that nobody needed, and {accuracy: groups dropped}."""


class NoSignalError(RuntimeError):
    """The problems are too easy or too hard: nearly all groups are all right or all wrong."""


class GenerationBudget:
    """Stands before verl's function that adds prompts to a step: counts them, and stops at the limit.

    Args:
        refill: verl's function; takes a number of prompts.
        batch_size: prompts of a training batch.
        max_batches: most generation batches of a step.
        note: takes a line for the person who watches.
    """

    def __init__(self, refill: Callable[[int], Any], batch_size: int, max_batches: int, note: Callable[[str], None]):
        self._refill, self._batch_size, self._max_batches, self._note = refill, batch_size, max_batches, note
        self._prompts = batch_size

    def begin_step(self) -> None:
        """A step begins: its first batch is sampled."""
        self._prompts = self._batch_size

    def refill(self, count: int) -> Any:
        """Add `count` prompts; NoSignalError if that is more than a step may sample."""
        before, self._prompts = self._prompts, self._prompts + count
        if self._prompts > self._max_batches * self._batch_size:
            raise NoSignalError(
                f"{before} prompts ({before / self._batch_size:.1f} generation batches) gave fewer than "
                f"{self._batch_size} groups that are neither all right nor all wrong; take other problems, a larger "
                f"rollout.group_size, or raise algorithm.max_gen_batches = {self._max_batches}"
            )
        batches = -(-self._prompts // self._batch_size)
        if batches > max(2, -(-before // self._batch_size)):  # a sign of life: one more batch is nothing special
            self._note(f"dynamic sampling: generation batch {batches} of at most {self._max_batches}")
        return self._refill(count)


def sampling_metrics(metrics: dict, batch_size: int) -> dict[str, float]:
    """Columns of a step with dynamic sampling, from verl's metrics of it.

    Returns:
        kept_groups: share of the sampled groups that are neither all right nor all wrong;
        gen_batches: sampled groups over `batch_size`; groups_all_right, groups_all_wrong: how many were dropped.
    """
    evicted, surplus = metrics.get(EVICTED, 0), metrics.get(SURPLUS, 0)
    sampled = batch_size + surplus + evicted
    values = metrics.get(VALUES) or {}
    return {
        "kept_groups": (batch_size + surplus) / sampled,
        "gen_batches": sampled / batch_size,
        "groups_all_right": float(sum(count for value, count in values.items() if value > 0.5)),
        "groups_all_wrong": float(sum(count for value, count in values.items() if value <= 0.5)),
    }
