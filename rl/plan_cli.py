"""Command line of scripts/plan.py."""

import json
import sys
from pathlib import Path

from rl.config import ConfigError, load_recipe
from rl.launch import Parser
from rl.plan_fit import find_machine, plan_recipe, smallest_change
from rl.plan_table import render

EXAMPLES = """examples:
  python scripts/plan.py --config dapo_math.yaml
  python scripts/plan.py --config dapo_math.yaml trainer.nodes=4 data.max_response_length=4096
  python scripts/plan.py --config tiny_math.yaml --gpu-gib 80
  python scripts/plan.py --config dapo_math.yaml --json plan.json

exit status: 0 it fits, 1 it does not, 2 bad usage or recipe
docs/planning.md has the formulas."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("plan.py", "Memory and sync of a recipe, from the model's configuration alone.", EXAMPLES)
    parser.add_argument("--config", required=True, metavar="NAME", help="recipe in recipes/, or a path to one")
    parser.add_argument(
        "--gpu-gib", type=float, metavar="N", help="memory of a GPU in GiB (else: what is here, or 139)"
    )
    parser.add_argument("--host-gib", type=float, metavar="N", help="RAM of a node in GiB, to judge loading as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan there, in bytes")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")
    args = parser.parse_intermixed_args(argv)
    for flag, value in (("--gpu-gib", args.gpu_gib), ("--host-gib", args.host_gib)):
        if value is not None and not 0 < value < 1e6:
            parser.error(f"{flag} {value}: expected GiB above 0")
    try:
        recipe = load_recipe(args.config, args.overrides)
        plan = plan_recipe(recipe, find_machine(recipe.trainer.nodes, args.gpu_gib, args.host_gib))
        print(render(recipe, plan))
        if args.json is not None:
            changes = None if plan.fits else smallest_change(recipe, plan.machine)
            content = {**plan.as_dict(), "change": changes and list(changes)}
            args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except ConfigError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{parser.prog}: --json {args.json}: {error.strerror}; choose a writable file", file=sys.stderr)
        return 2
    return 0 if plan.fits else 1
