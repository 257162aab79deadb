"""The trainer's hooks without Ray: which objective may train, what a step writes, and the limit of dynamic sampling."""

import json
import types

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from test_rl_step_metrics import METRICS, tag
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rl import trainer as trainer_module
from rl.config import load_recipe
from rl.dynamic_sampling import EVICTED, VALUES, NoSignalError
from rl.run_folder import RunFolder
from rl.trainer import GateError, LockstepTrainer


def make(tmp_path, *overrides: str) -> LockstepTrainer:
    """A trainer with a run folder of tiny_math and nothing else."""
    recipe = load_recipe("tiny_math", overrides)
    config = {"recipe": recipe.model_dump(mode="json"), "environment": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = LockstepTrainer.__new__(LockstepTrainer)
    made.folder = RunFolder(tmp_path)
    made.total_training_steps = 9
    made.config = types.SimpleNamespace(trainer=types.SimpleNamespace(logger=["console"]))
    made.tokenizer = types.SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    return made


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("found", "refused"),
    [(["ppo_clip"], False), (["ppo_clip", "ppo_clip"], False), (["reinforce_tis"], True), (["ppo_clip", "x"], True)],
)
def test_what_every_workers_loss_computes_must_be_the_recipes_objective(tmp_path, found, refused):
    made = make(tmp_path, "algorithm.objective=ppo_clip", "algorithm.rollout_is=null")
    made.actor_rollout_wg = types.SimpleNamespace(lockstep_objective=lambda: found)
    if not refused:
        made._check_objective()
        return
    with pytest.raises(GateError, match=r"the recipe trains ppo_clip, verl's loss computes .*"):
        made._check_objective()


def test_a_step_writes_its_row_and_samples_and_renames_what_the_loggers_get(tmp_path, monkeypatch):
    made = make(tmp_path, "algorithm.filter_groups=true")

    def verls(_self, _batch, metrics, _timing, **_):
        metrics.update(METRICS)

    def get(keys, partition_id, select_fields):
        assert (keys, partition_id) == (["k0", "k1", "k2", "k3"], "train")
        jagged = torch.nested.as_nested_tensor([torch.arange(n + 1) for n in range(4)], layout=torch.jagged)
        plain = {"reward_model": {"ground_truth": "7"}, "extra_fields": {"reward_extra_info": {"acc": 1.0}}}
        fields = {name: NonTensorStack(*[NonTensorData(value)] * 4) for name, value in plain.items()}
        fields |= dict.fromkeys(("prompts", "responses", "rm_scores"), jagged)
        assert set(select_fields) == set(fields)
        return TensorDict(fields, batch_size=4)

    monkeypatch.setattr(PPOTrainerSync, "_compute_metrics", verls)
    monkeypatch.setattr(trainer_module.tq, "kv_batch_get", get)
    tags = [tag(True), tag(False, "timeout"), tag(True, penalty=-0.5), tag(False), tag(True, is_padding=True)]
    batch = types.SimpleNamespace(keys=[f"k{n}" for n in range(5)], tags=tags, partition_id="train")
    metrics = {EVICTED: 16, VALUES: {1.0: 4, 0.0: 12}}
    made._compute_metrics(batch, metrics, {"gen": 1.0, "step": 2.0}, global_steps=3, epoch=0)
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert (row["step"], row["accuracy"], row["reward_timeouts"], row["overlong_penalty"]) == (3, 0.5, 1.0, -0.125)
    assert (row["kept_groups"], row["gen_batches"]) == (0.5, 2.0), "16 of 32 groups"
    assert (row["groups_all_right"], row["groups_all_wrong"]) == (4.0, 12.0)
    assert [one["tokens"] for one in lines(tmp_path / "samples.jsonl")] == [1, 2, 3, 4]
    assert metrics["train/num_gen_batches"] == 2.0 and metrics["lockstep/reward_timeouts"] == 1.0
    assert metrics[VALUES] == {1.0: 4, 0.0: 12}, "verl takes this out itself, for a table"
    assert not any("lockstep/sum" in key for key in metrics)
    (event,) = lines(tmp_path / "events.jsonl")
    assert event["event"] == "step" and event["of"] == 9


