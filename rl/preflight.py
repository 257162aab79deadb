"""Checks that need the disk, before anything is started: checkpoint, tokenizer, adapter, data, versions, devices.

Every failure is a `ConfigError` of one line. Safetensors headers are read by hand, so no torch is imported.
"""

import json
import os
import re
import sys
import tomllib
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rl.config import REPO_ROOT, ConfigError, Recipe, find_path
from rl.environment import gpu_count
from rl.plan_fit import refusal

SUPPORTED_FORMATS = ("nvfp4-pack-quantized", "mxfp8-quantized")
"""compressed-tensors formats that both sides read; mixed-precision is a checkpoint with several of them."""
_SCALES = re.compile(r"\.(weight_scale(_2|_inv)?|weight_global_scale|input_scale|input_global_scale)$")


@dataclass(frozen=True)
class Preflight:
    """What the checks found out."""

    model_type: str
    architecture: str
    parameters: int
    """Weights, counted unpacked and without scales."""
    checkpoint_bytes: int
    formats: tuple[str, ...]
    """Quantisation formats of the base; empty for an unquantised one."""
    train_rows: int
    val_rows: int

    @property
    def model_text(self) -> str:
        """Such as: qwen3_moe with 3.1 M parameters (nvfp4-pack-quantized + mxfp8-quantized, 2.4 MB)."""
        formats = " + ".join(name.split("-")[0] for name in self.formats) or "not quantised"
        size = _human(self.checkpoint_bytes, "B")
        return f"{self.model_type} with {_human(self.parameters)} parameters ({formats}, {size})"

    def as_dict(self) -> dict[str, Any]:
        """For config.json."""
        return asdict(self)


def preflight(recipe: Recipe) -> Preflight:
    """Check everything that a recipe points at.

    Raises:
        ConfigError: one line that names the key or file, the value and the remedy.
    """
    check_launcher()
    check_devices(recipe)
    folder = find_path(recipe.model.path)
    config = read_model_config(folder, recipe.model.path)
    tensors, size = read_tensors(folder)
    formats = check_quantisation(folder, config, tensors)
    check_vocabulary(folder, config, recipe.model.padded_vocab)
    check_length(recipe, config)
    check_sharing(recipe, config)
    if recipe.model.adapter is not None:
        check_adapter(recipe)
    check_versions(recipe.trainer.logger)
    return Preflight(
        model_type=config["model_type"],
        architecture=(config.get("architectures") or ["unknown"])[0],
        parameters=count_parameters(tensors),
        checkpoint_bytes=size,
        formats=formats,
        train_rows=check_data("data.train", recipe.data.train),
        val_rows=check_data("data.val", recipe.data.val),
    )


def check_launcher() -> None:
    """Refuse torchrun and its like: the Ray controller starts the workers itself."""
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        if name in os.environ:
            raise ConfigError(
                f"{name} = {os.environ[name]}: this was started by torchrun or a similar launcher; "
                "start it once, with plain python"
            )


def check_plan(recipe: Recipe) -> None:
    """Refuse a training run that cannot fit this machine, as far as the model's configuration is known.

    No part of `preflight`, which also precedes checks and evaluations: they need less.
    """
    line = refusal(recipe)
    if line is None:
        return
    folder = find_path(recipe.model.path)
    if not folder.is_dir():
        line = f"{_no_folder(recipe.model.path)}; {line}"
    raise ConfigError(line)


def _no_folder(given: str) -> str:
    return f"model.path = {given!r}: no such folder; download or build the checkpoint there"


def check_devices(recipe: Recipe) -> None:
    """Refuse what these devices cannot do: Ray would wait for missing GPUs forever."""
    gpus, backend = gpu_count(), recipe.model.backend
    if gpus == 0 and backend in ("marlin", "flashinfer_w4a4"):
        raise ConfigError(f"model.backend = {backend}: no GPU is visible; set model.backend=auto or emulation")
    if gpus == 0 and recipe.rollout.sleep_level > 0:
        raise ConfigError(
            f"rollout.sleep_level = {recipe.rollout.sleep_level}: no GPU is visible, and vLLM sleeps on GPUs only; "
            "set rollout.sleep_level=0"
        )
    wanted, nodes = recipe.trainer.gpus_per_node, recipe.trainer.nodes
    in_cluster = bool(os.environ.get("RAY_ADDRESS"))
    if nodes > 1 and not in_cluster:
        raise ConfigError(
            f"trainer.nodes = {nodes}: no Ray cluster is named; start one on all nodes and set RAY_ADDRESS, "
            "or set trainer.nodes=1 with trainer.gpus_per_node"
        )
    if gpus and wanted > gpus and not in_cluster:
        raise ConfigError(f"trainer.gpus_per_node = {wanted}: {gpus} GPU(s) are visible; set at most that")


