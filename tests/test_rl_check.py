"""The check's command line: bad usage in one line, the page and the console table, history and watch."""

import json
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rl import check, history
from rl.consistency_page import console, render
from rl.data import dapo_prompt
from rl.watch import watch

ROOT = Path(__file__).resolve().parent.parent

STATS = {"mean_abs": 1e-4, "p99_abs": 1e-3, "max_abs": 5e-3, "kl_k1": 1e-5, "kl_k3": 2e-7, "pearson": 1.0}


def report(**changes) -> dict:
    """A passing report as `ConsistencyReport.as_dict` gives it."""
    layer = {"layer": 0, "free": 0.99, "replayed": 1.0, "disagree": 3, "near_ties": 2}
    whole = {
        "schema": 1,
        "verdict": "pass",
        "reasons": [],
        "diagnosis": [],
        "step": 0,
        "weights": {
            "base": {"tensors": 79, "workers": 1, "bytes": 1870000, "mismatched": []},
            "adapter": {"tensors": 56, "workers": 1, "bytes": 2200000, "mismatched": [], "unbound": []},
        },
        "routing": {"tokens": 300, "free_agreement": 0.99, "replayed_agreement": 1.0, "per_layer": [layer]},
        "logprobs": {
            "tokens": 20,
            **{key: dict(STATS) for key in ("free", "replayed", "decode_prefill", "prefill")},
            "by_position": [{"first": 0, "last": 1, "tokens": 9, "mean": 0.0, "mean_abs": 1e-4}],
            "worst": [{"sequence": 0, "position": 3, "token": 7, "text": "<b>", "trainer": -1.0, "engine": -1.1}],
            "points": [[-1.1, -1.0], [-0.5, -0.5]],
        },
        "probe": {"adapter_effect": 0.1, "zero_adapter_effect": 0.0},
        "thresholds": {"kl_k3": 2e-5, "mean_abs_logp": 2e-3},
        "environment": {"git": {"commit": "abc"}, "devices": ["CPU"], "packages": {"torch": "2.13.0"}},
        "recipe": {"name": "tiny"},
    }
    return whole | changes


# ---- command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either --config or --watch"),
        (["--config", "tiny_math.yaml", "--watch", "runs"], "give either"),
        (["--config", "no_such.yaml"], "no_such"),
        (["--config", "tiny_math.yaml", "model.lora_ranc=8"], "lora_rank"),
        (["--config", "tiny_math.yaml", "--adapter", "nowhere"], "adapter_config.json"),
        (
            ["--config", "tiny_math.yaml", "--engine-checkpoint", "nowhere"],
            "--engine-checkpoint nowhere: no config.json",
        ),
        (["--config", "tiny_math.yaml", "--engine-adapter", "assets"], "no adapter_config.json"),
        (["--watch", "assets"], "--watch assets: no config.json there"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, words):
    command = [sys.executable, "scripts/check_consistency.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_probe_prompts_are_what_a_run_would_ask_whatever_form_the_set_has(tmp_path):
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(3)))
    recipe = types.SimpleNamespace(data=types.SimpleNamespace(val=str(path)))
    tokenizer = types.SimpleNamespace(apply_chat_template=lambda messages, **_: messages)
    prompts = check.probe_prompts(recipe, 2, tokenizer)
    assert prompts == [[{"role": "user", "content": dapo_prompt(f"{n} + 1?")}] for n in range(2)]


