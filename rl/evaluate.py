"""Accuracy of a checkpoint, with or without an adapter, on the embedded engine: `scripts/evaluate.py` calls `main`.

Every sample is kept (samples.jsonl); the figures come with 95 % intervals by bootstrap over problems (`intervals`).
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from math import comb
from pathlib import Path

import numpy as np

from rl.check import engine_options, existing, libraries_in_log
from rl.config import ConfigError, Recipe, find_path, load_recipe, run_root, with_absolute_paths
from rl.data import DataError, chat_ids, problem_rows
from rl.hub import HUB_SETS
from rl.launch import Parser
from rl.preflight import preflight
from rl.progress import percent
from rl.reward import as_integer, score

EXAMPLES = """examples:
  python scripts/evaluate.py --config tiny_math.yaml
  python scripts/evaluate.py --config tiny_math.yaml --adapter runs/latest/adapter --samples 8
  python scripts/evaluate.py --config tiny_math.yaml --data my_problems.jsonl --greedy
  python scripts/evaluate.py --config dapo_math.yaml --data aime_2024 --samples 32
  python scripts/evaluate.py --compare runs/eval-base runs/eval-adapter

A data set is a parquet or jsonl file in verl's schema, or of {question, answer} objects; a plain name is a file
in data/ that scripts/prepare_data.py made.
exit status: 0 done, 2 bad usage, recipe or data"""

BOOTSTRAP = 2000


@dataclass(frozen=True)
class Sample:
    """One judged response."""

    problem: int
    sample: int
    response: str
    answer: str | None
    gold: str
    correct: bool
    error: str | None
    tokens: int


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; bad usage ends with exit 2."""
    parser = Parser("evaluate.py", "Sample answers to a data set with the embedded engine and judge them.", EXAMPLES)
    parser.add_argument("--config", metavar="NAME", help="recipe in recipes/, or a path to one")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="compare two evaluations instead")
    parser.add_argument("--adapter", metavar="DIR", help="adapter (default: the base alone)")
    parser.add_argument("--data", metavar="FILE", help="file or name (default: the recipe's held-out set)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="samples a problem (default: 1)")
    parser.add_argument("--greedy", action="store_true", help="temperature 0, one sample")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N problems")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: in the runs folder)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")
    args = parser.parse_intermixed_args(argv)
    if (args.config is None) == (args.compare is None):
        parser.error("give either --config or --compare")
    if args.samples < 1 or (args.limit is not None and args.limit < 1):
        parser.error("--samples and --limit must be 1 or more")
    if args.greedy and args.samples > 1:
        parser.error(f"--samples {args.samples} with --greedy: greedy decoding gives one answer; leave one out")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parse(argv)
    try:
        if args.compare:
            print(compare(*(load(folder) for folder in args.compare)))
            return 0
        recipe = load_recipe(args.config, args.overrides)
        preflight(recipe)
        adapter = existing(args.adapter, "--adapter", "adapter_config.json")
        data = data_file(args.data or recipe.data.val)
        rows = problem_rows(data)[: args.limit]
        out = output_folder(recipe, args.out)
    except (ConfigError, DataError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    samples, refused = args.samples, None
    print(f"{recipe.name}: {len(rows)} problems of {data.name}, {samples} sample(s) each", flush=True)
    started = time.monotonic()
    with libraries_in_log() as log:
        try:
            responses = sample(with_absolute_paths(recipe), adapter, rows, samples, args.greedy)
        except ConfigError as error:  # printed below: here it would go to the log
            refused = error
    log.unlink()
    if refused is not None:
        out.rmdir()  # nothing was written
        print(f"evaluate.py: {refused}", file=sys.stderr)
        return 2
    judged = judge(rows, responses)
    result = {
        "schema": 1,
        "recipe": recipe.name,
        "model": recipe.model.path,
        "adapter": args.adapter,
        "data": str(args.data or recipe.data.val),
        "greedy": args.greedy,
        "seconds": round(time.monotonic() - started, 1),
        **figures(judged, samples),
    }
    write(out, result, judged)
    print(table(result))
    print(f"{out}/samples.jsonl")
    return 0


def data_file(value: str) -> Path:
    """The file of `--data`: a path, or the name of a set that scripts/prepare_data.py wrote into data/."""
    path = find_path(value)
    if path.is_file() or Path(value).name != value or Path(value).suffix:
        return path
    prepared = find_path(f"data/{value}.parquet")
    if not prepared.is_file() and value in HUB_SETS:
        raise ConfigError(
            f"--data {value}: data/{value}.parquet is not there; make it with "
            f"python scripts/prepare_data.py {value} data/{value}.parquet"
        )
    return prepared


def output_folder(recipe: Recipe, wanted: Path | None) -> Path:
    """An empty folder for the results; ConfigError if there is something in it already."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = wanted or run_root(recipe) / f"eval-{recipe.name}-{stamp}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder}: exists and is not an empty folder; name another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}; name a writable folder") from None
    return folder


def sample(recipe: Recipe, adapter: Path | None, rows: list[dict], count: int, greedy: bool) -> list[tuple[str, int]]:
    """(text, tokens) of `count` responses to each row, in the order of the rows; ConfigError as `encode`."""
    settings, options = engine_options(recipe, recipe.rollout.max_num_seqs)
    from transformers import AutoTokenizer

    from rollout.engine import InProcessEngine

    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    prompts = [ids for ids in encode(recipe, rows, tokenizer) for _ in range(count)]  # before the engine is started
    engine = InProcessEngine(Path(recipe.model.path), options)
    if adapter is not None:
        load_adapter(engine, Path(recipe.model.path), settings, adapter)
    outputs = engine.generate(
        prompts,
        recipe.data.max_response_length,
        adapter=adapter is not None,
        seed=recipe.seed,
        temperature=0.0 if greedy else recipe.rollout.temperature,
    )
    return [(tokenizer.decode(output.response_ids), len(output.response_ids)) for output in outputs]


def encode(recipe: Recipe, rows: list[dict], tokenizer) -> list[list[int]]:
    """Token ids of the rows' prompts.

    Raises:
        ConfigError: one is so long that the engine has no room for it and data.max_response_length tokens.
    """
    prompts = chat_ids(tokenizer, (row["prompt"] for row in rows))
    limit, longest = recipe.data.max_prompt_length, max(range(len(prompts)), key=lambda index: len(prompts[index]))
    if len(prompts[longest]) > limit:
        raise ConfigError(
            f"--data: {sum(len(ids) > limit for ids in prompts)} of {len(rows)} prompts are longer than "
            f"data.max_prompt_length = {limit}; the longest, of row {longest}, has {len(prompts[longest])} tokens: "
            f"add data.max_prompt_length={len(prompts[longest])}"
        )
    return prompts


def load_adapter(engine, checkpoint: Path, settings, adapter: Path) -> None:
    """Let the engine read the adapter's own format if a run saved it, else send what the PEFT files hold."""
    if (adapter / "engine" / "adapter_config.json").is_file():
        engine.load_adapter(adapter / "engine")
        return
    from dataclasses import replace

    from rl import lora, modeling

    trainer = modeling.build_from(checkpoint, replace(settings, adapter=str(adapter)))
    wire = lora.wire_tensors(lora.engine_tensors(trainer.model))
    engine.sync_adapter(wire, lora.wire_config(trainer.spec, trainer.adapted))


def judge(rows: list[dict], responses: list[tuple[str, int]]) -> list[Sample]:
    """Every response against its gold answer."""
    count = len(responses) // len(rows)
    judged = []
    for number, (text, tokens) in enumerate(responses):
        problem, index = divmod(number, count)
        gold = rows[problem]["reward_model"]["ground_truth"]
        reward = score(text, gold)
        judged.append(Sample(problem, index, text, reward.answer, gold, reward.correct, reward.error, tokens))
    return judged


# ---- figures -------------------------------------------------------------------------------------------------------


def figures(judged: list[Sample], count: int) -> dict:
    """avg@n, pass@k and maj@k (k = 2, 4, 8, ... and n itself) with 95 % intervals, errors, and the mean length."""
    problems = max(one.problem for one in judged) + 1
    by_problem: list[list[Sample]] = [[] for _ in range(problems)]
    for one in judged:
        by_problem[one.problem].append(one)
    per_problem = {f"avg@{count}": [np.mean([one.correct for one in group]) for group in by_problem]}
    powers = [2**power for power in range(1, count.bit_length()) if 2**power < count]
    for k in [*powers, count] if count > 1 else []:
        per_problem[f"pass@{k}"] = [pass_at(len(group), sum(one.correct for one in group), k) for group in by_problem]
        per_problem[f"maj@{k}"] = [majority_at(group, k) for group in by_problem]
    errors = Counter(one.error for one in judged if one.error)
    return {
        "problems": problems,
        "samples": count,
        "figures": {name: intervals(values) for name, values in per_problem.items()},
        "no_answer": sum(one.answer is None for one in judged),
        "errors": dict(errors),
        "tokens": float(np.mean([one.tokens for one in judged])),
        "per_problem": {name: [float(value) for value in values] for name, values in per_problem.items()},
    }


def pass_at(count: int, correct: int, k: int) -> float:
    """Chance that one of k samples drawn from `count` with `correct` right ones is right (unbiased)."""
    return 1.0 - comb(count - correct, k) / comb(count, k)


def majority_at(group: list[Sample], k: int) -> float:
    """Share of disjoint sets of k samples whose most frequent answer (the first among equals) is right.

    Answers that differ in writing only (25, 025, 25.0) are one: see `_vote`.
    """
    right = []
    for start in range(0, len(group) - k + 1, k):
        part = [one for one in group[start : start + k] if one.answer is not None]
        votes = Counter(map(_vote, part))
        right.append(bool(votes) and votes.most_common(1)[0][0][0])
    return float(np.mean(right))


def _vote(one: Sample) -> tuple[bool, str]:
    """What a sample votes for: all right answers for the gold one; a wrong one for its integer, or else its text."""
    return one.correct, one.gold if one.correct else as_integer(one.answer) or one.answer


def intervals(values: list[float], seed: int = 0) -> dict[str, float]:
    """{"mean", "low", "high"}: the mean over problems and its 95 % interval, by bootstrap over problems."""
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = array[rng.integers(0, array.size, (BOOTSTRAP, array.size))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {"mean": float(array.mean()), "low": float(low), "high": float(high)}


# ---- files and tables ----------------------------------------------------------------------------------------------


def write(folder: Path, result: dict, judged: list[Sample]) -> None:
    """samples.jsonl, then result.json, so that a folder with a result is complete."""
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
        for one in judged:
            file.write(json.dumps(vars(one), ensure_ascii=False) + "\n")
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> dict:
    """result.json of an evaluation; ConfigError if there is none."""
    path = folder / "result.json"
    if not path.is_file():
        raise ConfigError(f"--compare {folder}: no result.json there; name a folder that evaluate.py wrote")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ConfigError(f"{path}: not valid JSON; evaluate again") from None
    if not isinstance(result, dict) or not {"data", "problems", "figures", "per_problem"} <= result.keys():
        raise ConfigError(f"{path}: not what evaluate.py writes; evaluate again")
    return result | {"folder": folder.name}


def table(result: dict) -> str:
    """The figures of one evaluation."""
    lines = [f"{name:>8}  {_interval(value)}" for name, value in result["figures"].items()]
    errors = ", ".join(f"{count} {name}" for name, count in result["errors"].items()) or "none"
    lines.append(f"  no answer line: {result['no_answer']}, errors: {errors}, {result['tokens']:.1f} tokens a response")
    return "\n".join(lines)


def compare(a: dict, b: dict) -> str:
    """Two evaluations side by side; on the same problems the interval of the difference is paired."""
    if a["data"] != b["data"] or a["problems"] != b["problems"]:
        raise ConfigError(
            f"--compare: {a['folder']} is on {a['problems']} problems of {a['data']}, {b['folder']} on {b['problems']} "
            f"of {b['data']}; compare evaluations of the same problems"
        )
    shared = [name for name in a["figures"] if name in b["figures"]]
    if not shared:
        raise ConfigError("--compare: the two have another number of samples, so no figure in common; evaluate again")
    lines = [f"{'':>8}  {a['folder']:>28}  {b['folder']:>28}  difference"]
    for name in shared:
        paired = intervals([y - x for x, y in zip(a["per_problem"][name], b["per_problem"][name], strict=True)])
        difference = f"{100 * paired['mean']:+.1f} ({100 * paired['low']:+.1f} to {100 * paired['high']:+.1f})"
        lines.append(
            f"{name:>8}  {_interval(a['figures'][name]):>28}  {_interval(b['figures'][name]):>28}  {difference}"
        )
    return "\n".join(lines)


def _interval(value: dict[str, float]) -> str:
    return f"{percent(value['mean'])} ({percent(value['low'])} to {percent(value['high'])})"
