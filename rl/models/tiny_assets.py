"""Makes a folder that ``make train`` starts from: a tiny model's checkpoints, its problems and how it was trained.

bf16/            the checkpoint as Hugging Face has it
nvfp4_mxfp8/     the same in the served formats: the trainer's frozen base and what the engine loads
train.parquet    problems to train on with reinforcement learning
test.parquet     held-out problems
training.json    the plan, the seconds, and both checkpoints' accuracy on test.parquet

torch is imported only once there is something to train or to load, so that a wrong folder is refused at once.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl.data import write_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from rl.models.tiny_training import Plan

TRAIN_ROWS, TEST_ROWS = 4096, 256
BF16, QUANTISED = "bf16", "nvfp4_mxfp8"
CONTENTS = frozenset({BF16, QUANTISED, "train.parquet", "test.parquet", "training.json"})


@dataclass(frozen=True)
class Family:
    """What differs between tiny models: their problems, network and training."""

    generate: Callable[[str, int, int], list]
    """(split, count, seed) -> problems."""
    to_rows: Callable[[list, str], list[dict]]
    build_tokenizer: Callable[[int], "PreTrainedTokenizerFast"]
    build_model: Callable[["PreTrainedTokenizerFast", "Plan"], "PreTrainedModel"]
    train: Callable[..., dict]
    """(model, tokenizer, plan, minutes, show_progress) -> what was seen."""
    evaluate: Callable[..., dict]
    """(model, tokenizer, problems, seed) -> accuracies."""
    rows: tuple[int, int] = (TRAIN_ROWS, TEST_ROWS)
    """Problems to train on, and held out."""


def family_of(size: str) -> Family:
    """The family of a `Plan.size`."""
    if size.endswith("_m3"):
        from rl.models.tiny_m3 import FAMILY
    else:
        from rl.models.tiny_training import FAMILY
    return FAMILY


def check_target(out: Path, overwrite: bool) -> None:
    """Refuses a target that exists, or that holds anything this module did not write.

    Raises:
        FileExistsError: one line with the remedy.
    """
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"--out {out}: is a file; name a folder")
    present = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if present and not overwrite:
        raise FileExistsError(f"--out {out}: exists already; name another folder or add --overwrite")
    if foreign := sorted(present - CONTENTS):
        raise FileExistsError(f"--out {out}: holds {foreign[0]}, which is not this script's; name another folder")


def make_assets(
    out: Path,
    plan: "Plan",
    minutes: float | None = None,
    overwrite: bool = False,
    show_progress: bool = True,
    device: str = "cpu",
) -> dict:
    """Trains the tiny model on `device` and writes the folder ``out``; returns what training.json holds.

    Everything is written beside ``out`` and renamed at the end, so ``out`` is never half written.

    Raises:
        FileExistsError: see ``check_target``.
    """
    check_target(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        summary = _fill(partial, plan, minutes, show_progress, device)
        if out.exists():
            replaced = out.with_name(f".{out.name}.{os.getpid()}.replaced")
            out.rename(replaced)
            partial.rename(out)
            shutil.rmtree(replaced)
        else:
            partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary


def _fill(folder: Path, plan: "Plan", minutes: float | None, show_progress: bool, device: str) -> dict:
    from quant.checkpoint import quantize_checkpoint

    family = family_of(plan.size)
    train_rows, test_rows = family.rows
    train_problems = family.generate("train", train_rows, plan.seed)
    test_problems = family.generate("test", test_rows, plan.seed)
    write_rows(family.to_rows(train_problems, "train"), folder / "train.parquet")
    write_rows(family.to_rows(test_problems, "test"), folder / "test.parquet")
    tokenizer = family.build_tokenizer(plan.seed)
    model = family.build_model(tokenizer, plan).to(device)
    summary = {"parameters": model.num_parameters(), "vocab_size": len(tokenizer)}
    summary |= family.train(model, tokenizer, plan, minutes, show_progress)
    save(model.cpu(), tokenizer, folder / BF16)
    quantize_checkpoint(folder / BF16, folder / QUANTISED, progress=False)
    for name in (BF16, QUANTISED):
        model = load_plain(folder / name).to(device)
        summary[name] = family.evaluate(model, tokenizer, test_problems, plan.seed)
    (folder / "training.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def save(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Rounds to bf16 and saves, with the end-of-turn token as the only stop and no sampling settings.

    What the model keeps in float32 (a router, its selection bias) is saved so.
    """
    import torch
    from transformers import GenerationConfig

    for name, parameter in model.named_parameters():
        if not any(kept in name for kept in model._keep_in_fp32_modules_strict or ()):
            parameter.data = parameter.data.bfloat16()
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_plain(folder: Path) -> "PreTrainedModel":
    """A checkpoint of either format as a plain float32 model: stored weights, decoded exactly, float32 arithmetic."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from quant.checkpoint import decoded_state
    from quant.modules import swap_modules
    from rl.models import minimax_m3  # noqa: F401 - registers the model with transformers

    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    del config.quantization_config  # the weights are decoded here, so that transformers needs no quantiser
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return swap_modules(model, decoded_state(folder, torch.float32))
