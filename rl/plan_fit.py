"""Does a recipe fit this machine, and if not, what does: the model's configuration, the device, changes, recipes."""

import functools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl.config import REPO_ROOT, ConfigError, Recipe, find_path, load_recipe
from rl.environment import devices, gpu_count, memory_gib
from rl.plan import GIB, Machine, Plan, make_plan
from rl.plan_shapes import PlanError, Shape, format_rule, planned_rule, read_shape
from rl.schema import ENGINE_LORA_RANKS

H200_GIB = 139.0
"""What an H200 (141 GB) has for programs, for a plan on a machine without a GPU."""
LEAST_RESPONSE = 256
FITS = (0, 0)
Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """A model's configuration and where it came from; `planned`: from model.shape, as the checkpoint is not there."""

    config: dict[str, Any]
    source: str
    planned: bool

    @property
    def shape(self) -> Shape:
        return read_shape(self.config, self.source)

    @property
    def rule(self):
        """Module name -> format."""
        text = self.config.get("text_config")
        inner = text.get("quantization_config") if isinstance(text, dict) else None
        quantisation = self.config.get("quantization_config", inner)
        planned = self.planned and quantisation is None
        return functools.cache(planned_rule() if planned else format_rule(quantisation, self.source))


def find_config(recipe: Recipe) -> Known | None:
    """config.json of `model.path` if the folder is there, else the file of `model.shape`, else None.

    PlanError for a file that is named and cannot be read.
    """
    folder = find_path(recipe.model.path)
    if folder.is_dir():
        return Known(_read(folder / "config.json", "model.path"), str(folder / "config.json"), False)
    if recipe.model.shape is None:
        return None
    path = find_path(recipe.model.shape)
    return Known(_read(path, "model.shape"), recipe.model.shape, True)


