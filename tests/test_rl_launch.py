"""The front end, with a stand-in for the trainer process: what is shown and written, and that nothing is left over."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rl import dry_run, plan_fit
from rl.config import REPO_ROOT, ConfigError, load_recipe
from rl.events import EventLog, JsonlFollower, read_jsonl
from rl.failure import last_traceback, log_excerpt
from rl.launch import find_resume, main, make_run
from rl.plan import GIB, Machine
from rl.preflight import check_plan
from rl.processes import Process, RunProcesses, _pids
from rl.progress import Progress
from rl.summary import summarize

FAKE = REPO_ROOT / "tests" / "fake_trainer.py"
DRIVER = """
import sys, time
sys.path.insert(0, {root!r})
from rl import launch
from rl.config import load_recipe
from rl.preflight import Preflight
recipe = load_recipe("tiny_math", ["run.root=" + {runs!r}, "trainer.steps=3", "name=fake"])
checked = Preflight("qwen3_moe", "Qwen3MoeForCausalLM", 1_800_000, 1_700_000, ("nvfp4-pack-quantized",), 10, 10)
run_dir, run_id = launch.make_run(recipe)
launch.write_config(run_dir, run_id, recipe, checked, "fake", [], None)
command = [sys.executable, {fake!r}, {behaviour!r}, str(run_dir)]
run = launch.Run(recipe, run_dir, run_id, time.time(), command)
sys.exit(run.execute(launch.headline(recipe, checked, run_dir)))
"""


def start(tmp_path: Path, behaviour: str, stdout: int = subprocess.PIPE, **env: str) -> subprocess.Popen:
    """The front end around the stand-in, in its own process."""
    runs = str(tmp_path / "runs")
    code = DRIVER.format(root=str(REPO_ROOT), runs=runs, fake=str(FAKE), behaviour=behaviour)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"LOCKSTEP_GRACE_S": "0.5", "LOCKSTEP_POLL_S": "1"} | env,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, tmp_path: Path) -> tuple[int, str, Path, dict]:
    """(status, output, run folder, summary) when the front end has ended."""
    output, _ = process.communicate(timeout=40)
    run_dir = (tmp_path / "runs" / "latest").resolve()
    assert_nothing_left(run_dir)
    return process.returncode, output, run_dir, json.loads((run_dir / "summary.json").read_text())


def assert_nothing_left(run_dir: Path) -> None:
    """No process of the run, none of its segments, no Ray folder; every file that a run always has."""
    run_id = json.loads((run_dir / "config.json").read_text())["run_id"]
    assert RunProcesses(run_id, Path("/nowhere")).alive() == []
    assert not Path(f"/tmp/lockstep-{run_id}").exists()
    if (run_dir / "left.txt").exists():
        segment, semaphore, *children = (run_dir / "left.txt").read_text().split()
        assert not (Path("/dev/shm") / segment).exists() and not (Path("/dev/shm") / semaphore).exists()
        assert not {int(pid) for pid in children} & {pid for pid in _pids() if Process.of(pid).alive()}
    for name in ("config.json", "events.jsonl", "summary.json", "report.html", "logs/trainer.log"):
        assert (run_dir / name).is_file()


def test_a_run_that_ends_well(tmp_path):
    status, output, run_dir, summary = finish(start(tmp_path, "normal"), tmp_path)
    assert status == 0
    lines = output.splitlines()
    assert (
        lines[0].startswith("fake: reinforce_tis on qwen3_moe with 1.8 M parameters")
        and "3 steps of 16 x 8" in lines[0]
    )
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 1/3", "step 2/3", "step 3/3"]
    step = next(line for line in lines if line.startswith("step 2/3"))
    for part in ("reward +0.00", "accuracy 50.0%", "k3 2.0e-05", "200 tokens/s", "left"):
        assert part in step
    assert "consistency check, step 0: pass" in output and "loading model" in output
    assert lines[-1].startswith("done: 3 steps in") and "40.0 % -> 62.0 %" in lines[-1]
    assert summary["status"] == "done" and summary["steps"] == 3 and summary["gates"] == {"pass": 1, "fail": 0}
    assert (summary["initial_accuracy"], summary["final_accuracy"], summary["best_accuracy"]) == (0.4, 0.62, 0.62)
    assert summary["kl_k3_max"] == pytest.approx(3e-5) and summary["is_ratio_min"] == 0.9
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == 3
    config = json.loads((run_dir / "config.json").read_text())
    assert config["recipe"]["trainer"]["steps"] == 3 and config["environment"]["packages"]["verl"]
    assert config["environment"]["devices"] and "commit" in config["environment"]["git"]


def test_self_made_stop_shows_its_reason_and_no_foreign_log(tmp_path):
    status, output, _, summary = finish(start(tmp_path, "gate"), tmp_path)
    assert status == 1 and summary["status"] == "failed" and summary["gates"]["fail"] == 1
    assert "failed: consistency check failed at step 0" in output and "experts.0 differs" in output
    assert "fake trainer begins" not in output and "Traceback" not in output


def test_crash_shows_the_engine_error_and_the_logs(tmp_path):
    status, output, run_dir, summary = finish(start(tmp_path, "raises"), tmp_path)
    assert status == 1 and summary["status"] == "failed"
    assert "failed: the trainer process ended with status 1 during 'starting ray'" in output
    assert "ValueError: shard 3 does not fit" in output and "RuntimeError" not in output
    assert str(run_dir / "logs") in output


@pytest.mark.parametrize(("behaviour", "part"), [("silent", "ended early, during 'step 3'"), ("killed", "SIGKILL")])
def test_ends_without_a_word(tmp_path, behaviour, part):
    status, output, _, summary = finish(start(tmp_path, behaviour), tmp_path)
    assert status == 1 and summary["status"] == "failed" and part in summary["reason"] and part in output


def test_hang_names_the_stage_and_dumps_stacks(tmp_path):
    process = start(tmp_path, "hangs", LOCKSTEP_STALL_MINUTES="0.025")
    status, output, run_dir, _ = finish(process, tmp_path)
    assert status == 1
    assert "'starting engine' may hang" in output and "failed: 'starting engine' hangs" in output
    (stacks,) = (run_dir / "logs").glob("stacks-*.txt")
    assert "fake_trainer.py" in stacks.read_text()


def test_helpers_that_outlive_the_trainer_are_ended(tmp_path):
    status, _, run_dir, summary = finish(start(tmp_path, "leaves"), tmp_path)
    assert status == 0 and summary["status"] == "done"
    assert (run_dir / "logs" / "ray" / "worker-1.err").read_text() == "ray's own log\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_leaves_nothing_and_keeps_what_was_written(tmp_path, number, status):
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = start(tmp_path, "long")
    wait_for(lambda: (tmp_path / "runs" / "latest" / "metrics.jsonl").exists())
    time.sleep(0.5)
    process.send_signal(number)
    found, output, run_dir, summary = finish(process, tmp_path)
    assert found == status and summary["status"] == "stopped" and summary["steps"] == 2
    assert "stopping" in output and len(read_jsonl(run_dir / "metrics.jsonl")) == 2
    assert foreign.poll() is None  # not ours
    foreign.kill()
    foreign.wait()


def test_closing_the_terminal_stops_the_run(tmp_path):
    """SIGHUP, and every write fails from then on."""
    reader, writer = os.openpty()
    process = start(tmp_path, "long", stdout=writer)
    os.close(writer)
    wait_for(lambda: (tmp_path / "runs" / "latest" / "metrics.jsonl").exists())
    assert b"starting" in os.read(reader, 100_000)
    os.close(reader)
    process.send_signal(signal.SIGHUP)
    status, _, _, summary = finish(process, tmp_path)
    assert status == 129 and summary["status"] == "stopped"


def test_kill_of_the_front_end_ends_the_trainer(tmp_path):
    process = start(tmp_path, "hangs")
    wait_for(lambda: (tmp_path / "runs" / "latest" / "events.jsonl").exists())
    run_id = json.loads((tmp_path / "runs" / "latest" / "config.json").read_text())["run_id"]
    process.kill()
    process.communicate()
    wait_for(lambda: RunProcesses(run_id, Path("/nowhere")).alive() == [])
    Path(f"/tmp/lockstep-{run_id}").rmdir()  # the one thing that kill -9 leaves


def wait_for(condition, seconds: float = 20) -> None:
    """Until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Terminal(io.StringIO):
    """A terminal that remembers what was written."""

    def isatty(self):
        return True


