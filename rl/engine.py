"""The FSDP2 training engine that verl drives: packed base, float32 adapter masters, routing replay, proof of sync.

Registered with verl for cpu and for NVIDIA GPUs; loaded through `actor_rollout_ref.model.external_lib`. Everything else
of the step (dispatch, micro-batches, loss, optimizer, clipping, schedule) is verl's.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from verl.utils.tensordict_utils import assign_non_tensor, get_non_tensor_data
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from rl import adapter_files, lora, modeling, replay, shared_prompts, stats
from rl.models import minimax_m3
from rl.probe import TrainerProbe
from rl.settings import EngineSettings
from rollout.patching import patch_target

EngineRegistry = patch_target("verl.workers.engine.base:EngineRegistry")
for _name in (
    "_build_module",
    "_build_lora_module",
    "_build_fsdp_module",
    "get_per_tensor_param",
    "prepare_model_inputs",
    "prepare_model_outputs",
):
    patch_target(f"verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.{_name}")


class LockstepEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine over a `modeling.TrainerModel`."""

    def _build_module(self):
        self.settings = EngineSettings.from_verl(self.model_config.lora)
        self.trainer_model = modeling.build_from(Path(self.model_config.local_path), self.settings)
        if self.model_config.enable_gradient_checkpointing:
            self.trainer_model.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        self.probe = TrainerProbe(self.trainer_model)
        return self.trainer_model.model

    def _build_lora_module(self, module):
        return module  # injected by modeling.build, with float32 masters that verl would cast to the base's dtype

    def _build_fsdp_module(self, module):
        module = super()._build_fsdp_module(module)
        # Rounding points are explicit in the modules; autocast would move them.
        self._autocast_dtype = torch.float32
        return module

    # ---- routing replay -------------------------------------------------------------------------------------------

    def prepare_model_inputs(self, micro_batch):
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        routing, model = self.trainer_model.routing, self.trainer_model
        labels, ids, tokens = inputs["input_ids"].roll(-1, dims=-1), None, micro_batch["input_ids"].values().numel()
        routed = micro_batch.get("routed_experts", None)
        if routed is not None and model.moe_layers:
            lengths = micro_batch["input_ids"].offsets().diff().tolist()
            width = None if inputs["attention_mask"] is None else inputs["input_ids"].shape[1]
            ids = replay.layout(list(routed.unbind()), lengths, width, model.moe_layers, model.num_experts)
            ids = ids.to(inputs["input_ids"].device)
        if self.settings.share_prompts and "response_mask" in micro_batch.keys():  # noqa: SIM118 - a TensorDict
            lengths = micro_batch["input_ids"].offsets().diff() - micro_batch["response_mask"].offsets().diff()
            replayed = ids if routing.enabled else None
            shared = shared_prompts.share(inputs["input_ids"], inputs["attention_mask"], lengths.tolist(), replayed)
            ids, tokens = None if ids is None else ids[shared.source], shared.source.numel()
            computed = inputs["input_ids"].flatten()[shared.source].unsqueeze(0)
            inputs = {"input_ids": computed, "attention_mask": None, "shared": shared}
        routing.begin(ids, tokens)
        if bool(torch.as_tensor(micro_batch["temperature"]).ne(1).any()):
            raise ValueError("the trainer takes log-probs at temperature 1 only, as the engine samples")
        entropy = get_non_tensor_data(micro_batch, "calculate_entropy", False)
        self.trainer_model.model.lm_head.ask(labels, entropy)
        return inputs, output_args

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        """The head gave log-probs, as verl's fused kernels would; its logits never exist at once."""
        log_probs, entropy = output.logits.unbind(-1)
        fused = SimpleNamespace(log_probs=log_probs, entropy=entropy)
        assign_non_tensor(micro_batch, use_fused_kernels=True)
        try:
            return super().prepare_model_outputs(fused, output_args, micro_batch, logits_processor_func)
        finally:
            assign_non_tensor(micro_batch, use_fused_kernels=False)

    def forward_step(self, micro_batch, loss_function, forward_only):
        wanted = self.settings.routing_replay and self.trainer_model.moe_layers and not forward_only
        if wanted and micro_batch.get("routed_experts", None) is None:
            raise replay.ReplayError(
                "a micro-batch has no expert ids to replay: check enable_rollout_routing_replay of the engine, or set "
                "algorithm.routing_replay=false"
            )
        if self.settings.index_loss_coef:
            # Normalised as the policy loss: by the response tokens of the whole batch, and against FSDP2's averaging.
            tokens = get_non_tensor_data(micro_batch, "batch_num_tokens", None)
            share = get_non_tensor_data(micro_batch, "dp_size", 1) / (tokens * self.trainer_model.blocks.heads)
            minimax_m3.train_indexer(self.module, 0.0 if forward_only else self.settings.index_loss_coef * share)
        try:
            loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        finally:
            self.trainer_model.model.lm_head.ask(None)
        log_probs = output["model_output"].get("log_probs")
        if log_probs is not None:
            output["metrics"].update(stats.mismatch_metrics(log_probs, micro_batch))
        output["metrics"].update(stats.routing_metrics(self.trainer_model.routing, micro_batch))
        if self.settings.index_loss_coef and not forward_only:
            losses, blocks = minimax_m3.index_losses(self.module), self.trainer_model.blocks
            output["metrics"].update(stats.index_metrics(losses, len(blocks.layers), blocks.heads, micro_batch))
        return loss, output

    def disable_adapter(self):
        """The base alone, which verl asks for as the reference of a KL penalty."""
        return lora.disabled(self.trainer_model.model)

    # ---- sync and proof -------------------------------------------------------------------------------------------

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """Canonical adapter tensors on CPU as the engine must hold them (collective)."""
        return {
            name: tensor.cpu().contiguous() for name, tensor in lora.engine_tensors(self.trainer_model.model).items()
        }

    def get_per_tensor_param(self, layered_summon=False, base_sync_done=False, **_kwargs):
        """Only adapter tensors ever leave the trainer; the engine loads the base from the same checkpoint."""
        if not base_sync_done:
            raise RuntimeError("the base is never sent to the engine: set rollout.load_format=safetensors")
        wire = lora.wire_tensors(self.adapter_tensors())
        return iter(wire.items()), lora.wire_config(self.trainer_model.spec, self.trainer_model.adapted)

    def save_adapter(self, folder: str) -> None:
        """Write the adapter in PEFT's format, and below engine/ in vLLM's (collective; rank 0 writes)."""
        model, spec = self.trainer_model, self.trainer_model.spec
        adapter_files.save_peft(model.model, spec, Path(folder), self.model_config.path)
        tensors = lora.engine_tensors(model.model)
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            wire = lora.wire_tensors(tensors)
            adapter_files.save_engine_format(wire, spec, model.adapted, Path(folder) / "engine")

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **_kwargs):
        self.save_adapter(str(Path(local_path) / "adapter"))


EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cpu")(LockstepEngine)
EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cuda", vendor="nvidia")(LockstepEngine)