def test_an_evaluation_counts_what_was_not_judged_and_every_set(tmp_path):
    """By verl's own `_val_metrics_update`, with what its `_validate` hands over."""
    made = make(tmp_path)
    made.global_steps = 7
    sources, uids = ["a", "a", "b", "b", "a", "a"], ["u", "u", "v", "v", "w", "w"]
    infos = {
        "reward": [1.0, -1.0, 1.0, 1.0, -1.0, -1.0],
        "acc": [1.0, 0.0, 1.0, 1.0, 0.0, 0.0],
        "pred": ["1", "2", "3", "3", "", "x"],
        "error": ["", "timeout", "", "", "timeout", "ValueError"],
    }
    counts = {("a", "u"): 2, ("b", "v"): 2, ("a", "w"): 2}
    metrics = made._val_metrics_update(sources, uids, infos, [2] * 6, expected_acc_counts=counts)
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["step"], event["by_set"]) == (7, {"a": 0.25, "b": 1.0}) and event["accuracy"] == 0.5
    assert (event["reward_errors"], event["reward_timeouts"]) == (1, 2)
    assert metrics["val-core/a/acc/mean@2"] == 0.25 and metrics["val-aux/reward_timeouts"] == 2


def test_a_wakes_time_is_a_column_and_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: None)
    monkeypatch.setattr(LockstepTrainer, "_verify_adapter", lambda self, step: None)
    report = {"level": 2, "tensors": 79, "kept_bytes": 8, "restore_ms": 300.0, "proof_ms": 200.0}
    made = make(tmp_path, "rollout.sleep_level=2", "consistency.every=0")
    made.global_steps, made.timing_raw = 3, {}
    made.engine_side = types.SimpleNamespace(wake_report=lambda: report)
    made.on_step_end()
    assert made.timing_raw == {"wake": 0.5} and not (tmp_path / "events.jsonl").exists()
    made._wake_seconds(tell=True)
    (event,) = lines(tmp_path / "events.jsonl")
    assert "sleep level 2: 79 base tensors equal after the wake (0.50 s)" in event.values()
    made.engine_side = types.SimpleNamespace(wake_report=lambda: None)
    with pytest.raises(GateError, match="one has not proved its base"):
        made.on_step_end()


def test_an_engine_that_never_sleeps_is_not_asked(tmp_path):
    assert make(tmp_path)._wake_seconds() is None


def test_prompts_that_a_step_adds_are_counted_from_its_first_batch(tmp_path, monkeypatch):
    made, added = make(tmp_path, "algorithm.max_gen_batches=2", "data.batch_size=4"), []
    made.replay_buffer = types.SimpleNamespace(refill_fn=added.append, poll_interval=2.0)
    monkeypatch.setattr(PPOTrainerSync, "_setup", lambda _self: None)
    monkeypatch.setattr(trainer_module.server, "register", lambda: None)
    made._setup()
    for _ in range(2):
        made.on_sample_begin()
        made.replay_buffer.refill_fn(4)
    assert added == [4, 4]
    with pytest.raises(NoSignalError):
        made.replay_buffer.refill_fn(1)


def test_the_gates_report_goes_to_wandb_once_a_check(tmp_path, monkeypatch):
    made, sent = make(tmp_path), []
    report = types.SimpleNamespace(verdict="fail", reasons=["x"], diagnosis=[], step=0, summary=lambda: "")
    report.as_dict = lambda: {"verdict": report.verdict, "step": report.step}
    made.trainer_side = made.engine_side = None
    lora = types.SimpleNamespace(lockstep=types.SimpleNamespace(backend="emulation"))
    made.config.actor_rollout_ref = types.SimpleNamespace(model=types.SimpleNamespace(lora=lora))
    monkeypatch.setattr(trainer_module, "check", lambda *_, **__: report)
    monkeypatch.setattr(trainer_module, "log_consistency", lambda loggers, path: sent.append((loggers, path)))
    monkeypatch.setattr(made, "_probe_prompts", lambda _count: [[1]])
    for step in (0, 20):
        report.step = step
        with pytest.raises(GateError):
            made._gate(step=step, probe=False)
    assert sent == [(["console"], tmp_path)], "a failed one too, and none before wandb is there"
    made.on_train_begin()
    assert len(sent) == 2
