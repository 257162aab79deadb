"""Recipe -> verl's configuration: one place where every lockstep setting meets the name it has in verl 0.9.1."""

import functools
from pathlib import Path

from rl.preflight import tokenizer_length
from rl.schema import Recipe
from rl.settings import EngineSettings

REWARD_FILE = Path(__file__).parent / "reward.py"
KV_CACHE_GIB_ON_CPU = 1.0


def engine_settings(recipe: Recipe, backend: str) -> EngineSettings:
    """What the training engine needs beyond verl's own keys; `backend` is the resolved one (never "auto")."""
    model = recipe.model
    return EngineSettings(
        backend=backend,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        lora_rank=model.lora_rank,
        lora_alpha=model.lora_alpha,
        lora_targets=tuple(model.lora_targets),
        lora_dropout=model.lora_dropout,
        share_gate_up_a=model.share_gate_up_a,
        adapter=model.adapter,
        routing_replay=recipe.algorithm.routing_replay,
        seed=recipe.seed,
        index_loss_coef=recipe.algorithm.index_loss_coef,
        vocabulary=tokenizer_length(Path(model.path)) if model.padded_vocab else None,
        share_prompts=recipe.trainer.share_prompts,
        sleep_level=recipe.rollout.sleep_level,
    )


def _correction(recipe: Recipe) -> dict:
    """verl's rollout correction: bypass (rollout log-probs are the old ones), corrected once by the objective.

    verl computes but does not apply the weights with loss_type=ppo_clip, where the clipped ratio corrects (the schema
    refuses rollout_is there); reinforce applies them exactly once.
    """
    algorithm = recipe.algorithm
    threshold: float | str = algorithm.rollout_is_threshold
    if algorithm.icepop_low is not None:
        threshold = f"{algorithm.icepop_low}_{algorithm.icepop_high}"
    correction = {
        "bypass_mode": True,
        "loss_type": {"reinforce_tis": "reinforce", "ppo_clip": "ppo_clip"}[algorithm.objective],
        "rollout_is": algorithm.rollout_is,
        "rollout_is_threshold": threshold,
        "rollout_rs": algorithm.sequence_mask,
        "rollout_rs_threshold": None,
    }
    if algorithm.sequence_mask is not None:
        low, high = algorithm.sequence_mask_low, algorithm.sequence_mask_high
        correction["rollout_rs_threshold"] = high if low is None else f"{low}_{high}"
    return correction


def _data(recipe: Recipe) -> dict:
    data = recipe.data
    return {
        "train_batch_size": data.batch_size,
        "max_prompt_length": data.max_prompt_length,
        "max_response_length": data.max_response_length,
        "filter_overlong_prompts": False,
        "truncation": "error",
        "shuffle": data.shuffle,
        "seed": recipe.seed,
        "dataloader_num_workers": 0,
        "val_max_samples": data.val_limit or -1,
    }


def _model(recipe: Recipe, settings: EngineSettings) -> dict:
    model = recipe.model
    return {
        "path": model.path,
        "external_lib": "rl.engine",
        "trust_remote_code": model.trust_remote_code,
        "lora_rank": model.lora_rank,
        # verl wants a whole number and uses it nowhere here; the scaling comes from lora.lockstep.
        "lora_alpha": max(1, round(model.lora_alpha)),
        "lora": {"lockstep": settings.to_verl()},
        "override_config": {"attn_implementation": model.attn_implementation},
        "use_remove_padding": False,
        "enable_gradient_checkpointing": model.gradient_checkpointing,
    }


def _trainer(recipe: Recipe, run_dir: str) -> dict:
    trainer = recipe.trainer
    return {
        "n_gpus_per_node": trainer.gpus_per_node,
        "nnodes": trainer.nodes,
        "total_epochs": 10**6,
        "total_training_steps": trainer.steps,
        "test_freq": trainer.val_every or trainer.steps,
        "val_before_train": trainer.val_before_train,
        "save_freq": trainer.save_every or -1,
        "resume_mode": "disable",
        "logger": list(trainer.logger),
        "project_name": trainer.project_name,
        "experiment_name": Path(run_dir).name,
        "default_local_dir": str(Path(run_dir) / "checkpoints"),
    }


