"""A data set made ready for training: the instruction added, copies, contradictions and evaluation problems dropped.

Every row is dropped for the first reason that holds, in the order of ``PrepareReport``'s counts.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.data import (
    DAPO_PREFIX,
    DAPO_SUFFIX,
    DataError,
    Messages,
    chat_ids,
    load_rows,
    messages_of,
    source_rows,
    with_answer_line,
    with_prompt,
    write_rows,
)
from rl.reward import as_integer

PREFIX_CHARS = 80
"""Letters and digits after which two problems are taken for one: a set may ask for the same in other closing words."""

# LaTeX that only sets spaces, sizes and the borders of formulas.
_LAYOUT = re.compile(r"\\(?:left|right|q?quad)(?![a-z])|\\[()\[\],;:! ]")
# Not noise: operators, brackets, primes, and the point of a decimal fraction.
_NOISE = re.compile(r"(?:[\s$\\,;:?~\"“”‘’、。,;:?]|\.(?!\d))+")


@dataclass(frozen=True)
class PrepareReport:
    """What ``prepare`` did. The first three reasons count rows; those after them count problems, each prompt once."""

    read: int
    """Rows read."""
    written: int
    """Rows written, one a problem."""
    contradicting: int = 0
    """Rows whose prompt another row has with another answer."""
    damaged: int = 0
    """Rows whose answer is an integer that went through a float (see ``float_damaged``)."""
    duplicates: int = 0
    """Rows whose prompt and answer an earlier row has."""
    contaminated: int = 0
    """Problems that stand in a set which they must be kept out of, by all their letters and digits."""
    contaminated_by_prefix: int = 0
    """Further ones, whose first ``PREFIX_CHARS`` letters and digits stand there."""
    near_contradicting: int = 0
    """Problems that differ from another in layout only (``near_key``), with another answer."""
    near_copies: int = 0
    """Problems that differ from an earlier one in layout only."""
    instruction_added: int = 0
    """Written rows whose prompt did not ask for the ``Answer:`` line."""

    def __str__(self) -> str:
        return (
            f"{self.read} rows read, {self.written} written; dropped {self.duplicates} duplicates, "
            f"{self.contradicting} with contradicting answers, {self.damaged} with damaged ones; of the problems left "
            f"{self.contaminated} of the evaluation sets and {self.contaminated_by_prefix} that begin like one, "
            f"{self.near_copies} near-copies and {self.near_contradicting} near-copies with contradicting answers; "
            f"Answer: instruction added to {self.instruction_added}"
        )


def float_damaged(answer: str) -> bool:
    """Whether an integer answer lost digits in a float: above 2^53, exactly a double, and not a round number.

    DAPO-Math-17K has some, such as 22099999999999998951424. No such answer can be meant.
    """
    digits = as_integer(answer)
    if digits is None or len(digits) > 300 or abs(int(digits)) <= 2**53:
        return False
    return int(float(digits)) == int(digits) and not digits.endswith("000000")


def problem_key(content: str) -> str:
    """A problem's letters and digits in lower case, for comparison across sets: without DAPO's instruction."""
    return "".join(char for char in _problem(content).lower() if char.isalnum())


def near_key(content: str) -> str:
    """A problem's text without layout: case, blanks, borders of formulas, most punctuation.

    Stricter than ``problem_key``, as it decides within a set: operators and brackets stay, and what separates two
    digits does, so that a+b and a-b, x^{12} and x^{1}2, 1.5 and 15, "1, 2" and "12" are not taken for one.
    """
    text = _LAYOUT.sub(" ", _problem(content).lower().replace("\u2212", "-"))
    return _NOISE.sub(_separator, text)


def _separator(noise: re.Match) -> str:
    """What is left of a run of noise: nothing, or between two digits its punctuation, or else one blank."""
    before, after = noise.string[: noise.start()][-1:], noise.string[noise.end() :][:1]
    if not (before.isdigit() and after.isdigit()):
        return ""
    return "".join(char for char in noise[0] if char not in "$\\" and not char.isspace()) or " "


def _problem(content: str) -> str:
    return content.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX)


@dataclass(frozen=True)
class _Candidate:
    """A row with what it is compared by."""

    row: dict[str, Any]
    copies: int
    original: Messages
    prompt: Messages
    """With the instruction."""
    near: Messages
    """With ``near_key`` of each message."""
    key: str
    """``problem_key`` of the last message."""
    answer: str
    """So written that "025" does not contradict "25"."""
    damaged: bool


def _candidate(row: dict[str, Any], copies: int) -> _Candidate:
    original, answer = messages_of(row), row["reward_model"]["ground_truth"]
    prompt = with_answer_line(original)
    near = tuple((role, near_key(content)) for role, content in prompt)
    canonical = as_integer(answer) or answer.strip()
    return _Candidate(row, copies, original, prompt, near, problem_key(prompt[-1][1]), canonical, float_damaged(answer))


class _Sieve:
    """Says of each candidate in turn why it is dropped."""

    def __init__(self, candidates: Iterable[_Candidate], forbidden: Iterable[str]) -> None:
        self._answers: dict[Messages, set[str]] = defaultdict(set)
        self._near_answers: dict[Messages, set[str]] = defaultdict(set)
        for one in candidates:
            self._answers[one.prompt].add(one.answer)
            if not one.damaged:  # a damaged answer contradicts nothing
                self._near_answers[one.near].add(one.answer)
        self._forbidden = set(forbidden)
        self._beginnings = {key[:PREFIX_CHARS] for key in self._forbidden}
        self._prompts: set[Messages] = set()
        self._kept: set[Messages] = set()

    def reason(self, one: _Candidate) -> str | None:
        """The count of ``PrepareReport`` that the candidate belongs to; None keeps it."""
        if len(self._answers[one.prompt]) > 1:
            return "contradicting"
        if one.damaged:
            return "damaged"
        if one.prompt in self._prompts:
            return "duplicates"
        self._prompts.add(one.prompt)
        if one.key in self._forbidden:
            return "contaminated"
        if one.key[:PREFIX_CHARS] in self._beginnings:
            return "contaminated_by_prefix"
        if len(self._near_answers[one.near]) > 1:
            return "near_contradicting"
        if one.near in self._kept:
            return "near_copies"
        self._kept.add(one.near)
        return None


_COUNTS_ROWS = ("contradicting", "damaged", "duplicates")


def prepare(
    path_in: str | Path,
    path_out: str | Path,
    against: Sequence[str | Path] = (),
    subset: str | None = None,
    split: str | None = None,
) -> PrepareReport:
    """Makes a parquet file that verl and ``rl.reward`` can use as it is, from a file or a set on the Hub.

    Adds DAPO's ``Answer:`` instruction to prompts without it, and drops what ``PrepareReport`` counts: all rows of a
    problem whose answers contradict each other, answers that a float has damaged, all but the first of several equal
    problems, and those of the evaluation sets `against`; then the same by ``near_key`` for problems that differ in
    layout only. The order is kept.

    Raises:
        DataError: ``path_in`` cannot be read or breaks the schema, ``path_out`` is no .parquet, or nothing is left.
    """
    if Path(path_out).suffix != ".parquet":
        raise DataError(f"{path_out}: the prepared file is parquet; name it .parquet")
    candidates = [_candidate(row, copies) for row, copies in source_rows(str(path_in), subset, split).values()]
    others = (row for path in against for row, _ in source_rows(str(path)).values())
    sieve = _Sieve(candidates, (problem_key(row["prompt"][-1]["content"]) for row in others))
    kept, dropped = [], Counter()
    for one in candidates:
        reason = sieve.reason(one)
        if reason is None:
            kept.append(one)
        dropped[reason] += one.copies if reason in _COUNTS_ROWS else 1
        if reason not in _COUNTS_ROWS:
            dropped["duplicates"] += one.copies - 1
    del dropped[None]
    if not kept:
        reasons = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in dropped.items() if count)
        raise DataError(
            f"{path_in}: nothing is left ({reasons}); correct reward_model.ground_truth or the sets to keep out"
        )
    write_rows((with_prompt(one.row, one.prompt) for one in kept), path_out)
    return PrepareReport(
        read=sum(one.copies for one in candidates),
        written=len(kept),
        instruction_added=sum(one.original != one.prompt for one in kept),
        **dropped,
    )


def drop_long(path: str | Path, limit: int, tokenizer) -> int:
    """Takes the rows whose prompt has more than `limit` tokens out of a prepared file; returns how many.

    Raises:
        DataError: no row is left.
    """
    rows = load_rows(Path(path))
    prompts = chat_ids(tokenizer, (row["prompt"] for row in rows))
    kept = [row for row, ids in zip(rows, prompts, strict=True) if len(ids) <= limit]
    if not kept:
        shortest = min(map(len, prompts))
        raise DataError(
            f"data.max_prompt_length = {limit}: the shortest prompt has {shortest} tokens; set at least that"
        )
    if len(kept) < len(rows):
        write_rows(kept, path)
    return len(rows) - len(kept)
