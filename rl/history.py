"""One row a check, so that an upgrade of a dependency that moves numbers is seen."""

import hashlib
import json
import time
from pathlib import Path

# Numbers that may move by this factor between two checks of the same model without a word.
SPREAD = 3.0
NUMBERS = ("kl_k3", "mean_abs", "max_abs")


def row_of(report: dict, model: str, adapter: str | None) -> dict:
    """What is kept of a report: when, what was checked, versions, verdict and numbers."""
    replayed = report["logprobs"].get("replayed", {})
    return {
        "t": round(time.time()),
        "recipe": report["recipe"]["name"],
        "settings": hashlib.sha256(json.dumps(report["recipe"], sort_keys=True).encode()).hexdigest()[:12],
        "model": model,
        "adapter": adapter,
        "commit": report["environment"]["git"]["commit"],
        "devices": report["environment"]["devices"],
        "packages": report["environment"]["packages"],
        "verdict": report["verdict"],
        "free_agreement": report["routing"].get("free_agreement"),
        **{name: replayed.get(name) for name in NUMBERS},
    }


def compare(new: dict, rows: list[dict]) -> list[str]:
    """What changed since the last check of the same model and adapter on the same devices; [] for nothing."""
    same = ("recipe", "settings", "model", "adapter", "devices")
    last = next((row for row in reversed(rows) if all(row.get(key) == new[key] for key in same)), None)
    if last is None:
        return []
    lines = [
        f"{name} {last['packages'].get(name, 'absent')} -> {new['packages'].get(name, 'absent')}"
        for name in sorted(last["packages"].keys() | new["packages"].keys())
        if last["packages"].get(name) != new["packages"].get(name)
    ]
    if last["verdict"] != new["verdict"]:
        lines.append(f"verdict {last['verdict']} -> {new['verdict']}")
    for name in NUMBERS:
        before, now = last.get(name), new.get(name)
        if before and now and not 1 / SPREAD <= now / before <= SPREAD:
            lines.append(f"{name} {before:.2e} -> {now:.2e}")
    return lines


def record(path: Path, new: dict) -> list[str]:
    """Append `new` to the history file and return what changed."""
    changes = compare(new, rows_of(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + json.dumps(new) + "\n")
    return changes


def rows_of(path: Path) -> list[dict]:
    """Rows of a history file that are whole; what else stands there (a line cut by a crash) is passed over."""
    found = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        numbers = isinstance(row, dict) and all(isinstance(row.get(key), int | float | None) for key in NUMBERS)
        if numbers and isinstance(row.get("packages"), dict) and "verdict" in row:
            found.append(row)
    return found
