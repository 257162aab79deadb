"""Safetensors files read by range and written in place: one tensor in memory at a time, every defect a clear line.

The safetensors library maps a file into memory, and mapped pages count as resident; conversion promises a memory bound,
so this module reads exact byte ranges and writes each tensor to its final offset. Format: an 8-byte little-endian
length, that many bytes of JSON ({name: {dtype, shape, data_offsets}}), then the data.
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER = 100 << 20


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message is one line that names the file or tensor and why."""


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: `start` and `end` are absolute byte positions."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.end - self.start

    def read(self, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or its `index`-th slice along dimension 0, or rows first:last of either; copied from the file.

        CheckpointError when the file ends early.
        """
        shape, start, size = self.shape, self.start, self.nbytes
        if index is not None:
            size //= shape[0]
            start += index * size
            shape = shape[1:]
        if rows is not None:
            row = size // shape[0]
            start, size = start + rows[0] * row, (rows[1] - rows[0]) * row
            shape = (rows[1] - rows[0], *shape[1:])
        if size == 0:
            return torch.empty(shape, dtype=self.dtype)
        buffer = bytearray(size)
        with open(self.file, "rb", buffering=0) as stream:
            stream.seek(start)
            view = memoryview(buffer)
            done = 0
            while done < size:
                count = stream.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{self.file}: truncated inside tensor {self.name}")
                done += count
        return torch.frombuffer(buffer, dtype=torch.uint8).view(self.dtype).view(shape)


def read_header(file: Path) -> dict[str, Entry]:
    """Tensors of one safetensors file by name. CheckpointError for a cut, malformed or unknown-dtype file."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
            if length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{file}: truncated or not a safetensors file (header of {length} bytes)")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot read it: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: its header is not JSON: {error}") from error
    header.pop("__metadata__", None)
    return {name: _entry(file, name, info, 8 + length, size) for name, info in header.items()}


def _entry(file: Path, name: str, info: dict, base: int, size: int) -> Entry:
    try:
        kind, shape, (start, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: malformed header entry for tensor {name}") from error
    if kind not in DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has unknown dtype {kind!r}; known: {', '.join(DTYPES)}")
    if end - start != math.prod(shape) * DTYPES[kind].itemsize:
        raise CheckpointError(f"{file}: tensor {name} holds {end - start} bytes, which is not {kind} {list(shape)}")
    if base + end > size:
        raise CheckpointError(f"{file}: truncated: tensor {name} ends at byte {base + end} of {size}")
    return Entry(name, DTYPES[kind], shape, file, base + start, base + end)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder: `entries` by tensor name, `files` in order, and its config.json."""

    path: Path
    entries: dict[str, Entry]
    files: tuple[Path, ...]
    config: dict


def read_json(file: Path) -> dict:
    """A JSON object from `file`, or CheckpointError."""
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot read it: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return content


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face safetensors checkpoint folder and check its index against its files (headers only).

    CheckpointError names what is missing: the folder, config.json, a file, a tensor that the index promises, or an
    index entry for a tensor that a file holds.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder")
    config = read_json(path / "config.json")
    index_file = path / INDEX_NAME
    if index_file.exists():
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index_file}: it has no weight_map")
    elif (path / SINGLE_NAME).exists():
        weight_map = dict.fromkeys(read_header(path / SINGLE_NAME), SINGLE_NAME)
    else:
        raise CheckpointError(f"{path}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")
    files = tuple(path / name for name in sorted(set(weight_map.values())))
    entries = {}
    for file in files:
        for name, entry in read_header(file).items():
            if weight_map.get(name) != file.name:
                raise CheckpointError(f"{index_file}: no entry for tensor {name}, which {file.name} holds")
            entries[name] = entry
    for name, file_name in weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{path / file_name}: tensor {name} is missing, but the index promises it")
    return Checkpoint(path, entries, files, config)


Spec = tuple[str, torch.dtype, tuple[int, ...]]


class ShardWriter:
    """Writes one safetensors file whose tensors are known beforehand, each at its final offset as it arrives.

    The file is `<path>.partial` until `finish` has seen every tensor, synced the data and renamed it.
    """

    def __init__(self, path: Path, specs: Iterable[Spec]) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        # Wide dtypes first: every tensor is then aligned to its own item size, as readers that map the file expect.
        ordered = sorted(specs, key=lambda spec: (-spec[1].itemsize, spec[0]))
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        self._offsets: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        for name, dtype, shape in ordered:
            size = math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, offset + size],
            }
            self._offsets[name] = (offset, dtype, tuple(shape))
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base, self._size = 8 + len(text), 8 + len(text) + offset
        self._stream = open(self.partial, "wb")  # noqa: SIM115 - closed by finish or close
        self._stream.write(struct.pack("<Q", len(text)) + text)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; its dtype and shape must be the declared ones, and each name may come once."""
        offset, dtype, shape = self._offsets.pop(name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: declared {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        self._stream.seek(self._base + offset)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._stream.write(memoryview(data))

    def finish(self) -> None:
        """Sync and rename to the final name; ValueError when a declared tensor never came."""
        if self._offsets:
            raise ValueError(f"{self.path}: never written: {', '.join(sorted(self._offsets)[:3])}")
        self._stream.truncate(self._size)
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self.partial, self.path)

    def close(self) -> None:
        """Close without finishing (after an error); the partial file stays and a later run replaces it."""
        self._stream.close()


def write_json(file: Path, content: dict) -> None:
    """Write JSON so that `file` either has all of it or does not exist under that name."""
    partial = file.with_name(file.name + ".partial")
    with open(partial, "w") as stream:
        stream.write(json.dumps(content, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, file)
