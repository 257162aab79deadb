"""The front end of a training run: `scripts/train_grpo.py`.

Validates, makes the run folder, starts `python -m rl.train RUN_DIR` (which runs verl) in its own session, shows what it
reports, and ends everything that it started. Imports no torch, verl, vLLM or Ray: errors answer at once.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rl.config import (
    OBJECTIVES,
    REPO_ROOT,
    ConfigError,
    Recipe,
    find_path,
    load_recipe,
    run_root,
    with_absolute_paths,
)
from rl.dry_run import dry_run
from rl.environment import describe
from rl.events import STACKS_PREFIX, JsonlFollower, read_jsonl
from rl.failure import log_excerpt
from rl.preflight import Preflight, check_plan, preflight
from rl.processes import Process, RunProcesses, die_with_parent, environment, process_start_time
from rl.progress import Progress, count, duration, percent
from rl.report import write_report
from rl.summary import summarize, write_summary

EXAMPLES = """examples:
  python scripts/train_grpo.py --config tiny_math.yaml
  python scripts/train_grpo.py --config tiny_math.yaml trainer.steps=20 model.lora_rank=16
  python scripts/train_grpo.py --config tiny_math.yaml trainer.logger=[console,wandb]
  python scripts/train_grpo.py --config my/recipe.yaml --dry-run

exit status: 0 done, 1 a check failed or training stopped itself, 2 bad usage or recipe, 130 stopped with Ctrl-C
Every key of a recipe is explained in rl/schema.py."""


class Parser(argparse.ArgumentParser):
    """A command line with examples that says what is wrong in one line."""

    def __init__(self, prog: str, description: str, examples: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> None:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")

    def check_writable(self, option: str, path: Path | None) -> None:
        """`error` if a file that an option names (None: it is not given) cannot be written, before anything is done."""
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            self.error(f"{option} {path}: cannot be written; name a file in a writable folder")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("train_grpo.py", "Train a recipe with GRPO.", EXAMPLES)
    parser.add_argument("--config", required=True, metavar="NAME", help="recipe in recipes/, or a path to one")
    parser.add_argument(
        "--dry-run", action="store_true", help="print recipe, verl's configuration, plan; start nothing"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")
    args = parser.parse_intermixed_args(argv)
    started = process_start_time()
    try:
        recipe = load_recipe(args.config, args.overrides)
        if args.dry_run:
            dry_run(recipe)
            return 0
        resume_from = find_resume(recipe)
        check_plan(recipe)
        checked = preflight(recipe)
        run_dir, run_id = make_run(recipe)
    except ConfigError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    write_config(run_dir, run_id, recipe, checked, args.config, args.overrides, resume_from)
    return Run(recipe, run_dir, run_id, started).execute(headline(recipe, checked, run_dir))


def headline(recipe: Recipe, checked: Preflight, run_dir: Path) -> str:
    """One line of what is about to happen."""
    config = json.loads((run_dir / "config.json").read_text())
    devices = config["environment"]["devices"]
    device = devices[0] if len(devices) == 1 else f"{len(devices)} x {devices[0]}"
    return (
        f"{recipe.name}: {recipe.algorithm.objective} on {checked.model_text} with rank-{recipe.model.lora_rank} LoRA "
        f"({', '.join(recipe.model.lora_targets)}), {recipe.trainer.steps} steps of {recipe.data.batch_size} x "
        f"{recipe.rollout.group_size} samples, {device.partition(' (')[0]}, into {_relative(run_dir)}"
    )


def find_resume(recipe: Recipe) -> Path | None:
    """The run folder to go on from; ConfigError if `trainer.resume` names none."""
    wanted = recipe.trainer.resume
    if wanted is None:
        return None
    if wanted != "auto":
        folder = find_path(wanted)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"trainer.resume = {wanted!r}: no run folder there (config.json); use auto or a run folder"
            )
        return folder
    root = run_root(recipe)
    runs = [path.parent for path in root.glob(f"{recipe.name}-*/checkpoints") if any(path.iterdir())]
    return max(runs, key=lambda path: (path / "checkpoints").stat().st_mtime, default=None)


def make_run(recipe: Recipe) -> tuple[Path, str]:
    """Create the run folder and the link `latest`; returns it with the run's id."""
    root = run_root(recipe)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        for attempt in range(1, 100):
            run_dir = root / (f"{recipe.name}-{stamp}" + (f"-{attempt}" if attempt > 1 else ""))
            try:
                run_dir.mkdir(parents=True)
                break
            except FileExistsError:
                continue
        (run_dir / "logs").mkdir()
        link = root / f".latest-{os.getpid()}"
        link.symlink_to(run_dir.name)
        link.replace(root / "latest")
    except OSError as error:
        raise ConfigError(f"run.root = {recipe.run.root!r}: {error.strerror}; choose a writable folder") from None
    return run_dir, secrets.token_hex(4)


