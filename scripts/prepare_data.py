"""A data set of math problems -> the parquet file that training and evaluation read; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.data import DataError
from rl.hub import HUB_SETS
from rl.launch import Parser
from rl.prepare import prepare

EXAMPLES = """examples:
  python scripts/prepare_data.py dapo-math-17k.parquet data/dapo_math_17k.parquet --against aime24.jsonl math500.jsonl
  python scripts/prepare_data.py gsm8k_test.jsonl data/gsm8k_test.parquet
  python scripts/prepare_data.py dapo_math_17k data/dapo_math_17k.parquet \\
      --against aime_2024 aime_2025 math_500 gsm8k_test
  python scripts/prepare_data.py openai/gsm8k data/gsm8k_test.parquet --subset main --split test

A source is a file, a repository on the Hugging Face Hub, or a short name for one: NAMES.
Rows are in verl's schema, or objects with question (or problem) and answer. Copies (also those that differ in layout
only), contradicting and damaged answers are dropped, and problems that stand in the sets named by --against or begin
like one there; the counts are printed.
exit status: 0 done, 2 bad usage or data""".replace("NAMES", ", ".join(HUB_SETS))


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("prepare_data.py", __doc__, EXAMPLES)
    parser.add_argument("source", help="a .parquet or .jsonl file, owner/name on the Hub, or a short name")
    parser.add_argument("target", type=Path, help="the .parquet file to write; it appears whole or not at all")
    parser.add_argument("--against", nargs="*", default=[], metavar="SOURCE", help="evaluation sets to keep out")
    parser.add_argument("--subset", metavar="NAME", help="configuration of a set on the Hub")
    parser.add_argument("--split", metavar="NAME", help="split of a set on the Hub (default: train)")
    args = parser.parse_args()
    try:
        report = prepare(args.source, args.target, args.against, args.subset, args.split)
    except (DataError, OSError) as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return 2
    print(f"{args.target}: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
