"""SHA-256 fingerprints of tensors by their bytes, the same function on both sides of a run."""

import hashlib
from collections.abc import Iterable, Mapping

import torch


class EngineError(RuntimeError):
    """The engine does not hold what it was given; the message says what."""


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


def details(tensor: torch.Tensor) -> dict:
    """What helps to explain a difference: {"norm": of a floating tensor, "head": its first values, "parts"}.

    "parts" are digests of the two halves of the rows of each leading index of a stack: experts in another order and a
    swapped gate and up show there.
    """
    found = {}
    if tensor.is_floating_point() and tensor.element_size() > 1:
        found["norm"] = float(tensor.detach().double().norm())
        found["head"] = tensor.detach().reshape(-1)[:4].double().tolist()
    if tensor.dim() >= 3:
        found["parts"] = [sha256(half) for part in tensor for half in part.tensor_split(2)]
    return found


def cut(tensor: torch.Tensor, shard: dict) -> torch.Tensor:
    """The part of a whole tensor that a worker of a tensor-parallel engine holds.

    `shard`: {"dim", "start", "stop", "halves"}; with "halves" gate and up lie one below the other along dim, and the
    worker holds start:stop of each.
    """
    length = shard["stop"] - shard["start"]
    if not shard["halves"]:
        return tensor.narrow(shard["dim"], shard["start"], length)
    halves = tensor.unflatten(shard["dim"], (2, -1))
    return halves.narrow(shard["dim"] + 1, shard["start"], length).flatten(shard["dim"], shard["dim"] + 1)


def digests(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    detail: bool = False,
    shards: Mapping[str, dict] | None = None,
) -> dict[str, dict]:
    """`digest` of every tensor, by name; with `detail` also its `details`; of the part only where `shards` has one."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    found = {}
    for name, tensor in items:
        part = cut(tensor, shards[name]) if shards and name in shards else tensor
        found[name] = digest(part) | (details(part) if detail else {})
    return found