def write_config(
    run_dir: Path,
    run_id: str,
    recipe: Recipe,
    checked: Preflight,
    source: str,
    overrides: list[str],
    resume_from: Path | None,
) -> None:
    """Write config.json: everything that decides the run, before step 0."""
    config = {
        "schema": 1,
        "run_id": run_id,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "source": source,
        "overrides": list(overrides),
        "resume_from": str(resume_from) if resume_from else None,
        "objective": OBJECTIVES[recipe.algorithm.objective],
        "recipe": with_absolute_paths(recipe).model_dump(mode="json"),
        "model": checked.as_dict(),
        "environment": describe(REPO_ROOT),
    }
    (run_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class Run:
    """One trainer process: start it, follow it, end it, sum it up."""

    def __init__(self, recipe: Recipe, run_dir: Path, run_id: str, started: float, command: list[str] | None = None):
        self.recipe, self.run_dir, self.started = recipe, run_dir, started
        self.ray_tmp = Path("/tmp") / f"lockstep-{run_id}"  # short: a socket's path has at most 107 bytes
        self.processes = RunProcesses(run_id, self.ray_tmp)
        self.command = command or [sys.executable, "-m", "rl.train", str(run_dir)]
        self.progress = Progress(recipe.trainer.steps)
        self.grace = float(os.environ.get("LOCKSTEP_GRACE_S", "5"))
        self.stall_s = 60 * float(os.environ.get("LOCKSTEP_STALL_MINUTES", recipe.trainer.stall_minutes))
        self.poll_s = float(os.environ.get("LOCKSTEP_POLL_S", "10"))
        self.signals: list[int] = []
        self.reason: str | None = None
        self.exit_code = 0
        self.finished = False
        self.explained = False  # the trainer itself said why it stops

    def execute(self, headline: str) -> int:
        """Run to the end; returns the exit status. Whatever happens, nothing that was started is left."""
        self.progress.line(headline)
        with self._signals():
            child = self._spawn()
            try:
                self._follow(child)
            finally:
                self._end(child)
            return self._conclude()

    @contextmanager
    def _signals(self):
        """Note SIGINT, SIGTERM and SIGHUP instead of dying of them."""

        def note(number: int, _frame: Any) -> None:
            self.signals.append(number)

        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _spawn(self) -> subprocess.Popen:
        env = os.environ | environment(self.processes.run_id, self.ray_tmp)
        env["PYTHONPATH"] = os.pathsep.join([str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env["PYTHONUNBUFFERED"] = "1"
        env |= {"WANDB_MODE": self.recipe.trainer.wandb_mode, "WANDB_DIR": str(self.run_dir), "WANDB_SILENT": "true"}
        env["TENSORBOARD_DIR"] = str(self.run_dir / "tensorboard")
        self.ray_tmp.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / "logs" / "trainer.log").open("ab") as log:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # the terminal's Ctrl-C reaches us alone; we end the rest in order
                # kill -9 of the front end must leave no run
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )

    def _follow(self, child: subprocess.Popen) -> None:
        """Show events until the child ends, a signal comes, or nothing has come for too long."""
        events = JsonlFollower(self.run_dir / "events.jsonl")
        last_event = last_poll = time.monotonic()
        warned = False
        while not self.signals:
            ended = child.poll() is not None  # before reading, so that the last events are read too
            new = events.read()
            for event in new:
                self._handle(event)
            self.processes.watch_segments()
            now = time.monotonic()
            if new:
                last_event, warned = now, False
            if ended:
                self._judge(child.returncode)
                return
            if now - last_poll >= self.poll_s:
                self.processes.poll()
                last_poll = time.monotonic()
            silent = now - last_event
            if silent > self.stall_s and not warned:
                warned = True
                self._report_stall(silent)
            if silent > 3 * self.stall_s:
                self._fail(f"{self.progress.stage!r} hangs: no event for {duration(silent)}; see logs/{STACKS_PREFIX}*")
                return
            self.progress.tick()
            time.sleep(0.2)

    def _handle(self, event: dict[str, Any]) -> None:
        self.progress.handle(event)
        if event["event"] == "failed":
            self.explained = True
            self._fail(event["reason"], event.get("exit", 1))
        elif event["event"] == "done":
            self.finished = True

    def _fail(self, reason: str, exit_code: int = 1) -> None:
        self.reason, self.exit_code = reason, exit_code

    def _judge(self, returncode: int) -> None:
        """Decide what the end of the child means."""
        if self.reason is not None:
            return
        if returncode < 0:
            name = signal.Signals(-returncode).name
            hint = "; often the machine ran out of memory" if -returncode == signal.SIGKILL else ""
            self._fail(f"the trainer process was ended by {name} during {self.progress.stage!r}{hint}")
        elif returncode > 0:
            self._fail(f"the trainer process ended with status {returncode} during {self.progress.stage!r}")
        elif not self.finished:
            self._fail(f"the trainer process ended early, during {self.progress.stage!r}")

    def _report_stall(self, silent: float) -> None:
        self.progress.line(f"  no event for {duration(silent)}: {self.progress.stage!r} may hang")
        logs = self.run_dir / "logs"
        for process in self.processes.alive():
            if (logs / f"{STACKS_PREFIX}{process.pid}.txt").exists():  # only those have a handler
                process.signal(signal.SIGUSR1)
        time.sleep(0.5)
        for path in sorted(logs.glob(f"{STACKS_PREFIX}*.txt")):
            if path.stat().st_size:
                self.progress.line(f"  stacks: {_relative(path)}")
        self._show_log()

    def _show_log(self) -> None:
        path, lines = log_excerpt(self.run_dir / "logs", only_errors=self.explained)
        known = self.explained and lines and lines[-1].partition(": ")[2] in (self.reason or "")
        if path is not None and lines and not known:  # else the reason says the same, and better
            self.progress.line(f"  {_relative(path)}:")
            for line in lines:
                self.progress.line(f"    {line[:300]}")

    def _end(self, child: subprocess.Popen) -> None:
        """End what is left, keep Ray's logs, remove shared memory and temporary files."""
        if self.signals:
            self.progress.line("  stopping (again to stop at once)")
        stat = Process.of(child.pid)
        asked = len(self.signals)
        # After a finished run there is nothing left that a process could still have to write.
        grace = min(self.grace, 0.5) if self.finished else self.grace
        self.processes.stop(stat, grace, interrupted=lambda: len(self.signals) > max(asked, 1))
        child.wait()
        self._keep_ray_logs()
        self.processes.clean()
        for path in (self.run_dir / "logs").glob(f"{STACKS_PREFIX}*.txt"):
            if path.stat().st_size == 0:
                path.unlink()

    def _keep_ray_logs(self) -> None:
        """Ray writes below its temporary folder: copy its logs into the run folder, the last megabyte of each."""
        for session in self.ray_tmp.glob("session_2*"):
            for source in (session / "logs").rglob("*"):
                if source.is_file() and source.suffix in (".log", ".out", ".err") and source.stat().st_size:
                    target = self.run_dir / "logs" / "ray" / source.relative_to(session / "logs")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with source.open("rb") as reader, target.open("wb") as writer:
                        reader.seek(max(0, source.stat().st_size - 2**20))
                        shutil.copyfileobj(reader, writer)

    def _conclude(self) -> int:
        """Write summary.json and report.html, say how it ended, return the exit status."""
        self.progress.close()
        if self.reason is not None:
            status, code = "failed", self.exit_code
        elif self.finished:
            status, code = "done", 0
        else:
            status, code = "stopped", 128 + self.signals[0]
        summary = summarize(
            read_jsonl(self.run_dir / "events.jsonl"),
            read_jsonl(self.run_dir / "metrics.jsonl"),
            status,
            self.started,
            time.time(),
            self.processes.peak_memory_bytes,
            self.reason,
        )
        write_summary(self.run_dir, summary)
        write_report(self.run_dir)
        if status == "failed":
            self.progress.line(f"failed: {self.reason}")
            self._show_log()
            self.progress.line(f"logs: {_relative(self.run_dir / 'logs')}")
        else:
            self.progress.line(closing_line(summary, self.run_dir))
        return code


def closing_line(summary: dict[str, Any], run_dir: Path) -> str:
    """How a run ended, in one line."""
    accuracy = ""
    if summary["initial_accuracy"] is not None and summary["steps"]:
        accuracy = f", held-out accuracy {percent(summary['initial_accuracy'])} -> {percent(summary['final_accuracy'])}"
    return (
        f"{summary['status']}: {count(summary['steps'], 'step')} in {duration(summary['wall_s'])}{accuracy}; "
        f"{_relative(run_dir / 'report.html')}"
    )


def _relative(path: Path) -> str:
    """A path as short as it is still right."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
