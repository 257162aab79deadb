"""A consistency report as one HTML file that needs no network, and as a table for the console."""

import html

from rl.page import flatten, number, page, table
from rl.progress import percent
from rl.svg import Series, line_plot

MAX_TENSORS = 60


def console(report: dict) -> str:
    """Verdict, one line a check, reasons and their likely causes."""
    lines = [f"verdict: {report['verdict']}"]
    for kind, block in report["weights"].items():
        lines.append(
            f"  {kind + ' weights':<18} {block['tensors']} tensors, {block['bytes'] / 1e6:.2f} MB, "
            f"{len(block['mismatched'])} differ" + (f", on {block['workers']} workers" if block["workers"] > 1 else "")
        )
    if routing := report["routing"]:
        ties, differ = (sum(entry[key] for entry in routing["per_layer"]) for key in ("near_ties", "disagree"))
        lines.append(
            f"  {'routing':<18} {routing['free_agreement']:.4f} free ({differ} rows differ, {ties} of them near-ties), "
            f"{routing['replayed_agreement']:.4f} replayed, {routing['tokens']} tokens"
        )
    if selection := report.get("selection", {}):
        flipped = selection["flipped"]
        lines.append(
            f"  {'selected blocks':<18} {selection['agreement']:.4f} ({selection['disagree']} differ, "
            f"{selection['near_ties']} of them near-ties); mean |delta| of the {flipped['tokens']} response tokens "
            f"among them {number(flipped['free'])} free, {number(flipped['replayed'])} replayed"
        )
    names = {"free": "log-probs free", "replayed": "log-probs replayed", "decode_prefill": "engine alone"}
    for key, name in names.items():
        if block := report["logprobs"].get(key):
            lines.append(
                f"  {name:<18} k3 {number(block['kl_k3'])}, mean {number(block['mean_abs'])}, "
                f"p99 {number(block['p99_abs'])}, worst {number(block['max_abs'])}"
            )
    if probe := report["probe"]:
        zero = probe["zero_adapter_effect"]
        text = f"adapter effect {number(probe['adapter_effect'])}"
        lines.append(f"  {'probe':<18} {text}" + ("" if zero is None else f", zero adapter {number(zero)}"))
    lines += [f"  failed: {reason}" for reason in report["reasons"]]
    lines += [f"  likely: {cause}" for cause in report["diagnosis"]]
    return "\n".join(lines)


def render(report: dict) -> str:
    """The page as text; `report` is `ConsistencyReport.as_dict()`, everything in it is escaped."""
    name = report["recipe"].get("name", "consistency")
    parts = [
        _head(name, report),
        _tiles(report),
        "<section class='plots'>",
        *_plots(report),
        "</section>",
        _worst(report),
        _tensors(report),
        table("Thresholds", flatten(report["thresholds"])),
        table("Environment", flatten(report["environment"])),
        table("Recipe", flatten(report["recipe"])),
    ]
    return page(f"{name}: {report['verdict']} - lockstep consistency", parts)


def _head(name: str, report: dict) -> str:
    verdict = html.escape(report["verdict"])
    reasons = "".join(f"<p class='reason'>{html.escape(reason)}</p>" for reason in report["reasons"])
    causes = "".join(f"<p><b>Likely cause:</b> {html.escape(cause)}.</p>" for cause in report["diagnosis"])
    return (
        f"<header><h1>{html.escape(name)} <span class='badge {verdict}'>{verdict}</span></h1>"
        f"<p class='quiet'>is the trainer the model that the engine serves? step {report['step']}</p>{reasons}{causes}"
        "</header>"
    )


def _tiles(report: dict) -> str:
    tiles = []
    for kind, block in report["weights"].items():
        tiles.append((f"{kind} tensors equal", f"{block['tensors'] - len(block['mismatched'])} of {block['tensors']}"))
    if routing := report["routing"]:
        tiles.append(("experts agree, replayed", percent(routing["replayed_agreement"])))
        tiles.append(("experts agree, free", percent(routing["free_agreement"])))
    if selection := report.get("selection", {}):
        tiles.append(("attention blocks agree", percent(selection["agreement"])))
    for key, name in (("replayed", "k3, replayed"), ("free", "k3, free"), ("decode_prefill", "k3, engine alone")):
        if block := report["logprobs"].get(key):
            tiles.append((name, number(block["kl_k3"])))
    if "replayed" in report["logprobs"]:
        tiles.append(("worst token", number(report["logprobs"]["replayed"]["max_abs"])))
    cells = "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>" for label, value in tiles
    )
    return f"<section class='tiles'>{cells}</section>"


