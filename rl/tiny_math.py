"""Seeded one- and two-step arithmetic word problems in DAPO's prompt form, with worked and with flawed solutions.

The tiny model of recipes/tiny_math.yaml is trained on these. About half of the demonstrations end in a wrong answer, as
scraped text does, because any digit of a result may have slipped: the likeliest digit is the right one everywhere. A
model that fits such text knows more (greedy decoding) than it says (sampling at temperature 1), and that gap is what
reinforcement learning closes.

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
SLIP_RATE = 0.14
"""Chance that a digit of a result in a demonstration is wrong; about half of the demonstrations then end wrongly."""

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
    return Problem(name, operands, text, steps, run(steps))


def run(steps: tuple[Step, ...]) -> int:
    """The result of the last step."""
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
    return distinct(stream(split, seed), count)


def distinct(problems: Iterator[Problem], count: int) -> list[Problem]:
    """The first ``count`` of ``problems`` whose texts differ."""
    found: dict[str, Problem] = {}
    for problem in problems:
        if len(found) >= count:
            break
        found.setdefault(problem.text, problem)
    return list(found.values())


def _slip(value: int, rng: random.Random, rate: float) -> int:
    """``value`` with each digit replaced by another with probability ``rate``; no number gets a leading zero."""
    digits = list(str(value))
    for place, digit in enumerate(digits):
        lowest = 1 if place == 0 and len(digits) > 1 else 0
        if rng.random() < rate:
            digits[place] = rng.choice([other for other in "0123456789"[lowest:] if other != digit])
    return int("".join(digits))


def _write(problem: Problem, rng: random.Random, slip_rate: float) -> str | None:
    """A solution in which each written result may slip; None when a slip leads to a negative number."""
    lines: list[str] = []
    result = 0
    for left, operation, right in problem.steps:
        x = result if left is _PREVIOUS else left
        y = result if right is _PREVIOUS else right
        exact = _OPERATIONS[operation](x, y)
        if exact < 0:
            return None
        result = _slip(exact, rng, slip_rate)
        lines.append(f"{x} {operation} {y} = {result}")
    lines.append(f"Answer: {_slip(result, rng, slip_rate)}")
    return "\n".join(lines)


def worked_solution(problem: Problem) -> str:
    """The right solution: one line a step, then ``Answer: N``."""
    return demonstration(problem, random.Random(0), slip_rate=0.0)


def demonstration(problem: Problem, rng: random.Random, slip_rate: float = SLIP_RATE) -> str:
    """A solution as scraped text has it: any digit of a result may be wrong, and a wrong result is carried on.

    Slips are independent of each other, so that a model which fits them says the right digit with probability
    1 - ``slip_rate`` everywhere, and samples right answers as often as the demonstrations have them.
    """
    while (solution := _write(problem, rng, slip_rate)) is None:
        pass
    return solution


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
