"""Seeded one- and two-step arithmetic word problems in DAPO's prompt form, with worked and with flawed solutions.

The tiny model of ``make train`` is trained on these. More than half of the demonstrations end in a wrong answer, as
scraped text does, and the wrong digit may be any digit of the solution: everywhere the likeliest digit is still the
right one. A model that fits such text knows more (greedy decoding) than it says (sampling at temperature 1), and that
gap is what reinforcement learning closes.

Held-out problems share neither their text nor their numbers with training problems: a stable hash of (kind, operands)
decides the side, whatever the seed.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rl.data import dapo_prompt

DATA_SOURCE = "tiny_math"
SPLITS = ("train", "test")
ERROR_SHARE = 0.5
"""Share of demonstrations that end in a wrong answer."""

NAMES = ("Tom", "Ann", "Ben", "Eva", "Sam", "Mia", "Leo", "Ida")
OBJECTS = ("apples", "books", "coins", "cards", "pens", "eggs", "cups", "shells")

_HELD_OUT_MODULUS = 8  # one operand tuple in eight is held out
_PREVIOUS = None  # stands for "the result of the step before" in a step
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
}

Step = tuple[int | None, str, int | None]
"""(left, operation, right); None on either side is the result of the step before."""


@dataclass(frozen=True)
class Kind:
    """One family of problems: how to draw its operands, its steps and its wordings.

    ``commutative`` counts the leading operands whose order does not matter: 12 + 30 and 30 + 12 fall on the same side.
    """

    draw: Callable[[random.Random], tuple[int, ...]]
    steps: Callable[..., tuple[Step, ...]]
    texts: tuple[str, ...]
    commutative: int = 0


@dataclass(frozen=True)
class Problem:
    """A word problem, its steps and its integer answer (never negative)."""

    kind: str
    operands: tuple[int, ...]
    text: str
    steps: tuple[Step, ...]
    answer: int


def _two_digit(rng: random.Random) -> int:
    return rng.randint(10, 99)


def _one_digit(rng: random.Random) -> int:
    return rng.randint(2, 9)


def _draw_difference(rng: random.Random) -> tuple[int, ...]:
    a, b = rng.sample(range(10, 100), 2)
    return (max(a, b), min(a, b))


def _draw_sum_difference(rng: random.Random) -> tuple[int, ...]:
    a, b = _two_digit(rng), _two_digit(rng)
    return (a, b, rng.randint(10, min(99, a + b)))


def _draw_change(rng: random.Random) -> tuple[int, ...]:
    a, b = _one_digit(rng), _one_digit(rng)
    return (a, b, rng.randint(max(10, a * b), 99))


KINDS: dict[str, Kind] = {
    "add": Kind(
        draw=lambda rng: (_two_digit(rng), _two_digit(rng)),
        steps=lambda a, b: ((a, "+", b),),
        texts=(
            "{n} has {a} {o} and gets {b} more. How many {o} does {n} have now?",
            "{n} has {a} {o} and {m} has {b} {o}. How many {o} do they have in all?",
            "There are {a} {o} in a box and {b} {o} in a bag. How many {o} are there in all?",
        ),
        commutative=2,
    ),
    "sub": Kind(
        draw=_draw_difference,
        steps=lambda a, b: ((a, "-", b),),
        texts=(
            "{n} has {a} {o} and gives {b} to {m}. How many {o} does {n} have now?",
            "There are {a} {o} in a box. {n} takes {b}. How many {o} are left?",
        ),
    ),
    "mul": Kind(
        draw=lambda rng: (_one_digit(rng), _one_digit(rng)),
        steps=lambda a, b: ((a, "*", b),),
        texts=(
            "{n} has {a} bags of {b} {o}. How many {o} does {n} have?",
            "There are {a} boxes with {b} {o} in each. How many {o} are there in all?",
        ),
        commutative=2,
    ),
    "mul_add": Kind(
        draw=lambda rng: (_one_digit(rng), _one_digit(rng), _two_digit(rng)),
        steps=lambda a, b, c: ((a, "*", b), (_PREVIOUS, "+", c)),
        texts=(
            "{n} has {a} bags of {b} {o} and gets {c} more. How many {o} does {n} have now?",
            "There are {a} boxes with {b} {o} in each and {c} {o} in a bag. How many {o} are there in all?",
        ),
        commutative=2,
    ),
    "mul_sub": Kind(
        draw=_draw_change,
        steps=lambda a, b, c: ((a, "*", b), (c, "-", _PREVIOUS)),
        texts=(
            "{n} has {c} {o} and gives {a} friends {b} each. How many {o} does {n} have now?",
            "There are {c} {o} in a box. {n} takes {a} bags of {b}. How many {o} are left?",
        ),
        commutative=2,
    ),
    "add_sub": Kind(
        draw=_draw_sum_difference,
        steps=lambda a, b, c: ((a, "+", b), (_PREVIOUS, "-", c)),
        texts=(
            "{n} has {a} {o}, gets {b} more and gives {c} to {m}. How many {o} does {n} have now?",
            "There are {a} {o} in a box and {b} {o} in a bag. {n} takes {c}. How many {o} are left?",
        ),
        commutative=2,
    ),
    "add_add": Kind(
        draw=lambda rng: (_two_digit(rng), _two_digit(rng), _two_digit(rng)),
        steps=lambda a, b, c: ((a, "+", b), (_PREVIOUS, "+", c)),
        texts=(
            "{n} has {a} {o}, gets {b} more and finds {c}. How many {o} does {n} have now?",
            "There are {a} {o} in a box, {b} in a bag and {c} in a cup. How many {o} are there in all?",
        ),
        commutative=3,
    ),
}


def split_of(kind: str, operands: tuple[int, ...]) -> str:
    """The side, "train" or "test", to which these numbers belong; the same for every seed and every wording."""
    free = KINDS[kind].commutative
    canonical = tuple(sorted(operands[:free])) + tuple(operands[free:])
    return "test" if zlib.crc32(repr((kind, canonical)).encode()) % _HELD_OUT_MODULUS == 0 else "train"


def _draw(rng: random.Random, split: str) -> Problem:
    name = rng.choice(tuple(KINDS))
    kind = KINDS[name]
    operands = kind.draw(rng)
    while split_of(name, operands) != split:
        operands = kind.draw(rng)
    n, m = rng.sample(NAMES, 2)
    numbers = dict(zip("abc", operands, strict=False))
    text = rng.choice(kind.texts).format(n=n, m=m, o=rng.choice(OBJECTS), **numbers)
    steps = kind.steps(*operands)
    return Problem(name, operands, text, steps, _run(steps))


def _run(steps: tuple[Step, ...]) -> int:
    result = 0
    for left, operation, right in steps:
        x = result if left is _PREVIOUS else left
        y = result if right is _PREVIOUS else right
        result = _OPERATIONS[operation](x, y)
    return result


def stream(split: str, seed: int) -> Iterator[Problem]:
    """Endless problems of one split, texts may repeat.

    Raises:
        ValueError: ``split`` is neither "train" nor "test".
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    rng = random.Random(f"{split}:{seed}")
    while True:
        yield _draw(rng, split)


