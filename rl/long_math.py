"""Seeded arithmetic problems with a long context: a few facts hidden among distractors, then a question on them.

They are for a tiny model with block-sparse attention, which must find the right blocks before it can calculate. The
calculations are those of `rl.tiny_math`: same kinds, steps, solutions, demonstrations, and the same held-out numbers.
Only the numbers are retrieved here: each is the one number that the text gives a person whom the question names, and
a solution says them again before it calculates.

A text is an opening, `sentences` sentences in random order, and the question. Each sentence is a fact, "These are Tom's
34 apples.", or a filler without names and numbers. No name has two facts, so the name is the key of its number, which
follows it at once: one step of induction finds it. (After "Tom has 34 apples." a model of this size took another fact's
first digit a third of the time.)
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rl import tiny_math
from rl.tiny_math import KINDS, OBJECTS, SPLITS, Problem, split_of

DATA_SOURCE = "long_math"

LONG = (46, 72)
"""Fewest and most sentences of a long problem: roughly 410 to 660 tokens with its prompt."""
SHORT = (6, 14)
"""About 65 to 160 tokens."""
MIN_SENTENCES = 4  # three facts and one distractor

_NAMES = "Tom Ann Ben Eva Sam Mia Leo Ida Max Amy Dan Jim Joe Kim Liz Lou Mae Ned Pam Pat Ray Rob Sue Zoe"
NAMES = tuple(_NAMES.split())
"""Alone and with "'s" a token each: more do not fit into the vocabulary."""
OPENING = "Read this story."
"""Before the first sentence, so that each name has a space in front of it: one token, in a fact as in a question."""

PLACES = ("town", "park", "school", "lake", "shop", "farm", "bank", "hill", "market")
COLOURS = ("red", "blue", "green", "white", "black", "old", "new")
WEATHER = ("warm", "cold", "wet", "dry", "dark", "quiet")
TIMES = ("today", "again", "early", "late")
FILLERS = (
    "The bus to the {place} was full {time}.",
    "It was {weather} in the {place} {time}.",
    "The {colour} door of the {place} was open.",
    "A {colour} bird sat on the roof {time}.",
    "The dog ran to the {place} and back.",
    "The road to the {place} was {weather} {time}.",
    "It is a long walk to the {place}.",
    "The {colour} car was at the {place} {time}.",
    "A cat sat by the {colour} door {time}.",
    "The {place} was open in the morning.",
    "The {colour} train to the {place} was full.",
    "The sun was out and it was {weather}.",
    "The wind at the {place} was {weather} {time}.",
    "A man sat in the {colour} car.",
    "The water of the lake was {weather} {time}.",
    "The {colour} house is by the {place}.",
    "The walk to the {place} is {weather}.",
    "The bell of the {place} rang {time}.",
    "The {colour} boat was on the lake {time}.",
    "It was a {weather} morning at the {place}.",
    "The {colour} bus ran to the {place} {time}.",
    "The {place} and the road are {weather}.",
    "A {colour} dog sat by the road {time}.",
    "The {colour} house was {weather} in the morning.",
)

_ONE_DIGIT_SHARE = 0.3  # of the distractor facts; the others have two digits
_OTHER_FACTS = (1, 4)  # facts about people whom the question does not name, fewest and most


@dataclass(frozen=True)
class Question:
    """A wording for a kind of `tiny_math`: the operands in ``hidden`` are facts about n, m and k, in this order."""

    text: str
    hidden: str


QUESTIONS: dict[str, tuple[Question, ...]] = {
    "add": (
        Question("How many {o} do {n} and {m} have in all?", "ab"),
        Question("{n} gets {b} more {o}. How many {o} does {n} have now?", "a"),
    ),
    "sub": (
        Question("How many more {o} does {n} have than {m}?", "ab"),
        Question("{n} gives {b} of the {o} away. How many {o} does {n} have now?", "a"),
    ),
    "mul": (
        Question(
            "There are {a} boxes. Each box holds as many {o} as {n} has. How many {o} are there in all?",
            "b",
        ),
    ),
    "mul_add": (
        Question(
            "There are {a} boxes. Each box holds as many {o} as {n} has. "
            "How many {o} do {m} and the boxes have in all?",
            "bc",
        ),
    ),
    "mul_sub": (Question("{n} gives {a} friends {b} {o} each. How many {o} does {n} have now?", "c"),),
    "add_sub": (
        Question("{n} and {m} give {c} of the {o} away. How many {o} do they have now?", "ab"),
        Question("How many more {o} do {n} and {m} have than {k}?", "abc"),
    ),
    "add_add": (
        Question("How many {o} do {n}, {m} and {k} have in all?", "abc"),
        Question("{n} and {m} get {c} more {o}. How many {o} do they have now?", "ab"),
    ),
}


@dataclass(frozen=True)
class LongProblem(Problem):
    """A problem with the facts that its question asks for: (name, number), in the question's order."""

    facts: tuple[tuple[str, int], ...] = ()


