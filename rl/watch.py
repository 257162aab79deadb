"""`check_consistency.py --watch RUN`: the trend of trainer against engine in a run, while it runs or afterwards."""

import time
from pathlib import Path

from rl.events import JsonlFollower

POLL_S = 1.0
HEADER = f"{'step':>6}  {'k3':>9}  {'worst':>9}  {'IS weights':>13}  {'free':>7}"


def watch(run_dir: Path, poll_s: float = POLL_S) -> int:
    """Print a line a step and a line a check until the run ends; 0 if it ended well and every check passed, else 1."""
    rows, events = JsonlFollower(run_dir / "metrics.jsonl"), JsonlFollower(run_dir / "events.jsonl")
    print(HEADER, flush=True)
    passed = True
    while True:
        ended = None
        lines = [(row["step"], 0, _line(row)) for row in rows.read()]
        for event in events.read():
            if event["event"] == "gate":
                passed &= event["verdict"] == "pass"
                lines.append((event["step"], 1, f"{event['step']:>6}  check: {event['summary']}"))
            elif event["event"] in ("done", "failed"):
                ended = event["event"]
        for _, _, line in sorted(lines):
            print(line, flush=True)
        if ended is None and (run_dir / "summary.json").is_file():
            ended = "stopped"
        if ended is not None:
            print(f"the run is {ended}")
            return 0 if ended == "done" and passed else 1
        time.sleep(poll_s)


def _line(row: dict) -> str:
    needed = ("kl_k3", "logp_diff_max", "is_ratio_min", "is_ratio_max")
    if any(row.get(key) is None for key in needed):  # null stands for a number that was not finite
        return f"{row['step']:>6}  no finite log-probs in this step"
    weights = f"{row['is_ratio_min']:.3f}-{row['is_ratio_max']:.3f}"
    free = row.get("routing_free_agreement")
    return f"{row['step']:>6}  {row['kl_k3']:>9.2e}  {row['logp_diff_max']:>9.2e}  {weights:>13}  " + (
        f"{free:>7.4f}" if free is not None else f"{'n/a':>7}"
    )
