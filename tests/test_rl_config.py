"""Recipes: loading, overrides, and one clear line for everything that is wrong."""

import subprocess
import sys

import pytest

from rl.config import (
    REPO_ROOT,
    ConfigError,
    Recipe,
    dump_yaml,
    find_path,
    load_recipe,
    recipe_keys,
    with_absolute_paths,
)


def error_of(*overrides: str, recipe: str = "tiny_math") -> str:
    """The line that is printed for a wrong recipe."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, list(overrides))
    line = str(caught.value)
    assert "\n" not in line and len(line) < 400
    return line


@pytest.mark.parametrize("path", sorted((REPO_ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_loads_and_is_named_as_its_file(path):
    recipe = load_recipe(path.stem)
    assert recipe == load_recipe(path.name) == load_recipe(path)
    assert recipe.name == path.stem


def test_overrides_are_yaml():
    recipe = load_recipe(
        "tiny_math",
        [
            "trainer.steps=20",
            "optim.lr=3e-4",
            "trainer.logger=[console,wandb]",
            "model.adapter=",
            "trainer.val_before_train=false",
            "consistency.thresholds.kl_k3=0.5",
            "consistency.thresholds={max_abs_logp: 2}",
        ],
    )
    assert recipe.trainer.steps == 20
    assert recipe.optim.lr == 3e-4  # YAML 1.1 would read text here
    assert recipe.trainer.logger == ["console", "wandb"]
    assert recipe.model.adapter is None
    assert recipe.trainer.val_before_train is False
    assert recipe.consistency.thresholds.max_abs_logp == 2


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.stepz=3", ["trainer.stepz", "did you mean trainer.steps"]),
        ("steps=3", ["unknown key steps", "trainer.steps"]),
        ("trainr.steps=3", ["unknown key trainr", "trainer"]),
        ("consistency.thresholds.klk3=1", ["consistency.thresholds.kl_k3"]),
        ("zzz=1", ["unknown key zzz", "a recipe has name"]),
        ("trainer.steps=ten", ["trainer.steps = 'ten'", "an integer"]),
        ("trainer.steps=3.5", ["trainer.steps = 3.5", "an integer"]),
        ("trainer.steps=0", ["trainer.steps = 0", "greater than or equal to 1"]),
        ("trainer.val_before_train=yes", ["'yes'", "true or false"]),
        ("optim.lr=.nan", ["optim.lr = nan", "finite"]),
        ("run.root=2024", ["run.root = 2024", "text"]),
        ("trainer=5", ["trainer = 5", "section"]),
        ("trainer.steps.x=5", ["trainer.steps", "no keys below it"]),
        ("trainer.steps", ["key=value"]),
        ("=3", ["key=value"]),
        ("trainer.logger=[console", ["not valid YAML"]),
        ("trainer.logger=wandb", ["trainer.logger = 'wandb'", "a list"]),
        ("trainer.logger=[console,mlflow]", ["trainer.logger[1] = 'mlflow'", "'console', 'wandb' or 'tensorboard'"]),
        ("algorithm.rollout_is=none", ["algorithm.rollout_is = 'none'", "null"]),
        ("rollout.temperature=0.7", ["rollout.temperature = 0.7", "set rollout.temperature=1"]),
        ("rollout.top_p=0.9", ["rollout.top_p = 0.9", "set rollout.top_p=1"]),
        ("rollout.top_k=50", ["rollout.top_k = 50", "set rollout.top_k=-1"]),
        ("rollout.group_size=1", ["rollout.group_size = 1", "group_size=2"]),
        ("model.lora_rank=12", ["model.lora_rank = 12", "8, 16, 32"]),
        ("model.lora_targets=[atention]", ["'atention'", "did you mean 'attention'"]),
        ("model.lora_targets=[experts,experts]", ["twice"]),
        ("model.lora_targets=[]", ["model.lora_targets = []", "1 item"]),
        ("trainer.micro_batch_size=60", ["trainer.micro_batch_size = 60", "divisor"]),
        ("trainer.max_tokens_per_micro_batch=9", ["max_tokens_per_micro_batch = 9", "208"]),
        ("rollout.tensor_parallel_size=2", ["tensor_parallel_size = 2", "fsdp_workers (1)"]),
        ("rollout.max_num_batched_tokens=8", ["max_num_batched_tokens = 8", "max_num_seqs"]),
        ("algorithm.rollout_is_threshold=0", ["rollout_is_threshold = 0", "greater than 0"]),
        ("algorithm.icepop_low=0.5", ["algorithm.icepop_high", "both bounds"]),
        ("algorithm.sequence_mask=seq_sum_k1", ["sequence_mask_"]),
        ("reward.overlong_buffer=4096", ["reward.overlong_buffer = 4096", "less than 1", "share"]),
        ("algorithm.clip_ratio_low=1", ["algorithm.clip_ratio_low = 1", "less than 1"]),
        ("algorithm.max_gen_batches=1", ["algorithm.max_gen_batches = 1", "2"]),
        ("algorithm.objective=ppo_clip", ["rollout_is = token", "set algorithm.rollout_is=null"]),
        ("data={}", ["data.train is missing"]),
        ("name=a/b", ["name = 'a/b'"]),
    ],
)
def test_wrong_override_is_one_line_with_key_value_and_remedy(override, parts):
    line = error_of(override)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("name", "part"),
    [("tiny_mth", "did you mean tiny_math.yaml"), ("qqqqqq.yaml", "recipes/ has"), ("README.md", "not a .yaml file")],
)
def test_unknown_recipe(name, part, monkeypatch):
    monkeypatch.chdir(REPO_ROOT)
    assert part in error_of(recipe=name)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name: x\nmodel: {path: a\n", ["recipe.yaml", "not valid YAML"]),
        ("name: x\nname: y\n", ["recipe.yaml:2", "'name' is given twice"]),
        ("- a\n", ["a mapping"]),
        ("", ["a mapping"]),
        ("name: x\nmodel: a\n", ["model = 'a'", "section"]),
        ("name: x\ntrainer: {stepz: 3}\n", ["trainer.stepz", "trainer.steps"]),
        ("name: x\n? [a]\n: 1\n", ["recipe.yaml"]),
    ],
)
def test_broken_file_is_one_line(tmp_path, text, parts):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    line = error_of(recipe=str(path))
    for part in parts:
        assert part in line


def test_devices_are_derived():
    recipe = load_recipe("tiny_math", ["trainer.fsdp_workers=2"])
    assert (recipe.trainer.gpus_per_node, recipe.rollout.replicas) == (2, 2)
    recipe = load_recipe("tiny_math", ["trainer.gpus_per_node=4", "rollout.tensor_parallel_size=2"])
    assert (recipe.trainer.fsdp_workers, recipe.rollout.replicas) == (4, 2)
    assert load_recipe("tiny_math").trainer.fsdp_workers == 1  # no state is shared between recipes
    assert "fsdp_workers = 3" in error_of("trainer.fsdp_workers=3", "trainer.gpus_per_node=2")


def test_resolved_recipe_reads_back(tmp_path):
    recipe = load_recipe("tiny_math", ["trainer.fsdp_workers=2", "optim.lr=1e-5"])
    path = tmp_path / "again.yaml"
    path.write_text(dump_yaml(recipe))
    assert load_recipe(path) == recipe
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_recipe_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load_recipe("tiny_math").trainer.steps = 3


def test_paths_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_path("recipes/tiny_math.yaml") == REPO_ROOT / "recipes" / "tiny_math.yaml"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny_math.yaml").touch()
    assert find_path("recipes/tiny_math.yaml") == tmp_path / "recipes" / "tiny_math.yaml"
    absolute = with_absolute_paths(load_recipe("tiny_math"))
    assert absolute.data.train.startswith("/") and absolute.model.adapter is None


def test_every_key_has_a_description():
    missing = [key for key, field in recipe_keys().items() if not field.description]
    assert missing == []


def test_import_is_fast_and_light():
    """Processor time, so that other work on the machine does not count."""
    code = (
        "import sys, time, rl.config; seconds = time.process_time(); "
        "print(seconds, {'torch', 'verl', 'vllm', 'ray', 'transformers', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO_ROOT, check=True)
    seconds, heavy = result.stdout.split(maxsplit=1)
    assert heavy.strip() == "set()"
    assert float(seconds) < 1.0


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("trainer.micro_batch_size=1", "one sequence shares with none"),
        ("model.lora_dropout=0.1", "a dropout mask of its own"),
    ],
)
def test_prompts_are_shared_only_where_that_changes_nothing(override, problem):
    overrides = [override, "model.lora_targets=[attention]"]
    assert problem in error_of(*overrides, recipe="tiny_m3")
    load_recipe("tiny_m3", [*overrides, "trainer.share_prompts=false"])


def test_the_indexers_loss_is_not_shared():
    overrides = ["model.lora_targets=[attention,index]", "algorithm.index_loss_coef=0.1"]
    assert "counts each row's prompt" in error_of(*overrides, recipe="tiny_m3")
