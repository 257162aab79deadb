"""Command line of scripts/quantize_checkpoint.py: convert a checkpoint, or print what a conversion would do."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from quant.policy import POLICIES

EXAMPLES = """examples:
  python scripts/quantize_checkpoint.py models/bf16 models/nvfp4_mxfp8
  python scripts/quantize_checkpoint.py models/bf16 --dry-run
  python scripts/quantize_checkpoint.py models/bf16 models/q --policy my_policy.yaml --device cuda

An interrupted conversion goes on where it stopped when the same command is run again.
exit status: 0 done, 2 bad usage, a damaged source or a DST that cannot be written (one line says which and why)
"""


def build_parser() -> argparse.ArgumentParser:
    """The argument parser."""
    parser = argparse.ArgumentParser(
        prog="quantize_checkpoint.py",
        description="Convert a bf16 safetensors checkpoint to the formats that the engine serves.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", type=Path, help="Hugging Face checkpoint folder (only read)")
    parser.add_argument("dst", metavar="DST", type=Path, nargs="?", help="new or unfinished folder to write")
    parser.add_argument(
        "--policy",
        default="nvfp4_mxfp8",
        help=f"{', '.join(POLICIES)} or a YAML file with rules (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", help="where to encode: cpu or cuda (same bytes; default: %(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print module, shape, format and bytes; write nothing")
    parser.add_argument("--every", action="store_true", help="with --dry-run: one row a module, not one a kind")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.dst is None and not args.dry_run:
        parser.error("DST is missing (or ask for --dry-run)")
    from quant.checkpoint import CheckpointError, quantize_checkpoint
    from quant.convert import make_plan

    try:
        if args.dry_run:
            print("\n".join(table(make_plan(args.src, args.policy), args.every)))
        else:
            quantize_checkpoint(args.src, args.dst, args.policy, progress=not args.quiet, device=args.device)
    except (CheckpointError, ValueError) as error:
        print(f"quantize_checkpoint.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quantize_checkpoint.py: stopped; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


def table(plan, every: bool = False) -> list[str]:
    """Lines of the dry-run table: one row a module, or one a kind of module with layer and expert numbers as `*`."""
    rows: dict[tuple, list[int]] = {}
    for job in plan.all_jobs():
        name = job.module if every else re.sub(r"\.\d+(?=\.|$)", ".*", job.module)
        before = job.source.dtype.itemsize * _count(job.shape)
        after = sum(_count(shape) * dtype.itemsize for _, dtype, shape in job.specs())
        total = rows.setdefault((name, job.shape, job.fmt or "-"), [0, 0, 0])
        for column, value in enumerate((1, before, after)):
            total[column] += value
    body = [
        (name, "x".join(map(str, shape)), fmt, str(count), f"{before:,}", f"{after:,}")
        for (name, shape, fmt), (count, before, after) in rows.items()
    ]
    sums = [sum(values[column] for values in rows.values()) for column in range(3)]
    body.append(("total", "", "", str(sums[0]), f"{sums[1]:,}", f"{sums[2]:,} ({sums[2] / max(1, sums[1]):.0%})"))
    head = ("module", "shape", "format", "count", "bytes before", "bytes after")
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(6)]
    lines = []
    for row in (head, *body):
        padded = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        padded += [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
