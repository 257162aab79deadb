"""A step's row: rewards, penalties and errors apart; names in wandb; samples; the penalty on length by verl."""

import asyncio
import json

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from test_rl_verl_config import convert
from verl.protocol import DataProto

from rl.events import METRIC_KEYS
from rl.reward import compute_score
from rl.samples import choose, sample_rows
from rl.step_metrics import LOGGED_AS, TIMINGS, VERL_COLUMNS, held_out, logged, reward_metrics, row


def tag(correct: bool, error: str = "", penalty: float = 0.0, answered: bool = True, **more) -> dict:
    return {
        "correct": correct,
        "answered": answered,
        "reward_error": error,
        "overlong_penalty": penalty,
        "reward_s": 0.5,
        **more,
    }


def test_what_could_not_be_judged_is_counted_apart_from_wrong_answers():
    tags = [tag(True), tag(False), tag(False, "timeout"), tag(False, "timeout"), tag(False, "ValueError")]
    tags += [tag(True, penalty=-0.5), tag(False, answered=False), tag(True, penalty=-1.0)]
    tags += [tag(True, is_padding=True)] * 8
    assert reward_metrics(tags) == {
        "accuracy": 3 / 8,
        "no_answer": 1 / 8,
        "reward_errors": 1.0,
        "reward_timeouts": 2.0,
        "overlong": 2 / 8,
        "overlong_penalty": -1.5 / 8,
        "time_reward": 0.5,
    }
    assert reward_metrics([{"status": "success"}]) == {}, "samples of verl's own loops have no such tags"


def test_held_out_accuracy_is_the_mean_over_problems_of_all_sets():
    metrics = {"val-core/a/acc/mean@2": 0.5, "val-core/b/c/acc/mean@2": 0.9, "val-core/a/acc/best@2/mean": 1.0}
    metrics |= {"val-aux/a/acc_success_only/mean@2": 0.7}
    errors = ["", "timeout", None, "ValueError", "timeout"]
    found = held_out(metrics, ["a", "b/c", "a", "a"], errors)
    assert found == {
        "accuracy": pytest.approx((3 * 0.5 + 0.9) / 4),
        "by_set": {"a": 0.5, "b/c": 0.9},
        "reward_errors": 1,
        "reward_timeouts": 2,
    }
    alone = {"accuracy": 0.5, "by_set": {}, "reward_errors": 0, "reward_timeouts": 0}
    assert held_out(metrics, ["a"], []) == alone
    with pytest.raises(RuntimeError, match="0 held-out accuracies of x"):
        held_out(metrics, ["a", "x"], [])


METRICS = {
    "critic/score/mean": 0.25,
    "actor/grad_norm": 0.1,
    "actor/lockstep/sum/tokens": 10.0,
    "actor/lockstep/sum/k1": 0.1,
    "actor/lockstep/sum/k3": 0.02,
    "actor/lockstep/sum/abs": 0.3,
    "actor/lockstep/sum/ratio": 10.1,
    "actor/lockstep/sum/rollout_logp": -5.0,
    "actor/lockstep/max/abs": 0.2,
    "actor/lockstep/max/ratio": 1.2,
    "actor/lockstep/min/ratio": 0.9,
    "actor/lockstep/sum/rows": 8.0,
    "actor/lockstep/sum/replayed": 6.0,
    "actor/lockstep/sum/known/3": 6.0,
    "actor/lockstep/sum/agree/3": 3.0,
    "val-core/x/acc/mean@2": 0.5,
}


