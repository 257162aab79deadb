"""The committed tiny checkpoints as trainer models, for the tests of rl/."""

from pathlib import Path

import torch

from rl import lora, modeling

ASSETS = Path(__file__).resolve().parent.parent / "assets/tiny_math"
QUANTISED, PLAIN = ASSETS / "nvfp4_mxfp8", ASSETS / "bf16"
TARGETS = ("attention", "experts")


def spec(**changes) -> lora.LoRASpec:
    """A small adapter on attention and experts; alpha is not the rank, so that the scaling shows."""
    return lora.LoRASpec(**({"rank": 8, "alpha": 12, "targets": TARGETS} | changes))


def build(adapter: lora.LoRASpec | None, path: Path = QUANTISED, **options) -> modeling.TrainerModel:
    """The trainer's model in evaluation mode."""
    trainer_model = modeling.build(path, adapter, **options)
    trainer_model.model.eval()
    return trainer_model


def token_ids(rows: int = 2, length: int = 20, seed: int = 0) -> torch.Tensor:
    """Random ids [rows, length] without the padding token."""
    return torch.randint(3, 600, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(trainer_model: modeling.TrainerModel, ids: torch.Tensor, **inputs) -> torch.Tensor:
    """float32 [rows, length, V]."""
    return trainer_model.model(input_ids=ids, use_cache=False, **inputs).logits


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 1, std: float = 0.05) -> None:
    """Give every B random values, as after some training."""
    generator = torch.Generator().manual_seed(seed)
    for adapter in lora.adapters(model).values():
        for name, parameter in adapter.named_parameters(recurse=False):
            if name.endswith("B"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def masters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every A and B by name."""
    return {
        f"{name}.{leaf}": parameter
        for name, adapter in lora.adapters(model).items()
        for leaf, parameter in adapter.named_parameters(recurse=False)
    }