def generate(split: str, count: int, seed: int = 0) -> list[Problem]:
    """``count`` problems of one split with distinct texts, in an order fixed by ``seed``."""
    found: dict[str, Problem] = {}
    for problem in stream(split, seed):
        if len(found) >= count:
            break
        found.setdefault(problem.text, problem)
    return list(found.values())


def _wrong_digit(value: int, rng: random.Random) -> int:
    """``value`` with one digit replaced by another; the first of several digits never becomes 0."""
    digits = list(str(value))
    place = rng.randrange(len(digits))
    lowest = 1 if place == 0 and len(digits) > 1 else 0
    digits[place] = rng.choice([d for d in "0123456789"[lowest:] if d != digits[place]])
    return int("".join(digits))


def _write(problem: Problem, flaw: int | None, rng: random.Random | None) -> tuple[str, int]:
    """The solution with one wrong digit in line ``flaw`` (None: in no line), carried on from there; and its answer."""
    lines: list[str] = []
    result = 0
    for index, (left, operation, right) in enumerate(problem.steps):
        x = result if left is _PREVIOUS else left
        y = result if right is _PREVIOUS else right
        result = _OPERATIONS[operation](x, y)
        if index == flaw:
            result = _wrong_digit(result, rng)
        lines.append(f"{x} {operation} {y} = {result}")
    if flaw == len(problem.steps):
        result = _wrong_digit(result, rng)
    lines.append(f"Answer: {result}")
    return "\n".join(lines), result


def worked_solution(problem: Problem) -> str:
    """The right solution: one line a step, then ``Answer: N``."""
    return _write(problem, None, None)[0]


def flawed_solution(problem: Problem, rng: random.Random) -> str:
    """A solution that ends in a wrong, non-negative answer because of one wrong digit somewhere in it.

    The line is drawn uniformly over the steps and the final line, and the digit uniformly within its number; a wrong
    step is carried on, so that the rest of the solution follows from it.
    """
    while True:
        solution, answer = _write(problem, rng.randrange(len(problem.steps) + 1), rng)
        if answer >= 0 and answer != problem.answer:
            return solution


def demonstration(problem: Problem, rng: random.Random, error_share: float = ERROR_SHARE) -> str:
    """A solution as scraped text has it: flawed with probability ``error_share``, else right."""
    return flawed_solution(problem, rng) if rng.random() < error_share else worked_solution(problem)


def to_rows(problems: list[Problem], split: str) -> list[dict]:
    """Rows in the schema of DAPO-Math-17K (see ``rl.data``), ready for a parquet file."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": dapo_prompt(problem.text)}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(problem.answer), "style": "rule"},
            "extra_info": {"index": index, "kind": problem.kind, "split": split},
        }
        for index, problem in enumerate(problems)
    ]
