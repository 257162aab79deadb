"""What a run writes while it runs, and how it is read back: events.jsonl and metrics.jsonl in the run folder.

The trainer process (and nobody else) writes them with `EventLog`; the front end (`rl.launch`) follows them. Both files
hold one JSON object a line, appended whole, so a reader never has to lock. No torch, verl, vLLM or Ray here.

Events:
    {"event": "stage", "name": "loading model", "t": seconds since the epoch}      every event has "t"
    {"event": "step", "step": n, "of": N, ...metrics}
    {"event": "validation", "step": n, "accuracy": f, "by_set": {name: f}, "reward_errors": n, "reward_timeouts": n}
    {"event": "gate", "step": n, "verdict": "pass" | "fail", "reasons": [...], "summary": "..."}
    {"event": "note", "text": "..."}                                               a line for the person who watches
    {"event": "done"}
    {"event": "failed", "reason": "...", "exit": 1 | 2}
"""

import faulthandler
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import IO, Any

METRIC_KEYS = (
    "step",
    "reward",
    "accuracy",
    "kl_k1",
    "kl_k3",
    "logp_diff_mean",
    "logp_diff_max",
    "is_ratio_mean",
    "is_ratio_min",
    "is_ratio_max",
    "response_length",
    "entropy",
    "grad_norm",
    "loss",
    "lr",
    "tokens",
    "tokens_per_s",
    "time_generate",
    "time_reward",
    "time_advantage",
    "time_update",
    "time_sync",
    "time_wake",
    "time_gate",
    "time_save",
    "time_validate",
    "time_step",
    "trainer_memory_gb",
    "replayed_fraction",
    "routing_free_agreement",
    "routing_free_agreement_by_layer",
    "policy_version",
    "clip_ratio",
    "pg_clipfrac",
    "index_kl",
    "no_answer",
    "reward_errors",
    "reward_timeouts",
    "overlong",
    "overlong_penalty",
    "kept_groups",
    "gen_batches",
    "groups_all_right",
    "groups_all_wrong",
)
"""Columns of metrics.jsonl. Times are seconds; a row may lack a column that its step has no value for."""

STACKS_PREFIX = "stacks-"


class EventLog:
    """Appends events and metric rows to a run folder; used by the trainer process.

    Example:
        log = EventLog(run_dir)
        log.stage("loading model")
        log.step(1, 80, {"reward": -0.1, "kl_k3": 2e-5})
        log.done()
    """

    def __init__(self, run_dir: str | Path):
        self._events = Path(run_dir) / "events.jsonl"
        self._metrics = Path(run_dir) / "metrics.jsonl"

    def stage(self, name: str) -> None:
        """The part of the start-up (or shut-down) that begins now."""
        self._append(self._events, {"event": "stage", "name": name})

    def step(self, step: int, of: int, metrics: dict[str, float]) -> None:
        """A finished optimizer step: one row in metrics.jsonl and one event. Unknown columns are a KeyError."""
        unknown = sorted(set(metrics) - set(METRIC_KEYS))
        if unknown:
            raise KeyError(f"metric columns {unknown} are not in rl.events.METRIC_KEYS; add them there")
        row = {"step": step, **metrics}
        _append_line(self._metrics, row)
        self._append(self._events, {"event": "step", "of": of, **row})

    def validation(
        self,
        step: int,
        accuracy: float,
        by_set: dict[str, float] | None = None,
        reward_errors: int = 0,
        reward_timeouts: int = 0,
    ) -> None:
        """Held-out accuracy in [0, 1] after `step` optimizer steps, and the samples that could not be judged.

        `by_set` has the accuracy of each data source where the held-out file mixes several.
        """
        event = {"event": "validation", "step": step, "accuracy": accuracy, "by_set": by_set or {}}
        self._append(self._events, {**event, "reward_errors": reward_errors, "reward_timeouts": reward_timeouts})

    def gate(self, step: int, verdict: str, reasons: list[str], summary: str) -> None:
        """Outcome of a consistency check; verdict is pass or fail."""
        if verdict not in ("pass", "fail"):
            raise ValueError(f"verdict {verdict!r} is neither pass nor fail")
        self._append(
            self._events, {"event": "gate", "step": step, "verdict": verdict, "reasons": reasons, "summary": summary}
        )

    def note(self, text: str) -> None:
        """A line for the person who watches."""
        self._append(self._events, {"event": "note", "text": text})

    def done(self) -> None:
        """The run reached its end."""
        self._append(self._events, {"event": "done"})

    def failed(self, reason: str, exit_code: int = 1) -> None:
        """The run stops itself: one line that says why; exit 1 for a failed check, 2 for bad input."""
        self._append(self._events, {"event": "failed", "reason": reason, "exit": exit_code})

    @staticmethod
    def _append(path: Path, event: dict[str, Any]) -> None:
        _append_line(path, {**event, "t": round(time.time(), 3)})


def _append_line(path: Path, row: dict[str, Any]) -> None:
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    line = json.dumps(clean, allow_nan=False, default=_plain) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def _plain(value: Any) -> Any:
    """Zero-dimensional numpy and torch values, without importing either."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not belong in an event")


class JsonlFollower:
    """Reads the complete lines that were appended since the last call."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """New rows; [] if the file does not exist yet or holds no new complete line."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a jsonl file; [] if there is none."""
    return JsonlFollower(path).read()


def enable_stack_dumps(run_dir: str | Path) -> IO[str]:
    """On SIGUSR1, write all Python stacks of this process to logs/stacks-PID.txt of the run folder.

    Every process of a run may call it. The front end signals the processes that have such a file when no event came for
    `trainer.stall_minutes`. The returned file has to stay open for as long as the process lives.
    """
    path = Path(run_dir) / "logs" / f"{STACKS_PREFIX}{os.getpid()}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    return file
