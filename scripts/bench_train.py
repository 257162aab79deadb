"""Train a recipe with several seeds, one after another, and print the table of docs/benchmarks.md; see --help."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.config import ConfigError, Recipe, load_recipe, run_root  # noqa: E402

EXAMPLES = """examples:
  python scripts/bench_train.py --config tiny_math.yaml
  python scripts/bench_train.py --config tiny_math.yaml --seeds 1 2 3 --json docs/benchmarks/tiny_math.json

exit status: 0 all runs ended well, 1 one did not, 2 bad usage or recipe"""

COLUMNS = {
    "seed": lambda run: str(run["seed"]),
    "steps": lambda run: str(run["steps"]),
    "accuracy before": lambda run: _percent(run["initial_accuracy"]),
    "after": lambda run: _percent(run["final_accuracy"]),
    "best": lambda run: _percent(run["best_accuracy"]),
    "wall s": lambda run: f"{run['wall_s']:.0f}",
    "start-up s": lambda run: _number(run["startup_s"], 0),
    "step s": lambda run: _number(run["step_time_median_s"]["step"], 2),
    "generate": lambda run: _number(run["step_time_median_s"]["generate"], 2),
    "update": lambda run: _number(run["step_time_median_s"]["update"], 2),
    "sync": lambda run: _number(run["step_time_median_s"]["sync"], 3),
    "worst k3": lambda run: "n/a" if run["kl_k3_max"] is None else f"{run['kl_k3_max']:.1e}",
    "IS weights": lambda run: f"{_number(run['is_ratio_min'], 2)}-{_number(run['is_ratio_max'], 2)}",
    "peak GB": lambda run: _number(run["peak_memory_gb"], 1),
}


def run_recipe(prog: str, what: str, config: str, overrides: list[str]) -> tuple[Recipe, Path]:
    """Train a recipe to its end; (recipe, run folder). A failure is one line, and ends the caller with 2 or 1."""
    try:
        recipe = load_recipe(config, overrides)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)
    command = [sys.executable, str(ROOT / "scripts" / "train_grpo.py"), "--config", config, *overrides]
    if status := subprocess.run(command, check=False).returncode:
        print(f"{prog}: {what} ended with status {status}", file=sys.stderr)
        sys.exit(2 if status == 2 else 1)
    return recipe, run_root(recipe) / "latest"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="NAME", help="recipe in recipes/, or a path to one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="settings for all runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the summaries to a file")
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        overrides = [*args.set, f"seed={seed}"]
        _, run_dir = run_recipe("bench_train.py", f"the run with seed {seed}", args.config, overrides)
        runs.append({"seed": seed, **json.loads((run_dir / "summary.json").read_text())})
    print(table(runs))
    if args.json:
        args.json.write_text(json.dumps({"recipe": args.config, "overrides": args.set, "runs": runs}, indent=2) + "\n")
    return 0


def table(runs: list[dict]) -> str:
    """Markdown table, one row a run."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "--|" * len(COLUMNS)]
    lines += ["| " + " | ".join(show(run) for show in COLUMNS.values()) + " |" for run in runs]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
