"""Makes the folder that ``make train`` starts from: the tiny model's checkpoints, its problems and how it was trained.

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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rl import tiny_math
from rl.data import write_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

    from rl.models.tiny_training import Plan

TRAIN_ROWS, TEST_ROWS = 4096, 256
BF16, QUANTISED = "bf16", "nvfp4_mxfp8"
CONTENTS = frozenset({BF16, QUANTISED, "train.parquet", "test.parquet", "training.json"})


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
    from rl.models.tiny import build_model, build_tokenizer, evaluate
    from rl.models.tiny_training import train

    train_problems = tiny_math.generate("train", TRAIN_ROWS, plan.seed)
    test_problems = tiny_math.generate("test", TEST_ROWS, plan.seed)
    write_rows(tiny_math.to_rows(train_problems, "train"), folder / "train.parquet")
    write_rows(tiny_math.to_rows(test_problems, "test"), folder / "test.parquet")
    tokenizer = build_tokenizer(plan.seed)
    model = build_model(tokenizer, plan.seed, plan.size).to(device)
    summary = {"parameters": model.num_parameters(), "vocab_size": len(tokenizer)}
    summary |= train(model, tokenizer, plan, minutes, show_progress)
    _save(model.cpu(), tokenizer, folder / BF16)
    quantize_checkpoint(folder / BF16, folder / QUANTISED, progress=False)
    for name in (BF16, QUANTISED):
        model = load_plain(folder / name).to(device)
        summary[name] = asdict(evaluate(model, tokenizer, test_problems, seed=plan.seed))
    (folder / "training.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _save(model: "Qwen3MoeForCausalLM", tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Rounds to bf16 and saves, with the end-of-turn token as the only stop and no sampling settings."""
    model = model.bfloat16()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_plain(folder: Path) -> "Qwen3MoeForCausalLM":
    """A checkpoint of either format as a plain float32 model: stored weights, decoded exactly, float32 arithmetic."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from quant.checkpoint import decoded_state

    config = Qwen3MoeConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is None:
        return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    del config.quantization_config  # the weights are decoded here, so that transformers needs no quantiser
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.load_state_dict(decoded_state(folder, torch.float32))
    return model
