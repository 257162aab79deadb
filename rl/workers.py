"""verl's actor worker with the calls that the consistency check and the run folder need."""

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker

from rl.objective import effective_objective


class LockstepWorker(ActorRolloutRefWorker):
    """One FSDP2 worker. Every method here is collective: the controller calls it on all workers at once."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        # verl accepts settings that its loss never looks at: what is trained must be what the recipe says.
        self.objective = effective_objective(omega_conf_to_dataclass(self.config.actor))
        threads = torch.get_num_threads()
        super().init_model()
        torch.set_num_threads(threads)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lockstep_objective(self) -> str:
        """The objective that verl's loss was found to compute, a name in `rl.schema.OBJECTIVES`."""
        return self.objective

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lockstep_probe(self, method: str, *args):
        """Call a method of the engine's `TrainerProbe`; rank 0's answer counts."""
        return getattr(self.actor.engine.probe, method)(*args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lockstep_save_adapter(self, folder: str) -> None:
        self.actor.engine.save_adapter(folder)