def test_bar_on_a_terminal():
    screen = Terminal()
    progress = Progress(3, screen)
    progress.handle({"event": "stage", "name": "loading model"})
    progress.tick()
    assert "loading model  0 s" in screen.getvalue().splitlines()[-1]
    for step in (1, 2, 3):
        row = {"reward": 0.25, "accuracy": 0.5, "kl_k3": 2e-5, "tokens_per_s": 900.0}
        progress.handle({"event": "step", "step": step, "of": 3, **row})
    progress.handle({"event": "validation", "step": 3, "accuracy": 0.6})
    progress.close()
    text = screen.getvalue()
    assert "reward +0.25  accuracy 50.0%  k3 2.0e-05  900 tokens/s [" in text and "step 3/3 |" in text
    assert "held-out accuracy 60.0 % after 3 steps" in text


def test_foreign_shared_memory_stays(tmp_path):
    segment = Path("/dev/shm") / f"lockstep-test-{os.getpid()}"
    segment.write_bytes(b"x")
    processes = RunProcesses("0" * 8, tmp_path / "ray")
    processes._segments.add((segment.name, segment.stat().st_ino + 1))  # an older file of this name
    assert processes.clean() == []
    processes._segments.add((segment.name, segment.stat().st_ino))
    with segment.open("rb"):  # in use by a living process
        assert processes.clean() == []
    assert processes.clean() == [str(segment)]


