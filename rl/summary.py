"""summary.json: what came of a run, computed from its events and metric rows."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PHASES = ("time_generate", "time_reward", "time_update", "time_sync", "time_step")


def summarize(
    events: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    status: str,
    started: float,
    ended: float,
    peak_memory_bytes: int = 0,
    reason: str | None = None,
) -> dict[str, Any]:
    """Figures of a run.

    Args:
        events: rows of events.jsonl, each with its time "t".
        rows: rows of metrics.jsonl.
        status: done, stopped or failed.
        started, ended: seconds since the epoch; `started` is when the command was given.
        peak_memory_bytes: largest sampled memory of all processes together.
        reason: why it failed.

    Returns:
        Times in seconds, accuracies in [0, 1], memory in GB (1e9 bytes); null where a run has no such figure.
        `startup_s` runs from the command to the begin of the first step.
    """
    accuracies = [event["accuracy"] for event in events if event["event"] == "validation"]
    before = [event["accuracy"] for event in events if event["event"] == "validation" and event["step"] == 0]
    gates = [event for event in events if event["event"] == "gate"]
    return {
        "schema": 1,
        "status": status,
        "reason": reason,
        "steps": max((row["step"] for row in rows), default=0),
        "initial_accuracy": before[0] if before else None,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "wall_s": round(ended - started, 1),
        "startup_s": _startup(events, started),
        "kl_k3_max": max(_column(rows, "kl_k3"), default=None),
        "is_ratio_max": max(_column(rows, "is_ratio_max"), default=None),
        "is_ratio_min": min(_column(rows, "is_ratio_min"), default=None),
        "tokens_per_s": _median(_column(rows[1:] or rows, "tokens_per_s")),
        "step_time_median_s": {key.removeprefix("time_"): _median(_column(rows[1:] or rows, key)) for key in PHASES},
        "reward_errors": int(sum(_column(rows, "reward_errors"))),
        "reward_timeouts": int(sum(_column(rows, "reward_timeouts"))),
        "gen_batches": _median(_column(rows, "gen_batches")),
        "peak_memory_gb": round(peak_memory_bytes / 1e9, 2) if peak_memory_bytes else None,
        "gates": {
            "pass": sum(event["verdict"] == "pass" for event in gates),
            "fail": sum(event["verdict"] == "fail" for event in gates),
        },
    }


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write summary.json."""
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _startup(events: list[dict[str, Any]], started: float) -> float | None:
    for event in events:
        if event["event"] == "step":
            return round(event["t"] - (event.get("time_step") or 0.0) - started, 1)
    return None


def _column(rows: Iterable[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None