def check_versions(logger: list[str]) -> None:
    """Refuse an environment that does not hold the pinned versions; LOCKSTEP_ALLOW_VERSIONS=1 only says so."""
    path = REPO_ROOT / "pyproject.toml"
    if not path.is_file():  # installed without its source: pip has resolved the pins
        return
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    optional = () if "wandb" in logger else ("wandb",)
    needed = [text for text in project["dependencies"] if not text.startswith(optional)]
    wrong = [problem for text in needed if (problem := _pin_problem(text))]
    extras = project["optional-dependencies"]
    engine = [[problem for text in extras[extra] if (problem := _pin_problem(text))] for extra in ("cpu", "gpu")]
    wrong += min(engine, key=len)  # one of the two is enough
    if not wrong:
        return
    if os.environ.get("LOCKSTEP_ALLOW_VERSIONS") == "1":
        print(f"environment: {', '.join(wrong)}; going on, as LOCKSTEP_ALLOW_VERSIONS=1 asks", file=sys.stderr)
        return
    raise ConfigError(
        f"environment: {', '.join(wrong)}; run make venv, or set LOCKSTEP_ALLOW_VERSIONS=1 to try these versions"
    )


def _pin_problem(requirement: str) -> str | None:
    match = re.match(r"^([A-Za-z0-9_.-]+)(?:\[.*\])?==([\w.+]+)$", requirement)
    if match is None:
        return None
    name, wanted = match.groups()
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} {wanted} is missing"
    return None if found.split("+")[0] == wanted else f"{name} is {found}, not {wanted}"


def read_model_config(folder: Path, given: str) -> dict[str, Any]:
    """config.json of a checkpoint."""
    if not folder.is_dir():
        raise ConfigError(_no_folder(given))
    config = _read_json(folder / "config.json", "this is no Hugging Face checkpoint; set model.path to one")
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{folder / 'config.json'}: model_type is missing; the checkpoint is incomplete")
    return config


def read_tensors(folder: Path) -> tuple[dict[str, tuple[str, list[int]]], int]:
    """(dtype, shape) of every tensor and the bytes of all shards; truncated or missing shards are a ConfigError."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        index = _read_json(index_path, "").get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
            raise ConfigError(f"{index_path}: weight_map is missing, empty or damaged; download the file again")
        shards = sorted(set(index.values()))
    else:
        index, shards = None, sorted(path.name for path in folder.glob("*.safetensors"))
        if not shards:
            raise ConfigError(f"{folder}: no *.safetensors file; download or build the weights")
    tensors: dict[str, tuple[str, list[int]]] = {}
    size = 0
    for name in shards:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name}: this shard is missing ({index_path.name} names it); download it again")
        header = read_safetensors_header(folder / name)
        size += (folder / name).stat().st_size
        for tensor, entry in header.items():
            tensors[tensor] = (entry["dtype"], entry["shape"])
        for tensor in (key for key, shard in (index or {}).items() if shard == name):
            if tensor not in header:
                raise ConfigError(f"{folder / name}: tensor {tensor} is missing in this shard; download it again")
    return tensors, size


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Header of a safetensors file (name -> dtype, shape, data_offsets), and a check that its data is all there."""
    actual = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if actual < 8 or length > actual - 8:
            raise ConfigError(f"{path}: truncated ({actual} bytes, its header alone needs {8 + length}); get it again")
        try:
            header = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise ConfigError(f"{path}: not a safetensors file (its header is no JSON); get it again") from None
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    entries = header.values() if isinstance(header, dict) else [None]
    if not all(isinstance(entry, dict) and {"dtype", "shape", "data_offsets"} <= entry.keys() for entry in entries):
        raise ConfigError(f"{path}: not a safetensors file (its header names no tensors); get it again")
    needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if actual < needed:
        raise ConfigError(f"{path}: truncated ({actual} of {needed} bytes); get it again")
    return header


