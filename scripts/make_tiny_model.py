"""Make a small model that the tiny recipes start from, and its problems; see --help."""

import argparse
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

EXAMPLES = """examples:
  python scripts/make_tiny_model.py --out assets/tiny_math --overwrite   # as committed, about 6 minutes on two cores
  python scripts/make_tiny_model.py --out /tmp/m3 --size tiny_m3 --device cuda   # assets/tiny_m3 was made in two parts
  python scripts/make_tiny_model.py --out /tmp/tiny --seed 1
  python scripts/make_tiny_model.py --out /tmp/mid --size mid --device cuda --steps 300
  python scripts/make_tiny_model.py --out /tmp/rough --minutes 2         # a rough model, quickly

exit status: 0 done, 2 bad usage (one line says which option and why)
"""


def positive(kind: type) -> object:
    """An argparse type: a number of this kind above zero."""

    def convert(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    convert.__name__ = kind.__name__
    return convert


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; bad usage ends with exit 2."""
    parser = argparse.ArgumentParser(
        prog="make_tiny_model.py",
        description="Train a small Qwen3-MoE on word problems, or a small MiniMax-M3 on long ones; write it in "
        "bf16 and quantised.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of everything random (default: %(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", metavar="N", type=positive(int), help="training steps (default: as committed)")
    length.add_argument("--minutes", metavar="M", type=positive(float), help="limit of the training's wall time")
    parser.add_argument(
        "--size",
        choices=("tiny", "mid", "tiny_m3", "mid_m3"),
        default="tiny",
        help="Qwen3-MoE of 2.7 (default) or 29 M parameters, or MiniMax-M3 of 5 or 34 M",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default: cpu)")
    parser.add_argument("--threads", metavar="N", type=positive(int), help="CPU threads (default: torch's choice)")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if this script made it")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    args = parse(argv)
    from rl.models.tiny_assets import check_target, make_assets

    try:
        check_target(args.out, args.overwrite)
    except FileExistsError as error:
        print(f"make_tiny_model.py: {error}", file=sys.stderr)
        return 2
    # Waiting threads sleep: on a machine shared with other work, spinning ones make small matrix products 10x slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from rl.models.tiny_m3 import LongPlan
    from rl.models.tiny_training import Plan

    if args.device == "cuda" and not torch.cuda.is_available():
        print("make_tiny_model.py: --device cuda: torch finds no GPU; leave it out", file=sys.stderr)
        return 2

    if args.threads:
        torch.set_num_threads(args.threads)
    plan = (
        LongPlan(seed=args.seed, size=args.size) if args.size.endswith("_m3") else Plan(seed=args.seed, size=args.size)
    )
    if args.steps:
        plan = replace(plan, steps=args.steps)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that unfinished files are removed
    summary = make_assets(args.out, plan, args.minutes, args.overwrite, not args.quiet, args.device)
    print(f"{args.out}: {summary['parameters']:,} parameters, {summary['steps']} steps in {summary['seconds']:.0f} s")
    for name in ("bf16", "nvfp4_mxfp8"):
        accuracy = summary[name]
        print(f"{name}: held-out accuracy {accuracy['greedy']:.1%} greedy, {accuracy['sampled']:.1%} at temperature 1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
