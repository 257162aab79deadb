"""The preparation of DAPO's rows for verl: what is dropped, what is added, and the counts."""

import json
import os
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
from test_rl_data import FIXTURE, GOOD, changed
from tiny_model import QUANTISED
from transformers import AutoTokenizer

from rl.data import DAPO_PREFIX, DAPO_SUFFIX, DataError, dapo_prompt, load_rows, validate_rows, write_rows
from rl.prepare import PrepareReport, drop_long, float_damaged, near_key, prepare
from rl.reward import score

# FIXTURE: 12 rows with 3 duplicates (one whose answer is written "025", one that already has the instruction) and 3
# rows of one problem whose answers contradict each other.


def test_prepare(tmp_path):
    report = prepare(FIXTURE, tmp_path / "out.parquet")
    assert (report.read, report.written, report.duplicates, report.contradicting) == (12, 6, 3, 3)
    assert report.instruction_added == 5  # the sixth had it
    assert "12 rows read, 6 written; dropped 3 duplicates, 3 with contradicting answers" in str(report)
    rows = load_rows(tmp_path / "out.parquet")
    validate_rows(rows, "out.parquet")
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 3, 4, 5, 10]
    for row in rows:
        (message,) = row["prompt"]
        assert message["content"].startswith(DAPO_PREFIX) and message["content"].endswith(DAPO_SUFFIX)
        assert message["content"].count("of the form Answer:") == 1
        assert score(f"Answer: {row['reward_model']['ground_truth']}", row["reward_model"]["ground_truth"]).correct
    assert rows[3]["prompt"][0]["content"] == dapo_prompt("一个长方形长 5 米,宽 3 米。它的面积是多少平方米?")


def test_prepare_is_idempotent(tmp_path):
    prepare(FIXTURE, tmp_path / "once.parquet")
    report = prepare(tmp_path / "once.parquet", tmp_path / "twice.parquet")
    assert (report.read, report.written, report.instruction_added) == (6, 6, 0)
    assert load_rows(tmp_path / "once.parquet") == load_rows(tmp_path / "twice.parquet")