def test_run_folders_never_collide(tmp_path):
    recipe = load_recipe("tiny_math", [f"run.root={tmp_path / 'runs'}"])
    folders = [make_run(recipe)[0] for _ in range(3)]
    assert len(set(folders)) == 3
    assert (tmp_path / "runs" / "latest").resolve() == folders[-1]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.root"):
        make_run(load_recipe("tiny_math", [f"run.root={tmp_path / 'file' / 'runs'}"]))


def test_resume_finds_the_newest_state(tmp_path):
    def resume(value):
        return find_resume(load_recipe("tiny_math", [f"run.root={tmp_path}", f"trainer.resume={value}"]))

    assert resume("") is None and resume("auto") is None
    for age, name in ((20, "tiny_math-1"), (10, "tiny_math-2"), (0, "other-1")):
        (tmp_path / name / "checkpoints" / "step-1").mkdir(parents=True)
        os.utime(tmp_path / name / "checkpoints", (time.time() - age,) * 2)
    assert resume("auto") == tmp_path / "tiny_math-2"
    with pytest.raises(ConfigError, match=r"trainer\.resume"):
        resume(str(tmp_path / "none"))


def test_events_are_read_as_they_are_written(tmp_path):
    follower = JsonlFollower(tmp_path / "events.jsonl")
    assert follower.read() == []
    log = EventLog(tmp_path)
    log.stage("a")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "no')
        file.flush()
        assert [event["event"] for event in follower.read()] == ["stage"]
        file.write('te", "text": "b"}\n')
    assert [event["event"] for event in follower.read()] == ["note"]
    log.step(1, 2, {"reward": float("nan"), "loss": 0.5})
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": None, "loss": 0.5}]
    with pytest.raises(KeyError, match="rewrd"):
        log.step(2, 2, {"rewrd": 1.0})
    with pytest.raises(ValueError, match="verdict"):
        log.gate(0, "ok", [], "")


def test_summary_of_a_run_that_did_nothing():
    summary = summarize([], [], "failed", 10.0, 12.5, reason="x")
    assert summary["steps"] == 0 and summary["wall_s"] == 2.5 and summary["final_accuracy"] is None


def test_startup_ends_where_the_first_step_begins():
    events = [{"event": "stage", "name": "a", "t": 101.0}, {"event": "step", "step": 1, "t": 150.0, "time_step": 5.0}]
    assert summarize(events, [{"step": 1, "time_step": 5.0}], "done", 100.0, 151.0)["startup_s"] == 45.0


def test_the_cause_comes_before_its_echo(tmp_path):
    trace = "Traceback (most recent call last):\n  File 'x', line 1, in f\n    g()\n"
    (tmp_path / "trainer.log").write_text(f"{trace}ray.exceptions.ActorDiedError: the actor died\n")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "worker-1.err").write_text(f"\x1b[31m{trace}\x1b[0mtorch.OutOfMemoryError: no memory\nmore\n")
    path, lines = log_excerpt(tmp_path)
    assert path.name == "worker-1.err" and lines[-1] == "torch.OutOfMemoryError: no memory" and len(lines) == 4
    assert last_traceback(["no", "trouble"]) == []


# ---- the plan before a run -----------------------------------------------------------------------------------------


