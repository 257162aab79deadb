"""bfloat16 checkpoint -> compressed-tensors mixed checkpoint, one tensor in memory at a time, resumable.

What a run leaves in DST, in order: `.quantizing.json` (source fingerprint and policy), the shards (each under a partial
name until it is complete and synced), the other files, the index, and last config.json with its quantization_config;
then the marker goes. A DST without config.json loads nowhere, so a killed run never looks complete, and the next run
with the same source and policy keeps the shards that are done.

On disk: MXFP8 `X.weight` (e4m3) + `X.weight_scale` (E8M0 bytes); NVFP4 `X.weight_packed`, `X.weight_scale` (e4m3),
`X.weight_global_scale` float32 [1], stored as the divisor 1 / global_scale (exact: a power of two). Routed experts are
one matrix each (`experts.E.gate_proj`), also when the source has them fused (`experts.gate_up_proj` [E, 2I, H]).
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quant import mxfp8, nvfp4
from quant.policy import BLOCK_SIZES, MXFP8, NVFP4, Policy, fused_group, get_policy
from quant.shards import (
    INDEX_NAME,
    Checkpoint,
    CheckpointError,
    Entry,
    ShardWriter,
    Spec,
    open_checkpoint,
    read_header,
    read_json,
    write_json,
)

MARKER = ".quantizing.json"
_FUSED_EXPERTS = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<part>gate_up_proj|down_proj)$")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".md")


@dataclass(frozen=True)
class Job:
    """One output matrix: rows `rows` of slice `index` of a source tensor, written as `module` in `fmt` (None: copied).

    `name` is the plain output tensor's name; `group` names the jobs that share a global scale.
    """

    source: Entry
    module: str
    name: str
    fmt: str | None
    shape: tuple[int, ...]
    index: int | None = None
    rows: tuple[int, int] | None = None
    group: str = ""

    def read(self) -> torch.Tensor:
        """The matrix from the source file."""
        return self.source.read(self.index, self.rows)

    def specs(self) -> list[Spec]:
        """Names, dtypes and shapes that this job writes."""
        if self.fmt is None:
            return [(self.name, self.source.dtype, self.shape)]
        rows, columns = self.shape
        blocks = columns // BLOCK_SIZES[self.fmt]
        if self.fmt == MXFP8:
            data = (f"{self.module}.weight", torch.float8_e4m3fn, (rows, columns))
            return [data, (f"{self.module}.weight_scale", torch.uint8, (rows, blocks))]
        return [
            (f"{self.module}.weight_packed", torch.uint8, (rows, columns // 2)),
            (f"{self.module}.weight_scale", torch.float8_e4m3fn, (rows, blocks)),
            (f"{self.module}.weight_global_scale", torch.float32, (1,)),
        ]


@dataclass
class Plan:
    """Everything a conversion will write: jobs by source file name, in source order."""

    checkpoint: Checkpoint
    policy: Policy
    jobs: dict[str, list[Job]] = field(default_factory=dict)

    def all_jobs(self) -> Iterator[Job]:
        """Jobs of all files."""
        for jobs in self.jobs.values():
            yield from jobs


def make_plan(source: str | Path, policy: str | Policy) -> Plan:
    """Read the headers of `source` and decide every tensor's format. CheckpointError or ValueError when it cannot."""
    checkpoint = open_checkpoint(source)
    if "quantization_config" in checkpoint.config:
        raise CheckpointError(f"{checkpoint.path}: it is already quantised (config.json has a quantization_config)")
    plan = Plan(checkpoint, get_policy(policy), {file.name: [] for file in checkpoint.files})
    for entry in checkpoint.entries.values():
        plan.jobs[entry.file.name].extend(_jobs_of(entry, checkpoint, plan.policy))
    if not any(job.fmt for job in plan.all_jobs()):
        raise CheckpointError(f"{checkpoint.path}: policy {plan.policy.name!r} matches none of its tensors")
    return plan


