"""report.html: what a run did, as one file that needs no network. Light and dark follow the reader's system."""

import html
import json
from pathlib import Path

from rl.events import read_jsonl
from rl.page import flatten, number, page, table
from rl.progress import count, duration, percent
from rl.svg import Series, line_plot

PHASES = (
    ("Seconds a step", "by phase", ("step", "generate", "update", "sync")),
    ("Seconds of smaller parts", "reward is within generate, wake within sync", ("reward", "advantage", "wake")),
    ("Seconds of what is not done every step", "gate, save, held-out evaluation", ("gate", "save", "validate")),
)
"""Title, note and columns time_PHASE of metrics.jsonl of the plots of times: no more lines in one than colours."""


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
        _tiles(summary, _held_out_name(recipe)),
        "<section class='plots'>",
        *_plots(rows, events, recipe, consistency.get("thresholds", {})),
        "</section>",
        _gates(events, consistency),
        _samples(read_jsonl(run_dir / "samples.jsonl")),
        table("Recipe", flatten(recipe)),
        table("Environment", flatten(_environment(config))),
        table("Summary", flatten(summary)),
    ]
    return page(f"{recipe.get('name', 'run')} - lockstep", parts)


def _head(name: str, folder: str, summary: dict, config: dict) -> str:
    status = summary.get("status", "running")
    reason = f"<p class='reason'>{html.escape(summary['reason'])}</p>" if summary.get("reason") else ""
    objective = html.escape(config.get("objective", ""))
    return (
        f"<header><h1>{html.escape(name)} <span class='badge {html.escape(status)}'>{html.escape(status)}</span></h1>"
        f"<p class='quiet'>{html.escape(folder)} &middot; {html.escape(config.get('created', ''))}</p>"
        f"<p>{objective}</p>{reason}</header>"
    )


def _held_out_name(recipe: dict) -> str:
    """The held-out set and how often each problem of it is sampled."""
    data = recipe.get("data", {})
    return f"{Path(data['val']).stem}, {count(data['val_samples'], 'sample')} a problem" if "val" in data else ""


def _tiles(summary: dict, held_out: str) -> str:
    if not summary:
        return ""
    accuracy = f"{percent(summary['initial_accuracy'])} &rarr; {percent(summary['final_accuracy'])}"
    tiles = [
        (f"held-out accuracy ({held_out})" if held_out else "held-out accuracy", accuracy),
        ("best", percent(summary["best_accuracy"])),
        ("steps", str(summary["steps"])),
        ("wall time", duration(summary["wall_s"])),
        ("start-up", "n/a" if summary["startup_s"] is None else duration(summary["startup_s"])),
        ("largest k3 KL", number(summary["kl_k3_max"])),
        ("IS weights", f"{number(summary['is_ratio_min'])} to {number(summary['is_ratio_max'])}"),
        ("tokens/s", number(summary["tokens_per_s"])),
        ("answers not judged", _not_judged(summary)),
        ("peak memory", "n/a" if summary["peak_memory_gb"] is None else f"{summary['peak_memory_gb']} GB"),
    ]
    cells = "".join(f"<div><b>{value}</b><span>{html.escape(label)}</span></div>" for label, value in tiles)
    return f"<section class='tiles'>{cells}</section>"


def _not_judged(summary: dict) -> str:
    """Errors and time-outs of the reward, which are not wrong answers."""
    return f"{summary.get('reward_errors', 0)} errors, {summary.get('reward_timeouts', 0)} time-outs"


def _plots(rows: list[dict], events: list[dict], recipe: dict, thresholds: dict) -> list[str]:
    algorithm = recipe.get("algorithm", {})
    plots = [
        ("Reward", "mean of a step's samples", [Series("reward", column(rows, "reward"))], {}),
        (
            "Accuracy",
            f"share of right answers: the step's samples, and held-out problems ({_held_out_name(recipe) or 'n/a'})",
            [Series("train", column(rows, "accuracy")), *_held_out(events)],
            {"percent": True},
        ),
        (
            "KL between trainer and engine (k3)",
            f"0 means the same model; the gate lets {number(thresholds.get('kl_k3'))} pass",
            [Series("k3", column(rows, "kl_k3"))],
            {"floor": 0.0, "rule": thresholds.get("kl_k3")},
        ),
        (
            "Importance weights",
            f"exp(logp_train - logp_rollout), capped at {number(algorithm.get('rollout_is_threshold'))}",
            [
                Series("largest", column(rows, "is_ratio_max")),
                Series("mean", column(rows, "is_ratio_mean")),
                Series("smallest", column(rows, "is_ratio_min")),
            ],
            {"rule": algorithm.get("rollout_is_threshold")},
        ),
        *_answer_plots(rows),
        *_time_plots(rows),
    ]
    return [line_plot(title, note, series, **options) for title, note, series, options in plots]


