"""Data sets: the row schema, its check, and the preparation of DAPO's rows for verl."""

import copy
import json
import os
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest

from rl import data
from rl.data import DAPO_PREFIX, DAPO_SUFFIX, DataError, dapo_prompt, load_rows, prepare, validate_rows, write_rows
from rl.reward import as_integer, score

FIXTURE = Path(__file__).parent / "fixtures" / "dapo_rows.jsonl"
"""Written for these tests: 12 rows with 3 duplicates (one whose answer is written "025", one that already has the
instruction) and 3 rows of one problem whose answers contradict each other."""

GOOD = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 0},
}


def changed(path: str, value) -> dict:
    """``GOOD`` with one field replaced, or removed if ``value`` is ...; ``path`` is like "prompt.0.role"."""
    row = copy.deepcopy(GOOD)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target = row
    for part in parents:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return row


def test_good_rows_pass():
    validate_rows([GOOD], "x.parquet")
    validate_rows([changed("extra_info", ...), changed("ability", ...)], "x.parquet")
    validate_rows([changed("prompt", [{"role": "system", "content": "Be brief."}, *GOOD["prompt"]])], "x.parquet")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (changed("reward_model.ground_truth", ...), "reward_model.ground_truth is missing; add the gold answer"),
        (changed("reward_model.ground_truth", None), "reward_model.ground_truth is missing"),
        (changed("reward_model.ground_truth", "  "), "reward_model.ground_truth is empty"),
        (changed("reward_model.ground_truth", 2), "reward_model.ground_truth is int 2, expected str"),
        (changed("reward_model", ...), "reward_model is missing"),
        (changed("reward_model", "2"), "reward_model is str '2', expected dict"),
        (changed("prompt", ...), "prompt is missing"),
        (changed("prompt", []), "prompt is empty"),
        (changed("prompt", "What is 1 + 1?"), "prompt is str 'What is 1 + 1?', expected list"),
        (changed("prompt", ["What?"]), "prompt[0] is str 'What?', expected dict"),
        (changed("prompt.0.content", ""), "prompt[0].content is empty"),
        (changed("prompt.0.role", ...), "prompt[0].role is missing"),
        (changed("prompt.0.role", "assistant"), "prompt ends with role 'assistant', expected user"),
        (changed("data_source", ...), "data_source is missing"),
        (changed("extra_info", 3), "extra_info is int 3, expected dict"),
        ("text", "is str, expected an object"),
    ],
)
def test_a_bad_row_is_one_clear_line(row, message):
    with pytest.raises(DataError) as caught:
        validate_rows([GOOD, row], "some/train.parquet")
    text = str(caught.value)
    assert text.startswith("some/train.parquet: row 1: ") and message in text
    assert "\n" not in text and isinstance(caught.value, ValueError)


def test_an_empty_data_set_is_refused():
    with pytest.raises(DataError, match=r"x\.parquet: no rows"):
        validate_rows([], "x.parquet")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "broken.jsonl").write_text(json.dumps(GOOD) + "\n{oops\n")
    for name, message in [
        ("missing.parquet", "no such file"),
        ("table.csv", "is a .parquet or .jsonl file"),
        ("broken.parquet", "not a readable parquet file"),
        ("broken.jsonl", "line 2 is not JSON"),
    ]:
        with pytest.raises(DataError) as caught:
            load_rows(tmp_path / name)
        assert message in str(caught.value) and name in str(caught.value) and "\n" not in str(caught.value)


def test_both_formats_give_the_same_rows(tmp_path):
    rows = load_rows(FIXTURE)
    validate_rows(rows, FIXTURE)
    write_rows(rows, tmp_path / "deep" / "rows.parquet")
    assert load_rows(tmp_path / "deep" / "rows.parquet") == rows
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rows.parquet"]  # nothing half-written is left


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
    with pytest.raises(DataError, match="nothing is left: 2 rows contradict each other"):
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
    assert data.float_damaged(answer) == damaged


def test_problems_of_evaluation_sets_are_kept_out(tmp_path):
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    rows.append({"question": "Big?", "answer": "22099999999999998951424"})
    train, held_out = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out.write_text(json.dumps({"problem": "What is  2 + 2 ?", "answer": 4}) + "\n")
    report = data.prepare(train, tmp_path / "out.parquet", [held_out])
    assert (report.read, report.written, report.contaminated, report.damaged) == (5, 3, 1, 1)
    assert "2 + 2" not in str(data.load_rows(tmp_path / "out.parquet"))


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


# ---- the prompt asks for what the parser reads -----------------------------------------------------------------------

SETS = {
    "gsm8k_test": 1319,
    "gsm8k_train": 7473,
    "math500": 500,
    "aime24": 30,
    "aime24_int": 30,
    "aime25_int": 30,
    "dapo_math_17k": 17917,
}
"""Public files by name, with their rows: not part of this repository; LOCKSTEP_DATA names the folder that has them."""


def gold_answers(name: str) -> list[tuple[str, str]]:
    """(prompt, gold answer) of a set as training and evaluation would see it; skips the test without the file."""
    folder = Path(os.environ.get("LOCKSTEP_DATA", "data"))
    path = next((path for path in folder.glob(f"{name}.*") if path.suffix in (".jsonl", ".parquet")), None)
    if path is None:
        pytest.skip(f"no {name} in {folder} (LOCKSTEP_DATA)")
    rows = data.problem_rows(path)
    assert len(rows) == SETS[name]
    return [(data._with_answer_line(data._messages(row))[-1][1], row["reward_model"]["ground_truth"]) for row in rows]


@pytest.mark.parametrize("name", SETS)
def test_every_gold_answer_written_as_the_prompt_asks_is_accepted(name):
    for prompt, gold in gold_answers(name):
        assert prompt.count("of the form Answer: $Answer") == 1 and prompt.count('after "Answer:"') == 1
        for response in (f"So it is.\n\nAnswer: {gold}<|im_end|>", f"So it is \\boxed{{{gold}}}."):
            assert score(response, gold).correct, (response, gold)


@pytest.mark.parametrize("name", [name for name in SETS if name != "math500"])
def test_no_integer_that_is_off_by_one_is_accepted(name):
    for _, gold in gold_answers(name):
        number = int(as_integer(gold))
        for wrong in (number - 1, number + 1):
            assert not score(f"Answer: {wrong}", gold).correct, (wrong, gold)


def test_the_projects_own_sets_keep_the_contract():
    for path in sorted((Path(__file__).parent.parent / "assets").glob("*/*.parquet")):
        for row in data.problem_rows(path)[:200]:
            gold = row["reward_model"]["ground_truth"]
            assert data.asks_for_answer_line(row["prompt"][-1]["content"]), path
            assert score(f"Answer: {gold}<|im_end|>", gold).correct