def check_quantisation(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> tuple[str, ...]:
    """Formats of a quantised base; ConfigError for one that trainer and engine would not read alike."""
    where = folder / "config.json"
    quantisation = config.get("quantization_config")
    if quantisation is None:
        packed = next((name for name in tensors if name.endswith((".weight_packed", ".weight_scale"))), None)
        if packed:
            raise ConfigError(f"{where}: quantization_config is missing, yet {packed} is quantised; quantise it again")
        return ()
    groups = quantisation.get("config_groups", {}) if isinstance(quantisation, dict) else None
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ConfigError(f"{where}: quantization_config is damaged; download config.json again")
    method = quantisation.get("quant_method")
    if method == "modelopt":
        algorithm = quantisation.get("quant_algo")
        if algorithm != "NVFP4":
            raise ConfigError(
                f"{where}: ModelOpt quant_algo = {algorithm!r}: only NVFP4 is read alike by both sides; quantise the "
                "bf16 checkpoint with scripts/quantize_checkpoint.py"
            )
        return ("nvfp4-modelopt",)
    if method != "compressed-tensors":
        raise ConfigError(
            f"{where}: quant_method = {method!r}: the base is bf16, compressed-tensors or ModelOpt NVFP4; quantise the "
            "bf16 checkpoint with scripts/quantize_checkpoint.py"
        )
    formats = sorted({group.get("format") or quantisation.get("format") for group in groups.values()}, reverse=True)
    unknown = [name for name in formats if name not in SUPPORTED_FORMATS]
    if unknown or not formats:
        raise ConfigError(f"{where}: format {unknown or None}: supported are {', '.join(SUPPORTED_FORMATS)}")
    for name in tensors:
        if name.endswith(".weight_packed"):
            for part in ("weight_scale", "weight_global_scale"):
                if name.removesuffix("weight_packed") + part not in tensors:
                    raise ConfigError(f"{folder}: {name} has no {part}; quantise the checkpoint again")
    return tuple(formats)


def tokenizer_length(folder: Path) -> int:
    """Ids of a checkpoint's tokenizer, the added ones included: its largest id and one."""
    tokenizer = _read_json(folder / "tokenizer.json", "copy the model's tokenizer there")
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if not vocabulary:
        raise ConfigError(f"{folder / 'tokenizer.json'}: has no vocabulary; copy the model's tokenizer there")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    return max([*ids, *(entry["id"] for entry in tokenizer.get("added_tokens", []))]) + 1


def check_vocabulary(folder: Path, config: dict[str, Any], padded: bool) -> None:
    """vocab_size must be the tokenizer's length, or larger if the recipe says that the rest is padding."""
    tokens = tokenizer_length(folder)
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if size == tokens or (padded and size is not None and size > tokens):
        return
    more = size is not None and size > tokens
    raise ConfigError(
        f"{folder / 'config.json'}: vocab_size = {size}, but tokenizer.json has {tokens} tokens; "
        + ("if the rest is padding, set model.padded_vocab=true" if more else "copy the tokenizer of this model there")
    )


def check_sharing(recipe: Recipe, config: dict[str, Any]) -> None:
    """ConfigError if the model cannot take rows whose prompts are shared."""
    kind = config["model_type"]
    if recipe.trainer.share_prompts and kind not in ("minimax_m3_text", "minimax_m3_vl"):
        raise ConfigError(f"trainer.share_prompts = true: {kind} cannot share them, MiniMax-M3 can; set it to false")


def check_length(recipe: Recipe, config: dict[str, Any]) -> None:
    """The longest sequence must fit the model's positions."""
    limit = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
    if limit is not None and recipe.max_model_len > limit:
        raise ConfigError(
            f"data.max_response_length = {recipe.data.max_response_length}: with max_prompt_length "
            f"{recipe.data.max_prompt_length} that is {recipe.max_model_len} tokens, the model has {limit} positions; "
            "shorten one"
        )


def check_adapter(recipe: Recipe) -> None:
    """A starting adapter must be complete and of the recipe's rank."""
    folder = find_path(recipe.model.adapter)
    config = _read_json(folder / "adapter_config.json", "set model.adapter to the folder of a PEFT adapter")
    rank = config.get("r")
    if rank != recipe.model.lora_rank:
        raise ConfigError(
            f"model.lora_rank = {recipe.model.lora_rank}: the adapter in {recipe.model.adapter!r} has rank {rank}; "
            f"set model.lora_rank={rank}"
        )
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{folder / 'adapter_model.safetensors'}: missing; save the adapter again")
    read_safetensors_header(folder / "adapter_model.safetensors")


def check_data(key: str, value: str) -> int:
    """Rows of a data set, each with a prompt and a ground truth."""
    path = find_path(value)
    if not path.is_file():
        raise ConfigError(f"{key} = {value!r}: no such file; set {key} to a parquet or jsonl file")
    from rl.data import DataError, problem_rows  # reads parquet: only once everything cheaper is right

    try:
        rows = problem_rows(path, name=value)
    except DataError as error:
        raise ConfigError(f"{key}: {error}") from None
    return len(rows)


def count_parameters(tensors: dict[str, tuple[str, list[int]]]) -> int:
    """Weights of a checkpoint: two for each byte of packed NVFP4, none for scales."""
    total = 0
    for name, (_, shape) in tensors.items():
        if _SCALES.search(name):
            continue
        number = 1
        for extent in shape:
            number *= extent
        total += number * (2 if name.endswith(".weight_packed") else 1)
    return total


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; {remedy or 'download the checkpoint again'}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ConfigError(f"{path}: not valid JSON (truncated?); download or build it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object; download or build it again")
    return content


def _human(number: float, unit: str = "") -> str:
    """1234567 as 1.23 M."""
    for prefix in ("", "K", "M", "G"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.3g} T{unit}"