def _actor(recipe: Recipe) -> dict:
    algorithm, optim, trainer = recipe.algorithm, recipe.optim, recipe.trainer
    dynamic = trainer.max_tokens_per_micro_batch is not None
    dtype = {"bfloat16": "bf16", "float32": "fp32"}[recipe.model.dtype]
    return {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": recipe.data.batch_size,
        "ppo_micro_batch_size_per_gpu": trainer.micro_batch_size,
        "use_dynamic_bsz": dynamic,
        "ppo_max_token_len_per_gpu": trainer.max_tokens_per_micro_batch or 16384,
        "ppo_epochs": 1,
        "use_kl_loss": algorithm.kl_coef > 0,
        "kl_loss_coef": algorithm.kl_coef,
        "entropy_coeff": algorithm.entropy_coef,
        "loss_agg_mode": algorithm.loss_agg_mode,
        "clip_ratio": algorithm.clip_ratio_low,
        "clip_ratio_low": algorithm.clip_ratio_low,
        "clip_ratio_high": algorithm.clip_ratio_high,
        "clip_ratio_c": algorithm.clip_ratio_c,
        "use_torch_compile": False,
        "shuffle": False,
        # In verl's V1 trainer the loss function is chosen here; algorithm.rollout_correction alone does not enter it.
        "policy_loss": {"loss_mode": "bypass_mode", "rollout_correction": _correction(recipe)},
        "optim": {
            "lr": optim.lr,
            "lr_warmup_steps": optim.warmup_steps,
            "lr_scheduler_type": optim.schedule,
            "weight_decay": optim.weight_decay,
            "betas": list(optim.betas),
            "clip_grad": optim.clip_grad,
        },
        "fsdp_config": {
            "strategy": "fsdp2",
            "model_dtype": recipe.model.dtype,
            "use_torch_compile": False,
            "mixed_precision": {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        },
    }


def _reward(recipe: Recipe, cuda: bool) -> dict:
    """Rewards by `rl.reward`; with an overlong buffer through verl's DAPO manager, which takes the penalty off."""
    reward = {
        "num_workers": min(8, 1 if not cuda else recipe.trainer.gpus_per_node),
        "custom_reward_function": {"path": str(REWARD_FILE), "name": "compute_score"},
    }
    if recipe.reward.overlong_buffer:
        reward["reward_manager"] = {"name": "dapo"}
        reward["reward_kwargs"] = {
            "max_resp_len": recipe.data.max_response_length,
            "overlong_buffer_cfg": {
                "enable": True,
                "len": max(1, round(recipe.reward.overlong_buffer * recipe.data.max_response_length)),
                "penalty_factor": recipe.reward.overlong_penalty,
                "log": False,
            },
        }
    return reward


def _rollout(recipe: Recipe, cuda: bool) -> dict:
    rollout, trainer = recipe.rollout, recipe.trainer
    gib = rollout.kv_cache_gib if rollout.kv_cache_gib is not None or cuda else KV_CACHE_GIB_ON_CPU
    engine = {
        "kv_cache_memory_bytes": None if gib is None else int(gib * 2**30),
        "kv_cache_dtype": None if rollout.kv_cache_dtype == "auto" else rollout.kv_cache_dtype,
        "distributed_executor_backend": "uni" if rollout.tensor_parallel_size == 1 else "mp",
    }
    return {
        "name": "vllm",
        "mode": "async",
        "dtype": recipe.model.dtype,
        "n": rollout.group_size,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "seed": recipe.seed,
        "tensor_model_parallel_size": rollout.tensor_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": rollout.enforce_eager or not cuda,
        # verl knows no level: rl.server takes it from the engine settings.
        "free_cache_engine": rollout.sleep_level > 0,
        "enable_sleep_mode": rollout.sleep_level > 0,
        # The engine reads the base from the checkpoint itself; verl then sends adapters only.
        "load_format": "safetensors",
        "max_model_len": recipe.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_prefix_caching": rollout.prefix_caching,
        "calculate_log_probs": True,
        "logprobs_mode": "processed_logprobs",
        "enable_rollout_routing_replay": True,
        "log_prob_micro_batch_size_per_gpu": trainer.micro_batch_size,
        "engine_kwargs": {"vllm": {key: value for key, value in engine.items() if value is not None}},
        "agent": {
            "num_workers": 1 if not cuda else min(8, trainer.fsdp_workers),
            "agent_loop_manager_class": "rl.group_rollout.GroupLoopManager",
        },
        "checkpoint_engine": {"update_weights_bucket_megabytes": 64 if not cuda else 2048},
        "val_kwargs": {
            "n": recipe.data.val_samples,
            "do_sample": True,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
        },
    }


def _ray(recipe: Recipe, cuda: bool, ray_tmp: str, address: str | None, py_executable: str | None) -> dict:
    """The run's own Ray: the one at `address`, or a local one that verl starts.

    Without a GPU, logical GPUs stand for CPU workers.
    """
    init = {"logging_level": "warning", "runtime_env": {"py_executable": py_executable}}
    if address is not None:
        return {"ray_init": {**init, "address": address}}
    init |= {
        "address": "local",
        "num_cpus": 16,
        "include_dashboard": False,
        "object_store_memory": 256 << 20 if not cuda else 4 << 30,
        "_temp_dir": ray_tmp,
        "_node_ip_address": "127.0.0.1",  # found by asking the network otherwise
    }
    if not cuda:
        init["num_gpus"] = recipe.trainer.fsdp_workers
    return {"ray_init": init}


@functools.cache
def _defaults():
    """verl's own `ppo_trainer` configuration, open to keys that it does not have; not to be changed in place."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        base = compose("ppo_trainer")
    OmegaConf.set_struct(base, False)
    return base


def to_verl(
    recipe: Recipe,
    *,
    backend: str,
    cuda: bool,
    run_dir: str,
    ray_tmp: str,
    train_file: str,
    val_file: str,
    ray_address: str | None = None,
    py_executable: str | None = None,
):
    """verl's `ppo_trainer` configuration (an OmegaConf DictConfig) for a recipe.

    Args:
        backend: resolved rounding backend; cuda: whether a GPU is used; ray_tmp: short folder for Ray's sockets;
        train_file, val_file: parquet files that `rl.data.prepare` made; ray_address: a Ray that runs already, or None;
        py_executable: Python that Ray starts workers with (see `rl.prefork`), or None for Ray's own choice.
    """
    from omegaconf import OmegaConf

    settings = engine_settings(recipe, backend)
    override = {
        "algorithm": {
            "adv_estimator": "grpo",
            "norm_adv_by_std_in_grpo": recipe.algorithm.norm_adv_by_std,
            "use_kl_in_reward": False,
            "rollout_correction": _correction(recipe),
            # "acc", not "reward": with a penalty on length a group of right answers still has different rewards.
            "filter_groups": {"enable": recipe.algorithm.filter_groups, "metric": "acc"},
        },
        "data": {"train_files": train_file, "val_files": val_file, **_data(recipe)},
        "actor_rollout_ref": {
            "model": _model(recipe, settings),
            "actor": _actor(recipe),
            "rollout": _rollout(recipe, cuda),
            "ref": {"log_prob_micro_batch_size_per_gpu": recipe.trainer.micro_batch_size},
        },
        "reward": _reward(recipe, cuda),
        "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}},
        "trainer": {"device": "cuda" if cuda else "cpu", **_trainer(recipe, run_dir)},
        "ray_kwargs": _ray(recipe, cuda, ray_tmp, ray_address, py_executable),
    }
    config = OmegaConf.merge(_defaults(), override)
    if ray_address is not None:
        config.ray_kwargs.ray_init.pop("num_cpus")  # verl's default; a running cluster has its own
    return config