def _held_out(events: list[dict]) -> list[Series]:
    """The held-out accuracy, and that of each set where there are several."""
    found = [event for event in events if event["event"] == "validation"]
    names = sorted({name for event in found for name in event.get("by_set", {})})
    series = [Series("held-out, all" if names else "held-out", column(found, "accuracy"), dots=True)]
    by_set = [(name, [{"step": one["step"], **one["by_set"]} for one in found if one.get("by_set")]) for name in names]
    return series + [Series(f"held-out, {name}", column(shares, name), dots=True) for name, shares in by_set]


def _time_plots(rows: list[dict]) -> list[tuple]:
    """As `_answer_plots`; without the plots that no step has a value for, but for the first."""
    plots = []
    for title, note, phases in PHASES:
        found = [(name, points) for name in phases if (points := column(rows, f"time_{name}"))]
        if found or not plots:
            series = [Series(name, points, dots=len(points) < len(rows)) for name, points in found]
            plots.append((title, note, series, {"floor": 0.0}))
    return plots


def _answer_plots(rows: list[dict]) -> list[tuple]:
    """What the samples are like: title, note, series and options of each plot."""
    plots = [
        ("Entropy", "mean -log p of the sampled tokens", [Series("entropy", column(rows, "entropy"))], {"floor": 0.0}),
        ("Response length", "tokens, mean", [Series("length", column(rows, "response_length"))], {"floor": 0.0}),
        (
            "Answers",
            "share of samples that were cut off, that have no readable answer, that cost a penalty on length",
            [
                Series(name, column(rows, key))
                for name, key in (("cut off", "clip_ratio"), ("no answer", "no_answer"), ("overlong", "overlong"))
            ],
            {"floor": 0.0, "percent": True},
        ),
    ]
    if column(rows, "gen_batches"):
        kept = [Series("kept", column(rows, "kept_groups"))]
        batches = [Series("batches", column(rows, "gen_batches"))]
        plots += [
            (
                "Kept groups",
                "share of sampled groups that are neither all right nor all wrong",
                kept,
                {"percent": True},
            ),
            ("Generation batches", "sampled groups over the batch size", batches, {"floor": 0.0}),
        ]
    return plots


def column(rows: list[dict], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have a value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


SHOWN_SAMPLES = 8
SHOWN_CHARS = 1500


def _samples(samples: list[dict]) -> str:
    """Samples of the first steps and of the last: what was asked, what came, what was read and what it was worth."""
    if not samples:
        return ""
    half = SHOWN_SAMPLES // 2
    shown = samples if len(samples) <= SHOWN_SAMPLES else [*samples[:half], *samples[-half:]]
    heads = "".join(f"<th>{name}</th>" for name in ("step", "reward", "gold", "read", "tokens", "prompt", "response"))
    lines = []
    for one in shown:
        read = one["answer"] if one["answer"] is not None else "none"
        cells = [
            one["step"],
            f"{one['reward']:+.2f}",
            one["gold"],
            f"{read} ({one['error']})" if one["error"] else read,
        ]
        cells += [one["tokens"], _ends(one["prompt"]), _ends(one["response"])]
        lines.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return (
        f"<details><summary><h2>Samples</h2></summary><table class='samples'><tr>{heads}</tr>{''.join(lines)}</table>"
        "</details>"
    )


def _ends(text: str) -> str:
    """A text, or its beginning and end."""
    half = SHOWN_CHARS // 2
    return text if len(text) <= SHOWN_CHARS else f"{text[:half]} [...] {text[-half:]}"


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
            f"log-probabilities over {report['logprobs'].get('tokens')} tokens: k3 {number(logprobs.get('kl_k3'))}, "
            f"worst |delta| {number(logprobs.get('max_abs'))}"
        )
    lines = [*report.get("reasons", []), *(f"Likely cause: {cause}." for cause in report.get("diagnosis", []))]
    items = "".join(f"<li>{html.escape(str(line))}</li>" for line in lines)
    return f"<p><span class='badge {verdict}'>{verdict}</span> {html.escape('; '.join(facts))}</p>" + (
        f"<ul>{items}</ul>" if items else ""
    )


def _environment(config: dict) -> dict:
    keep = ("environment", "model", "source", "overrides", "command", "resume_from")
    return {key: config[key] for key in keep if config.get(key) not in (None, [])}


def _read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
