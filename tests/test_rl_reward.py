"""The reward: what counts as an answer, when it equals the gold answer, and that judging never hangs or lies."""

import subprocess
import sys
import threading
import time

import pytest

from rl import reward
from rl.data import dapo_prompt
from rl.reward import Reward, as_integer, compute_score, extract_answer, score

HANGS = "10^{10^{10^{10}}}"  # sympy takes this for a number to be computed


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("12 + 30 = 42\nAnswer: 42", "42"),
        ("Answer: 41\nNo, wait.\nAnswer: 42\n", "42"),
        ("answer: 42", "42"),
        ("ANSWER :  42  ", "42"),
        ("The final Answer: 42.", "42"),
        ("Answer:\n42", "42"),
        ("Answer: 42<|im_end|>", "42"),
        ("Answer: 42<|im_end|>\n<|endoftext|>", "42"),
        ("Answer: 42</s>", "42"),
        ("Answer: $42$", "42"),
        ("Answer: $42$.", "42"),
        ("Answer: $$42$$", "42"),
        (r"Answer: \(42\)", "42"),
        (r"Answer: \boxed{42}", "42"),
        (r"Answer: $\boxed{42}$.", "42"),
        (r"Answer: \boxed{\text{42}}", "42"),
        ("**Answer:** 42", "42"),
        ("**Answer: 42**", "42"),
        ("**Answer**: **42**", "42"),
        ('Answer: "42"', "42"),
        (r"Answer: \frac{1}{2}", r"\frac{1}{2}"),
        (r"Answer: $\frac{1}{2}$", r"\frac{1}{2}"),
        (r"Answer: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("42", None),
        ("", None),
        ("Answer:", None),
        ("The answer is 42", None),
    ],
)
def test_the_last_answer_line_is_read(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("42", "42"),
        ("025", "25"),
        ("-0", "0"),
        ("+7", "7"),
        ("-007", "-7"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        ("12.0", "12"),
        ("\u22125", "-5"),
        ("22099999999999998951424", "22099999999999998951424"),
        ("9" * 5000, "9" * 5000),
        ("12.5", None),
        ("1,23", None),
        ("1/2", None),
        ("٣", None),  # a digit to Python, not to a grader
        ("", None),
    ],
)
def test_integers_have_one_canonical_form(text, integer):
    assert as_integer(text) == integer


@pytest.mark.parametrize(
    ("response", "gold", "correct"),
    [
        ("Answer: 42", "42", True),
        ("Answer: 43", "42", False),
        ("Answer: 25", "025", True),
        ("Answer: -0", "0", True),
        ("Answer: 192,000,000", "192000000", True),
        ("Answer: 22099999999999998951425", "22099999999999998951424", False),  # equal as floats
        ("42", "42", False),
        ("Answer: " + "9" * 600, "9", False),
    ],
)
def test_integers_are_compared_exactly_and_without_a_worker(response, gold, correct, monkeypatch):
    monkeypatch.setattr(reward._verifier, "verify", None)
    result = score(response, gold)
    assert (result.correct, result.score, result.error) == (correct, 1.0 if correct else -1.0, None)


def test_prompt_and_parser_agree():
    """An answer written as the prompt asks is read as such, for every kind of gold answer."""
    prompt = dapo_prompt("What is 1 + 1?")
    assert 'after "Answer:"' in prompt and "form Answer: $Answer (without quotes)" in prompt
    for gold in ("2", "-13", "025", "1,000", r"\frac{1}{2}", r"2\sqrt{3}", "x^2+1", "(1,2)"):
        for written in (gold, f"${gold}$", rf"\boxed{{{gold}}}", f"{gold}."):
            assert score(f"Some work.\nAnswer: {written}<|im_end|>", gold).correct, written


def test_other_answers_go_to_math_verify():
    cases = [
        (r"\frac{1}{2}", "0.5", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"\frac{84}{2}", "42", True),
        ("x=42", "42", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\frac{1}{3}", r"\frac{1}{2}", False),
        (r"\frac{", "3", False),
        ("no idea", "3", False),
    ]
    for answer, gold, correct in cases:
        result = score(f"Answer: {answer}", gold)
        assert (result.correct, result.error) == (correct, None), (answer, gold)


def test_what_cannot_be_judged_is_named():
    assert score("Answer: 3", "1/0").error == "ValueError"  # raised by sympy
    assert score("Answer: 3", r"\$").error == "unreadable gold answer"
    with pytest.raises(ValueError, match="gold answer is empty"):
        score("Answer: 3", " ")


def test_a_hanging_answer_is_killed_and_the_worker_replaced():
    assert score(r"Answer: \frac{2}{4}", "0.5").correct
    before = reward._verifier.pid
    started = time.monotonic()
    assert score(f"Answer: {HANGS}", "3", timeout_s=0.5) == Reward(-1.0, False, HANGS, "timeout")
    assert time.monotonic() - started < 5
    assert score(r"Answer: \frac{2}{4}", "0.5").correct
    assert reward._verifier.pid != before


def test_a_dead_worker_is_an_error_once_and_replaced():
    assert score(r"Answer: \frac{2}{4}", "0.5").correct
    reward._verifier._process.kill()
    reward._verifier._process.wait()
    assert score(r"Answer: \frac{2}{4}", "0.5").correct  # seen before anything was sent to it
    reward._verifier._connection.close()
    assert score(r"Answer: \frac{2}{4}", "0.5").error == "worker died: OSError"
    assert score(r"Answer: \frac{2}{4}", "0.5").correct


def test_any_thread_may_call():
    results = {}
    cases = [("7", "7"), ("8", "7"), (r"\frac{1}{2}", "0.5"), (r"\frac{1}{3}", "0.5"), (r"\sqrt{4}", "2")] * 4

    def judge(index: int, answer: str, gold: str) -> None:
        results[index] = score(f"Answer: {answer}", gold)

    threads = [threading.Thread(target=judge, args=(i, *case)) for i, case in enumerate(cases)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i].correct for i in range(5)] == [True, False, True, False, True]
    assert not any(result.error for result in results.values())


def test_verl_gets_plain_values():
    right = compute_score("math_dapo", "Answer: 42<|im_end|>", "42", {"index": 0}, unknown_option=1)
    assert right == {"score": 1.0, "acc": 1.0, "pred": "42", "error": ""}
    assert compute_score("math_dapo", "no", "42") == {"score": -1.0, "acc": 0.0, "pred": "", "error": ""}


def test_import_is_cheap():
    code = (
        "import sys, rl.reward, rl.data; print({'torch', 'verl', 'math_verify', 'sympy', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
