"""The reward against hand-made right values, and against answers that are made to hang or break a grader."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from rl import reward
from rl.reward import MAX_ANSWER_CHARS, TIMEOUT_S, extract_answer, score

FIXTURES = Path(__file__).parent / "fixtures"
CASES = [json.loads(line) for line in (FIXTURES / "reward_cases.jsonl").read_text(encoding="utf-8").splitlines()]
"""Written by hand: response, gold answer, and whether they are equal. scripts/bench_reward.py reports on them too."""
HOSTILE = json.loads((FIXTURES / "hostile_answers.json").read_text(encoding="utf-8"))
"""Name -> parts of an answer, each with how often it is repeated."""


def test_the_suite_is_large_and_has_both_verdicts_of_every_kind():
    assert len(CASES) >= 150 and len({(case["response"], case["gold"]) for case in CASES}) == len(CASES)
    verdicts = Counter((case["kind"], case["correct"]) for case in CASES)
    for kind in {case["kind"] for case in CASES} - {"unicode digits"}:
        assert min(verdicts[kind, True], verdicts[kind, False]) >= 2, kind


def test_every_case_is_judged_right():
    wrong = []
    for case in CASES:
        result = score(case["response"], case["gold"])
        if result.correct != case["correct"] or result.error:
            wrong.append((case["response"], case["gold"], result))
    assert wrong == []


@pytest.mark.slow
def test_a_hostile_answer_takes_no_more_than_the_limit_and_is_never_right():
    """Against a formula, so that math-verify has to read every one; scripts/bench_reward.py takes an integer too."""
    limit, over = 1.0, {}
    for name, parts in HOSTILE.items():
        assert score("Answer: \\frac{2}{4}", "0.5").correct  # a worker that is ready: its start is not the answer's
        response = "Answer: " + "".join(text * count for text, count in parts)
        started = time.monotonic()
        result = score(response, "x+1", timeout_s=limit)
        seconds = time.monotonic() - started
        assert not result.correct, name
        assert result.error in (None, "timeout") or result.error.startswith("worker died"), (name, result.error)
        if seconds > limit + 1.0:  # killing and the start of the next one, on a loaded machine
            over[name] = seconds
    assert over == {}
    assert score("Answer: \\frac{2}{4}", "0.5").correct


def test_a_long_response_is_read_in_linear_time():
    for part in ("Answer: ", "\\boxed{", "Answer: \\[", "answer*", "{", "$", "*", "<|", "Answer: $$"):
        started = time.process_time()
        extract_answer(part * (1_000_000 // len(part)))
        assert time.process_time() - started < 2, part


def test_the_last_answer_line_is_found_however_much_stands_around_it():
    filler = "We add one and one.\n" * 1000
    for response in (
        f"{filler}Answer: 42",
        f"Answer: 42\n{filler}",
        f"Answer: 41\n{filler}Answer: 42\nThat is all.",
        f"Answer: 41\n{filler}Answer: 42\n{filler}",
        f"{filler}\\boxed{{42}}\n{filler}",
        "x" * 10_000 + " Answer: 42",
        "\n" * 10_000 + "Answer: 42" + "\n" * 10_000,
    ):
        assert extract_answer(response) == "42", response[:20]


def test_an_answer_that_is_too_long_is_wrong_unread_and_not_kept_whole():
    result = score("Answer: " + "{" * 50_000 + "42" + "}" * 50_000, "42")
    assert (result.correct, result.error, len(result.answer)) == (False, None, MAX_ANSWER_CHARS + 1)


def test_memory_of_the_worker_is_bounded():
    """A power of 12 GB is refused by name; the machine has no say in it."""
    for answer in ("2**(10**11)", "2^{10^{11}}"):
        result = score(f"Answer: {answer}", "x+1", timeout_s=TIMEOUT_S)
        assert not result.correct and result.error in (None, "timeout", "MemoryError")
    assert reward._verifier.pid is not None
