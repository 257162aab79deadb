"""Long-context problems (`rl.long_math`) and the tokenizer that is made for them."""

import random
import re
from collections import Counter
from itertools import islice

import pytest
from transformers import AutoTokenizer

from rl import long_math, tiny_math
from rl.data import dapo_prompt, validate_rows
from rl.long_math import LONG, NAMES, OPENING, SHORT
from rl.models.tiny import END, PAD, VOCAB_SIZE, prompt_ids
from rl.models.tiny_m3_tokenizer import INSTRUCTIONS, build_tokenizer
from rl.reward import score

FACT = re.compile(r"These are ([A-Z][a-z]+)'s (\d+) ([a-z]+)\.")

# Wording of a question, with names as n, m and k, and the calculation from what they have and from the numbers asked.
SOLVERS = [
    (r"How many (?P<o>\w+) do (?P<n>\w+) and (?P<m>\w+) have in all\?", lambda n, m: n + m),
    (r"How many (?P<o>\w+) do (?P<n>\w+), (?P<m>\w+) and (?P<k>\w+) have in all\?", lambda n, m, k: n + m + k),
    (r"How many more (?P<o>\w+) does (?P<n>\w+) have than (?P<m>\w+)\?", lambda n, m: n - m),
    (r"How many more (?P<o>\w+) do (?P<n>\w+) and (?P<m>\w+) have than (?P<k>\w+)\?", lambda n, m, k: n + m - k),
    (r"(?P<n>\w+) gets (?P<x>\d+) more (?P<o>\w+)\. How many .* have now\?", lambda n, x: n + x),
    (r"(?P<n>\w+) and (?P<m>\w+) get (?P<x>\d+) more (?P<o>\w+)\. .* have now\?", lambda n, m, x: n + m + x),
    (r"(?P<n>\w+) gives (?P<x>\d+) of the (?P<o>\w+) away\. .* have now\?", lambda n, x: n - x),
    (r"(?P<n>\w+) and (?P<m>\w+) give (?P<x>\d+) of the (?P<o>\w+) away\. .* now\?", lambda n, m, x: n + m - x),
    (r"(?P<n>\w+) gives (?P<x>\d) friends (?P<y>\d) (?P<o>\w+) each\. .* have now\?", lambda n, x, y: n - x * y),
    (
        r"There are (?P<x>\d) boxes\. Each box holds as many (?P<o>\w+) as (?P<n>\w+) has\. .* are there in all\?",
        lambda n, x: x * n,
    ),
    (
        r"There are (?P<x>\d) boxes\. Each box holds as many (?P<o>\w+) as (?P<n>\w+) has\. "
        r"How many \w+ do (?P<m>\w+) and the boxes have in all\?",
        lambda n, m, x: x * n + m,
    ),
]


def facts_of(text: str) -> dict[str, tuple[int, str]]:
    found = FACT.findall(text)
    assert len({name for name, _, _ in found}) == len(found), f"a name has two facts: {text}"
    return {name: (int(number), thing) for name, number, thing in found}


def solve(text: str) -> tuple[int, list[str]]:
    """(answer, names asked), read from the text alone."""
    facts = facts_of(text)
    matches = [(match, rule) for form, rule in SOLVERS if (match := re.search(rf" {form}$", text))]
    assert len(matches) == 1, text
    match, rule = matches[0]
    groups = match.groupdict()
    thing = groups.pop("o")
    names = [groups[key] for key in "nmk" if key in groups]
    assert {facts[name][1] for name in names} == {thing}
    return rule(**{key: int(facts[v][0] if key in "nmk" else v) for key, v in groups.items()}), names


@pytest.fixture(scope="module")
def problems() -> list[tiny_math.Problem]:
    return long_math.generate("train", 300) + long_math.generate("test", 200, sentences=SHORT)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_answers_follow_from_the_text(problems):
    for problem in problems:
        assert solve(problem.text)[0] == problem.answer >= 0
        solution = long_math.worked_solution(problem)
        assert all(eval(line.replace(" = ", " == ")) for line in solution.split("\n")[1:-1])
        assert score(solution, str(problem.answer)).correct
    assert {p.kind for p in problems} == set(tiny_math.KINDS)
    assert len({long_math.demonstration(problems[0], random.Random(seed)) for seed in range(20)}) > 1


def test_solutions_say_the_facts_first_in_the_questions_order(problems):
    for problem in problems:
        facts, (_, names) = facts_of(problem.text), solve(problem.text)
        said = ", ".join(f"{name}'s {facts[name][0]}" for name in names)
        assert long_math.worked_solution(problem).startswith(f"Here are {said}.\n")
        # slips are in results only
        assert long_math.demonstration(problem, random.Random(0), 0.5).startswith(f"Here are {said}.\n")


