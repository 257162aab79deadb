"""The vLLM worker extension of a verl run: verl's weight receiver, and lockstep's fingerprints and checks."""

from rollout.patching import patch_target
from rollout.worker import EngineWorker, SyncError

_utils = "verl.workers.rollout.vllm_rollout.utils"
ColocateExtension = patch_target(f"{_utils}:vLLMColocateWorkerExtension")
patch_target(f"{_utils}:vLLMColocateWorkerExtension._update_weights")


class LockstepWorkerExtension(EngineWorker, ColocateExtension):
    """Mixed into vLLM's worker class by name (`worker_extension_cls`)."""

    def _update_weights(self, weights, peft_config, base_sync_done) -> None:
        names = [name for name, _ in weights]
        if not peft_config or not base_sync_done:
            raise SyncError(f"{len(names)} base tensors were pushed to the engine; only adapters may be")
        if not any("lora_" in name for name in names):
            raise SyncError(f"{len(names)} tensors were pushed and none is of an adapter")
        super()._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)
