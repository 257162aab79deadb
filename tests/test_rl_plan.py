"""The planner against modules on the meta device, injected adapters, bytes of a checkpoint, and counts by hand."""

import json
import math
import re

import pytest
import torch
from tiny_model import ASSETS, build, spec
from transformers import AutoConfig, AutoModelForCausalLM

from quant.modules import swap_plain_experts
from rl import lora, plan_cli, plan_fit
from rl.config import REPO_ROOT, ConfigError, load_recipe
from rl.models.minimax_m3 import MiniMaxM3Config, MiniMaxM3SparseForCausalLM
from rl.plan import GIB, Machine, make_plan
from rl.plan_fit import change, find_config, find_machine, plan_recipe, smallest_change, verdict
from rl.plan_shapes import PlanError, adapter_factors, format_rule, matrix_bytes, planned_rule, read_shape
from rl.preflight import read_tensors

M3_FILE = REPO_ROOT / "recipes" / "shapes" / "minimax_m3.json"
M3 = read_shape(json.loads(M3_FILE.read_text()))
H200 = Machine("gpu", 139.0, "a test")
SMALL = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
QWEN = {**SMALL, "num_hidden_layers": 4, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 4}
QWEN |= {"num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True}
TINY_M3 = {**SMALL, "num_hidden_layers": 4, "intermediate_size": 32, "dense_intermediate_size": 96}
TINY_M3 |= {"shared_intermediate_size": 48, "n_shared_experts": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
TINY_M3 |= {"moe_layer_freq": [0, 1, 1, 0], "rotary_dim": 8}
TINY_M3 |= {"sparse_attention_config": {"sparse_index_dim": 16, "sparse_attention_freq": [0, 0, 1, 1]}}
CONFIGS = {
    "qwen3_moe": QWEN,
    "qwen3_moe, tied": {**QWEN, "attention_bias": False, "tie_word_embeddings": True},
    "mixtral": {
        **SMALL,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "minimax_m3_text": TINY_M3,
}


def kind_of(name: str) -> str:
    """The planner's word for a parameter of a Hugging Face module."""
    rules = (
        (r"norm", "norm"),
        (r"embed_tokens", "embedding"),
        (r"lm_head", "lm_head"),
        (r"\.experts\.", "experts"),
        (r"shared_expert", "shared_experts"),
        (r"\.gate\.(weight|e_score)", "router"),
        (r"index_[qk]_proj", "index"),
        (r"self_attn", "attention"),
        (r"\.mlp\.", "dense_mlp"),
    )
    return next(kind for pattern, kind in rules if re.search(pattern, name))


def counted(model: torch.nn.Module) -> dict[str, int]:
    """Parameters by kind, of the modules themselves."""
    total: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        total[kind_of(name)] = total.get(kind_of(name), 0) + parameter.numel()
    return total


def hf_config(name: str):
    """A small transformers configuration."""
    if name.startswith("minimax"):
        return MiniMaxM3Config(**CONFIGS[name])
    return AutoConfig.for_model(name.split(",")[0], **CONFIGS[name])


# ---- counts --------------------------------------------------------------------------------------------------------


def test_full_m3_has_the_planned_parameters_kind_by_kind():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = MiniMaxM3SparseForCausalLM(MiniMaxM3Config())
    finally:
        torch.set_default_dtype(torch.float32)
    assert M3.parameters() == counted(model)
    assert sum(M3.parameters().values()) == sum(p.numel() for p in model.parameters()) == 426_174_565_632
    assert read_shape(model.config.to_dict()) == M3
    wrapped = {"model_type": "minimax_m3_vl", "text_config": model.config.to_dict()}
    assert read_shape(wrapped).parameters() == M3.parameters()
    buffers = {name for name, _ in model.named_buffers() if "e_score" in name}
    assert sum(matrix.buffer for matrix in M3.matrices()) == len(buffers) == 57


@pytest.mark.parametrize("name", CONFIGS)
def test_small_models_have_the_planned_parameters(name):
    config = hf_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert read_shape(json.loads(config.to_json_string(use_diff=False))).parameters() == counted(model)


def small_model(name: str) -> torch.nn.Module:
    """On CPU, its experts as lora.inject wants them."""
    return swap_plain_experts(AutoModelForCausalLM.from_config(hf_config(name)))


TARGETS = {
    "qwen3_moe": ["attention", "experts", "dense_mlp", "k_proj", "up_proj"],
    "mixtral": ["attention", "experts", "v_proj"],
    "minimax_m3_text": ["attention", "experts", "shared_experts", "dense_mlp", "index", "down_proj", "index_k_proj"],
}


@pytest.mark.parametrize("share", [True, False], ids=["shared A", "own A"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [(name, group) for name, all_of in TARGETS.items() for group in [*([t] for t in all_of), all_of]],
    ids=lambda value: "+".join(value) if isinstance(value, list) else value,
)
def test_adapters_have_the_injected_parameters_and_bytes(name, targets, share):
    model = small_model(name)
    lora.inject(model, lora.LoRASpec(8, 8, tuple(targets), share_gate_up_a=share))
    factors = [p for adapter in lora.adapters(model).values() for p in adapter.parameters(recurse=False)]
    shape = read_shape(json.loads(model.config.to_json_string(use_diff=False)))
    planned = adapter_factors(shape, targets, 8, share)
    assert sorted(p.numel() for p in factors) == sorted(factor.elements for factor in planned)
    assert sorted(p.shape[0] for p in factors) == sorted(factor.first for factor in planned)
    overrides = [f"model.lora_targets=[{','.join(targets)}]", "model.lora_rank=8"]
    overrides += ["algorithm.index_loss_coef=1"] if any("index" in target for target in targets) else []
    recipe = load_recipe("tiny_math", [*overrides, f"model.share_gate_up_a={str(share).lower()}"])
    plan = make_plan(recipe, shape, H200)
    assert plan.adapter_parameters == sum(p.numel() for p in factors)
    assert plan.sync_bytes == sum(tensor.nbytes for tensor in lora.engine_tensors(model).values())


def test_a_target_that_the_model_lacks_is_refused_as_injection_refuses_it():
    with pytest.raises(PlanError, match="'shared_experts' matches no module of qwen3_moe"):
        adapter_factors(read_shape({"model_type": "qwen3_moe", **QWEN}), ["attention", "shared_experts"], 8, True)
    with pytest.raises(lora.AdapterError, match="'shared_experts' matches no module"):
        lora.inject(small_model("qwen3_moe"), lora.LoRASpec(8, 8, ("attention", "shared_experts")))


# ---- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["nvfp4_mxfp8", "bf16"])
def test_base_bytes_are_those_of_the_committed_checkpoint(folder):
    sizes = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
    tensors, _ = read_tensors(ASSETS / folder)
    on_disk = sum(sizes[dtype] * math.prod(shape) for dtype, shape in tensors.values())
    recipe = load_recipe("tiny_math", [f"model.path={ASSETS / folder}"])
    assert plan_recipe(recipe, H200).base_bytes == on_disk
    assert plan_recipe(recipe, H200).sync_bytes == sum(
        tensor.nbytes for tensor in lora.engine_tensors(build(spec(rank=32), ASSETS / folder).model).values()
    )


def test_m3_by_hand():
    """31.85 MB an expert in NVFP4, 4.08 GB a layer, 232 GB in 57 layers, 137,472 bytes of KV a token."""
    rule = planned_rule()
    experts = [matrix for matrix in M3.matrices() if matrix.kind == "experts"]
    expert = 3 * (6144 * 3072 * 9 // 16 + 4)
    assert expert == pytest.approx(31.85e6, rel=1e-4)
    assert [matrix_bytes(matrix, rule(matrix.module), 2) for matrix in experts[:3]] == [128 * expert // 3] * 3
    total = sum(matrix_bytes(matrix, rule(matrix.module), 2) for matrix in experts)
    assert total == 57 * 128 * expert and round(total / 1e9) == 232
    parts = {matrix.module: matrix_bytes(matrix, rule(matrix.module), 2) for matrix in M3.matrices()}
    assert parts["model.layers.3.self_attn.q_proj"] == 8192 * 6144 * 33 // 32
    assert parts["model.layers.3.block_sparse_moe.gate"] == 128 * 6144 * 4
    assert parts["lm_head"] == parts["model.embed_tokens"] == 200064 * 6144 * 2
    recipe = load_recipe("dapo_math", ["model.lora_targets=[experts]"])
    plan = make_plan(recipe, M3, H200)
    assert plan.kv_model_token_bytes == 137_472 == 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2
    assert plan.kv_token_bytes == 60 * 2 * 128 * 2 + 57 * 128 * 2  # four heads on eight devices: one each
    assert make_plan(change(recipe, ('rollout.kv_cache_dtype="fp8"',)), M3, H200).kv_model_token_bytes == 68_736
    own, shared = plan.adapter_parameters, 57 * 128 * 32 * (6144 + 2 * 3072 + 3072 + 6144)
    assert own == shared + 57 * 128 * 32 * 6144
    assert round(shared / 1e9, 1) == 5.0 and round(own / 1e9, 1) == 6.5
    assert make_plan(change(recipe, ("model.share_gate_up_a=true",)), M3, H200).adapter_parameters == shared
    assert plan.base_bytes == pytest.approx(250e9, rel=0.01) and plan.full_sync_bytes == 2 * 426_174_565_632


def test_slots_for_adapters_in_the_engine():
    """vLLM: A of q, k, v, gate, up and B of o, down whole on each of eight devices, the rest split; all modules."""
    mlp = 2 * 6144 + 6144
    experts, shared = 57 * 128 * (mlp + 3 * 384), 57 * (mlp + 3 * 384)
    dense, head = 3 * (mlp + 3 * 1536), 6144 + 200064 // 8
    attention = 60 * (3 * 6144 + (8192 + 512 + 512) // 8 + 8192 // 8 + 6144)
    index = 57 * (2 * 6144 + (512 + 128) // 8)
    plan = make_plan(load_recipe("dapo_math", ["model.lora_targets=[attention]"]), M3, H200)
    assert plan.engine["adapter buffers"] == 2 * 32 * (experts + shared + dense + head + attention + index)


def test_what_a_worker_holds():
    """dapo_math on 16: FSDP2 splits the first dimension, adapters in float32 with gradient and two moments."""
    recipe = load_recipe("dapo_math")
    plan = make_plan(recipe, M3, H200)
    assert plan.trainer["frozen base"] == pytest.approx(plan.base_bytes / 16, rel=1e-3)
    assert plan.trainer["adapter, float32"] == pytest.approx(4 * plan.adapter_parameters / 16, rel=1e-3)
    assert plan.trainer["Adam moments, float32"] == 2 * plan.trainer["gradients, float32"]
    assert plan.host_bytes == 8 * (plan.base_bytes + 4 * plan.adapter_parameters)
    layer = [m for group in M3.groups if group.name == "model.layers.30" for m in group.matrices if not m.buffer]
    whole = sum(matrix_bytes(m, planned_rule()(m.module) if m.columns else None, 2) for m in layer)
    adapted = sum(
        f.elements for f in adapter_factors(M3, recipe.model.lora_targets, 32, False) if f.group.endswith(".30")
    )
    assert plan.update["gathered layers"] == pytest.approx(3 * (whole + 2 * adapted), rel=1e-4)
    # Hidden and residual of every layer and of the final norm.
    assert plan.update["activations kept"] == 22528 * 61 * 2 * 2 * 6144
    assert list(plan.update)[-1] == "backward of one layer"
    assert plan.sync["adapter on its way"] == 2 * plan.sync_bytes and plan.peak == "update"


def test_experts_do_not_split_finer_than_their_number():
    recipe = load_recipe("dapo_math", ["data.batch_size=384"])
    held = {}
    for nodes in (2, 6, 16, 32):
        held[nodes] = make_plan(change(recipe, (f"trainer.nodes={nodes}",)), M3, H200).trainer["frozen base"]
    experts = sum(matrix_bytes(m, "nvfp4", 2) for m in M3.matrices() if m.kind == "experts")
    assert held[6] > experts * 3 / 128  # 48 workers: three of 128 experts each, not 2.67
    assert held[16] - held[32] < 0.1 * held[16] and held[32] > experts / 128


# ---- formats and configurations ------------------------------------------------------------------------------------


def test_formats_follow_the_checkpoint_and_not_the_policy():
    quantisation = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"targets": [r"re:.*\.experts\..*"], "format": "nvfp4-pack-quantized"},
            "group_1": {"targets": ["Linear"], "format": "mxfp8-quantized"},
        },
        "ignore": ["lm_head", r"re:.*\.gate$"],
    }
    rule = format_rule(quantisation)
    names = ["model.layers.0.mlp.experts.0.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate"]
    assert [rule(name) for name in [*names, "lm_head"]] == ["nvfp4", "mxfp8", None, None]
    modelopt = format_rule({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*self_attn*"]})
    assert [modelopt(name) for name in names[:2]] == ["nvfp4", None]
    with pytest.raises(PlanError, match="gptq"):
        format_rule({"quant_method": "gptq"})


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'"),
        ({}, "model_type = None"),
        ({"model_type": "minimax_m3_vl"}, "text_config is missing"),
        (
            {"model_type": "qwen3_moe", **{k: v for k, v in QWEN.items() if k != "hidden_size"}},
            "hidden_size is missing",
        ),
        ({"model_type": "mixtral", **CONFIGS["mixtral"], "num_local_experts": "8"}, "num_local_experts = '8'"),
        (
            {"model_type": "minimax_m3_text", **TINY_M3, "moe_layer_freq": [1]},
            "moe_layer_freq = [1]: expected a list of 4",
        ),
    ],
)
def test_a_configuration_that_is_not_understood_is_one_line(config, part):
    with pytest.raises(PlanError) as caught:
        read_shape(config, "x.json")
    assert str(caught.value).startswith("x.json") and part in str(caught.value) and "\n" not in str(caught.value)


def test_the_checkpoint_takes_the_place_of_the_shape_file(tmp_path):
    recipe = load_recipe("dapo_math", [f"model.path={tmp_path / 'none'}"])
    known = find_config(recipe)
    assert known.planned and known.shape == M3 and known.rule("model.layers.9.block_sparse_moe.experts.0.w1") == "nvfp4"
    recipe = load_recipe("dapo_math", [f"model.path={ASSETS / 'bf16'}"])
    assert find_config(recipe).shape.model_type == "qwen3_moe" and not find_config(recipe).planned
    assert find_config(load_recipe("tiny_math", ["model.path=/no/such"])) is None
    with pytest.raises(ConfigError, match=r"model.path = '/no/such': .* set model.shape"):
        plan_recipe(load_recipe("tiny_math", ["model.path=/no/such"]), H200)
    (tmp_path / "broken.json").write_text('{"model_type"')
    for name, part in (("broken.json", "not valid JSON"), ("missing.json", "No such file")):
        broken = load_recipe("tiny_math", ["model.path=/no/such", f"model.shape={tmp_path / name}"])
        with pytest.raises(ConfigError, match=rf"^model.shape: .*{part}"):
            find_config(broken)


def test_machines(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(plan_fit, "gpu_count", lambda: 0)
    assert find_machine(1).kind == find_machine(2, here=True).kind == "cpu"
    assert (find_machine(2).gib, find_machine(2).host_gib) == (139.0, None)
    assert (find_machine(1, 80.0).gib, find_machine(1, 80.0).kind) == (80.0, "gpu")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # a cluster's nodes may have GPUs where this one has none
    assert find_machine(2, here=True).kind == "gpu"
    monkeypatch.setattr(plan_fit, "gpu_count", lambda: 2)
    monkeypatch.setattr(plan_fit, "devices", lambda: ["NVIDIA H200, 143771 MiB", "NVIDIA H100, 81559 MiB"])
    assert find_machine(1).gib == 81559 / 1024 and find_machine(1).host_gib == plan_fit.memory_gib()


# ---- verdicts ------------------------------------------------------------------------------------------------------

SHORT = ("data.max_response_length=2048", "trainer.max_tokens_per_micro_batch=4096")


@pytest.mark.parametrize(
    ("name", "overrides", "machine", "first"),
    [
        ("dapo_math", ("rollout.gpu_memory_utilization=0.25",), H200, "rollout.gpu_memory_utilization"),
        ("dapo_math", (), Machine("gpu", 120.0, ""), "trainer.nodes"),
        ("dapo_math", ("rollout.gpu_memory_utilization=0.42",), H200, "trainer.nodes"),
        ("dapo_math", (*SHORT, "rollout.gpu_memory_utilization=0.2"), H200, "rollout.gpu_memory_utilization"),
        ("dapo_math", (*SHORT, "model.gradient_checkpointing=false"), H200, "model.gradient_checkpointing"),
        ("tiny_math", ("trainer.micro_batch_size=64",), Machine("cpu", 4.0, ""), "model.gradient_checkpointing"),
        ("tiny_math", ("rollout.kv_cache_gib=0.0001",), Machine("cpu", 24.0, ""), "rollout.kv_cache_gib"),
    ],
)
def test_the_named_change_makes_it_fit_and_nothing_of_it_is_idle(name, overrides, machine, first):
    recipe = load_recipe(name, overrides)
    plan = plan_recipe(recipe, machine)
    assert not plan.fits and plan.missing > 0
    changes = smallest_change(recipe, machine)
    assert changes[0].startswith(first)
    assert plan_recipe(load_recipe(name, (*overrides, *changes)), machine).fits  # as a user would type them
    for left_out in changes if len(changes) > 1 else ():
        part = change(recipe, tuple(other for other in changes if other is not left_out))
        assert part is None or not plan_recipe(part, machine).fits
    line = verdict(recipe, plan)
    assert line.startswith("does not fit: ") and line.endswith(" ".join(changes)) and "\n" not in line


def test_what_is_missing_is_said_in_gib():
    recipe = load_recipe("dapo_math")
    plan = plan_recipe(recipe, Machine("gpu", 100.0, "", host_gib=1000.0))
    line = verdict(recipe, plan)
    assert f"{(plan.needed / GIB) - 100:.1f} GiB too few" in line
    assert f"loading takes {plan.host_bytes / GIB:.1f} GiB of a node's RAM and 1000.0 are there" in line
    assert "nothing smaller of it fits either" in line  # eight workers read 248 GB each, whatever is changed
    small = load_recipe("dapo_math", ["rollout.gpu_memory_utilization=0.29"])
    assert "one sequence of 22528 tokens lacks" in verdict(small, plan_recipe(small, H200))


def test_the_headline_recipe_fits_two_nodes_of_eight_h200():
    """With DAPO's answers, and a cache for several of the longest."""
    recipe = load_recipe("dapo_math")
    plan = plan_recipe(recipe, H200)
    assert plan.fits and plan.sequences >= 4 and plan.workers == 16
    assert (recipe.data.max_response_length, recipe.model.lora_rank) == (20480, 32)


# ---- command line --------------------------------------------------------------------------------------------------


def run_cli(capsys, *arguments: str) -> tuple[int, str, str]:
    """(status, stdout, stderr)."""
    try:
        status = plan_cli.main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_command_line(capsys, tmp_path):
    target = tmp_path / "plan.json"
    status, out, _ = run_cli(capsys, "--config", "dapo_math.yaml", "--gpu-gib", "120", "--json", str(target))
    written = json.loads(target.read_text())
    assert status == 1 and not written["fits"] and written["machine"]["gib"] == 120
    static = sum(written["trainer"].values()) + sum(written["engine"].values()) + written["reserved"]
    assert written["needed"] == static + sum(written["update"].values())
    assert written["change"] and " ".join(written["change"]) in out
    for part in (
        "426.17 B parameters, 248.36 GB",
        "137472 bytes a token",
        "sync: 13.17 GB",
        "not judged without --host",
    ):
        assert part in out
    status, out, _ = run_cli(capsys, "--config", "dapo_math", "--gpu-gib", "120", *written["change"])
    assert status == 0 and out.splitlines()[-1].startswith("fits: ")
    status, out, _ = run_cli(capsys, "--config", "dapo_math", "--gpu-gib", "139")
    assert status == 0 and out.splitlines()[-1].startswith("fits: ")
    status, out, _ = run_cli(capsys, "--config", "tiny_math", "--gpu-gib", "80")
    assert status == 0 and "2.73 M parameters, 1.87 MB" in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--config", "tiny_mth"], "did you mean tiny_math.yaml"),
        (["--config", "tiny_math", "--gpu-gib", "0"], "--gpu-gib 0.0"),
        (["--config", "tiny_math", "--gpu-gib", "nan"], "--gpu-gib nan"),
        (["--config", "tiny_math", "model.path=/no/such"], "set model.shape"),
        (["--config", "tiny_math", "model.lora_targets=[dense_mlp]"], "'dense_mlp' matches no module"),
        (["--config", "tiny_math", "--json", "/no/such/folder/x"], "--json /no/such/folder/x"),
    ],
)
def test_bad_usage_is_one_line_and_2(capsys, arguments, part):
    status, _, err = run_cli(capsys, *arguments)
    assert status == 2 and err.count("\n") == 1 and part in err