def test_workers_of_a_tensor_parallel_engine_hold_the_trainers_parts(tmp_path):
    command = [sys.executable, "scripts/check_consistency.py", "--config", "tiny_math.yaml"]
    command += ["rollout.tensor_parallel_size=2", "trainer.fsdp_workers=2", "rollout.kv_cache_gib=0.25"]
    command += ["--json", str(tmp_path / "report.json"), "--history", str(tmp_path / "history.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = json.loads((tmp_path / "report.json").read_text())["weights"]
    for kind in ("base", "adapter"):
        assert weights[kind]["workers"] == 2 and weights[kind]["mismatched"] == []
    assert weights["base"]["bytes"] < 1_000_000  # each worker holds half


def test_what_libraries_print_goes_to_the_log(capfd):
    with check.libraries_in_log() as log:
        subprocess.run(["sh", "-c", "echo from a library; echo and an error >&2"], check=True)
    print("after")
    assert capfd.readouterr().out == "after\n"
    assert log.read_text() == "from a library\nand an error\n"
    log.unlink()


# ---- page and console ----------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Counts tags and keeps the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not any(name in ("src", "href") or name.startswith("on") for name, _ in attrs), (tag, attrs)

    def handle_data(self, data):
        self.text += data


def test_page_has_verdict_four_plots_and_tables_and_needs_no_network():
    page = Elements(render(report()))
    assert page.tags.count("figure") == 4 and page.tags.count("svg") == 4
    assert "script" not in page.tags and "link" not in page.tags
    for words in ("pass", "79 of 79", "Tokens that differ most", "kl_k3", "abc"):
        assert words in page.text


def test_page_escapes_everything():
    evil = "<script>alert(1)</script>"
    failed = report(verdict="fail", reasons=[evil], diagnosis=[evil], recipe={"name": evil}, environment={"a": evil})
    failed["weights"]["base"]["mismatched"] = [evil]
    failed["logprobs"]["worst"][0]["text"] = evil
    page = Elements(render(failed))
    assert "script" not in page.tags and page.text.count(evil) >= 6


def test_page_of_a_report_that_ended_with_the_weights():
    page = Elements(render(report(verdict="fail", logprobs={}, routing={}, probe={})))
    assert "fail" in page.text and "figure" not in page.tags


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_shows_itself_in_a_browser(tmp_path, dark):
    from PIL import Image  # comes with vLLM

    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(render(report()))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [f"--user-data-dir={tmp_path}/profile", "--window-size=1200,1600", f"--screenshot={picture}"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=120)
    image = np.asarray(Image.open(picture), dtype=np.float32) / 255
    assert image.shape[:2] == (1600, 1200)
    corner, spread = float(image[5, 5, :3].mean()), float(image[..., :3].std())
    assert (corner < 0.3 if dark else corner > 0.9) and spread > 0.02  # the right theme, and something on it


def test_console_names_every_check_reasons_and_causes():
    text = console(report(verdict="fail", reasons=["weights: 1 base tensors differ"], diagnosis=["bytes are damaged"]))
    assert text.splitlines()[0] == "verdict: fail"
    for words in ("79 tensors", "0.9900 free (3 rows differ, 2 of them near-ties)", "k3 2e-07", "zero adapter 0"):
        assert words in text
    assert text.endswith("failed: weights: 1 base tensors differ\n  likely: bytes are damaged")


# ---- history -------------------------------------------------------------------------------------------------------


def test_history_says_what_an_upgrade_moved(tmp_path):
    path = tmp_path / "runs" / "history.jsonl"
    assert history.record(path, history.row_of(report(), "model", None)) == []
    assert history.record(path, history.row_of(report(), "model", None)) == []
    moved = report(environment=report()["environment"] | {"packages": {"torch": "2.14.1", "new": "1"}})
    moved["logprobs"]["replayed"] = STATS | {"kl_k3": 9e-7, "max_abs": 6e-3}
    changes = history.record(path, history.row_of(moved, "model", None))
    assert changes == ["new absent -> 1", "torch 2.13.0 -> 2.14.1", "kl_k3 2.00e-07 -> 9.00e-07"]
    assert history.record(path, history.row_of(moved, "another model", None)) == []
    assert len(path.read_text().splitlines()) == 4
    with path.open("a") as file:
        file.write('{"recipe": "cut')
    assert history.record(path, history.row_of(moved, "model", None)) == []
    assert len(history.rows_of(path)) == 5


# ---- watch ---------------------------------------------------------------------------------------------------------


def run_folder(path: Path, *events: dict) -> Path:
    row = {"step": 1, "kl_k3": 1e-6, "logp_diff_max": 0.01, "is_ratio_min": 0.99, "is_ratio_max": 1.01}
    (path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"step": 2}) + "\n")
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


@pytest.mark.parametrize(
    ("verdict", "last", "status"), [("pass", "done", 0), ("fail", "done", 1), ("pass", "failed", 1)]
)
def test_watch_ends_with_the_run_and_says_how_it_went(tmp_path, capsys, verdict, last, status):
    gate = {"event": "gate", "step": 0, "verdict": verdict, "summary": f"{verdict}: 79 base tensors"}
    assert watch(run_folder(tmp_path, gate, {"event": last, "reason": "x"})) == status
    shown = capsys.readouterr().out
    assert f"0  check: {verdict}: 79 base tensors" in shown and "0.990-1.010" in shown
    assert "2  no finite log-probs in this step" in shown
