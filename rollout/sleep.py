"""Sleep and wake of an engine's worker, and proof that the base after a wake is that of the start.

Level 1 keeps the pool of the weights in host memory; level 2 keeps only what no checkpoint has (LoRA buffers, Marlin's
workspaces, rotary caches) and reads the weights again. vLLM 0.30.0 alone loses the former at level 2, and its
reload_weights skips experts that LoRA wraps with a warning. The KV cache is dropped at both levels.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from rollout.fingerprint import EngineError, digest
from rollout.patching import patch_target

Allocator = patch_target("vllm.device_allocator.cumem:CuMemAllocator")
CudaRuntime = patch_target("vllm.distributed.device_communicators.cuda_wrapper:CudaRTLibrary")
LoRALayer = patch_target("vllm.lora.layers.base:BaseLayerWithLoRA")
ModularMethod = patch_target("vllm.model_executor.layers.fused_moe.fused_moe_modular_method:FusedMoEModularMethod")
default_dtype = patch_target("vllm.utils.torch_utils:set_default_torch_dtype")
for _name in ("sleep", "wake_up", "reload_weights"):
    patch_target(f"vllm.v1.worker.gpu_worker:Worker.{_name}")

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's names of its two memory pools."""


class SleepError(EngineError):
    """A base that a wake did not bring back; the message names the tensors."""


@dataclass
class SleepState:
    """Of one worker. `base`: digests of the start; `kept`: (address, its bytes) of level 2."""

    base: dict[str, dict] | None = None
    level: int = 0
    kv_dropped: bool = False
    kept: list[tuple[int, torch.Tensor]] = field(default_factory=list)


