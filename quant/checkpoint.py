"""Checkpoints in the served formats: convert one, and read one into the tensors that the trainer holds.

`quantize_checkpoint` writes (see `quant.convert`), `packed_state` and `decoded_state` read (see `quant.reader`),
`load_model` builds the frozen model (see `quant.modules`).
"""

from pathlib import Path

from quant.convert import make_plan, run_plan
from quant.modules import load_model
from quant.policy import Policy
from quant.reader import decoded_state, load_quantized, packed_items, packed_state
from quant.shards import CheckpointError

__all__ = [
    "CheckpointError",
    "decoded_state",
    "load_model",
    "load_quantized",
    "packed_items",
    "packed_state",
    "quantize_checkpoint",
]


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    policy: str | Policy = "nvfp4_mxfp8",
    progress: bool = True,
    device: str = "cpu",
) -> None:
    """Convert the safetensors checkpoint folder `source` into a compressed-tensors checkpoint `target`.

    Streams: peak memory is a few matrices, whatever the checkpoint's size. Run again after a kill or a full disk with
    the same arguments it goes on; `target` gets its config.json last, so it never looks complete before it is. Raises
    CheckpointError (one line) for a damaged or already quantised source, a non-empty `target`, a matrix that its format
    cannot hold, NaN or Inf, and a full disk; ValueError for an unknown policy. The source is only read.
    """
    run_plan(make_plan(source, policy), Path(target), device, progress)
