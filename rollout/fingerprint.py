"""SHA-256 fingerprints of tensors by their bytes, the same function on both sides of a run."""

import hashlib
from collections.abc import Iterable, Mapping

import torch


def sha256(tensor: torch.Tensor) -> str:
    """Hex digest of the row-major bytes of `tensor` (any dtype, any device)."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 0:
        return hashlib.sha256(b"").hexdigest()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def digest(tensor: torch.Tensor) -> dict:
    """{"sha256", "bytes", "shape", "dtype"} of a tensor; the first decides, the others explain a difference."""
    return {
        "sha256": sha256(tensor),
        "bytes": tensor.numel() * tensor.element_size(),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def digests(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, dict]:
    """`digest` of every tensor, by name."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: digest(tensor) for name, tensor in items}
