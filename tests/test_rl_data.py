"""Data sets: the row schema, its check, and the prompt that every reader gets."""

import copy
import json
import os
import re
from pathlib import Path

import pytest

from rl import data
from rl.data import DataError, dapo_prompt, load_rows, problem_rows, validate_rows, write_rows
from rl.reward import as_integer, score

FIXTURE = Path(__file__).parent / "fixtures" / "dapo_rows.jsonl"
"""Written for these tests; see test_rl_prepare.py."""

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


def test_every_row_asks_for_the_answer_line_once_whatever_its_form(tmp_path):
    """Evaluation must ask as training does, which reads the rows of `prepare`."""
    system, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": dapo_prompt("2 + 2?")}
    rows = [GOOD, changed("prompt", [system, *GOOD["prompt"]]), changed("prompt", [asked])]
    write_rows(rows, tmp_path / "rows.parquet")
    plain, with_system, had_it = problem_rows(tmp_path / "rows.parquet")
    assert plain["prompt"] == [{"role": "user", "content": dapo_prompt("What is 1 + 1?")}]
    assert with_system["prompt"] == [system, *plain["prompt"]] and had_it["prompt"] == [asked]
    assert {**plain, "prompt": GOOD["prompt"]} == GOOD
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "What is 1 + 1?", "answer": "2"}))
    assert problem_rows(tmp_path / "rows.jsonl")[0]["prompt"] == plain["prompt"]


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
    rows = problem_rows(path)
    assert len(rows) == SETS[name]
    return [(row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]) for row in rows]


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
        for row in load_rows(path)[:200]:
            gold = row["reward_model"]["ground_truth"]
            assert data.asks_for_answer_line(row["prompt"][-1]["content"]), path
            assert score(f"Answer: {gold}<|im_end|>", gold).correct


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"question": "caf\xe9", "answer": 1}', "line 1 is not UTF-8"),
        (b'{"question": "1 \\ud800", "answer": 1}', "lone surrogate"),
        (b'{"question": "1 + 1", "answer": NaN}', "answer is nan"),
        (b'{"question": "1 + 1", "answer": true}', "answer is True"),
        (b'{"question": "1 + 1", "answer": {"x": 1}}', "answer is {'x': 1}"),
    ],
)
def test_a_damaged_line_is_one_message(tmp_path, line, problem):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line)
    with pytest.raises(DataError, match=re.escape(problem)) as caught:
        problem_rows(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_byte_order_mark_is_no_damage(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "1 + 1", "answer": 2}')
    assert problem_rows(path)[0]["reward_model"]["ground_truth"] == "2"