def test_columns_are_known_to_the_run_folder_and_keep_verls_names_elsewhere():
    out = row(METRICS, {"gen": 1.0, "step": 2.0, "testing": 3.0}, reward_metrics([tag(True)]))
    assert set(out) <= set(METRIC_KEYS), set(out) - set(METRIC_KEYS)
    assert (out["reward"], out["kl_k3"], out["tokens_per_s"], out["time_validate"]) == (0.25, 0.002, 5.0, 3.0)
    shown = logged(METRICS, out)
    assert not any("lockstep/sum" in key or "lockstep/max" in key for key in shown)
    assert shown["rollout_corr/k3_kl"] == 0.002 and shown["rollout_corr/rollout_is_max"] == 1.2
    assert shown["critic/score/mean"] == 0.25 and shown["val-core/x/acc/mean@2"] == 0.5
    assert shown["lockstep/accuracy"] == 1.0 and shown["lockstep/routing_free_agreement/layer_3"] == 0.5
    assert "lockstep/reward" not in shown and "lockstep/time_step" not in shown, "verl logs them itself"
    assert all(isinstance(value, float) for value in shown.values())
    assert set(VERL_COLUMNS) | set(TIMINGS) | set(LOGGED_AS) <= set(METRIC_KEYS)


def test_the_line_of_a_step_shows_what_was_kept_and_what_was_not_judged():
    from rl.progress import step_text

    shown = {"reward": -0.25, "accuracy": 0.4, "kl_k3": 1e-6, "reward_errors": 0.0, "reward_timeouts": 0.0}
    assert step_text(shown) == "reward -0.25  accuracy 40.0%  k3 1.0e-06"
    shown |= {"kept_groups": 0.625, "gen_batches": 1.6, "reward_errors": 1.0, "reward_timeouts": 3.0}
    assert step_text(shown) == (
        "reward -0.25  accuracy 40.0%  kept 62% of 1.6 batches  k3 1.0e-06  1 reward errors  3 reward timeouts"
    )


def test_the_line_of_an_evaluation_names_sets_if_there_are_several_and_what_was_not_judged():
    from rl.progress import validation_text

    event = {"step": 0, "accuracy": 0.25}
    assert validation_text(event) == "held-out accuracy 25.0 % before training", "of a run folder without counts"
    event = {"step": 1, "accuracy": 0.25, "by_set": {}, "reward_errors": 0, "reward_timeouts": 0}
    assert validation_text(event) == "held-out accuracy 25.0 % after 1 step"
    event |= {"by_set": {"a": 0.2, "b": 0.3}, "reward_timeouts": 4}
    assert validation_text(event) == "held-out accuracy 25.0 % (a 20.0 %, b 30.0 %) after 1 step  4 reward timeouts"


def test_wandb_and_tensorboard_take_what_is_logged(tmp_path, monkeypatch):
    """Offline: verl's own Tracking writes event files and a wandb run, and the consistency report is its artifact."""
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from verl.utils.tracking import Tracking

    from rl.tracking import log_consistency

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tensorboard"))
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    log_consistency(["wandb"], tmp_path)  # no check yet: nothing to attach, and no wandb run is needed
    (tmp_path / "consistency.json").write_text(json.dumps({"verdict": "pass", "step": 0, "reasons": []}))
    log_consistency(["console"], tmp_path)
    with pytest.raises(RuntimeError, match="no wandb run is open"):
        log_consistency(["wandb"], tmp_path)
    tracking = Tracking("lockstep", "run-1", ["wandb", "tensorboard"], config={"trainer": {}})
    out = row(METRICS, {"step": 2.0}, reward_metrics([tag(True)]))
    tracking.log(data=logged(METRICS, out), step=1)
    logged_artifacts = []
    real = wandb.run.log_artifact
    monkeypatch.setattr(wandb.run, "log_artifact", lambda artifact: logged_artifacts.append(real(artifact)))
    log_consistency(["console", "wandb"], tmp_path)
    tracking.finish()
    (artifact,) = logged_artifacts
    assert artifact.type == "consistency" and artifact.metadata["verdict"] == "pass"
    assert list(artifact.manifest.entries) == ["consistency.json"]
    (offline,) = (tmp_path / "wandb").glob("offline-run-*")
    blob = next(offline.glob("*.wandb")).read_bytes()
    blocks = range(0, len(blob), 32768)  # each begins with a header of 7 bytes, which may stand amid a name
    record = b"".join(blob[start + 7 : start + 32768] for start in blocks)
    assert b"rollout_corr/k3_kl" in record and b"consistency.json" in record
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("rollout_corr/k3_kl")[0].value == pytest.approx(0.002)
    assert events.Scalars("lockstep/accuracy")[0].step == 1


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_samples_are_spread_over_the_batch_and_padding_is_none():
    tags = [{}] * 8 + [{"is_padding": True}] * 8
    assert choose(list("abcdefghijklmnop"), tags) == [0, 2, 4, 6]
    assert choose(["a"], [{}]) == [0] and choose(["a"], [{"is_padding": True}]) == []


