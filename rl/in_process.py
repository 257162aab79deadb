"""Trainer and engine in one process, for checks and tests: FSDP2 over a one-process mesh, and an embedded vLLM.

No Ray and no server. The same model, probe and engine worker code as inside a verl run.
"""

import os
from pathlib import Path

import numpy as np
import torch

from rl import lora, modeling
from rl.probe import TrainerProbe
from rl.settings import EngineSettings
from rollout.engine import EngineOptions, InProcessEngine
from rollout.sampling import Sequence


def shard(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Shard `model` as verl does: every decoder layer, then the root; bf16 forward, float32 masters and reductions."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    kwargs = {
        "mesh": init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    names = set(model._no_split_modules)
    for module in [m for m in model.modules() if type(m).__name__ in names]:
        fully_shard(module, **kwargs)
    fully_shard(model, **kwargs)


class InProcessSide:
    """`consistency.EngineSide` over an `InProcessEngine`, and the sync from the trainer model to it."""

    def __init__(self, engine: InProcessEngine, trainer: modeling.TrainerModel) -> None:
        self.engine, self.trainer = engine, trainer

    def base_digests(self, detail: bool = False) -> list[dict[str, dict]]:
        return self.engine.base_digests(detail)

    def adapter_digests(self, detail: bool = False) -> list[dict[str, dict]]:
        return self.engine.adapter_digests(detail)

    def sync(self) -> None:
        wire = lora.wire_tensors(lora.engine_tensors(self.trainer.model))
        self.engine.sync_adapter(wire, lora.wire_config(self.trainer.spec, self.trainer.adapted))

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Sequence]:
        return self.engine.generate(prompts, max_tokens)

    def score(self, sequences: list[list[int]], adapter: bool) -> list[list[float]]:
        return self.engine.score(sequences, adapter=adapter)

    def selected_blocks(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return [scored.blocks for scored in self.engine.score_with_blocks(sequences)]


class InProcessPair:
    """Both sides of a checkpoint: `trainer_model`, `probe` (trainer side) and `engine_side`.

    vLLM is started first: it sets up torch.distributed for itself, which the trainer's mesh then joins. The engine
    loads `engine_path` if it is not to load the trainer's checkpoint; `device` is where the trainer computes.
    """

    def __init__(
        self,
        path: Path,
        settings: EngineSettings,
        options: EngineOptions,
        engine_path: Path | None = None,
        device: str = "cpu",
    ) -> None:
        self.engine = InProcessEngine(engine_path or path, options)
        self.trainer_model = modeling.build_from(path, settings)
        self.trainer_model.model.to(device)
        shard(self.trainer_model.model, getattr(torch, settings.dtype))
        self.probe = TrainerProbe(self.trainer_model)
        self.engine_side = InProcessSide(self.engine, self.trainer_model)
        self.engine_side.sync()
