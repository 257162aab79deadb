"""Adapters as files: bit-exact round trips, the same model in stock PEFT, and refusals of what does not fit."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_model import PLAIN, QUANTISED, TARGETS, build, logits, masters, randomise, spec, token_ids
from transformers import AutoConfig, AutoModelForCausalLM

from quant.checkpoint import decoded_state
from rl import adapter_files, lora

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, trainer model) of a trained adapter on attention and experts; A is shared by gate and up."""
    trainer_model = build(spec(), dtype=torch.float32)
    randomise(trainer_model.model)
    folder = tmp_path_factory.mktemp("adapter")
    adapter_files.save_peft(trainer_model.model, trainer_model.spec, folder, str(QUANTISED))
    return folder, trainer_model


def stock_model(quantised: bool = True) -> torch.nn.Module:
    """transformers' own Qwen3-MoE in float32, with the quantised checkpoint's decoded weights or the plain ones."""
    if not quantised:
        return AutoModelForCausalLM.from_pretrained(PLAIN, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(QUANTISED)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dict(decoded_state(QUANTISED, torch.float32)))
    return model.eval()


def copy_of(folder, target, **config):
    """The adapter in `folder` with other settings, in `target`."""
    save_file(load_file(folder / WEIGHTS), target / WEIGHTS)
    (target / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | config))
    return target


# ---- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"share_gate_up_a": False}, {"targets": ("q_proj", "v_proj")}, {"targets": ("experts",)}],
    ids=["shared A", "own A", "linears", "experts"],
)
def test_save_and_load_is_bit_exact(tmp_path, changes):
    first, second = build(spec(**changes)), build(spec(seed=5, **changes))
    randomise(first.model)
    adapter_files.save_peft(first.model, first.spec, tmp_path, "base")
    adapter_files.load_peft(second.model, tmp_path)
    ours, theirs = masters(first.model), masters(second.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours) and ours.keys() == theirs.keys()
    assert all(parameter.dtype == torch.float32 and parameter.requires_grad for parameter in theirs.values())
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS).values()} == {torch.float32}
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]