def _plots(report: dict) -> list[str]:
    logprobs, routing = report["logprobs"], report["routing"]
    if not logprobs:
        return []
    points = [(x, y) for x, y in logprobs["points"] if x is not None and y is not None]
    low = min((min(point) for point in points), default=-1.0)
    positions = logprobs["by_position"]
    layers = routing.get("per_layer", [])
    return [
        line_plot(
            "Log-probabilities of sampled tokens",
            "engine across, trainer up; on the line they are equal",
            [Series("equal", [(low, low), (0.0, 0.0)]), Series("tokens", points, dots=True, line=False)],
        ),
        line_plot(
            "Difference by position in the response",
            "mean |delta| of the tokens at each position",
            [Series("mean |delta|", [(row["first"], row["mean_abs"]) for row in positions], dots=True)],
            floor=0.0,
            rule=report["thresholds"]["mean_abs_logp"],
        ),
        line_plot(
            "Experts that agree, by layer",
            "share of tokens with the same set of experts",
            [
                Series("free", [(row["layer"], row["free"]) for row in layers], dots=True),
                Series("replayed", [(row["layer"], row["replayed"]) for row in layers], dots=True),
            ],
            percent=True,
        ),
        line_plot(
            "Disagreements by layer",
            "rows on which the trainer by itself takes other experts, and how many of them are near-ties",
            [
                Series("disagree", [(row["layer"], row["disagree"]) for row in layers], dots=True),
                Series("near-ties", [(row["layer"], row["near_ties"]) for row in layers], dots=True),
            ],
            floor=0.0,
        ),
        *_selection_plot(report.get("selection", {})),
    ]


def _selection_plot(selection: dict) -> list[str]:
    if not selection:
        return []
    rows = selection["per_layer"]
    plot = line_plot(
        "Attention blocks by layer",
        "selections (token and head) in which the trainer takes other blocks, and how many of them are near-ties",
        [
            Series("disagree", [(row["layer"], row["disagree"]) for row in rows], dots=True),
            Series("near-ties", [(row["layer"], row["near_ties"]) for row in rows], dots=True),
        ],
        floor=0.0,
    )
    return [plot]


def _worst(report: dict) -> str:
    rows = report["logprobs"].get("worst", [])
    if not rows:
        return ""
    cells = "".join(
        f"<tr><td>{row['sequence']}</td><td>{row['position']}</td><td>{row['token']}</td>"
        f"<td><code>{html.escape(repr(row.get('text', '')))}</code></td><td>{number(row['engine'])}</td>"
        f"<td>{number(row['trainer'])}</td></tr>"
        for row in rows
    )
    return (
        "<section><h2>Tokens that differ most</h2><table><tr><th>sequence</th><th>position</th><th>token</th>"
        f"<th>text</th><th>engine</th><th>trainer</th></tr>{cells}</table></section>"
    )


def _tensors(report: dict) -> str:
    rows = []
    for kind, block in report["weights"].items():
        state = "equal" if not block["mismatched"] else f"{len(block['mismatched'])} differ"
        rows.append(
            f"<tr><td>{html.escape(kind)}</td><td>{block['tensors']}</td><td>{block['bytes']:,}</td><td>{state}</td></tr>"
        )
        for name in block["mismatched"][:MAX_TENSORS]:
            rows.append(f"<tr><td></td><td colspan='3'><code>{html.escape(name)}</code></td></tr>")
    return (
        "<section><h2>Tensors, compared by SHA-256</h2><table><tr><th>part</th><th>tensors</th><th>bytes</th>"
        f"<th>result</th></tr>{''.join(rows)}</table></section>"
    )