def _read(path: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{key}: {path}: {error.strerror}; set {key} to a model's configuration") from None
    except ValueError:
        raise PlanError(f"{key}: {path}: not valid JSON (truncated?); get the file again") from None
    if not isinstance(content, dict):
        raise PlanError(f"{key}: {path}: expected a JSON object; get the file again")
    return content


def find_machine(
    nodes: int, gpu_gib: float | None = None, host_gib: float | None = None, here: bool = False
) -> Machine:
    """The device that a plan is for.

    A GPU as `gpu_gib` or nvidia-smi says. Without one: this machine's RAM, or, for several nodes, an H200 (`here`: not
    unless a Ray cluster is named, whose nodes may have GPUs).
    """
    if gpu_gib is not None:
        return Machine("gpu", gpu_gib, "--gpu-gib", host_gib)
    if gpu_count():
        sizes = [int(found[1]) / 1024 for line in devices() if (found := re.search(r",\s*(\d+) MiB", line))]
        host = memory_gib() if host_gib is None else host_gib
        return Machine("gpu", min(sizes), "nvidia-smi", host) if sizes else Machine("gpu", H200_GIB, "an H200", host)
    if nodes > 1 and (not here or os.environ.get("RAY_ADDRESS")):
        return Machine("gpu", H200_GIB, "an H200: no GPU is here to ask", host_gib)
    return Machine("cpu", memory_gib(), "this machine's RAM")


def plan_recipe(recipe: Recipe, machine: Machine) -> Plan:
    """The plan of a recipe; ConfigError if nothing is known of its model."""
    known = find_config(recipe)
    if known is None:
        raise ConfigError(
            f"model.path = {recipe.model.path!r}: no such folder, and no model.shape to plan with; "
            "set model.shape to a config.json"
        )
    return make_plan(recipe, known.shape, machine, known.rule)


def refusal(recipe: Recipe) -> str | None:
    """One line if the recipe cannot fit this machine; None if it does, or if its model's configuration is not known.

    A checkpoint's configuration from which nothing can be planned refuses nothing: later checks look at it closer.
    """
    try:
        known = find_config(recipe)
        if known is None:
            return None
        machine = find_machine(recipe.trainer.nodes, here=True)
        plan = make_plan(recipe, known.shape, machine, known.rule)
    except PlanError as error:
        return str(error) if str(error).startswith(("model.lora_targets", "model.shape")) else None
    if plan.fits:
        return None
    return f"{recipe.name} {verdict(recipe, plan)}{_other_recipe(recipe, machine)}"


def verdict(recipe: Recipe, plan: Plan) -> str:
    """The planner's sentence: fits, or what is missing and the smallest change that helps."""
    machine = plan.machine
    where = f"per {machine.unit}" if machine.kind == "gpu" else "of RAM"
    if plan.fits:
        room = f"{plan.sequences} sequences of {recipe.max_model_len} tokens"
        return (
            f"fits: {gib(plan.needed)} of {machine.gib:.1f} GiB {where} at the peak ({plan.peak}), KV cache for {room}"
        )
    changes = smallest_change(recipe, machine)
    remedy = (
        "nothing smaller of it fits either" if changes is None else f"smallest change that does: {' '.join(changes)}"
    )
    return f"does not fit: {'; '.join(shortages(recipe, plan))}; {remedy}"


def shortages(recipe: Recipe, plan: Plan) -> list[str]:
    """What is missing, each with its GiB."""
    machine, found = plan.machine, []
    where = f"per {machine.unit}" if machine.kind == "gpu" else "of RAM"
    over = plan.needed - machine.gib * GIB
    if over > 0:
        found.append(f"needs {gib(plan.needed)} GiB {where} and {machine.gib:.1f} are there, {gib(over)} GiB too few")
    if plan.kv_missing:
        text = f"one sequence of {recipe.max_model_len} tokens lacks {gib(plan.kv_missing)} GiB of KV cache"
        found.append(text)
    if machine.host_gib is not None and plan.host_bytes > machine.host_gib * GIB:
        text = f"loading takes {gib(plan.host_bytes)} GiB of a node's RAM and {machine.host_gib:.1f} are there"
        found.append(text)
    return found


def gib(number: float) -> str:
    """Bytes in GiB, to a tenth, or to three digits below 1."""
    value = number / GIB
    return f"{value:.1f}" if abs(value) >= 1 or not value else f"{value:.3g}"


# ---- changes -------------------------------------------------------------------------------------------------------


def change(recipe: Recipe, overrides: Overrides) -> Recipe | None:
    """The recipe with `key=value` overrides (JSON values); None where they do not fit together."""
    raw = recipe.model_dump()
    for override in overrides:
        key, _, value = override.partition("=")
        section, leaf = key.split(".")
        raw[section][leaf] = json.loads(value) if value[0] != "[" else value.strip("[]").split(",")
        if key == "trainer.nodes":
            raw["trainer"]["fsdp_workers"] = raw["rollout"]["replicas"] = None
    try:
        return Recipe.model_validate(raw)
    except ValidationError:
        return None


def _nodes(recipe: Recipe) -> Iterator[Overrides]:
    yield from ((f"trainer.nodes={recipe.trainer.nodes * factor}",) for factor in (2, 4, 8))


def _checkpointing(recipe: Recipe) -> Iterator[Overrides]:
    if not recipe.model.gradient_checkpointing:
        yield ("model.gradient_checkpointing=true",)


def _fewer_tokens(recipe: Recipe) -> Iterator[Overrides]:
    tokens, size, least = recipe.trainer.max_tokens_per_micro_batch, recipe.trainer.micro_batch_size, 1
    key = "micro_batch_size"
    if tokens is not None:
        key, size, least = "max_tokens_per_micro_batch", tokens, recipe.max_model_len
    while size > least:
        size = max(least, size // 2)
        yield (f"trainer.{key}={size}",)


def _fewer_targets(recipe: Recipe) -> Iterator[Overrides]:
    targets = recipe.model.lora_targets
    for dropped in ({"experts"}, {"experts", "shared_experts", "dense_mlp"}):
        kept = [target for target in targets if target not in dropped]
        if kept and kept != targets:
            yield (f"model.lora_targets=[{','.join(kept)}]",)


def _smaller_rank(recipe: Recipe) -> Iterator[Overrides]:
    yield from ((f"model.lora_rank={rank}",) for rank in reversed(ENGINE_LORA_RANKS) if rank < recipe.model.lora_rank)


def _other_share(recipe: Recipe) -> Iterator[Overrides]:
    """The engine's share of the GPU, in steps of 0.05, nearest first."""
    now = round(recipe.rollout.gpu_memory_utilization * 20)
    if recipe.rollout.kv_cache_gib is None:
        for step in sorted(range(2, 19), key=lambda step: (abs(step - now), step)):
            if step != now:
                yield (f"rollout.gpu_memory_utilization={step / 20}",)


def _larger_cache(recipe: Recipe, sequence: int, gpus: bool) -> Iterator[Overrides]:
    """A cache for one sequence, where its size is fixed."""
    now = recipe.rollout.kv_cache_gib
    size = math.ceil(sequence / GIB)
    if size > (now or 1) and (now is not None or not gpus):
        yield (f"rollout.kv_cache_gib={size}",)


def _shorter(recipe: Recipe) -> Iterator[Overrides]:
    """Shorter answers, in twentieths, with the token budget that goes with them."""
    longest, budget = recipe.data.max_response_length, recipe.trainer.max_tokens_per_micro_batch
    for part in range(19, 0, -1):
        length = longest * part // 20
        if length >= min(LEAST_RESPONSE, longest):
            total = f"trainer.max_tokens_per_micro_batch={recipe.data.max_prompt_length + length}"
            yield (f"data.max_response_length={length}", *([total] if budget is not None else []))


def smallest_change(recipe: Recipe, machine: Machine) -> Overrides | None:
    """The first change that makes it fit; None: nothing does.

    In order: more nodes, gradient checkpointing, fewer tokens a micro-batch, another share or cache for the engine,
    fewer targets, a smaller rank; else several together, with shorter answers among them.
    """
    gpus = machine.kind == "gpu"
    known = find_config(recipe)
    if known is None:
        return None
    shape, rule = known.shape, known.rule

    def missing(overrides: Overrides) -> tuple[float, float]:
        """(bytes that the KV cache lacks, all other bytes): the engine's share is not to be bought with its cache."""
        changed = change(recipe, overrides)
        if changed is None:
            return float("inf"), float("inf")
        plan = make_plan(changed, shape, machine, rule)
        return plan.kv_missing, plan.missing - plan.kv_missing

    cache = functools.partial(_larger_cache, sequence=make_plan(recipe, shape, machine, rule).sequence_bytes, gpus=gpus)
    only_gpus = (_nodes, _other_share)
    alone = [_nodes, _checkpointing, _fewer_tokens, _other_share, cache, _fewer_targets, _smaller_rank]
    for kind in (kind for kind in alone if gpus or kind not in only_gpus):
        for overrides in kind(recipe):
            if missing(overrides) == FITS:
                return overrides
    # Together: what costs only time first, what changes the training last.
    together = [cache, _checkpointing, _fewer_tokens, _other_share, _shorter, _nodes, _smaller_rank, _fewer_targets]
    chosen: list[Overrides] = []
    for kind in (kind for kind in together if gpus or kind not in only_gpus):
        options = [option for option in kind(recipe) if missing(_join([*chosen, option])) < missing(_join(chosen))]
        if options:
            lacks = {option: missing(_join([*chosen, option])) for option in options}
            chosen.append(
                next((option for option in options if lacks[option] == FITS), min(options, key=lacks.__getitem__))
            )
        if missing(_join(chosen)) == FITS:
            return _join(_prune(chosen, missing))
    return None


def _join(parts: list[Overrides]) -> Overrides:
    """All overrides; of the same key the last."""
    merged = {override.partition("=")[0]: override for part in parts for override in part}
    return tuple(merged.values())


def _prune(chosen: list[Overrides], missing) -> list[Overrides]:
    """Without those that the others do not need."""
    for part in list(chosen):
        rest = [other for other in chosen if other is not part]
        if rest and missing(_join(rest)) == FITS:
            chosen = rest
    return chosen


def _other_recipe(recipe: Recipe, machine: Machine) -> str:
    """`; NAME.yaml fits here` with the largest model that does, or nothing."""
    best, largest = None, 0
    for path in sorted((REPO_ROOT / "recipes").glob("*.yaml")):
        try:
            other = load_recipe(path)
            if other.name == recipe.name:
                continue
            plan = plan_recipe(other, find_machine(other.trainer.nodes, here=True))
        except ConfigError:
            continue
        if plan.fits and plan.base_bytes > largest and plan.machine.kind == machine.kind:
            best, largest = path.name, plan.base_bytes
    return "" if best is None else f"; --config {best} fits here"