def test_prepare_keeps_the_system_message(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    write_rows([changed("prompt", [system, *GOOD["prompt"]])], tmp_path / "in.parquet")
    prepare(tmp_path / "in.parquet", tmp_path / "out.parquet")
    (row,) = load_rows(tmp_path / "out.parquet")
    assert row["prompt"] == [system, {"role": "user", "content": dapo_prompt("What is 1 + 1?")}]


def test_prepare_refuses_and_writes_nothing(tmp_path):
    write_rows([GOOD, changed("reward_model.ground_truth", "")], tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r"in\.parquet: row 1: reward_model\.ground_truth is empty"):
        prepare(tmp_path / "in.parquet", tmp_path / "out.parquet")
    write_rows([GOOD, changed("reward_model.ground_truth", "3")], tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r"nothing is left \(2 contradicting\)"):
        prepare(tmp_path / "in.parquet", tmp_path / "out.parquet")
    with pytest.raises(DataError, match=r"name it \.parquet"):
        prepare(FIXTURE, tmp_path / "out.csv")
    assert not (tmp_path / "out.parquet").exists()


def test_datasets_reads_what_prepare_writes(tmp_path):
    """verl reads training files with the datasets package."""
    prepare(FIXTURE, tmp_path / "out.parquet")
    loaded = datasets.load_dataset("parquet", data_files=str(tmp_path / "out.parquet"), cache_dir=str(tmp_path))
    assert loaded["train"][0]["reward_model"] == {"ground_truth": "84", "style": "rule"}
    assert pq.read_schema(tmp_path / "out.parquet").names[:2] == ["data_source", "prompt"]


@pytest.mark.parametrize(
    ("answer", "damaged"),
    [
        ("22099999999999998951424", True),  # 2.21e22
        ("9007199254740993", False),  # 2^53 + 1 is no double
        ("9007199254740992", False),  # 2^53 is still exact
        ("100000000000000000000", False),  # a round number
        ("-22099999999999998951424", True),
        ("12", False),
        ("\\frac{1}{2}", False),
    ],
)
def test_integers_that_went_through_a_float(answer, damaged):
    assert float_damaged(answer) == damaged


def test_problems_of_evaluation_sets_are_kept_out(tmp_path):
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    rows.append({"question": "Big?", "answer": "22099999999999998951424"})
    train, held_out = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out.write_text(json.dumps({"problem": "What is  2 + 2 ?", "answer": 4}) + "\n")
    report = prepare(train, tmp_path / "out.parquet", [held_out])
    assert (report.read, report.written, report.contaminated, report.damaged) == (5, 3, 1, 1)
    assert "2 + 2" not in str(load_rows(tmp_path / "out.parquet"))


def lines(path: Path, rows: list[tuple[str, str]]) -> Path:
    """Write (question, answer) rows."""
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return path


LONG = "Let ABC be an acute triangle with sides of lengths 13, 14, 15, let D be the foot of the altitude from A to BC; "


def test_a_problem_that_begins_like_one_of_an_evaluation_set_is_kept_out_and_counted_apart(tmp_path):
    rows = [(LONG + "find AD.", "12"), (LONG + "find $AD+1$.", "13"), (LONG[:40], "1"), ("Short?", "1")]
    train = lines(tmp_path / "train.jsonl", [*rows, (LONG + "find $AD+1$.", "13")])
    against = lines(tmp_path / "test.jsonl", [("  " + LONG.upper() + "Find AD", "12"), ("Short?", "1")])
    report = prepare(train, tmp_path / "out.parquet", [against])
    assert report == PrepareReport(5, 1, contaminated=2, contaminated_by_prefix=1, duplicates=1, instruction_added=1), (
        "less than 80 letters and digits must be equal as a whole"
    )
    assert "2 of the evaluation sets and 1 that begin like one" in str(report)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $x$ if $x + 1 = 2$.", "find \\(x\\) if\n\\[x+1=2\\]"),
        ("How many of $20$ are even?", "How many of 20 are even"),
        ("Let $f(1, 2) = \\left(a+b\\right)$;  find it", "Let f(1,2)=(a+b), find it."),
        ("A \u201cword\u201d is $3\u2212x$.", 'A "word" is 3-x'),
        (dapo_prompt("One, two?"), "One two"),
    ],
)
def test_layout_makes_no_problem(one, other):
    assert near_key(one) == near_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("$a+b$", "$a-b$"),
        ("$(a+b)c$", "$a+bc$"),
        ("$1.5$", "$15$"),
        ("$x=.5$", "$x=5$"),
        ("1, 2", "12"),
        ("$1 2$", "$12$"),
        ("2:3", "23"),
        ("$x^{12}$", "$x^{1}2$"),
        ("$n!$", "$n$"),
        ("$f'(x)$", "$f(x)$"),
        ("$a < b$", "$a > b$"),
        ("$a/b$", "$ab$"),
    ],
)
def test_what_means_something_is_no_layout(one, other):
    assert near_key(one) != near_key(other)


