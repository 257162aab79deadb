"""Stock verl as a baseline: its main_ppo, engine, workers and agent loops, on a recipe's model and prompts.

`python -m rl.stock FOLDER` runs FOLDER/recipe.json (scripts/bench_variants.py writes it) and prints its steps.
Without a GPU it runs over lockstep's platform and kernels of vLLM. verl loads this module as external_lib too, which
makes its own FSDP engine known for CPU.
"""

import sys
from pathlib import Path

from rl.config import Recipe
from rl.environment import gpu_count


def register() -> None:
    """verl registers its FSDP engine for accelerators only."""
    from verl.utils.device import get_device_name
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    if get_device_name() == "cpu":
        EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)


def main(folder: Path) -> None:
    """Run to the end; adapters on attention, no routing replay, importance weights as the recipe says."""
    from rl.prepare import prepare
    from rl.train import set_environment
    from rl.verl_config import to_verl

    recipe = Recipe.model_validate_json((folder / "recipe.json").read_text())
    cuda = gpu_count() > 0
    set_environment(folder, Path(recipe.model.path), cuda, nodes=1)
    for split in ("train", "val"):
        prepare(getattr(recipe.data, split), folder / f"{split}.parquet")
    files = {f"{split}_file": str(folder / f"{split}.parquet") for split in ("train", "val")}
    config = to_verl(recipe, backend="emulation", cuda=cuda, run_dir=str(folder), ray_tmp=str(folder), **files)
    model, rollout, trainer = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.trainer
    model.external_lib = __spec__.name
    model.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    rollout.enable_rollout_routing_replay = False
    rollout.agent.agent_loop_manager_class = None
    trainer.logger, trainer.test_freq, trainer.save_freq = ["console"], -1, -1
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    run_ppo(config, task_runner_class=TaskRunnerV1)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
else:
    register()