def changed_tensors(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """Names of tensors that are not in both, or whose digests differ."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def is_engines_own(name: str) -> bool:
    """Whether a parameter is in no checkpoint: scales of the KV cache, ..."""
    return name.rpartition(".")[2].startswith("_")


def constant_digests(model: nn.Module) -> dict[str, dict]:
    """Of what a forward reads besides the base: buffers (rotary caches, ...) and parameters of the engine alone."""
    own = [(name, tensor) for name, tensor in model.named_parameters() if is_engines_own(name)]
    return {f"{name}#engine": digest(tensor) for name, tensor in (*model.named_buffers(), *own)}


# ---- level 2: what a checkpoint does not hold ------------------------------------------------------------------------


def blocks_besides(segments: Iterable[dict], storages: set[int]) -> list[tuple[int, int]]:
    """(address, bytes) of each used block of a memory pool's snapshot that begins no storage of `storages`.

    `segments`: as torch.cuda.memory_snapshot returns them; the blocks of a segment lie one behind the other.
    """
    found = []
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active") and address not in storages:
                found.append((address, block["size"]))
            address += block["size"]
    return found


def restored_storages(model: nn.Module) -> set[int]:
    """Addresses of the parameters that a checkpoint brings back."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {tensor.untyped_storage().data_ptr() for name, tensor in parameters if not is_engines_own(name)}


def keep_blocks(model: nn.Module) -> list[tuple[int, torch.Tensor]]:
    """Copies in host memory of all that lies in the weights' pool and is no parameter of the model."""
    torch.cuda.synchronize()
    pool, _ = Allocator.get_instance().allocator_and_pools[WEIGHTS]
    kept, runtime = [], CudaRuntime()
    for address, size in blocks_besides(pool.snapshot(), restored_storages(model)):
        copy = torch.empty(size, dtype=torch.uint8)
        runtime.cudaMemcpy(copy.data_ptr(), address, size)
        kept.append((address, copy))
    return kept


def put_back(kept: list[tuple[int, torch.Tensor]]) -> None:
    """Copy the blocks of `keep_blocks` to where they were; their pool is mapped again."""
    runtime = CudaRuntime()
    for address, copy in kept:
        runtime.cudaMemcpy(address, copy.data_ptr(), copy.numel())
    torch.cuda.synchronize()


def zero_kv_cache() -> None:
    """As vLLM allocates it: mapped again it holds what others left there, and 0 * NaN of a masked position is NaN."""
    runtime = CudaRuntime()
    for address, allocation in Allocator.get_instance().pointer_to_data.items():
        if allocation.tag == KV_CACHE:
            runtime.cudaMemset(address, 0, allocation.handle[1])
    torch.cuda.synchronize()


# ---- level 2: the checkpoint again -----------------------------------------------------------------------------------


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Within it the model is as it was loaded: no LoRA wrappers, and the experts' own quantisation methods.

    Wrapped, experts are not loaded at all (other names are expected), other models' loaders do not find a linear, and
    the method that LoRA puts before the experts' own does not repack. The kernels that hold the adapter stay; those
    that repacking makes are dropped, since the weights are copied to where the old ones read them.
    """
    wrappers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, LoRALayer)
    ]
    methods = [
        (module, method, method.old_quant_method.moe_kernel, method.old_quant_method.moe_quant_config)
        for module in model.modules()
        if isinstance(method := module._modules.get("quant_method"), ModularMethod)
    ]
    prefixes = [(module, module.lora_base_layer_prefix) for module, *_ in methods]
    for parent, name, wrapper in wrappers:
        parent._modules[name] = wrapper.base_layer
    for module, method, *_ in methods:
        del module.quant_method  # a module cannot be replaced by what is none
        module.quant_method = method.old_quant_method
        module.lora_base_layer_prefix = ""
    try:
        yield
    finally:
        for module, method, kernel, config in methods:
            method.old_quant_method.moe_kernel, method.old_quant_method.moe_quant_config = kernel, config
            del module.quant_method
            module.quant_method = method
        for module, prefix in prefixes:
            module.lora_base_layer_prefix = prefix
        for parent, name, wrapper in wrappers:
            parent._modules[name] = wrapper


def reload_base(worker) -> None:
    """Read the base from the worker's checkpoint into the tensors that are there. Adapters are dropped."""
    with without_lora(worker.model_runner.model), default_dtype(worker.model_config.dtype):  # as at the first load
        worker.reload_weights()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- the worker ------------------------------------------------------------------------------------------------------


class SleepWorker:
    """Part of `rollout.worker.EngineWorker`, which has `lockstep_base_digests`."""

    def _lockstep_sleep(self) -> SleepState:
        return self.__dict__.setdefault("lockstep_sleep_state", SleepState())

    def _lockstep_whole_base(self) -> dict[str, dict]:
        return self.lockstep_base_digests() | constant_digests(self.model_runner.model)

    def _lockstep_prove(self, state: SleepState) -> None:
        """SleepError unless the base is that of the start."""
        after = f"after a sleep of level {state.level}"
        try:
            found = self._lockstep_whole_base()
        except EngineError as error:  # no checkpoint gives such bytes (`rollout.marlin`)
            raise SleepError(f"{after} the engine's base is not that of its start: {error}") from error
        if changed := changed_tensors(state.base, found):
            count = f"{len(changed)} of {len(state.base)} tensors"
            raise SleepError(f"{after} {count} of the engine are not those of its start: {', '.join(changed[:5])}")

    def lockstep_before_sleep(self, level: int) -> None:
        """Call before vLLM's sleep(level), 1 or 2. The first time it takes the digests that every wake must give."""
        state = self._lockstep_sleep()
        if state.level:  # asleep: what a second sleep would read is not mapped
            return
        if state.base is None:
            state.base = self._lockstep_whole_base()
        if level == 2:
            state.kept = keep_blocks(self.model_runner.model)
        state.level, state.kv_dropped = level, True

    def lockstep_after_wake(self, tag: str) -> dict | None:
        """Call after vLLM's wake_up([tag]), "weights" before "kv_cache" and before any request.

        Returns, for the weights, {"level", "tensors", "kept_bytes", "restore_ms", "proof_ms"}: host memory and time
        that level 2 took, and the time of the digests. None if that part did not sleep. Raises SleepError if a tensor
        differs from the start's.
        """
        state = self._lockstep_sleep()
        if tag == KV_CACHE:
            if state.kv_dropped:
                zero_kv_cache()
            state.kv_dropped = False
            return None
        if not state.level:
            return None
        started = time.perf_counter()
        kept_bytes = sum(copy.numel() for _, copy in state.kept)
        if state.level == 2:
            put_back(state.kept)
            reload_base(self)
        restored = time.perf_counter()
        self._lockstep_prove(state)
        report = {
            "level": state.level,
            "tensors": len(state.base),
            "kept_bytes": kept_bytes,
            "restore_ms": 1e3 * (restored - started),
            "proof_ms": 1e3 * (time.perf_counter() - restored),
        }
        state.level, state.kept = 0, []
        return report
