"""Evaluation: the estimators against brute force, intervals, comparisons, and bad input in one line."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl import evaluate
from rl.config import ConfigError, load_recipe
from rl.data import DataError, problem_rows
from rl.reward import score

ROOT = Path(__file__).resolve().parent.parent


def sample(problem: int, index: int, answer: str | None, gold: str = "7", error: str | None = None) -> evaluate.Sample:
    correct = score(f"Answer: {answer}", gold).correct
    return evaluate.Sample(problem, index, f"Answer: {answer}", answer, gold, correct, error, 5)


@pytest.mark.parametrize(("count", "correct", "k"), [(4, 1, 2), (6, 2, 3), (5, 0, 2), (5, 5, 4), (8, 7, 2), (8, 3, 8)])
def test_pass_at_k_is_the_mean_over_all_subsets(count, correct, k):
    flags = [True] * correct + [False] * (count - correct)
    brute = np.mean([any(subset) for subset in itertools.combinations(flags, k)])
    assert evaluate.pass_at(count, correct, k) == pytest.approx(brute)


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        (["7", "7", "3", "3"], 4, 1.0),  # a tie goes to the answer seen first
        (["3", "3", "7", "7"], 4, 0.0),
        (["7", "3", "7", "7"], 2, 1.0),
        (["3", "7", "7", "7"], 2, 0.5),
        ([None, None, "7", None], 4, 1.0),  # no answer is no vote
        ([None, None], 2, 0.0),
        (["3", "3", "7", "007", "7.0"], 5, 1.0),  # three ways to write one answer
        (["7", "7", "3", "03", "3.0"], 5, 0.0),  # wrong ones too
    ],
)
def test_majority(answers, k, expected):
    assert evaluate.majority_at([sample(0, i, answer) for i, answer in enumerate(answers)], k) == expected


def test_figures_count_every_problem_once_and_errors_apart():
    judged = [sample(0, i, "7") for i in range(4)]
    judged += [sample(1, 0, "7"), sample(1, 1, "3"), sample(1, 2, None), sample(1, 3, "x", error="timeout")]
    result = evaluate.figures(judged, 4)
    means = {name: value["mean"] for name, value in result["figures"].items()}
    assert means == pytest.approx({"avg@4": 0.625, "pass@2": 0.75, "maj@2": 0.75, "pass@4": 1.0, "maj@4": 1.0})
    assert (result["no_answer"], result["errors"], result["tokens"]) == (1, {"timeout": 1}, 5.0)


@pytest.mark.parametrize(("count", "ks"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (12, [2, 4, 8, 12])])
def test_k_goes_up_to_the_number_of_samples(count, ks):
    found = evaluate.figures([sample(0, i, "7") for i in range(count)], count)["figures"]
    assert list(found) == [f"avg@{count}", *(f"{name}@{k}" for k in ks for name in ("pass", "maj"))]


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        found = evaluate.intervals((rng.random(60) < 0.4).astype(float), seed=trial)
        hits += found["low"] <= 0.4 <= found["high"]
    assert 0.89 <= hits / 200 <= 0.99
    assert evaluate.intervals([1.0, 1.0]) == {"mean": 1.0, "low": 1.0, "high": 1.0}


# ---- data ----------------------------------------------------------------------------------------------------------


def test_question_and_answer_files_get_the_prompt_that_the_reward_reads(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}, {"problem": "2?", "answer": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = problem_rows(path)
    assert first["reward_model"]["ground_truth"] == "7" and second["reward_model"]["ground_truth"] == "2"
    assert "What is 3 + 4?" in first["prompt"][0]["content"] and 'after "Answer:"' in first["prompt"][0]["content"]
    path.write_text(json.dumps({"text": "no question"}) + "\n")
    with pytest.raises(DataError, match="row 0: has neither prompt nor question and answer"):
        problem_rows(path)


# ---- command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either --config or --compare"),
        (["--config", "tiny_math.yaml", "--samples", "0"], "must be 1 or more"),
        (["--config", "tiny_math.yaml", "--samples", "2", "--greedy"], "greedy decoding gives one answer"),
        (["--config", "tiny_math.yaml", "--adapter", "nowhere"], "--adapter nowhere: no adapter_config.json"),
        (["--config", "tiny_math.yaml", "--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--config", "tiny_math.yaml", "--data", "aime_2024"], "prepare_data.py aime_2024 data/aime_2024.parquet"),
        (["--config", "tiny_math.yaml", "--data", "nowhere"], "nowhere.parquet: no such file"),
        (["--config", "tiny_math.yaml", "--out", "assets"], "is not an empty folder"),
        (["--compare", "assets", "docs"], "--compare assets: no result.json"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, words):
    command = [sys.executable, "scripts/evaluate.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_prompt_that_is_too_long_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys):
    """Without an engine: the prompts are counted before one is started."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "tiny_math" / "bf16")
    monkeypatch.setattr(evaluate, "sample", lambda recipe, _adapter, rows, *_: evaluate.encode(recipe, rows, tokenizer))
    path = tmp_path / "long.jsonl"
    questions = ["What is 3 + 4?", "Tom has 12 apples. " * 40, "Tom has 3 apples. " * 80]
    path.write_text("".join(json.dumps({"question": text, "answer": "7"}) + "\n" for text in questions))
    arguments = ["--config", "tiny_math.yaml", "--data", str(path), "--out", str(tmp_path / "out")]
    assert evaluate.main(arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "2 of 3 prompts are longer than data.max_prompt_length" in message
    remedy = message.split()[-1]
    assert remedy.startswith("data.max_prompt_length=")
    recipe = load_recipe("tiny_math", [remedy])
    assert max(map(len, evaluate.encode(recipe, problem_rows(path), tokenizer))) == recipe.data.max_prompt_length


def test_only_evaluations_of_the_same_problems_are_compared(tmp_path):
    result = evaluate.figures([sample(0, 0, "7"), sample(1, 0, "3")], 1) | {"data": "a", "folder": "one"}
    better = evaluate.figures([sample(0, 0, "7"), sample(1, 0, "7")], 1) | {"data": "a", "folder": "two"}
    assert "+50.0" in evaluate.compare(result, better)
    with pytest.raises(ConfigError, match="compare evaluations of the same problems"):
        evaluate.compare(result, better | {"data": "b"})


@pytest.mark.slow
def test_the_tiny_model_knows_more_than_it_says(tmp_path):
    command = [sys.executable, "scripts/evaluate.py", "--config", "tiny_math.yaml", "--limit", "64"]
    for name, more in (("sampled", ["--samples", "4"]), ("greedy", ["--greedy"])):
        done = subprocess.run(
            [*command, *more, "--out", str(tmp_path / name)], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    sampled, greedy = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("sampled", "greedy"))
    assert 0.3 < sampled["figures"]["avg@4"]["mean"] < 0.6 and sampled["figures"]["pass@4"]["mean"] > 0.8
    assert greedy["figures"]["avg@1"]["mean"] > 0.85
    assert len((tmp_path / "sampled" / "samples.jsonl").read_text().splitlines()) == 256
