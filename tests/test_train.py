"""The main command for real: verl's main_ppo, FSDP2 workers, vLLM in its own actor, Ray; three steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(tmp_path: Path, *overrides: str) -> tuple[subprocess.CompletedProcess, Path]:
    """Run train_grpo.py with its run folder below `tmp_path`; returns the process and the run folder."""
    command = [
        sys.executable,
        "scripts/train_grpo.py",
        "--config",
        "tiny_math.yaml",
        f"run.root={tmp_path}",
        *overrides,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return done, (tmp_path / "latest").resolve()


def left_over(run_dir: Path) -> list[str]:
    """Command lines of living processes that carry the run's marker."""
    marker = f"LOCKSTEP_RUN_ID={json.loads((run_dir / 'config.json').read_text())['run_id']}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    before = set(os.listdir("/dev/shm"))
    done, run_dir = run(
        tmp_path_factory.mktemp("runs"),
        "trainer.steps=3",
        "trainer.val_every=3",
        "data.val_limit=32",
        "consistency.every=2",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done, run_dir, before


@pytest.mark.slow
def test_three_steps_leave_a_complete_run_folder(three_steps):
    _, run_dir, _ = three_steps
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "done" and summary["steps"] == 3
    assert 0 <= summary["initial_accuracy"] <= 1 and 0 <= summary["final_accuracy"] <= 1
    for name in ("config.json", "consistency.json", "report.html", "adapter/adapter_config.json", "logs/trainer.log"):
        assert (run_dir / name).stat().st_size > 0, name


@pytest.mark.slow
def test_trainer_and_engine_are_one_model_throughout(three_steps):
    _, run_dir, _ = three_steps
    for name in ("consistency-0.json", "consistency-2.json"):
        report = json.loads((run_dir / name).read_text())
        assert report["verdict"] == "pass", report["reasons"]
        assert report["weights"]["base"]["mismatched"] == [] and report["weights"]["adapter"]["mismatched"] == []
        assert report["routing"]["replayed_agreement"] == 1.0
        assert report["logprobs"]["replayed"]["kl_k3"] < 1e-3
        assert report["logprobs"]["replayed"]["max_abs"] < 0.1
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["kl_k3"] < 1e-3 and 0.9 < row["replayed_fraction"] < 1 for row in rows)
    # Weights of 1 in the mean say that the loss saw the current policy against the rollout, not against itself.
    assert all(0.9 < row["is_ratio_min"] <= 1 <= row["is_ratio_max"] < 1.1 for row in rows)


@pytest.mark.slow
def test_the_trained_adapter_was_saved_and_is_not_zero(three_steps):
    from safetensors.torch import load_file

    _, run_dir, _ = three_steps
    tensors = load_file(run_dir / "adapter/adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in tensors.items() if "lora_B" in name)


@pytest.mark.slow
def test_nothing_is_left_and_no_secret_is_written(three_steps):
    _, run_dir, before = three_steps
    assert left_over(run_dir) == []
    assert set(os.listdir("/dev/shm")) - before == set()
    for path in run_dir.rglob("*"):
        if path.is_file():
            assert b"RAY_AUTH_TOKEN=" not in path.read_bytes(), path


@pytest.mark.slow
def test_a_failed_gate_stops_the_run_with_exit_1_and_the_reason(tmp_path):
    done, run_dir = run(tmp_path, "trainer.steps=1", "data.val_limit=8", "consistency.thresholds.kl_k3=1e-15")
    assert done.returncode == 1, done.stdout[-2000:]
    assert "kl_k3" in done.stdout + done.stderr
    report = json.loads((run_dir / "consistency.json").read_text())
    assert report["verdict"] == "fail" and any("kl_k3" in reason for reason in report["reasons"])
    assert not (run_dir / "metrics.jsonl").exists()
    assert left_over(run_dir) == []


@pytest.mark.slow
def test_dapos_settings_train_and_are_shown(tmp_path):
    """Clip-higher PPO, dynamic sampling, a penalty on length, and both loggers, offline."""
    settings = ("algorithm.objective=ppo_clip", "algorithm.rollout_is=null", "algorithm.filter_groups=true")
    settings += ("reward.overlong_buffer=0.8333", "trainer.logger=[console,wandb,tensorboard]")
    lengths = ("trainer.steps=2", "trainer.val_every=2", "trainer.val_before_train=false", "data.val_limit=16")
    done, run_dir = run(tmp_path, *settings, *lengths, "consistency.every=2")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ppo_clip on qwen3_moe" in done.stdout and " batches  k3 " in done.stdout
    assert "clipped ratio" in json.loads((run_dir / "config.json").read_text())["objective"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert 0 < row["kept_groups"] <= 1 <= row["gen_batches"] and 0 < row["accuracy"] < 1
        assert row["gen_batches"] * (1 - row["kept_groups"]) * 16 == pytest.approx(
            row["groups_all_right"] + row["groups_all_wrong"]
        )
        assert row["overlong"] > 0 > row["overlong_penalty"] > -1
        plain = 2 * row["accuracy"] - 1
        assert row["reward"] == pytest.approx(plain + row["overlong_penalty"], abs=1e-4)
        assert 0 <= row["pg_clipfrac"] < 0.1 and row["time_reward"] > 0 and row["reward_timeouts"] == 0
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [1] * 4 + [2] * 4
    assert all(sample["gold"] and sample["prompt"] and sample["response"] for sample in samples)
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    (offline,) = (run_dir / "wandb").glob("offline-run-*")
    blob = next(offline.glob("*.wandb")).read_bytes()
    blocks = range(0, len(blob), 32768)  # each begins with a header of 7 bytes, which may stand amid a name
    record = b"".join(blob[start + 7 : start + 32768] for start in blocks)
    assert b"train/num_gen_batches" in record and b"consistency-" in record
    assert left_over(run_dir) == []


@pytest.mark.slow
def test_problems_that_give_no_signal_end_the_run_with_the_reason(tmp_path):
    """Answers of one token are never right, so no group is mixed."""
    settings = ("algorithm.filter_groups=true", "algorithm.max_gen_batches=3", "data.max_response_length=1")
    small = ("trainer.steps=1", "trainer.val_before_train=false", "data.val_limit=8", "consistency.enabled=false")
    done, run_dir = run(tmp_path, *settings, *small)
    assert done.returncode == 1, done.stdout[-2000:]
    assert "dynamic sampling:" in done.stdout and "max_gen_batches = 3" in done.stdout
    assert not (run_dir / "metrics.jsonl").exists() and left_over(run_dir) == []