def test_near_copies_are_dropped_and_contradicting_ones_on_both_sides(tmp_path):
    rows = [("Find $a+b$.", "3"), ("Find a + b", "03"), ("Find $a-b$.", "3")]  # one copy; another problem
    rows += [("Is $5$ prime?", "1"), ("Is 5 prime", "2"), ("is 5 prime?", "1")]  # a contradiction of three
    rows += [("How many?", "1"), ("How many?", "2"), ("how many", "1")]  # the first two in so many words
    rows += [("Large?", "22099999999999998951424"), ("large", "7")]  # a damaged answer contradicts nothing
    report = prepare(lines(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet")
    assert report == PrepareReport(
        11, 3, contradicting=2, damaged=1, near_copies=1, near_contradicting=4, instruction_added=3
    )
    assert "1 near-copies and 4 near-copies with contradicting answers" in str(report)
    kept = [row["prompt"][0]["content"] for row in load_rows(tmp_path / "out.parquet")]
    assert kept == [dapo_prompt("Find $a+b$."), dapo_prompt("Find $a-b$."), dapo_prompt("large")]


def test_the_counts_of_the_public_set(tmp_path):
    """Of the file that MasterVito/SvS publishes; see docs/benchmarks.md."""
    folder = Path(os.environ.get("LOCKSTEP_DATA", "data"))
    names = ("dapo_math_17k.parquet", "math500.jsonl", "aime24_int.jsonl", "aime25_int.jsonl", "gsm8k_test.jsonl")
    if not all((folder / name).is_file() for name in names):
        pytest.skip(f"not all of {', '.join(names)} in {folder} (LOCKSTEP_DATA)")
    source, *against = (folder / name for name in names)
    report = prepare(source, tmp_path / "out.parquet", against)
    exact = {"contradicting": 22, "damaged": 3, "duplicates": 616, "contaminated": 8, "contaminated_by_prefix": 9}
    near = {"near_contradicting": 27, "near_copies": 832}
    assert report == PrepareReport(17917, 16400, **exact, **near, instruction_added=16400)


# ---- sets on the Hub -------------------------------------------------------------------------------------------------


def on_the_hub(monkeypatch, rows: list[dict]) -> list[tuple]:
    """Let `datasets` give `rows` for whatever is asked; the returned list notes what that was."""
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((*args, kwargs["split"]))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_set_on_the_hub_is_read_in_verls_schema_and_by_its_short_name(tmp_path, monkeypatch):
    """The Hub's DAPO-Math-17k holds every problem a hundred times, each copy with an index of its own."""
    rows = [{**GOOD, "extra_info": {"index": f"{copy}-{n}"}} for copy in range(100) for n in range(2)]
    asked = on_the_hub(monkeypatch, rows)
    report = prepare("dapo_math_17k", tmp_path / "out.parquet")
    assert asked == [("BytedTsinghua-SIA/DAPO-Math-17k", None, "train")]
    assert (report.read, report.written, report.duplicates) == (200, 1, 199)
    (row,) = load_rows(tmp_path / "out.parquet")
    assert row["extra_info"] == {"index": "0-0"}


def test_question_and_answer_sets_on_the_hub_and_sets_to_keep_out(tmp_path, monkeypatch):
    asked = on_the_hub(monkeypatch, [{"question": f"{n} + {n}?", "answer": f"so\n#### {2 * n}"} for n in range(3)])
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"problem": "1 + 1?", "answer": "2"}) + "\n")
    report = prepare("openai/gsm8k", tmp_path / "out.parquet", [held_out], subset="main", split="test")
    assert asked == [("openai/gsm8k", "main", "test")] and (report.written, report.contaminated) == (2, 1)
    assert [row["reward_model"]["ground_truth"] for row in load_rows(tmp_path / "out.parquet")] == ["0", "4"]
    asked.clear()
    prepare(FIXTURE, tmp_path / "again.parquet", against=["gsm8k_test"])
    assert asked == [("openai/gsm8k", "main", "test")]


def test_what_is_no_set_is_one_line(tmp_path, monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nand a second line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    for source, words in (
        ("no_such_name", "one of dapo_math_17k"),
        ("a/b/c", "one of dapo_math_17k"),
        ("owner/name", "owner/name (default, split train): cannot be loaded from the Hub (Couldn't reach the Hub)"),
    ):
        with pytest.raises(DataError) as caught:
            prepare(source, tmp_path / "out.parquet")
        assert words in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_prompts_beyond_the_limit_are_dropped_and_counted(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(QUANTISED)
    path = tmp_path / "out.parquet"
    prepare(FIXTURE, path)
    before = load_rows(path)
    lengths = [
        len(tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True, return_dict=False))
        for row in before
    ]
    assert drop_long(path, max(lengths), tokenizer) == 0 and load_rows(path) == before
    limit = sorted(lengths)[3]
    assert drop_long(path, limit, tokenizer) == sum(length > limit for length in lengths) > 0
    assert load_rows(path) == [row for row, length in zip(before, lengths, strict=True) if length <= limit]
    with pytest.raises(DataError, match=f"max_prompt_length = 3: the shortest prompt has {min(lengths)} tokens"):
        drop_long(path, 3, tokenizer)