def test_sample_rows_hold_what_the_judge_saw():
    def jagged(*rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    judged = [{"acc": 1.0, "pred": "42", "error": "", "score": 1.0}, {"acc": 0.0, "pred": "", "error": "timeout"}]
    plain = {
        "reward_model": [{"ground_truth": "42"}, {"ground_truth": "7"}],
        "extra_fields": [{"reward_extra_info": one} for one in judged],
    }
    data = TensorDict(
        {
            "prompts": jagged([1, 2], [3]),
            "responses": jagged([4, 5, 6], [7, 8]),
            "rm_scores": jagged([0.0, 0.0, 0.5], [0.0, -1.0]),
            **{name: NonTensorStack(*(NonTensorData(item) for item in items)) for name, items in plain.items()},
        },
        batch_size=2,
    )
    first, second = sample_rows(data, lambda ids: "".join(map(str, ids)))
    assert (first["prompt"], first["response"], first["tokens"], first["reward"]) == ("12", "456", 3, 0.5)
    assert (first["gold"], first["answer"], first["correct"], first["error"]) == ("42", "42", True, None)
    assert (second["answer"], second["correct"], second["error"], second["reward"]) == (None, False, "timeout", -1.0)


# ---- penalty on length -----------------------------------------------------------------------------------------------


class Words:
    """A tokenizer that gives the same text whatever it is asked."""

    def decode(self, ids, skip_special_tokens):
        return "Answer: 42"


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0.0), (32, 0.0), (33, -1 / 16 * 0.5), (40, -0.25), (47, -15 / 16 * 0.5), (48, -0.5)],
)
def test_the_last_tokens_cost_a_growing_part_of_the_penalty(length, penalty):
    """48 tokens with a buffer of 16: DAPO's formula ((L_max - L_buffer) - |y|) / L_buffer, times the factor 0.5."""
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    config = convert("reward.overlong_buffer=0.3333", "reward.overlong_penalty=0.5")
    manager_class = resolve_reward_manager_cls(config)
    assert manager_class.__name__ == "DAPORewardManager"
    padded = torch.ones(1, 60, dtype=torch.long)
    mask = (torch.arange(60) < length).long()[None]
    rows = {
        "data_source": np.array(["x"], dtype=object),
        "reward_model": np.array([{"ground_truth": "42"}], dtype=object),
        "extra_info": np.array([{}], dtype=object),
    }
    batch = TensorDict({"responses": padded, "attention_mask": mask}, batch_size=1)

    async def judge():
        manager = manager_class(config, Words(), compute_score)
        return await manager.run_single(DataProto(batch=batch, non_tensor_batch=rows))

    result = asyncio.run(judge())
    assert float(result["reward_score"]) == pytest.approx(1.0 + penalty)

    from rl.group_rollout import reward_tag

    made = reward_tag(float(result["reward_score"]), {**result, "reward_s": 0.1})
    assert made["correct"] and made["answered"] and made["overlong_penalty"] == pytest.approx(penalty)


def test_without_a_buffer_verls_plain_manager_judges():
    config = convert()
    assert config.reward.reward_manager.name == "naive" and "reward_kwargs" not in config.reward


def test_dapos_buffer_is_dapos():
    config = convert(recipe="dapo_math.yaml", cuda=True)
    given = config.reward.reward_kwargs
    assert (given.max_resp_len, given.overlong_buffer_cfg.len) == (20480, 4096)
    assert given.overlong_buffer_cfg.penalty_factor == 1.0 and config.reward.num_workers == 8
