"""Reading foreign layouts (ModelOpt, MiniMax MXFP8) and refusing what would decode to garbage."""

import json

import pytest
import torch
from quant_checkpoints import EXPERTS, HIDDEN, INTER, tensors, write
from safetensors.torch import load_file, save_file

from quant.checkpoint import CheckpointError, decoded_state, packed_state, quantize_checkpoint


@pytest.fixture
def ours(tmp_path):
    source = write(tmp_path / "src", tensors(layers=1))
    quantize_checkpoint(source, tmp_path / "ours", progress=False)
    return tmp_path / "ours"


def rewrite(folder, change, config=None):
    """Apply `change` to the tensors (in place) and write the checkpoint back, index included."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(state, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


def as_modelopt(state):
    for name in [name for name in state if name.endswith(".weight_packed")]:
        base = name.removesuffix("_packed")
        state[base] = state.pop(name)
        state[f"{base}_scale_2"] = 1 / state.pop(f"{base}_global_scale").reshape(())
        state[f"{base.removesuffix('weight')}input_scale"] = torch.tensor(0.25)


def test_modelopt_nvfp4_reads_as_the_same_tensors_with_its_input_scale(ours):
    expected = packed_state(ours)
    rewrite(ours, as_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    read = packed_state(ours)
    assert read.keys() == expected.keys()
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(read[name].packed, expected[name].packed)
    assert torch.equal(read[name].global_scale, expected[name].global_scale)
    assert float(read[name].input_scale) == 0.25 and expected[name].input_scale is None
    assert torch.equal(read[name].dequantize(), expected[name].dequantize())


def test_hf_quant_config_file_stands_in_for_a_missing_entry(ours):
    rewrite(ours, as_modelopt)
    (ours / "config.json").write_text("{}")
    (ours / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert "model.layers.0.mlp.experts.gate_up_proj" in packed_state(ours)


def test_minimax_mxfp8_scale_name_and_expert_names(ours):
    expected = decoded_state(ours)

    def minimax(state):
        for name in list(state):
            new = name.replace("weight_scale", "weight_scale_inv") if "self_attn" in name else name
            for leaf, short in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                new = new.replace(f".{leaf}.", f".{short}.") if ".experts." in new else new
            state[new] = state.pop(name)

    rewrite(ours, minimax, {"quant_method": "mxfp8"})
    read = decoded_state(ours)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in read)


def test_an_arbitrary_divisor_decodes_as_the_engine_does(ours):
    def scale(state):
        for name in state:
            if name.endswith("global_scale"):
                state[name] = torch.tensor([2688 / 0.3])

    rewrite(ours, scale)
    gate_up = packed_state(ours)["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(gate_up.global_scale, (1.0 / torch.full((EXPERTS,), 2688 / 0.3)))


BASE = "model.layers.0.mlp.experts.2"
Q = "model.layers.0.self_attn.q_proj"


def different_globals(state):
    state[f"{BASE}.up_proj.weight_global_scale"] *= 2


def negative_scale(state):
    state[f"{BASE}.up_proj.weight_scale"].view(torch.uint8)[0, 0] = 0x81


def nan_scale(state):
    state[f"{BASE}.up_proj.weight_scale"].view(torch.uint8)[0, 0] = 0x7F


def nan_mxfp8_scale(state):
    state[f"{Q}.weight_scale"][0, 0] = 255


def missing_expert(state):
    for name in [name for name in state if name.startswith(f"{BASE}.")]:
        del state[name]


def missing_scale(state):
    del state[f"{Q}.weight_scale"]


def orphan(state):
    state["model.layers.9.self_attn.q_proj.weight_scale"] = torch.zeros(1)


def two_scales(state):
    state[f"{Q}.weight_scale_inv"] = state[f"{Q}.weight_scale"].clone()


def wrong_scale_shape(state):
    state[f"{Q}.weight_scale"] = state[f"{Q}.weight_scale"][:, :1].repeat(1, 3)


def other_format(state):
    state[f"{Q}.weight_scale"] = state[f"{Q}.weight_scale"].float()


def zero_global(state):
    for leaf in ("gate_proj", "up_proj"):
        state[f"{BASE}.{leaf}.weight_global_scale"] *= 0


def mixed_experts(state):
    for part in ("weight_packed", "weight_scale", "weight_global_scale"):
        del state[f"{BASE}.down_proj.{part}"]
    state[f"{BASE}.down_proj.weight"] = torch.zeros(HIDDEN, INTER, dtype=torch.bfloat16)


REFUSED = {
    different_globals: r"different global scales.*experts.2.*up_proj",
    negative_scale: "negative or NaN block scales",
    nan_scale: "negative or NaN block scales",
    nan_mxfp8_scale: "NaN block scales",
    missing_expert: "expert 2 is missing",
    missing_scale: "float8_e4m3fn without a scale",
    orphan: "belongs to no matrix",
    two_scales: "two tensors for the same role",
    wrong_scale_shape: r"scales \[64, 3\] for data \[64, 64\]",
    other_format: "in no known format",
    zero_global: "divisor scale",
    mixed_experts: "format or shape differs from expert 0",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_would_decode_to_garbage_is_refused(ours, change):
    rewrite(ours, change)
    with pytest.raises(CheckpointError, match=REFUSED[change]) as error:
        packed_state(ours)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no quantization_config.*scripts/quantize_checkpoint.py"),
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not read"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo 'FP8'"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "MXFP8"}},
            },
            "MIXED_PRECISION with MXFP8",
        ),
    ],
)
def test_configs_that_are_refused(ours, config, message):
    content = {} if config is None else {"quantization_config": config}
    (ours / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        packed_state(ours)