def test_dry_run_prints_recipe_configuration_and_plan_and_starts_nothing(tmp_path):
    """Of the headline recipe, whose checkpoint is not here."""
    script, runs = REPO_ROOT / "scripts" / "train_grpo.py", tmp_path / "runs"
    overrides = ["model.path=models/none", f"run.root={runs}", "trainer.steps=7", "optim.lr=3e-6"]
    command = [sys.executable, str(script), "--config", "dapo_math.yaml", "--dry-run", *overrides]
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=True, timeout=180)
    assert not runs.exists() and list(tmp_path.iterdir()) == [] and "Ray" not in result.stderr
    recipe, verl, plan = yaml.safe_load_all(result.stdout)
    assert load_recipe("dapo_math", overrides).model_dump(mode="json") == recipe and plan is None
    actor = verl["actor_rollout_ref"]["actor"]
    assert (actor["optim"]["lr"], verl["trainer"]["total_training_steps"]) == (3e-6, 7)
    assert actor["policy_loss"]["rollout_correction"]["loss_type"] == "reinforce"
    assert verl["actor_rollout_ref"]["model"]["lora"]["lockstep"]["lora_targets"] == recipe["model"]["lora_targets"]
    assert verl["data"]["train_files"].startswith("RUN_DIR/") and (verl["trainer"]["nnodes"]) == 2
    comments = result.stdout.rpartition("---\n")[2].splitlines()
    assert comments and all(line.startswith("#") for line in comments)
    assert any("426.17 B parameters" in line for line in comments) and "fit" in comments[-2]
    assert comments[-1].startswith("# a start here would be refused: trainer.nodes = 2: no Ray cluster is named")


def test_dry_run_without_anything_to_plan_with(capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "verl_yaml", lambda recipe, plan: f"planned: {plan is not None}\n")
    assert main(["--config", "tiny_math", "--dry-run", "model.path=/no/such"]) == 0
    out = capsys.readouterr().out
    assert "planned: False" in out and "# no plan: model.path is not there, and model.shape is not set\n" in out
    assert "# a start here would be refused: model.path = '/no/such': no such folder" in out.splitlines()[-1]
    assert main(["--config", "tiny_math", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "planned: True" in out and "refused" not in out


def refused(capsys, *arguments: str) -> str:
    """The one line on stderr of a recipe that is refused."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_what_cannot_fit_is_refused_with_what_does(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(plan_fit, "gpu_count", lambda: 0)
    monkeypatch.setattr(plan_fit, "memory_gib", lambda: 24.0)
    root = f"run.root={tmp_path / 'runs'}"
    line = refused(capsys, "--config", "dapo_math", "model.path=models/none", root)
    assert line.startswith("train_grpo.py: model.path = 'models/none': no such folder;")
    assert "dapo_math does not fit: needs" in line and "24.0 are there" in line
    other = re.search(r"; --config (\w+)\.yaml fits here\n$", line)[1]
    assert plan_fit.refusal(load_recipe(other)) is None
    # With the checkpoint there, its own configuration counts, before anybody asks for a cluster.
    (tmp_path / "config.json").write_text((REPO_ROOT / "recipes" / "shapes" / "minimax_m3.json").read_text())
    line = refused(capsys, "--config", "dapo_math", f"model.path={tmp_path}", "model.shape=null", root)
    assert line.startswith("train_grpo.py: dapo_math does not fit: ") and "no such folder" not in line
    # A machine that is almost large enough: the change is named, and with it the recipe goes on to the next check.
    monkeypatch.setattr(plan_fit, "memory_gib", lambda: 4.0)
    line = refused(capsys, "--config", "tiny_math", root)
    assert "smallest change that does: model.gradient_checkpointing=true" in line
    check_plan(load_recipe("tiny_math", ["model.gradient_checkpointing=true"]))
    assert not (tmp_path / "runs").exists()


def test_on_gpus_the_plan_is_for_those_that_are_there(monkeypatch):
    monkeypatch.setattr(plan_fit, "gpu_count", lambda: 8)
    monkeypatch.setattr(plan_fit, "devices", lambda: ["NVIDIA H200, 143771 MiB"] * 8)
    monkeypatch.setattr(plan_fit, "memory_gib", lambda: 4096.0)
    assert plan_fit.refusal(load_recipe("dapo_math", ["model.path=models/none"])) is None
    large = ["model.path=models/none", "rollout.gpu_memory_utilization=0.5"]
    recipe = load_recipe("dapo_math", large)
    needed = plan_fit.plan_recipe(recipe, Machine("gpu", 143771 / 1024, "")).needed
    line = plan_fit.refusal(recipe)
    assert f"needs {needed / GIB:.1f} GiB per GPU and 140.4 are there" in line and "smallest change that does: " in line
    overrides = line.partition("smallest change that does: ")[2].partition(";")[0].split()
    assert plan_fit.refusal(load_recipe("dapo_math", [*large, *overrides])) is None