def test_needed_facts_lie_anywhere_in_the_text(problems):
    places = Counter()
    for problem in problems:
        for name in solve(problem.text)[1]:
            sentences = problem.text.removeprefix(OPENING).split(". ")
            fact = next(i for i, sentence in enumerate(sentences) if f" {name}'s " in sentence)
            places[4 * fact // len(sentences)] += 1
    assert min(places[quarter] for quarter in range(4)) > 0.15 * places.total()


def test_names_are_unique_keys_among_distractors(problems):
    assert len(set(NAMES)) == 24
    fillers = " ".join(long_math.FILLERS)
    assert not set(NAMES) & set(re.findall(r"\w+", fillers)) and not re.search(r"\d", fillers)
    others = Counter()
    for problem in problems:
        facts, (_, names) = facts_of(problem.text), solve(problem.text)
        assert len(set(names)) == len(names)
        others[len(facts) - len(names)] += 1
    assert set(others) == {1, 2, 3, 4} and min(others.values()) > 0.18 * len(problems)


def test_splits_share_no_text_and_no_numbers():
    sides = {split: list(islice(long_math.stream(split, 5, SHORT), 1500)) for split in tiny_math.SPLITS}
    sides["test"] += long_math.generate("test", 100)
    for split, found in sides.items():
        assert {tiny_math.split_of(p.kind, p.operands) for p in found} == {split}
    canonical = {
        split: {
            (p.kind, *sorted(p.operands[: (n := tiny_math.KINDS[p.kind].commutative)]), *p.operands[n:]) for p in ps
        }
        for split, ps in sides.items()
    }
    assert not canonical["train"] & canonical["test"]
    assert not {p.text for p in sides["train"]} & {p.text for p in sides["test"]}


def test_generation_is_seeded_and_without_repeats():
    first = long_math.generate("train", 50, seed=3)
    assert first == long_math.generate("train", 50, seed=3) != long_math.generate("train", 50, seed=4)
    assert len({p.text for p in first}) == 50


@pytest.mark.parametrize("sentences", [LONG, SHORT, (4, 4)])
def test_number_of_sentences(sentences):
    counts = set()
    for problem in islice(long_math.stream("train", 0, sentences), 400):
        body = problem.text.removeprefix(OPENING)
        question = 3 if "There are" in problem.text else 2 if body.endswith(" now?") else 1
        counts.add(len(re.findall(r"[.?]", body)) - question)
    assert counts == set(range(sentences[0], sentences[1] + 1))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="split must be one of train, test, got 'dev'"):
        next(long_math.stream("dev", 0))
    for sentences in ((3, 9), (9, 6)):
        with pytest.raises(ValueError, match="sentences must be"):
            next(long_math.stream("train", 0, sentences))


def test_rows_have_the_schema(problems):
    rows = long_math.to_rows(problems[:20], "train")
    validate_rows(rows, "rows")
    assert {row["data_source"] for row in rows} == {"long_math"}
    assert rows[3]["reward_model"]["ground_truth"] == str(problems[3].answer)


# ---- tokenizer


def test_vocabulary_is_exact_and_kept_on_disk(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for found in (tokenizer, again):
        assert len(found) == found.vocab_size == VOCAB_SIZE
        assert sorted(found.get_vocab().values()) == list(range(VOCAB_SIZE))
        assert (found.eos_token, found.pad_token) == (END, PAD)
    assert again.backend_tokenizer.to_str() == build_tokenizer().backend_tokenizer.to_str()


def test_round_trip_of_any_text(tokenizer, problems):
    rng = random.Random(0)
    texts = [dapo_prompt(p.text) for p in problems[:50]] + [long_math.worked_solution(p) for p in problems]
    texts += ["".join(rng.choices("aT 19.,?\n=+-'\té长", k=40)) for _ in range(300)]
    texts += ["".join(map(chr, rng.choices(range(1, 0xD800), k=40))) for _ in range(50)]
    texts += [bytes(range(256)).decode("latin-1"), f"a {INSTRUCTIONS[0]}{INSTRUCTIONS[0]} 1 {INSTRUCTIONS[1]}"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_digits_operations_and_words_are_tokens(tokenizer):
    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text)]

    assert pieces("34 + 12 = 46\nAnswer: 46") == [*"34", " + ", *"12", " = ", *"46", "\n", "Answer: ", *"46"]
    assert pieces(" These are 34 apples.\n\n") == [" These", " are ", "3", "4", " apples", ".", "\n", "\n"]
    for name in NAMES:
        assert pieces(f" {name}, {name}'s 4.") == [f" {name}", ",", f" {name}'s ", "4", "."]


@pytest.mark.parametrize(("sentences", "fewest", "mean", "most"), [(LONG, 400, 540, 680), (SHORT, 50, 113, 170)])
def test_prompts_have_the_intended_length(tokenizer, sentences, fewest, mean, most):
    texts = [p.text for p in long_math.generate("train", 400, sentences=sentences)]
    prompts = prompt_ids(tokenizer, texts)
    lengths = [len(prompt) for prompt in prompts]
    assert fewest <= min(lengths) and max(lengths) <= most
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.06)
    for prompt, text in zip(prompts[:20], texts, strict=False):
        expected = f"<|im_start|>user\n{dapo_prompt(text)}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(prompt) == expected
        assert all(tokenizer.convert_tokens_to_ids(instruction) in prompt for instruction in INSTRUCTIONS)
