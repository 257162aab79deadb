"""The tiny model: its problems, its tokenizer, its training, and the checkpoint that is committed."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from rl import tiny_math
from rl.data import dapo_prompt, load_rows, validate_rows
from rl.models import tiny_assets
from rl.models.tiny import END, VOCAB_SIZE, build_model, build_tokenizer, evaluate, generate, prompt_ids
from rl.models.tiny_training import IGNORE, Muon, Plan, _orthogonal, calculations, demonstrations, losses, train
from rl.reward import extract_answer, score

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "assets" / "tiny_math"
SCRIPT = ROOT / "scripts" / "make_tiny_model.py"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Products of this size gain nothing from threads, and lose much where other work shares the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / "bf16")


def canonical(problem: tiny_math.Problem) -> tuple:
    """The numbers of a problem without the order that does not matter."""
    free = tiny_math.KINDS[problem.kind].commutative
    return problem.kind, *sorted(problem.operands[:free]), *problem.operands[free:]


# ---- problems


def test_splits_share_no_text_and_no_numbers():
    train_problems = tiny_math.generate("train", 4000, seed=0) + tiny_math.generate("train", 2000, seed=5)
    held_out = tiny_math.generate("test", 500, seed=0) + tiny_math.generate("test", 200, seed=7)
    assert not {p.text for p in train_problems} & {p.text for p in held_out}
    assert not {canonical(p) for p in train_problems} & {canonical(p) for p in held_out}
    assert {p.kind for p in held_out} == {p.kind for p in train_problems} == set(tiny_math.KINDS)


def test_generation_is_seeded_and_without_repeats():
    problems = tiny_math.generate("train", 300, seed=3)
    assert problems == tiny_math.generate("train", 300, seed=3) != tiny_math.generate("train", 300, seed=4)
    assert len({p.text for p in problems}) == 300
    with pytest.raises(ValueError, match="split must be one of train, test, got 'dev'"):
        next(tiny_math.stream("dev", 0))


def test_worked_solutions_are_right():
    for problem in tiny_math.generate("train", 500) + tiny_math.generate("test", 200):
        *steps, last = tiny_math.worked_solution(problem).split("\n")
        for step in steps:
            left, right = step.split(" = ")
            assert eval(left) == int(right)
        assert last == f"Answer: {problem.answer}" and steps[-1].endswith(f"= {problem.answer}")
        assert problem.answer >= 0
        assert all(str(number) in problem.text for number in problem.operands)


def test_about_half_of_the_demonstrations_are_wrong_and_errors_are_spread():
    rng = random.Random(0)
    problems = tiny_math.generate("train", 3000)
    wrong, first_wrong_line = 0, {0: 0, 1: 0, 2: 0}
    for problem in problems:
        lines = tiny_math.demonstration(problem, rng).split("\n")
        right_lines = tiny_math.worked_solution(problem).split("\n")
        assert extract_answer(lines[-1]) is not None
        if lines != right_lines:
            wrong += not score(lines[-1], str(problem.answer)).correct
            first_wrong_line[next(i for i, line in enumerate(lines) if line != right_lines[i])] += 1
    assert 0.45 < wrong / len(problems) < 0.60
    assert min(first_wrong_line.values()) > 0.1 * wrong


def test_rows_have_the_schema_and_the_committed_files_are_these_rows():
    for split, count in (("train", tiny_assets.TRAIN_ROWS), ("test", tiny_assets.TEST_ROWS)):
        rows = load_rows(ASSETS / f"{split}.parquet")
        validate_rows(rows, f"{split}.parquet")
        seed = json.loads((ASSETS / "training.json").read_text())["plan"]["seed"]
        assert rows == tiny_math.to_rows(tiny_math.generate(split, count, seed), split)


# ---- tokenizer


def test_round_trip_of_any_text(tokenizer):
    texts = [
        dapo_prompt("Tom has 12 apples.\n\n\nHow many  are\tleft? "),
        "12 + 30 = 42\nAnswer: 42",
        "Ünïcödé, 一个长方形, \U0001f642 and \\frac{1}{2}$x^2$ ",
        bytes(range(1, 128)).decode(),
        "<|im_start|>user\nhi<|im_end|>\n",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_and_digits(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == VOCAB_SIZE
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, "<|endoftext|>")
    for text in ("1234567890", "\n\n\n"):
        assert len(tokenizer.encode(text)) == len(text)  # a token a digit, a token a line break
    assert tokenizer.encode("12 + 30 = 42") == [
        token for part in ("1", "2", " + ", "3", "0", " = ", "4", "2") for token in tokenizer.encode(part)
    ]


def test_prompts_and_responses_are_short(tokenizer):
    problems = tiny_math.generate("train", 200) + tiny_math.generate("test", 100)
    prompts = prompt_ids(tokenizer, [p.text for p in problems])
    assert max(map(len, prompts)) <= 45
    assert max(len(tokenizer.encode(tiny_math.worked_solution(p))) for p in problems) <= 35
    text = tokenizer.decode(prompts[0])
    assert text == f"<|im_start|>user\n{dapo_prompt(problems[0].text)}<|im_end|>\n<|im_start|>assistant\n"


def test_the_tokenizer_is_made_again_bit_for_bit(tokenizer):
    again = build_tokenizer(0).backend_tokenizer.to_str()
    assert json.loads(again)["model"] == json.loads(tokenizer.backend_tokenizer.to_str())["model"]


# ---- training


def test_loss_is_on_results_and_on_responses_only(tokenizer):
    batch = next(calculations(tokenizer, seed=0, batch_size=4))
    shown = tokenizer.decode(batch.labels[batch.labels != IGNORE])
    assert set(shown) <= set("0123456789\n") and batch.input_ids.shape == batch.labels.shape == (4, 48)
    batch = next(demonstrations(tokenizer, seed=0, batch_size=4, slip_rate=0.0))
    for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
        response = tokenizer.decode(labels[labels != IGNORE])
        assert response.endswith(END) and "Answer: " in response and "user" not in response
        inside = (labels[:-1] != IGNORE) & (labels[:-1] != tokenizer.eos_token_id)
        assert torch.equal(ids[1:][inside], labels[:-1][inside])  # each label is the next token


def test_orthogonal_updates():
    stacked = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    singular_values = torch.linalg.svdvals(_orthogonal(stacked))
    assert singular_values.min() > 0.5 and singular_values.max() < 1.5
    assert torch.allclose(_orthogonal(stacked)[1], _orthogonal(stacked[1]), atol=1e-5)  # each matrix by itself
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    parameter.grad = torch.eye(4)
    Muon([parameter], lr=0.1, weight_decay=0.0).step()
    assert torch.allclose(parameter.diagonal(), torch.full((4,), -0.1), atol=0.05)


def test_training_lowers_the_loss_and_is_seeded(tokenizer):
    plan = replace(Plan(), steps=8, batch_size=4)
    held = next(demonstrations(tokenizer, seed=99, batch_size=32, slip_rate=0.0))
    results = []
    for _ in range(2):
        model = build_model(tokenizer, seed=0)
        before = losses(model, held)[0].item()
        summary = train(model, tokenizer, plan, show_progress=False)
        results.append(losses(model, held)[0].item())
    assert results[0] < before - 1.0
    assert results[0] == pytest.approx(results[1], rel=1e-3)
    assert summary["steps"] == 8 and summary["tokens"] > 8 * 4 * 30


def test_minutes_end_the_training(tokenizer):
    model = build_model(tokenizer, seed=0)
    plan = replace(Plan(), steps=10_000, batch_size=2)
    assert train(model, tokenizer, plan, minutes=0.02, show_progress=False)["steps"] < 500


# ---- the committed checkpoint


def test_committed_files_are_small_and_complete():
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    assert {path.name for path in ASSETS.iterdir()} == tiny_assets.CONTENTS


@pytest.mark.parametrize("name", [tiny_assets.BF16, tiny_assets.QUANTISED])
def test_the_committed_model_knows_more_than_it_says(name, tokenizer):
    model = tiny_assets.load_plain(ASSETS / name)
    assert 2_000_000 <= model.num_parameters() <= 6_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.num_local_experts, model.config.num_experts_per_tok) == (8, 2)
    accuracy = evaluate(model, tokenizer, tiny_math.generate("test", 64), samples=1)
    assert accuracy.greedy >= 0.85
    assert 0.25 <= accuracy.sampled <= 0.65  # 64 samples: two standard deviations around 35-50 %
    recorded = json.loads((ASSETS / "training.json").read_text())[name]
    assert recorded["greedy"] >= 0.75 and 0.35 <= recorded["sampled"] <= 0.50


def test_generation_does_not_depend_on_the_batch(tokenizer):
    model = tiny_assets.load_plain(ASSETS / tiny_assets.BF16)
    prompts = prompt_ids(tokenizer, [p.text for p in islice(tiny_math.stream("test", 1), 6)])
    together = generate(model, prompts, temperature=0.0)
    assert together == [generate(model, [prompt], temperature=0.0)[0] for prompt in prompts]
    assert all(ids[-1] == tokenizer.eos_token_id for ids in together)


# ---- the script


def test_a_target_is_refused_or_replaced_whole(tmp_path, monkeypatch):
    out = tmp_path / "tiny"
    monkeypatch.setattr(tiny_assets, "_fill", lambda folder, *_: (folder / "training.json").write_text("1"))
    tiny_assets.make_assets(out, Plan())
    with pytest.raises(FileExistsError, match="exists already; name another folder or add --overwrite"):
        tiny_assets.make_assets(out, Plan())

    def fail(folder, *_):
        (folder / "train.parquet").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_assets, "_fill", fail)
    with pytest.raises(KeyboardInterrupt):
        tiny_assets.make_assets(out, Plan(), overwrite=True)
    assert (out / "training.json").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    (out / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match=r"holds thesis\.tex, which is not this script's"):
        tiny_assets.check_target(out, overwrite=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "required: --out"),
        (["--out", "x", "--steps", "0"], "--steps: 0 is not above 0"),
        (["--out", "x", "--steps", "many"], "--steps: invalid int value: 'many'"),
        (["--out", "x", "--steps", "1", "--minutes", "1"], "not allowed with argument --steps"),
        (["--out", str(ASSETS)], "exists already"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(options, message):
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_help_has_examples():
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert "examples:" in done.stdout and "--overwrite" in done.stdout
