"""verl's actor worker with the calls that the consistency check and the run folder need."""

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker


class LockstepWorker(ActorRolloutRefWorker):
    """One FSDP2 worker. Every method here is collective: the controller calls it on all workers at once."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        threads = torch.get_num_threads()
        super().init_model()
        torch.set_num_threads(threads)
        policy_loss = self.config.actor.policy_loss
        correction = policy_loss.rollout_correction
        # verl accepts a rollout_correction that its loss never looks at: what is trained must be what the recipe says.
        if policy_loss.loss_mode != "bypass_mode" or not correction.bypass_mode or correction.loss_type != "reinforce":
            raise RuntimeError(f"the loss would not apply importance sampling once: {policy_loss}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lockstep_probe(self, method: str, *args):
        """Call a method of the engine's `TrainerProbe`; rank 0's answer counts."""
        return getattr(self.actor.engine.probe, method)(*args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lockstep_save_adapter(self, folder: str) -> None:
        self.actor.engine.save_adapter(folder)