def _jobs_of(entry: Entry, checkpoint: Checkpoint, policy: Policy) -> list[Job]:
    fused = _FUSED_EXPERTS.match(entry.name)
    if fused and len(entry.shape) == 3:
        return _expert_jobs(entry, fused["prefix"], fused["part"], checkpoint, policy)
    module = entry.name.removesuffix(".weight")
    matrix = entry.name.endswith(".weight") and len(entry.shape) == 2
    fmt = policy.format_of(module) if matrix else None
    _check_encodable(entry, fmt, entry.shape)
    return [Job(entry, module, entry.name, fmt, entry.shape, group=fused_group(module))]


def _expert_jobs(entry: Entry, prefix: str, part: str, checkpoint: Checkpoint, policy: Policy) -> list[Job]:
    """One job an expert (two for gate_up) of a stacked tensor in the layout [E, 2I, H] / [E, H, I]."""
    other = checkpoint.entries.get(f"{prefix}.{'down_proj' if part == 'gate_up_proj' else 'gate_up_proj'}")
    gate_up, down = (entry, other) if part == "gate_up_proj" else (other, entry)
    if other is None or gate_up.shape[1] != 2 * down.shape[2] or gate_up.shape[2] != down.shape[1]:
        raise CheckpointError(f"{entry.file}: {entry.name} {list(entry.shape)} is not a [E, 2I, H] / [E, H, I] stack")
    if f"{entry.name}_bias" in checkpoint.entries:
        raise CheckpointError(f"{entry.file}: {entry.name} has biases, which packed experts do not support")
    mixtral_names = prefix.endswith("block_sparse_moe.experts")
    names = {"gate": "w1", "up": "w3", "down": "w2"} if mixtral_names else {}
    half = entry.shape[1] // 2
    parts = {"gate": (0, half), "up": (half, 2 * half)} if part == "gate_up_proj" else {"down": None}
    jobs = []
    for expert in range(entry.shape[0]):
        for kind, rows in parts.items():
            module = f"{prefix}.{expert}.{names.get(kind, kind + '_proj')}"
            fmt = policy.format_of(module)
            shape = (entry.shape[1] if rows is None else half, entry.shape[2])
            _check_encodable(entry, fmt, shape)
            jobs.append(Job(entry, module, f"{module}.weight", fmt, shape, expert, rows, fused_group(module)))
    return jobs


def _check_encodable(entry: Entry, fmt: str | None, shape: tuple[int, ...]) -> None:
    if fmt is None:
        return
    if entry.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"{entry.file}: {entry.name} is {entry.dtype}; only 16 and 32-bit floats can be encoded")
    if shape[-1] % BLOCK_SIZES[fmt]:
        raise CheckpointError(
            f"{entry.file}: {entry.name} has K={shape[-1]}, not a multiple of {BLOCK_SIZES[fmt]} as {fmt} needs; "
            "keep it with a rule in a policy file"
        )


class _GlobalScales:
    """Global scale of each group of fused matrices; the largest magnitudes are read once and kept as floats."""

    def __init__(self, plan: Plan) -> None:
        self._members: dict[str, list[Job]] = {}
        self._amax: dict[str, torch.Tensor] = {}
        for job in plan.all_jobs():
            if job.fmt == NVFP4:
                self._members.setdefault(job.group, []).append(job)

    def of(self, job: Job, weight: torch.Tensor) -> torch.Tensor:
        """Global scale [] for `job`, whose matrix is `weight`; reads the other members from their files if need be."""
        self._amax[job.module] = nvfp4.tensor_amax(weight)
        for other in self._members[job.group]:
            if other.module not in self._amax:
                self._amax[other.module] = nvfp4.tensor_amax(other.read())
        largest = torch.stack([self._amax[member.module] for member in self._members[job.group]]).max()
        return nvfp4.choose_global_scale(largest)


