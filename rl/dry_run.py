"""`train_grpo.py --dry-run`: the resolved recipe, verl's configuration and the plan; nothing is started.

Three YAML documents on stdout: the recipe (loads again as it is), the configuration, and as comments the plan and
whether the run could start on this machine with the files that are there.
"""

import contextlib
import sys

from rl.config import ConfigError, Recipe, dump_yaml, with_absolute_paths
from rl.environment import gpu_count
from rl.plan import Plan
from rl.plan_fit import find_config, find_machine, plan_recipe
from rl.plan_table import render
from rl.preflight import preflight

PLACEHOLDERS = {
    "run_dir": "RUN_DIR",
    "ray_tmp": "/tmp/lockstep-RUN_ID",
    "train_file": "RUN_DIR/data/train.parquet",
    "val_file": "RUN_DIR/data/val.parquet",
}
"""What only a run has."""


def dry_run(recipe: Recipe) -> None:
    """Print all three; ConfigError if a file that the recipe names for planning cannot be read."""
    plan = None if find_config(recipe) is None else plan_recipe(recipe, find_machine(recipe.trainer.nodes))
    print(dump_yaml(recipe), end="", flush=True)
    print(f"---\n# verl's configuration{_for(plan)}; names in capitals stand for what a run makes")
    print(verl_yaml(recipe, plan), end="")
    print("---")
    if plan is None:
        text = "no plan: model.path is not there, and model.shape is not set"
    else:
        text = render(recipe, plan)
    print("".join(f"# {line}".rstrip() + "\n" for line in text.splitlines()), end="")
    try:
        preflight(recipe)
    except ConfigError as error:
        print(f"# a start here would be refused: {error}")


def _for(plan: Plan | None) -> str:
    return " as on Hopper GPUs, of which none is here" if _uses_gpus(plan) and not gpu_count() else ""


def _uses_gpus(plan: Plan | None) -> bool:
    return gpu_count() > 0 if plan is None else plan.machine.kind == "gpu"


def verl_yaml(recipe: Recipe, plan: Plan | None) -> str:
    """The `ppo_trainer` configuration of a run, resolved, as YAML. Imports verl's configuration and torch."""
    with contextlib.redirect_stdout(sys.stderr):  # what they print while they are imported
        from omegaconf import OmegaConf

        from rl.train import resolve_backend
        from rl.verl_config import to_verl

        cuda = _uses_gpus(plan)
        backend = "marlin" if cuda and not gpu_count() and recipe.model.backend == "auto" else recipe.model.backend
        try:
            backend = resolve_backend(backend, cuda)
            config = to_verl(with_absolute_paths(recipe), backend=backend, cuda=cuda, **PLACEHOLDERS)
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror}; --dry-run cannot make verl's configuration"
            ) from None
    return OmegaConf.to_yaml(config, resolve=True)
