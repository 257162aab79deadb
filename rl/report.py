"""report.html: what a run did, as one file that needs no network. Light and dark follow the reader's system."""

import html
import json
from pathlib import Path
from typing import Any

from rl.events import read_jsonl
from rl.progress import duration, percent
from rl.svg import Series, line_plot


def write_report(run_dir: Path) -> Path:
    """Write report.html from what lies in the run folder; files that a stopped run lacks are left out."""
    path = run_dir / "report.html"
    path.write_text(render(run_dir), encoding="utf-8")
    return path


def render(run_dir: Path) -> str:
    """The page as text."""
    config = _read(run_dir / "config.json")
    summary = _read(run_dir / "summary.json")
    consistency = _read(run_dir / "consistency.json")
    rows = read_jsonl(run_dir / "metrics.jsonl")
    events = read_jsonl(run_dir / "events.jsonl")
    recipe = config.get("recipe", {})
    parts = [
        _head(recipe.get("name", run_dir.name), run_dir.name, summary, config),
        _tiles(summary),
        "<section class='plots'>",
        *_plots(rows, events, recipe, consistency.get("thresholds", {})),
        "</section>",
        _gates(events, consistency),
        _table("Recipe", _flatten(recipe)),
        _table("Environment", _flatten(_environment(config))),
        _table("Summary", _flatten(summary)),
    ]
    title = html.escape(f"{recipe.get('name', 'run')} - lockstep")
    return _PAGE.format(title=title, style=_STYLE, body="\n".join(part for part in parts if part))


def _head(name: str, folder: str, summary: dict, config: dict) -> str:
    status = summary.get("status", "running")
    reason = f"<p class='reason'>{html.escape(summary['reason'])}</p>" if summary.get("reason") else ""
    objective = html.escape(config.get("objective", ""))
    return (
        f"<header><h1>{html.escape(name)} <span class='badge {html.escape(status)}'>{html.escape(status)}</span></h1>"
        f"<p class='quiet'>{html.escape(folder)} &middot; {html.escape(config.get('created', ''))}</p>"
        f"<p>{objective}</p>{reason}</header>"
    )


def _tiles(summary: dict) -> str:
    if not summary:
        return ""
    accuracy = f"{percent(summary['initial_accuracy'])} &rarr; {percent(summary['final_accuracy'])}"
    tiles = [
        ("held-out accuracy", accuracy),
        ("best", percent(summary["best_accuracy"])),
        ("steps", str(summary["steps"])),
        ("wall time", duration(summary["wall_s"])),
        ("start-up", "n/a" if summary["startup_s"] is None else duration(summary["startup_s"])),
        ("largest k3 KL", _number(summary["kl_k3_max"])),
        ("IS weights", f"{_number(summary['is_ratio_min'])} to {_number(summary['is_ratio_max'])}"),
        ("tokens/s", _number(summary["tokens_per_s"])),
        ("peak memory", "n/a" if summary["peak_memory_gb"] is None else f"{summary['peak_memory_gb']} GB"),
    ]
    cells = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for label, value in tiles)
    return f"<section class='tiles'>{cells}</section>"


def _plots(rows: list[dict], events: list[dict], recipe: dict, thresholds: dict) -> list[str]:
    held_out = [(event["step"], event["accuracy"]) for event in events if event["event"] == "validation"]
    algorithm = recipe.get("algorithm", {})
    plots = [
        ("Reward", "mean of a step's samples", [Series("reward", column(rows, "reward"))], {}),
        (
            "Accuracy",
            "share of right answers: the step's samples, and held-out problems",
            [Series("train", column(rows, "accuracy")), Series("held-out", held_out, dots=True)],
            {"percent": True},
        ),
        (
            "KL between trainer and engine (k3)",
            f"0 means the same model; the gate lets {_number(thresholds.get('kl_k3'))} pass",
            [Series("k3", column(rows, "kl_k3"))],
            {"floor": 0.0, "rule": thresholds.get("kl_k3")},
        ),
        (
            "Importance weights",
            f"exp(logp_train - logp_rollout), capped at {_number(algorithm.get('rollout_is_threshold'))}",
            [
                Series("largest", column(rows, "is_ratio_max")),
                Series("mean", column(rows, "is_ratio_mean")),
                Series("smallest", column(rows, "is_ratio_min")),
            ],
            {"rule": algorithm.get("rollout_is_threshold")},
        ),
        ("Response length", "tokens, mean", [Series("length", column(rows, "response_length"))], {"floor": 0.0}),
        (
            "Seconds a step",
            "by phase",
            [
                Series(name, column(rows, f"time_{name}"))
                for name in ("step", "generate", "update", "sync")
                if column(rows, f"time_{name}")
            ],
            {"floor": 0.0},
        ),
    ]
    return [line_plot(title, note, series, **options) for title, note, series, options in plots]


