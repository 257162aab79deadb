"""Swapping into Hugging Face models: bit equality with the decoded twin, strictness, models without a name list."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quant import mxfp8, nvfp4
from quant.checkpoint import CheckpointError, decoded_state, load_model, packed_state, quantize_checkpoint
from quant.experts import QuantExperts
from quant.layers import QuantLinear
from quant.modules import is_experts, swap_modules

transformers = pytest.importorskip("transformers")
COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 4, "rotary_dim": 16},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    """(bf16 source folder, quantised folder) of a tiny random model, saved by transformers itself."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **COMMON, **CONFIGS[request.param])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(folder / "src")
    quantize_checkpoint(folder / "src", folder / "dst", progress=False)
    return folder / "src", folder / "dst"


def run(model, grad=False):
    ids = torch.arange(24).view(2, 12) * 7 % 96
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_(grad)
    logits = model(inputs_embeds=embeds).logits
    if not grad:
        return logits
    logits.float().pow(2).mean().backward()
    return logits, embeds.grad


def test_model_equals_its_decoded_twin(checkpoint):
    source, quantised = checkpoint
    packed = load_model(quantised, dtype=torch.float32)
    kinds = [type(module) for module in packed.modules()]
    assert kinds.count(QuantExperts) == 2 and kinds.count(QuantLinear) >= 8
    assert not any(parameter.device.type == "meta" or parameter.requires_grad for parameter in packed.parameters())

    twin = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, experts_implementation="eager"
    )
    originals = {name: value.clone() for name, value in twin.state_dict().items()}
    swapped = {name.replace("block_sparse_moe", "mlp"): value for name, value in decoded_state(quantised).items()}
    twin.load_state_dict({name: swapped.get(name, value) for name, value in originals.items()})
    changed = sum(not torch.equal(value, originals[name]) for name, value in twin.state_dict().items())
    assert changed >= 4, "the twin holds decoded weights"
    logits, grad = run(packed, grad=True)
    expected, expected_grad = run(twin, grad=True)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-3, atol=1e-5 * float(expected_grad.abs().max()))


def test_bytes_in_the_modules_are_the_files(checkpoint):
    _, quantised = checkpoint
    model = load_model(quantised)
    state = packed_state(quantised)
    modules = dict(model.named_modules())
    name = next(name for name in state if name.endswith("layers.1.self_attn.q_proj.weight"))
    linear = modules["model.layers.1.self_attn.q_proj"]
    assert torch.equal(linear.weight_data, state[name].data.view(torch.uint8))
    assert torch.equal(linear.weight_scale, state[name].scale)
    stack = next(
        value
        for name, value in state.items()
        if name.endswith(("layers.0.mlp.experts.gate_up_proj", "layers.0.block_sparse_moe.experts.gate_up_proj"))
    )
    experts = modules["model.layers.0.mlp.experts"]
    assert torch.equal(experts.gate_up_packed, stack.packed)
    assert torch.equal(experts.gate_up_scale, stack.scale.view(torch.uint8))
    assert torch.equal(experts.gate_up_global.view(torch.float32).squeeze(1), stack.global_scale)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert experts.gate_up_packed.dtype == torch.uint8, "model.to(bfloat16) was not applied to the bytes"
    assert model.to(torch.bfloat16).model.layers[0].mlp.experts.gate_up_packed.dtype == torch.uint8


class Experts(nn.Module):
    """An experts module that no library knows, with its own gate."""

    def __init__(self, limit=7.0):
        super().__init__()
        self.limit = limit
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 64, 64))
        self.down_proj = nn.Parameter(torch.zeros(4, 64, 32))

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.sigmoid(gate.clamp(max=self.limit)) * up


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts(0.25)
        self.proj = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(64)


def packed_model_state():
    torch.manual_seed(0)
    return {
        "experts.gate_up_proj": nvfp4.quantize(torch.randn(4, 64, 64)),
        "experts.down_proj": nvfp4.quantize(torch.randn(4, 64, 32)),
        "proj.weight": mxfp8.quantize(torch.randn(32, 64)),
        "proj.bias": torch.randn(32),
        "norm.weight": torch.ones(64),
        "norm.bias": torch.zeros(64),
    }


def test_any_module_with_stacked_experts_is_swapped_and_keeps_its_own_gate():
    model, state = Model(), packed_model_state()
    assert is_experts(model.experts) and not is_experts(model.proj)
    swap_modules(model, state, "marlin")
    assert isinstance(model.experts, QuantExperts) and model.experts.backend == "marlin"
    gate_up = torch.randn(3, 64)
    gate, up = gate_up.chunk(2, dim=-1)
    assert torch.equal(model.experts.act(gate_up), F.sigmoid(gate.clamp(max=0.25)) * up)
    x = torch.randn(2, 64)
    expected = F.linear(x, state["proj.weight"].dequantize(torch.float32), state["proj.bias"])
    torch.testing.assert_close(model.proj(x), expected)
    assert set(model.state_dict()) >= {"experts.down_global", "proj.weight_data", "norm.bias"}


CHANGES = {
    "missing": (lambda s: s.pop("norm.weight"), "tensor norm.weight of the model is not in the checkpoint"),
    "unknown": (lambda s: s.update(ghost=torch.zeros(1)), "tensor ghost has no place in Model"),
    "in part": (
        lambda s: s.update({"experts.down_proj": torch.zeros(4, 64, 32)}),
        "module experts is packed in part: only gate_up_proj",
    ),
    "half missing": (lambda s: s.pop("experts.down_proj"), "module experts is packed in part"),
    "shape": (lambda s: s.update({"norm.bias": torch.zeros(3)}), r"norm.bias is \[3\] in the checkpoint, \[64\]"),
    "packed shape": (
        lambda s: s.update({"proj.weight": mxfp8.quantize(torch.zeros(64, 64))}),
        r"proj.weight is \[64, 64\] in the checkpoint, \[32, 64\]",
    ),
    "kind": (
        lambda s: s.update({"experts.down_proj": mxfp8.quantize(torch.zeros(4, 64, 32))}),
        "tensor experts.down_proj is MXFP8, which Experts cannot hold",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_every_tensor_is_used_once_and_every_module_is_whole(case):
    change, message = CHANGES[case]
    state = packed_model_state()
    change(state)
    with pytest.raises(CheckpointError, match=message):
        swap_modules(Model(), state)


def test_a_name_given_twice_is_refused():
    items = [*packed_model_state().items(), ("norm.bias", torch.zeros(64))]
    with pytest.raises(CheckpointError, match=r"both fill norm\.bias"):
        swap_modules(Model(), items)


def test_tied_embeddings_need_no_head(tmp_path):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_moe", **COMMON, **CONFIGS["qwen3_moe"], tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "src")
    quantize_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    model = load_model(tmp_path / "dst")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert run(model).isfinite().all()