def _filler(rng: random.Random) -> str:
    return rng.choice(FILLERS).format(
        place=rng.choice(PLACES), colour=rng.choice(COLOURS), weather=rng.choice(WEATHER), time=rng.choice(TIMES)
    )


def _distractors(rng: random.Random, count: int, names: list[str]) -> list[str]:
    """``count`` sentences: fillers, and facts about others, of ``names``."""
    facts = min(rng.randint(*_OTHER_FACTS), count)
    sentences = [_filler(rng) for _ in range(count - facts)]
    for name in names[:facts]:
        number = rng.randint(2, 9) if rng.random() < _ONE_DIGIT_SHARE else rng.randint(10, 99)
        sentences.append(_fact(name, number, rng.choice(OBJECTS)))
    return sentences


def _fact(name: str, number: int, thing: str) -> str:
    return f"These are {name}'s {number} {thing}."


def _draw(rng: random.Random, split: str, count: int) -> LongProblem:
    """A problem of ``count`` sentences."""
    kind = rng.choice(tuple(QUESTIONS))
    operands = KINDS[kind].draw(rng)
    while split_of(kind, operands) != split:
        operands = KINDS[kind].draw(rng)
    numbers = dict(zip("abc", operands, strict=False))
    question = rng.choice(QUESTIONS[kind])
    names = rng.sample(NAMES, len(NAMES))
    thing = rng.choice(OBJECTS)
    asked, others = names[: len(question.hidden)], names[len(question.hidden) :]
    facts = tuple((name, numbers[operand]) for name, operand in zip(asked, question.hidden, strict=True))
    sentences = [_fact(name, number, thing) for name, number in facts]
    sentences += _distractors(rng, count - len(facts), others)
    rng.shuffle(sentences)
    asks = question.text.format(o=thing, **dict(zip("nmk", asked, strict=False)), **numbers)
    steps = KINDS[kind].steps(*operands)
    text = " ".join([OPENING, *sentences, asks])
    return LongProblem(kind, operands, text, steps, tiny_math.run(steps), facts)


def stream(split: str, seed: int, sentences: tuple[int, int] = LONG) -> Iterator[LongProblem]:
    """Endless problems of one split, texts may repeat; each has ``sentences`` = (fewest, most) sentences, uniformly.

    Raises:
        ValueError: ``split`` is neither "train" nor "test", or ``sentences`` is not a range from `MIN_SENTENCES` up.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    fewest, most = sentences
    if not MIN_SENTENCES <= fewest <= most:
        raise ValueError(f"sentences must be (fewest, most) with {MIN_SENTENCES} <= fewest <= most, got {sentences}")
    rng = random.Random(f"{DATA_SOURCE}:{split}:{seed}:{fewest}:{most}")
    while True:
        yield _draw(rng, split, rng.randint(fewest, most))


def generate(split: str, count: int, seed: int = 0, sentences: tuple[int, int] = LONG) -> list[LongProblem]:
    """``count`` problems of one split with distinct texts, in an order fixed by ``seed``."""
    return tiny_math.distinct(stream(split, seed, sentences), count)


def recall(facts: Iterable[tuple[str, int]]) -> str:
    """The facts in one line, as solutions say them: "Here are Tom's 34, Ann's 12."."""
    return "Here are " + ", ".join(f"{name}'s {number}" for name, number in facts) + "."


def some_facts(rng: random.Random, count: int) -> list[tuple[str, int]]:
    """``count`` people with a number of two digits each."""
    return [(name, rng.randint(10, 99)) for name in rng.sample(NAMES, count)]


def tell(rng: random.Random, facts: list[tuple[str, int]]) -> str:
    """A text of nothing but these facts."""
    return " ".join([OPENING, *(_fact(name, number, rng.choice(OBJECTS)) for name, number in facts)])


def worked_solution(problem: LongProblem) -> str:
    """The right solution: the facts, one line a step, then ``Answer: N``."""
    return f"{recall(problem.facts)}\n{tiny_math.worked_solution(problem)}"


def demonstration(problem: LongProblem, rng: random.Random, slip_rate: float = tiny_math.SLIP_RATE) -> str:
    """A solution as scraped text has it: right facts, and results in which any digit may be wrong."""
    return f"{recall(problem.facts)}\n{tiny_math.demonstration(problem, rng, slip_rate)}"


def to_rows(problems: list[Problem], split: str) -> list[dict]:
    """Rows in the schema of DAPO-Math-17K (see ``rl.data``), ready for a parquet file."""
    return [{**row, "data_source": DATA_SOURCE} for row in tiny_math.to_rows(problems, split)]