def column(rows: list[dict], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have a value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _gates(events: list[dict], consistency: dict) -> str:
    gates = [event for event in events if event["event"] == "gate"]
    if not gates and not consistency:
        return ""
    lines = ["<h2>Consistency</h2>"]
    if consistency:
        lines.append(_verdict(consistency))
    if gates:
        lines.append("<table><tr><th>step</th><th>verdict</th><th>numbers</th><th>reasons</th></tr>")
        for gate in gates:
            verdict = html.escape(gate["verdict"])
            reasons = html.escape("; ".join(gate.get("reasons", [])))
            lines.append(
                f"<tr><td>{gate['step']}</td><td><span class='badge {verdict}'>{verdict}</span></td>"
                f"<td>{html.escape(gate.get('summary', ''))}</td><td>{reasons}</td></tr>"
            )
        lines.append("</table>")
    return f"<section>{''.join(lines)}</section>"


def _verdict(report: dict) -> str:
    """The last consistency.json in three sentences and its reasons."""
    verdict = html.escape(str(report.get("verdict", "unknown")))
    weights, routing = report.get("weights", {}), report.get("routing", {})
    logprobs = report.get("logprobs", {}).get("replayed", {})
    facts = []
    for part in ("base", "adapter"):
        if part in weights:
            tensors, wrong = weights[part].get("tensors"), len(weights[part].get("mismatched", []))
            facts.append(f"{part}: {tensors} tensors, {wrong} differ")
    if routing:
        facts.append(
            f"experts agree: {percent(routing.get('replayed_agreement'))} replayed, "
            f"{percent(routing.get('free_agreement'))} free"
        )
    if logprobs:
        facts.append(
            f"log-probabilities over {report['logprobs'].get('tokens')} tokens: k3 {_number(logprobs.get('kl_k3'))}, "
            f"worst |delta| {_number(logprobs.get('max_abs'))}"
        )
    items = "".join(f"<li>{html.escape(str(reason))}</li>" for reason in report.get("reasons", []))
    return f"<p><span class='badge {verdict}'>{verdict}</span> {html.escape('; '.join(facts))}</p>" + (
        f"<ul>{items}</ul>" if items else ""
    )


def _environment(config: dict) -> dict:
    keep = ("environment", "model", "source", "overrides", "command", "resume_from")
    return {key: config[key] for key in keep if config.get(key) not in (None, [])}


def _table(title: str, cells: list[tuple[str, str]]) -> str:
    if not cells:
        return ""
    body = "".join(f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>" for key, value in cells)
    opened = " open" if title == "Recipe" else ""
    return (
        f"<details{opened}><summary><h2>{html.escape(title)}</h2></summary><table class='kv'>{body}</table></details>"
    )


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        cells = []
        for key, child in value.items():
            cells += _flatten(child, f"{prefix}.{key}" if prefix else str(key))
        return cells
    if isinstance(value, list):
        return [(prefix, ", ".join(str(item) for item in value) if value else "none")]
    return [(prefix, json.dumps(value) if value is None or isinstance(value, bool) else str(value))]


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3g}"


def _read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { --bg:#fbfbfa; --card:#fff; --ink:#1c2024; --quiet:#667079; --line:#e3e5e8;
  --s0:#2563c9; --s1:#c2541b; --s2:#12805c; --s3:#8a4fbf; --good:#12805c; --bad:#bf2f38; --mid:#8a6a10; }
@media (prefers-color-scheme: dark) { :root { --bg:#14171a; --card:#1c2024; --ink:#e8eaec; --quiet:#98a2ab;
  --line:#30363c; --s0:#7aa8f5; --s1:#f0a070; --s2:#5cc9a0; --s3:#c39aee; --good:#5cc9a0; --bad:#f0767e;
  --mid:#e0bd5a; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--bg); color:var(--ink); font:15px/1.5 system-ui, sans-serif; }
main { max-width:1120px; margin:0 auto; padding:24px 16px 64px; }
h1 { font-size:26px; margin:0; } h2 { font-size:17px; margin:0; display:inline; } h3 { font-size:15px; margin:0; }
p { margin:6px 0; } .quiet, .note { color:var(--quiet); font-size:13px; }
.reason { border-left:3px solid var(--bad); padding-left:10px; }
.badge { font-size:13px; font-weight:600; padding:1px 9px; border-radius:10px; border:1px solid currentColor;
  vertical-align:middle; color:var(--mid); }
.badge.done, .badge.pass { color:var(--good); } .badge.failed, .badge.fail { color:var(--bad); }
.tiles { display:grid; grid-template-columns:repeat(auto-fill, minmax(165px, 1fr)); gap:10px; margin:18px 0; }
.tiles div, figure, details, section:not(.plots):not(.tiles) { background:var(--card); border:1px solid var(--line);
  border-radius:8px; padding:10px 14px; }
.tiles b { display:block; font-size:16px; white-space:nowrap; } .tiles span { color:var(--quiet); font-size:13px; }
.plots { display:grid; grid-template-columns:repeat(auto-fit, minmax(330px, 1fr)); gap:12px; margin-bottom:12px; }
figure { margin:0; } figure svg { width:100%; height:auto; display:block; margin-top:6px; }
details, section:not(.plots):not(.tiles) { margin-bottom:12px; overflow-x:auto; } summary { cursor:pointer; }
table { border-collapse:collapse; font-size:13px; margin-top:8px; } th { text-align:left; color:var(--quiet); }
td, th { padding:3px 14px 3px 0; vertical-align:top; border-top:1px solid var(--line); }
.kv td { overflow-wrap:anywhere; } .kv td:first-child { color:var(--quiet); white-space:nowrap; }
svg text { fill:var(--quiet); font:11px system-ui, sans-serif; } svg .grid { stroke:var(--line); }
svg .rule { stroke:var(--quiet); stroke-dasharray:5 4; } svg .s { fill:none; stroke-width:1.8; }
svg .s0 { stroke:var(--s0); } svg .s1 { stroke:var(--s1); } svg .s2 { stroke:var(--s2); } svg .s3 { stroke:var(--s3); }
svg .d0 { fill:var(--s0); } svg .d1 { fill:var(--s1); } svg .d2 { fill:var(--s2); } svg .d3 { fill:var(--s3); }
.key { font-size:13px; margin-right:12px; color:var(--quiet); } .key i { display:inline-block; width:14px; height:3px;
  margin-right:5px; vertical-align:middle; }
"""
