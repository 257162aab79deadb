"""report.html: complete, well-formed, self-contained and escaped, whatever a run left behind."""

import itertools
import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from rl.events import METRIC_KEYS, EventLog
from rl.report import PHASES, render, write_report
from rl.summary import summarize, write_summary
from rl.svg import Series, line_plot, ticks

HOSTILE = "<script>alert('x')</script>\"&"


class Outline(HTMLParser):
    """Collects tags and addresses; complains about tags that are closed in the wrong order."""

    VOID = {"meta", "br", "img", "link"}

    def __init__(self):
        super().__init__()
        self.stack, self.tags, self.addresses, self.text = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text += data


def outline(page: str) -> Outline:
    """Parse a page."""
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.stack == []
    return parser


@pytest.fixture
def run_dir(tmp_path):
    """A finished run of 30 steps, with a hostile string wherever text comes from outside."""
    log = EventLog(tmp_path)
    log.validation(0, 0.45)
    log.gate(0, "pass", [], f"k3 1e-5 {HOSTILE}")
    rows = []
    for step in range(1, 31):
        row = {
            "reward": -0.2 + step / 40,
            "accuracy": 0.4 + step / 80,
            "kl_k3": 2e-5 * (1 + step % 3),
            "is_ratio_min": 0.93,
            "is_ratio_mean": 1.0,
            "is_ratio_max": 1.08,
            "response_length": 22.0,
            "entropy": 0.4,
            "clip_ratio": 0.1,
            "reward_timeouts": 1.0,
            "time_step": 3.0,
            "time_generate": 1.6,
        }
        log.step(step, 30, row)
        rows.append({"step": step, **row})
    log.validation(30, 0.8)
    log.gate(30, "fail", [f"layer 1 {HOSTILE}"], "k3 2e-3")
    recipe = {
        "name": HOSTILE,
        "algorithm": {"rollout_is_threshold": 2.0},
        "consistency": {"thresholds": {"kl_k3": 1e-4}},
    }
    config = {"recipe": recipe, "objective": HOSTILE, "created": "2030", "environment": {"packages": {"x": HOSTILE}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    consistency = {
        "verdict": "fail",
        "reasons": [HOSTILE],
        "weights": {"base": {"tensors": 31, "mismatched": [HOSTILE]}, "adapter": {"tensors": 16, "mismatched": []}},
        "routing": {"free_agreement": 0.98, "replayed_agreement": 1.0},
        "logprobs": {"tokens": 256, "replayed": {"kl_k3": 2e-3, "max_abs": 0.2}},
    }
    (tmp_path / "consistency.json").write_text(json.dumps(consistency))
    sample = {"prompt": HOSTILE, "response": HOSTILE * 400, "tokens": 9, "gold": "4", "answer": None, "correct": False}
    lines = [{"step": step, **sample, "error": "timeout", "reward": -1.0} for step in range(20)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"event": "validation", "step": 0, "accuracy": 0.45, "t": 1.0}]
    write_summary(tmp_path, summarize(events, rows, "failed", 0.0, 100.0, 9_000_000_000, HOSTILE))
    return tmp_path


def test_report_of_a_finished_run(run_dir):
    page = write_report(run_dir).read_text()
    parsed = outline(page)
    assert parsed.tags.count("svg") == 8 and parsed.tags.count("polyline") == 12
    for text in ("Reward", "held-out", "KL between trainer", "Importance weights", "Response length", "Consistency"):
        assert text in parsed.text
    for text in (
        "base: 31 tensors, 1 differ",
        "100.0 % replayed",
        "k3 0.002",
        "9.0 GB",
        "algorithm.rollout_is_threshold",
    ):
        assert text in parsed.text


def test_report_shows_samples_of_the_beginning_and_the_end_and_what_was_not_judged(run_dir):
    page = write_report(run_dir).read_text()
    parsed = outline(page)
    assert "0 errors, 30 time-outs" in parsed.text and "none (timeout)" in parsed.text
    rows = page[page.index("class='samples'") :].partition("</table>")[0].split("<tr>")[2:]
    steps = [int(row[4 : row.index("</td>")]) for row in rows]
    assert steps == [0, 1, 2, 3, 16, 17, 18, 19]
    assert " [...] " in parsed.text and len(page) < 150_000


def test_report_names_the_held_out_set_and_shows_each_part_of_a_mixed_one(run_dir):
    config = json.loads((run_dir / "config.json").read_text())
    config["recipe"]["data"] = {"val": "data/mixed<b>.parquet", "val_samples": 32}
    (run_dir / "config.json").write_text(json.dumps(config))
    EventLog(run_dir).validation(40, 0.5, {"aime": 0.25, HOSTILE: 0.75})
    page = render(run_dir)
    text = outline(page).text
    assert text.count("mixed<b>, 32 samples a problem") == 2, "the tile and the plot's caption"
    assert "held-out, all" in text and "held-out, aime" in text and "<script" not in page


def test_report_shows_every_phase_that_was_timed(run_dir):
    phases = [key.removeprefix("time_") for key in METRIC_KEYS if key.startswith("time_")]
    rows = [{"step": step, **{f"time_{name}": 1.0 for name in phases}} for step in (1, 2)]
    rows.append({"step": 3, "time_step": 1.0})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sorted(phases) == sorted(name for _, _, names in PHASES for name in names)
    assert all(len(names) <= 4 for _, _, names in PHASES), "there are four colours"
    page = render(run_dir)
    assert all(f"</i>{name}</span>" in page for name in phases) and outline(page).tags.count("figure") == 10


def test_report_shows_dynamic_sampling_where_it_is_on(run_dir):
    rows = [{"step": step, "kept_groups": 0.5, "gen_batches": 2.0} for step in (1, 2)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parsed = outline(render(run_dir))
    assert "Kept groups" in parsed.text and "Generation batches" in parsed.text and parsed.tags.count("figure") == 10


def test_report_is_escaped_and_needs_no_network(run_dir):
    page = render(run_dir)
    assert "<script" not in page
    assert "://" not in page and outline(page).addresses == []
    assert "prefers-color-scheme: dark" in page


def test_report_of_a_run_that_left_nothing(tmp_path):
    page = render(tmp_path)
    assert outline(page).text.count("no data") == 8


def test_report_of_a_run_that_failed_at_start(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"recipe": {"name": "x"}}))
    write_summary(tmp_path, summarize([], [], "failed", 0.0, 3.0, reason="no memory"))
    parsed = outline(write_report(tmp_path).read_text())
    assert "no memory" in parsed.text and "n/a" in parsed.text


def test_lines_lie_inside_the_canvas():
    figure = line_plot("t", "n", [Series("a", [(1, -3.0), (2, 8.5), (9, 0.0)]), Series("b", [(1, 0.1)])], rule=9.0)
    svg = ElementTree.fromstring(figure[figure.index("<svg") : figure.index("</svg>") + 6])
    points = svg.find("polyline").get("points").split()
    assert len(points) == 3
    for x, y in (point.split(",") for point in points):
        assert 52 <= float(x) <= 450 and 8 <= float(y) <= 194
    ys = [float(point.split(",")[1]) for point in points]
    assert ys[1] < ys[2] < ys[0]  # larger is higher up
    assert svg.find("circle") is not None  # a single point is visible
    assert any(line.get("class") == "rule" for line in svg.findall("line"))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.3, 0.71), (1e-6, 5e-5), (3, 3), (0, 0), (-2000, 12345)])
def test_ticks_are_round_and_cover(low, high):
    found = ticks(low, high)
    assert found[0] <= low + 1e-12 and found[-1] >= high - 1e-12 and 2 <= len(found) <= 9
    assert all(later > earlier for earlier, later in itertools.pairwise(found))
