"""Figures of data and rewards: right values, hostile answers, speed, gold answers, prepared rows; see --help."""

import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.config import REPO_ROOT
from rl.data import DataError, problem_rows
from rl.environment import describe
from rl.launch import Parser
from rl.prepare import prepare
from rl.reward import TIMEOUT_S, as_integer, score

EXAMPLES = """examples:
  python scripts/bench_reward.py --data DIR --json docs/benchmarks/reward.json

DIR holds the public files gsm8k_test.jsonl, math500.jsonl, aime24.jsonl, aime24_int.jsonl, aime25_int.jsonl and
dapo_math_17k.parquet, those that you have; without --data the figures of gold answers and counts are left out.
exit status: 0 done, 1 a case of the suites is judged wrong, 2 bad usage or data"""

FIXTURES = REPO_ROOT / "tests" / "fixtures"
EVALUATION = ("math500.jsonl", "aime24_int.jsonl", "aime25_int.jsonl", "gsm8k_test.jsonl")
SETS = ("gsm8k_test.jsonl", "math500.jsonl", "aime24.jsonl", "aime24_int.jsonl", "aime25_int.jsonl")
REASONING = "We add the two numbers and get the next one, which is 41 + 1.\n" * 1300
"""About 20 000 tokens, as long as DAPO's longest responses."""


def suite() -> dict:
    """The hand-made cases: how many are judged as their author says."""
    lines = (FIXTURES / "reward_cases.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [json.loads(line) for line in lines]
    judged = [(case, score(case["response"], case["gold"])) for case in cases]
    wrong = [case for case, result in judged if result.correct != case["correct"] or result.error]
    return {"cases": len(cases), "right": len(cases) - len(wrong), "wrong": wrong}


def hostile(limit_s: float) -> dict:
    """Answers made to hang a grader, against an integer and a formula: the slowest, and what was accepted."""
    parts = json.loads((FIXTURES / "hostile_answers.json").read_text(encoding="utf-8"))
    seconds, accepted, errors = {}, [], {}
    for name, texts in parts.items():
        for gold in ("42", "x+1"):
            score("Answer: \\frac{2}{4}", "0.5")  # a worker that is ready: its start is measured apart
            started = time.monotonic()
            result = score("Answer: " + "".join(text * count for text, count in texts), gold, timeout_s=limit_s)
            seconds[name] = max(seconds.get(name, 0.0), time.monotonic() - started)
            accepted += [name] if result.correct else []
            if result.error:
                errors[result.error] = errors.get(result.error, 0) + 1
    started = time.monotonic()
    alive = score("Answer: \\frac{2}{4}", "0.5").correct
    return {
        "answers": len(parts),
        "judged": 2 * len(parts),
        "limit_s": limit_s,
        "slowest_s": round(max(seconds.values()), 2),
        "slowest": max(seconds, key=seconds.get),
        "accepted": accepted,
        "errors": errors,
        "alive_afterwards": alive,
        "ready_again_s": round(time.monotonic() - started, 2),
    }


def rate(response: str, gold: str, seconds: float) -> float:
    """Scores a second of one response in this process."""
    count, started = 0, time.monotonic()
    while time.monotonic() - started < seconds:
        for _ in range(20):
            score(response, gold)
        count += 20
    return count / (time.monotonic() - started)


def speed(seconds: float) -> dict:
    """Scores a second: integers after short and long reasoning, by one process and by two, and formulas."""
    short, long = "6 * 7 = 42\nAnswer: 42", REASONING + "Answer: 42"
    with ProcessPoolExecutor(2) as pool:
        two = sum(pool.map(rate, [long] * 2, ["43"] * 2, [seconds] * 2))
    score("Answer: \\frac{2}{4}", "0.5")  # the worker's start is none of a formula's time
    return {
        "integer_short": round(rate(short, "43", seconds)),
        "integer_long": round(rate(long, "43", seconds)),
        "integer_long_two_processes": round(two),
        "long_response_chars": len(long),
        "formula": round(rate("Answer: (x+1)^2", "x^2+2x+1", seconds)),
        "cores": len(os.sched_getaffinity(0)),
    }


def gold_answers(path: Path) -> dict:
    """Of a set's gold answers: how many are accepted as the prompt asks for them, and how many integers off by one."""
    golds = [row["reward_model"]["ground_truth"] for row in problem_rows(path)]
    integers = [int(digits) for digits in map(as_integer, golds) if digits is not None]
    return {
        "answers": len(golds),
        "accepted": sum(score(f"So it is.\nAnswer: {gold}<|im_end|>", gold).correct for gold in golds),
        "accepted_boxed": sum(score(f"So it is $\\boxed{{{gold}}}$.", gold).correct for gold in golds),
        "integers": len(integers),
        "accepted_off_by_one": sum(score(f"Answer: {n + off}", str(n)).correct for n in integers for off in (-1, 1)),
    }


def preparation(folder: Path) -> dict:
    """What prepare_data.py counts on DAPO-Math-17K, with the evaluation sets kept out."""
    against = [folder / name for name in EVALUATION if (folder / name).is_file()]
    with tempfile.TemporaryDirectory() as target:
        report = prepare(folder / "dapo_math_17k.parquet", Path(target) / "out.parquet", against)
    return {**vars(report), "against": [path.name for path in against]}


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("bench_reward.py", __doc__, EXAMPLES)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the public data sets")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement of speed (default: 3)")
    parser.add_argument("--limit", type=float, default=TIMEOUT_S, help="seconds for a hostile answer (default: 5)")
    parser.add_argument("--json", type=Path, metavar="F", help="file to write")
    args = parser.parse_args()
    if args.data is not None and not args.data.is_dir():
        parser.error(f"--data {args.data}: no such folder")
    result = {"schema": 1, "environment": describe(REPO_ROOT), "suite": suite()}
    result |= {"speed": speed(args.seconds), "hostile": hostile(args.limit)}
    try:
        present = [args.data / name for name in SETS if (args.data / name).is_file()] if args.data else []
        result["gold"] = {path.stem: gold_answers(path) for path in present}
        if args.data is not None and (args.data / "dapo_math_17k.parquet").is_file():
            result["prepare"] = preparation(args.data)
    except DataError as error:
        print(f"bench_reward.py: {error}", file=sys.stderr)
        return 2
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    if args.json:
        args.json.write_text(text, encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "environment"}, indent=1))
    return 1 if result["suite"]["wrong"] or result["hostile"]["accepted"] else 0


if __name__ == "__main__":
    sys.exit(main())
