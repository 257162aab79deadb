"""verl's synchronous V1 trainer with the consistency gate, proof of every sync, and the run folder's files.

Runs in verl's TaskRunner actor. verl's loop, advantages and dispatch are untouched; the hooks it offers are used.
"""

import time

from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rl import server, stats
from rl.consistency import check, compare_digests, matching_digests
from rl.consistency_report import ConsistencyReport, resolve_limits
from rl.live import LiveEngine, LiveTrainer
from rl.run_folder import RunFolder
from rollout.patching import patch_target

for _name in ("_init_resource_pool_mgr", "_setup", "_compute_metrics", "_validate", "on_init_end", "on_step_end"):
    patch_target(f"verl.trainer.ppo.v1.trainer_base:PPOTrainer.{_name}")


patch_target("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll")
POLL_INTERVAL_S = 0.2


class GateError(RuntimeError):
    """The consistency gate failed: training stops itself."""


class LockstepTrainer(PPOTrainerSync):
    """`folder` is set by the task runner before `init`."""

    folder: RunFolder

    def _init_resource_pool_mgr(self) -> None:
        import ray

        from rl.workers import LockstepWorker

        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(LockstepWorker)

    def _setup(self) -> None:
        # verl asks every 2 s whether the rollouts are done, which is half a step of a small model.
        self.replay_buffer.poll_interval = POLL_INTERVAL_S
        server.register()
        self.folder.stage("loading model")
        super()._setup()

    # ---- sync and gate --------------------------------------------------------------------------------------------

    def on_init_end(self) -> None:
        self.folder.stage("sending adapter")
        self.trainer_side = LiveTrainer(self.actor_rollout_wg)
        self.engine_side = LiveEngine(self.llm_server_manager.get_replicas(), self._sync)
        self._sync()
        self._verify_adapter(0)
        recipe = self.folder.recipe
        if recipe.consistency.enabled:
            self.folder.stage("consistency check")
            self._gate(step=0, probe=True)
        if recipe.trainer.val_before_train:
            self.folder.stage("held-out evaluation")

    def on_train_begin(self) -> None:
        self.folder.stage("first step")

    def _sync(self) -> None:
        self.checkpoint_manager.update_weights(self.global_steps)

    def on_step_end(self) -> None:
        super().on_step_end()
        self._verify_adapter(self.global_steps)
        every = self.folder.recipe.consistency.every
        if self.folder.recipe.consistency.enabled and every and self.global_steps % every == 0:
            started = time.monotonic()
            self._gate(step=self.global_steps, probe=False)
            self.timing_raw["gate"] = time.monotonic() - started

    def _verify_adapter(self, step: int) -> None:
        """After a sync every worker of the engine must hold the trainer's adapter, tensor by tensor."""
        workers = self.engine_side.adapter_digests()
        for ours, worker in zip(matching_digests(self.trainer_side.adapter_digests, workers), workers, strict=True):
            differing = compare_digests(ours, worker)
            if differing:
                raise GateError(
                    f"after the sync of step {step} {len(differing)} adapter tensors differ, first {differing[0]}"
                )

    def _gate(self, step: int, probe: bool) -> ConsistencyReport:
        recipe = self.folder.recipe
        prompts = self._probe_prompts(recipe.consistency.probe_sequences)
        tokens = min(recipe.consistency.probe_tokens, recipe.data.max_response_length)
        backend = self.config.actor_rollout_ref.model.lora.lockstep.backend
        limits = resolve_limits(recipe.consistency.thresholds.model_dump(), backend)
        options = {"probe": probe, "replay_blocks": recipe.consistency.replay_blocks, "step": step}
        report = check(self.trainer_side, self.engine_side, prompts, tokens, limits, **options)
        self.folder.write_consistency(report)
        if report.verdict != "pass":
            raise GateError("; ".join([*report.reasons, *report.diagnosis]))
        return report

    def _probe_prompts(self, count: int) -> list[list[int]]:
        """The first prompts of the held-out set, as the rollout tokenises them."""
        prompts = []
        for index in range(min(count, len(self.val_dataset))):
            messages = self.val_dataset[index]["raw_prompt"]
            prompts.append(
                self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
            )
        return prompts

    # ---- run folder -----------------------------------------------------------------------------------------------

    def _validate(self):
        metrics = super()._validate()
        accuracy = next((v for k, v in metrics.items() if k.startswith("val-core/") and "/acc/mean@" in k), None)
        if accuracy is None:
            raise RuntimeError(f"verl reported no held-out accuracy among {sorted(metrics)}")
        self.folder.validation(self.global_steps, float(accuracy))
        return metrics

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        self.folder.step(global_steps, row(metrics, timing_raw), self.total_training_steps)
        if global_steps >= self.total_training_steps:
            self.folder.stage("saving adapter")
            self.actor_rollout_wg.lockstep_save_adapter(str(self.folder.path / "adapter"))


# Column of metrics.jsonl -> verl's name for it.
_METRICS = {
    "reward": "critic/score/mean",
    "response_length": "response_length/mean",
    "clip_ratio": "response_length/clip_ratio",
    "grad_norm": "actor/grad_norm",
    "loss": "actor/pg_loss",
    "lr": "actor/lr",
    "trainer_memory_gb": "actor/perf/max_memory_allocated_gb",
}
_TIMINGS = {
    "time_generate": "gen",
    "time_update": "update_actor",
    "time_sync": "update_weights",
    "time_gate": "gate",
    "time_step": "step",
}


def row(metrics: dict, timing: dict[str, float]) -> dict:
    """One row of metrics.jsonl from verl's metrics and timings (seconds)."""
    out = stats.finish(
        {key: float(value) for key, value in metrics.items() if key.startswith(("actor/lockstep", "lockstep"))}
    )
    out |= {name: float(metrics[key]) for name, key in _METRICS.items() if key in metrics}
    if "reward" in out:
        out["accuracy"] = (out["reward"] + 1) / 2  # the reward is +1 or -1
    out |= {name: float(timing[key]) for name, key in _TIMINGS.items() if key in timing}
    if out.get("tokens") and out.get("time_step"):
        out["tokens_per_s"] = out["tokens"] / out["time_step"]
    return out
