"""Every fault of rl/faults.py, injected into a real trainer and a real engine: found, explained, and taken back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_every_fault_is_found_and_explained_and_clean_checks_pass(tmp_path):
    command = [sys.executable, "scripts/bench_consistency.py", "--config", "tiny_math.yaml", "--clean", "3"]
    command += ["--json", str(tmp_path / "faults.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    outcome = json.loads((tmp_path / "faults.json").read_text())
    missed = [row["fault"] for row in outcome["faults"] if not (row["detected"] and row["explained"])]
    assert missed == [] and outcome["false_alarms"] == [] and done.returncode == 0
    assert len(outcome["faults"]) >= 18