def test_configuration_is_pefts(saved):
    config = json.loads((saved[0] / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (8, 12, "LORA")
    assert config["base_model_name_or_path"] == str(QUANTISED)
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert LoraConfig.from_pretrained(saved[0]).target_parameters == config["target_parameters"]


# ---- stock PEFT ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [TARGETS, ("attention",), ("experts",)], ids="-".join)
def test_stock_peft_computes_the_same_logits(tmp_path, targets):
    """Tolerance: float32 on both sides, only the order of additions differs; the adapter moves logits by far more."""
    ours, ids = build(spec(targets=targets), dtype=torch.float32), token_ids()
    randomise(ours.model)
    adapter_files.save_peft(ours.model, ours.spec, tmp_path, str(QUANTISED))
    theirs = PeftModel.from_pretrained(stock_model(), tmp_path)
    with torch.no_grad():
        expected = logits(ours, ids)
        torch.testing.assert_close(theirs(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
        with theirs.disable_adapter():
            base = theirs(input_ids=ids, use_cache=False).logits
        assert (base - expected).abs().max() > 0.05


def test_stock_peft_on_a_plain_checkpoint_computes_the_same_logits(tmp_path):
    ours, ids = build(spec(targets=("attention",)), PLAIN, dtype=torch.float32), token_ids()
    randomise(ours.model)
    adapter_files.save_peft(ours.model, ours.spec, tmp_path, str(PLAIN))
    theirs = PeftModel.from_pretrained(stock_model(quantised=False), tmp_path)
    with torch.no_grad():
        actual = theirs(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(actual, logits(ours, ids), rtol=1e-4, atol=1e-4)


def test_adapter_that_stock_peft_made_loads(tmp_path):
    parameters = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    config = LoraConfig(r=8, lora_alpha=12, target_modules=["q_proj", "o_proj"], target_parameters=parameters)
    theirs, ids = get_peft_model(stock_model(), config), token_ids()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    theirs.save_pretrained(tmp_path)
    ours = build(spec(targets=("q_proj", "o_proj", "experts")), dtype=torch.float32)
    adapter_files.load_peft(ours.model, tmp_path)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits(ours, ids), expected, rtol=1e-4, atol=1e-4)


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_initialisation_that_changed_the_base_is_refused(saved, tmp_path, method):
    copy_of(saved[0], tmp_path, init_lora_weights=method)
    with pytest.raises(lora.AdapterError, match=f"init_lora_weights='{method}' changed the base weights; convert"):
        adapter_files.load_peft(saved[1].model, tmp_path)


@pytest.mark.parametrize("value", [True, False, "gaussian"])
def test_initialisation_that_left_the_base_alone_loads(saved, tmp_path, value):
    adapter_files.load_peft(saved[1].model, copy_of(saved[0], tmp_path, init_lora_weights=value))


@pytest.mark.parametrize(
    "other, message",
    [
        ({"rank": 16}, r"rank 8, the recipe 16; set model.lora_rank=8"),
        ({"rank": 1}, r"rank 8, the recipe 1; set model.lora_rank=8"),
        ({"alpha": 8}, r"scaling is 12/8, the recipe's 1.0; set model.lora_alpha=12"),
        ({"targets": ("attention",)}, r"16 tensors match no adapted module, for example .*experts"),
        ({"targets": ("q_proj", "experts")}, r"24 tensors match no adapted module, for example .*self_attn"),
        ({"share_gate_up_a": False}, r"experts lacks gate_proj of some experts; check share_gate_up_a"),
    ],
    ids=["higher rank", "lower rank", "alpha", "fewer groups", "fewer modules", "own A"],
)
def test_adapter_of_another_recipe_is_refused(saved, other, message):
    with pytest.raises(lora.AdapterError, match=message):
        adapter_files.load_peft(build(spec(**other)).model, saved[0])


def test_adapter_without_a_group_that_the_recipe_trains_is_refused(tmp_path):
    attention = build(spec(targets=("attention",)))
    adapter_files.save_peft(attention.model, attention.spec, tmp_path, "base")
    with pytest.raises(lora.AdapterError, match=r"mlp.experts lacks fused expert tensors; .*lora_targets"):
        adapter_files.load_peft(build(spec()).model, tmp_path)


@pytest.mark.parametrize(
    "name", ["layers.1.self_attn.k_proj.lora_B.weight", "layers.3.mlp.experts.base_layer.lora_A.weight"]
)
def test_missing_tensor_is_named(saved, tmp_path, name):
    folder = copy_of(saved[0], tmp_path)
    tensors = load_file(folder / WEIGHTS)
    del tensors[f"base_model.model.model.{name}"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(lora.AdapterError, match=name.partition(".lora")[0].removesuffix(".base_layer")):
        adapter_files.load_peft(build(spec()).model, folder)


@pytest.mark.parametrize("name", ["extra.lora_A.weight", "layers.0.self_attn.q_proj.lora_magnitude_vector"])
def test_left_over_tensor_is_named(saved, tmp_path, name):
    folder = copy_of(saved[0], tmp_path)
    save_file(load_file(folder / WEIGHTS) | {name: torch.zeros(2)}, folder / WEIGHTS)
    with pytest.raises(lora.AdapterError, match=f"1 tensors match no adapted module, for example {name}"):
        adapter_files.load_peft(build(spec()).model, folder)


def test_tensor_of_another_shape_is_named(saved, tmp_path):
    folder, name = copy_of(saved[0], tmp_path), "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, folder / WEIGHTS)
    with pytest.raises(lora.AdapterError, match=r"layers.2.self_attn.v_proj has shape \(63, 8\), .* \(64, 8\)"):
        adapter_files.load_peft(build(spec()).model, folder)


@pytest.mark.parametrize(
    "setting",
    [{"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"q_proj": 4}}, {"rank_pattern": {"q_proj": 4}}],
)
def test_settings_that_the_tensors_do_not_show_are_refused(saved, tmp_path, setting):
    with pytest.raises(lora.AdapterError, match=f"{next(iter(setting))}=.*only plain LoRA loads"):
        adapter_files.load_peft(saved[1].model, copy_of(saved[0], tmp_path, **setting))
