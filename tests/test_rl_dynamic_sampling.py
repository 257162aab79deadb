"""Dynamic sampling through verl's own replay buffer: what is dropped, what a step shows, and when it ends."""

import pytest
from omegaconf import OmegaConf
from test_rl_verl_config import convert
from verl.trainer.ppo.v1 import replay_buffer as verl_buffer

from rl.config import load_recipe
from rl.dynamic_sampling import GenerationBudget, NoSignalError, sampling_metrics

GROUP = 4


class Queue:
    """TransferQueue's calls that the replay buffer makes, in memory; groups are finished as soon as they are added."""

    def __init__(self, correct_counts):
        self.counts = iter(correct_counts)
        self.tags, self.fields, self.uids = {}, {}, []

    def add(self, prompts: int) -> None:
        for _ in range(prompts):
            uid, correct = f"p{len(self.uids)}", next(self.counts)
            self.uids.append(uid)
            self.tags[uid] = {"is_prompt": True, "status": "finished", "global_steps": 1}
            for index in range(GROUP):
                key = f"{uid}_{index}_0"
                self.tags[key] = {"status": "success", "global_steps": 1}
                # A penalty on length makes all rewards of the group different: the metric must not be the reward.
                self.fields[key] = {"reward_extra_info": {"acc": float(index < correct), "score": 0.1 * index}}

    def kv_list(self, *_):
        return {"train": dict(self.tags)}

    def kv_clear(self, partition_id, keys):
        for key in keys:
            del self.tags[key]

    def kv_batch_get(self, keys, partition_id, select_fields):
        assert select_fields == ["extra_fields"]
        return {"extra_fields": [self.fields[key] for key in keys]}


def buffer(queue: Queue, monkeypatch, batch_size: int, max_batches: int = 10, notes: list | None = None):
    """verl's buffer over `queue`, with the metric that our configuration names and the budget before its refill."""
    monkeypatch.setattr(verl_buffer, "tq", queue)
    config = convert("algorithm.filter_groups=true").algorithm.filter_groups
    assert config.enable
    budget = GenerationBudget(queue.add, batch_size, max_batches, [].append if notes is None else notes.append)
    made = verl_buffer.ReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create(),
        max_off_policy_threshold=1,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create(),
        poll_interval=0.0,
        refill_fn=budget.refill,
        filter_groups_metric=config.metric,
        train_batch_size=batch_size,
        gen_batch_size=1,
    )
    queue.add(batch_size)
    budget.begin_step()
    return made


def test_groups_without_a_signal_are_dropped_and_replaced(monkeypatch):
    queue = Queue([0, 2, 4, 1, 0, 3, 2, 1, 1, 1, 1, 1])
    made = buffer(queue, monkeypatch, batch_size=4)
    batch, metrics = made.sample(global_steps=1, partition_id="train", batch_size=4)
    uids = {key.split("_")[0] for key in batch.keys}
    assert len(batch.keys) == 4 * GROUP and not uids & {"p0", "p2", "p4"}, "all wrong, all right, all wrong"
    columns = sampling_metrics(metrics, 4)
    sampled = len(queue.uids)
    assert columns["groups_all_wrong"] == 2 and columns["groups_all_right"] == 1
    assert columns["kept_groups"] == pytest.approx((sampled - 3) / sampled)
    assert columns["gen_batches"] == pytest.approx(sampled / 4)


def test_a_batch_in_which_every_group_has_a_signal_is_sampled_once(monkeypatch):
    queue = Queue([1, 2, 3, 1])
    batch, metrics = buffer(queue, monkeypatch, 4).sample(global_steps=1, partition_id="train", batch_size=4)
    assert len(batch.keys) == 4 * GROUP
    assert sampling_metrics(metrics, 4) == {
        "kept_groups": 1.0,
        "gen_batches": 1.0,
        "groups_all_right": 0.0,
        "groups_all_wrong": 0.0,
    }


def test_problems_without_a_signal_end_the_run_instead_of_sampling_forever(monkeypatch):
    queue, notes = Queue([4] * 1000), []
    made = buffer(queue, monkeypatch, batch_size=4, max_batches=5, notes=notes)
    with pytest.raises(NoSignalError, match=r"raise algorithm\.max_gen_batches = 5") as caught:
        made.sample(global_steps=1, partition_id="train", batch_size=4)
    assert len(queue.uids) <= 5 * 4 and "\n" not in str(caught.value)
    assert notes == [f"dynamic sampling: generation batch {n} of at most 5" for n in (3, 4, 5)]


def test_the_count_begins_anew_with_every_step():
    added = []
    budget = GenerationBudget(added.append, 4, 2, print)
    for _ in range(3):
        budget.begin_step()
        budget.refill(4)
    assert added == [4, 4, 4]
    with pytest.raises(NoSignalError):
        budget.refill(1)


def test_verl_is_told_to_compare_right_and_wrong_and_not_rewards():
    on, off = convert("algorithm.filter_groups=true"), convert()
    assert (on.algorithm.filter_groups.enable, on.algorithm.filter_groups.metric) == (True, "acc")
    assert off.algorithm.filter_groups.enable is False
    assert load_recipe("dapo_math.yaml").algorithm.filter_groups is True