def encode_job(job: Job, scales: "_GlobalScales", device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs that `job.specs` declares."""
    weight = job.read()
    if job.fmt is None:
        yield job.name, weight
        return
    try:
        if job.fmt == MXFP8:
            encoded = mxfp8.quantize(weight.to(device))
            tensors = (encoded.data, encoded.scale)
        else:
            encoded = nvfp4.quantize(weight.to(device), scales.of(job, weight))
            tensors = (encoded.packed, encoded.scale, (1.0 / encoded.global_scale).reshape(1))
    except ValueError as error:
        raise CheckpointError(f"{job.source.file}: {job.source.name} ({job.module}): {error}") from error
    for (name, _, _), tensor in zip(job.specs(), tensors, strict=True):
        yield name, tensor


def run_plan(plan: Plan, target: Path, device: str = "cpu", progress: bool = True) -> None:
    """Carry out `plan` into `target`, keeping shards that an earlier run of the same plan finished."""
    from tqdm import tqdm

    from quant.config import quantization_config

    with _claimed(target, plan):
        scales = _GlobalScales(plan)
        total = sum(entry.nbytes for entry in plan.checkpoint.entries.values())
        with tqdm(total=total, unit="B", unit_scale=True, desc="quantize", disable=not progress) as bar:
            for name, jobs in plan.jobs.items():
                if not _is_done(target / name, jobs):
                    _write_shard(target / name, jobs, scales, device, bar)
                else:
                    bar.update(sum(entry.nbytes for entry in {job.source for job in jobs}))
        _copy_other_files(plan.checkpoint.path, target)
        weight_map, size = {}, 0
        for name in plan.jobs:
            for entry in read_header(target / name).values():
                weight_map[entry.name] = name
                size += entry.nbytes
        write_json(target / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})
        config = {**plan.checkpoint.config, "quantization_config": quantization_config(plan)}
        write_json(target / "config.json", config)


def _write_shard(path: Path, jobs: list[Job], scales: _GlobalScales, device: str, bar) -> None:
    writer = ShardWriter(path, [spec for job in jobs for spec in job.specs()])
    try:
        for job in jobs:
            for name, tensor in encode_job(job, scales, device):
                writer.put(name, tensor)
            bar.update(job.source.nbytes * _elements(job.shape) // max(1, _elements(job.source.shape)))
        writer.finish()
    finally:
        writer.close()


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _is_done(path: Path, jobs: list[Job]) -> bool:
    if not path.exists():
        return False
    written = {(entry.name, entry.dtype, entry.shape) for entry in read_header(path).values()}
    return written == {spec for job in jobs for spec in job.specs()}


def _fingerprint(plan: Plan) -> dict:
    files = [plan.checkpoint.path / "config.json", *plan.checkpoint.files]
    stats = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"version": 1, "source": stats, "policy": [list(rule) for rule in plan.policy.rules]}


@contextmanager
def _claimed(target: Path, plan: Plan):
    """Hold `target` (fresh or resumable) for this run, locked against a second one; drop the marker at the end."""
    source = plan.checkpoint.path.resolve()
    if target.resolve() == source or source in target.resolve().parents:
        raise CheckpointError(f"{target}: DST lies in SRC; choose a folder of its own")
    marker, fingerprint = target / MARKER, _fingerprint(plan)
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: it exists and is not a folder")
    if not marker.exists():
        if target.exists() and any(file.name != f"{MARKER}.partial" for file in target.iterdir()):
            raise CheckpointError(f"{target}: it exists and is not empty; nothing is overwritten, choose another DST")
        target.mkdir(parents=True, exist_ok=True)
        write_json(marker, fingerprint)
    elif read_json(marker) != fingerprint:
        raise CheckpointError(f"{target}: it holds an unfinished conversion of another source or policy; remove it")
    with open(marker) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{target}: another conversion is writing into it") from error
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{target}: {error.strerror}; what is done stays: make room and run the same command again"
            ) from error
        for partial in target.glob("*.partial"):
            partial.unlink()
        os.unlink(marker)


def _copy_other_files(source: Path, target: Path) -> None:
    """Tokenizer, templates and the like; never weights, config.json (written last) or hidden files."""
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _COPIED_SUFFIXES and not file.name.endswith(_WEIGHT_FILES)
        if file.is_file() and wanted and file.name != "config.json" and not file.name.startswith("."):
            shutil.copyfile(file, target / file.name)
