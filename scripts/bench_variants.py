"""Mismatch and step times of a recipe's variants, and of stock verl on the same model and prompts; see --help."""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench_train import run_recipe  # noqa: E402

from rl.config import load_recipe, with_absolute_paths  # noqa: E402
from rl.launch import Parser  # noqa: E402

EXAMPLES = """examples:
  python scripts/bench_variants.py --config tiny_math.yaml --bf16 assets/tiny_math/bf16
  python scripts/bench_variants.py --config tiny_math.yaml --bf16 assets/tiny_math/bf16 --stock --json variants.json
  python scripts/bench_variants.py --config my.yaml --bf16 DIR --set trainer.steps=20 consistency.every=5

Four runs, one after another: the recipe's base and the unquantised one (--bf16), each with and without routing replay.
With --stock also verl's own engine, worker and rollout path: unquantised base, adapters on attention, no replay.

exit status: 0 all runs ended well, 1 one did not, 2 bad usage or recipe"""

STEP_LINE = re.compile(r"\bstep:(\d+) - (.*)")
NO_VALIDATION = ["trainer.val_before_train=false", "trainer.val_every=0"]


def parse() -> argparse.Namespace:
    """The command line; bad usage ends with exit 2."""
    parser = Parser("bench_variants.py", __doc__, EXAMPLES)
    parser.add_argument("--config", required=True, metavar="NAME", help="recipe in recipes/, or a path to one")
    parser.add_argument("--bf16", required=True, metavar="DIR", help="the unquantised checkpoint of the recipe's model")
    parser.add_argument("--stock", action="store_true", help="also run stock verl")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="settings for all runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    return parser.parse_args()


def main() -> int:
    """Run the command line."""
    args = parse()
    variants = {
        f"{base}, {'replay' if replay else 'no replay'}": [*settings, f"algorithm.routing_replay={str(replay).lower()}"]
        for base, settings in (("quantised", []), ("bf16", [f"model.path={args.bf16}"]))
        for replay in (True, False)
    }
    rows = {}
    for name, settings in variants.items():
        overrides = [*NO_VALIDATION, *args.set, *settings]
        recipe, run_dir = run_recipe("bench_variants.py", f"{name}: the run", args.config, overrides)
        rows[name] = figures(run_dir, recipe.algorithm.routing_replay)
        write(args, rows)  # after each, so that a later failure loses nothing
    if args.stock:
        overrides = [*NO_VALIDATION, *args.set, f"model.path={args.bf16}", "model.lora_targets=[attention]"]
        rows["stock verl, bf16, attention"] = run_stock(args.config, overrides)
    write(args, rows)
    print(table(rows))
    return 0


def write(args: argparse.Namespace, rows: dict[str, dict]) -> None:
    """The figures so far, if a file is wanted."""
    if args.json:
        whole = {"recipe": args.config, "overrides": args.set, "variants": rows}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def figures(run_dir: Path, replay: bool) -> dict:
    """Mismatch over the training tokens of a run, and medians of its step times (seconds)."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    gates = [json.loads(path.read_text()) for path in sorted(run_dir.glob("consistency-*.json"))]
    side = "replayed" if replay else "free"
    times = {key: statistics.median(row[key] for row in rows[1:] or rows) for key in rows[0] if key.startswith("time_")}
    tokens = sum(row["tokens"] for row in rows)
    return {
        "steps": len(rows),
        "k1": sum(row["kl_k1"] * row["tokens"] for row in rows) / tokens,
        "k3": sum(row["kl_k3"] * row["tokens"] for row in rows) / tokens,
        "k3_max": max(row["kl_k3"] for row in rows),
        "mean_abs": sum(row["logp_diff_mean"] * row["tokens"] for row in rows) / tokens,
        "p99_abs": max(gate["logprobs"][side]["p99_abs"] for gate in gates) if gates else None,
        "max_abs": max(row["logp_diff_max"] for row in rows),
        "is_ratio_min": min(row["is_ratio_min"] for row in rows),
        "is_ratio_max": max(row["is_ratio_max"] for row in rows),
        "free_agreement": min(
            (row["routing_free_agreement"] for row in rows if "routing_free_agreement" in row), default=None
        ),
        "trainer_memory_gb": rows[-1].get("trainer_memory_gb"),
        **{key: round(value, 4) for key, value in times.items()},
    }


def run_stock(config: str, overrides: list[str]) -> dict:
    """Step times of stock verl on the recipe's model and prompts, from its console."""
    recipe = with_absolute_paths(load_recipe(config, overrides))
    with tempfile.TemporaryDirectory(prefix="stock-") as folder:
        (Path(folder) / "recipe.json").write_text(recipe.model_dump_json())
        command = [sys.executable, "-m", "rl.stock", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    steps = [dict(re.findall(r"([\w/]+):(-?[\d.e+-]+)", match[2])) for match in STEP_LINE.finditer(done.stdout)]
    if done.returncode or len(steps) < recipe.trainer.steps:
        raise RuntimeError(f"stock verl ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    names = {"gen": "generate", "update_actor": "update", "update_weights": "sync", "step": "step"}
    times = {
        f"time_{ours}": statistics.median(float(step[f"timing_s/{theirs}"]) for step in steps[1:])
        for theirs, ours in names.items()
    }
    return {"steps": len(steps), **times}


def table(rows: dict[str, dict]) -> str:
    """Markdown table, one row a variant."""
    columns = {
        "k1": "{:.1e}",
        "k3": "{:.1e}",
        "mean_abs": "{:.1e}",
        "p99_abs": "{:.1e}",
        "max_abs": "{:.2f}",
        "is_ratio_min": "{:.2f}",
        "is_ratio_max": "{:.2f}",
        "free_agreement": "{:.4f}",
        "time_generate": "{:.2f}",
        "time_update": "{:.2f}",
        "time_sync": "{:.3f}",
        "time_step": "{:.2f}",
    }
    lines = ["| variant | " + " | ".join(columns) + " |", "|" + "--|" * (len(columns) + 1)]
    for name, row in rows.items():
        cells = ["n/a" if row.get(key) is None else form.format(row[key]) for key, form in columns.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
