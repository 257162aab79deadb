"""verl's synchronous V1 trainer with the consistency gate, proof of every sync, and the run folder's files.

Runs in verl's TaskRunner actor. verl's loop, advantages and dispatch are untouched; the hooks it offers are used.
"""

import time

import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rl import server
from rl.consistency import check, compare_digests, matching_digests
from rl.consistency_report import ConsistencyReport, resolve_limits
from rl.data import chat_ids
from rl.dynamic_sampling import GenerationBudget, sampling_metrics
from rl.live import LiveEngine, LiveTrainer
from rl.run_folder import RunFolder
from rl.samples import choose, sample_rows
from rl.step_metrics import held_out, logged, reward_metrics, row
from rl.tracking import log_consistency
from rollout.patching import patch_target

for _name in (
    "_init_resource_pool_mgr",
    "_setup",
    "_compute_metrics",
    "_val_metrics_update",
    "on_init_end",
    "on_step_end",
    "on_sample_begin",
):
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
        limits = (self.folder.recipe.data.batch_size, self.folder.recipe.algorithm.max_gen_batches)
        self.budget = GenerationBudget(self.replay_buffer.refill_fn, *limits, self.folder.note)
        self.replay_buffer.refill_fn = self.budget.refill
        server.register()
        self.folder.stage("loading model")
        super()._setup()

    # ---- sync and gate --------------------------------------------------------------------------------------------

    def on_init_end(self) -> None:
        self._check_objective()
        self.folder.stage("sending adapter")
        self.trainer_side = LiveTrainer(self.actor_rollout_wg)
        self.engine_side = LiveEngine(self.llm_server_manager.get_replicas(), self._sync)
        self._sync()
        self._verify_adapter(0)
        self._wake_seconds(tell=True)
        recipe = self.folder.recipe
        if recipe.consistency.enabled:
            self.folder.stage("consistency check")
            self._gate(step=0, probe=True)
        if recipe.trainer.val_before_train:
            self.folder.stage("held-out evaluation")

    def _check_objective(self) -> None:
        """The loss of every worker must be the recipe's objective (`rl.objective` asks verl's function itself)."""
        wanted, found = self.folder.recipe.algorithm.objective, set(self.actor_rollout_wg.lockstep_objective())
        if found != {wanted}:
            raise GateError(f"the recipe trains {wanted}, verl's loss computes {', '.join(sorted(found))}")

    def on_train_begin(self) -> None:
        self.folder.stage("first step")
        log_consistency(self.config.trainer.logger, self.folder.path)  # of step 0: wandb begins after that gate

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self.budget.begin_step()

    def _sync(self) -> None:
        self.checkpoint_manager.update_weights(self.global_steps)

    def on_step_end(self) -> None:
        super().on_step_end()
        self._verify_adapter(self.global_steps)
        if (seconds := self._wake_seconds()) is not None:
            self.timing_raw["wake"] = seconds  # part of verl's update_weights
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

    def _wake_seconds(self, tell: bool = False) -> float | None:
        """Seconds that the last wake took to restore and prove the base; None if the recipe lets no engine sleep."""
        if self.folder.recipe.rollout.sleep_level == 0:
            return None
        report = self.engine_side.wake_report()
        if report is None:
            raise GateError("the recipe lets the engines sleep, but one has not proved its base after its last sleep")
        seconds = (report["restore_ms"] + report["proof_ms"]) / 1e3
        if tell:
            tensors = f"{report['tensors']} base tensors equal after the wake"
            self.folder.note(f"sleep level {report['level']}: {tensors} ({seconds:.2f} s)")
        return seconds

    def _gate(self, step: int, probe: bool) -> ConsistencyReport:
        recipe = self.folder.recipe
        prompts = self._probe_prompts(recipe.consistency.probe_sequences)
        tokens = min(recipe.consistency.probe_tokens, recipe.data.max_response_length)
        backend = self.config.actor_rollout_ref.model.lora.lockstep.backend
        limits = resolve_limits(recipe.consistency.thresholds.model_dump(), backend)
        options = {"probe": probe, "replay_blocks": recipe.consistency.replay_blocks, "step": step}
        report = check(self.trainer_side, self.engine_side, prompts, tokens, limits, **options)
        self.folder.write_consistency(report)
        if step > 0:  # wandb begins after the first gate: see on_train_begin
            log_consistency(self.config.trainer.logger, self.folder.path)
        if report.verdict != "pass":
            raise GateError("; ".join([*report.reasons, *report.diagnosis]))
        return report

    def _probe_prompts(self, count: int) -> list[list[int]]:
        """The first prompts of the held-out set, as the rollout tokenises them."""
        indices = range(min(count, len(self.val_dataset)))
        return chat_ids(self.tokenizer, (self.val_dataset[index]["raw_prompt"] for index in indices))

    # ---- run folder -----------------------------------------------------------------------------------------------

    def _val_metrics_update(self, sources, uids, infos, turns, expected_acc_counts):
        metrics = super()._val_metrics_update(sources, uids, infos, turns, expected_acc_counts=expected_acc_counts)
        # Counted here: verl drops columns of text, and would bootstrap a numeric one for seconds.
        result = held_out(metrics, [source for source, _ in expected_acc_counts], infos.get("error", []))
        self.folder.validation(self.global_steps, **result)
        return metrics | {f"val-aux/{name}": result[name] for name in ("reward_errors", "reward_timeouts")}

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        more = reward_metrics(batch.tags)
        if self.folder.recipe.algorithm.filter_groups:
            more |= sampling_metrics(metrics, self.folder.recipe.data.batch_size)
        columns = row(metrics, timing_raw, more)
        self.folder.step(global_steps, columns, self.total_training_steps)
        for_loggers = logged(metrics, columns)
        metrics.clear()
        metrics.update(for_loggers)
        self._keep_samples(batch, global_steps)
        if global_steps >= self.total_training_steps:
            self.folder.stage("saving adapter")
            self.actor_rollout_wg.lockstep_save_adapter(str(self.folder.path / "adapter"))

    def _keep_samples(self, batch, step: int) -> None:
        """A few samples of the step into samples.jsonl."""
        keys = [batch.keys[place] for place in choose(batch.keys, batch.tags)]
        fields = ["prompts", "responses", "rm_scores", "reward_model", "extra_fields"]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        self.folder.samples(step, sample_rows(data, self.tokenizer.decode))
