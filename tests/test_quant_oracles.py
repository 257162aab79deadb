"""Other implementations as oracles: the layout of compressed-tensors, decoders and loader of vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quant_checkpoints import tensors, write

from quant import activations, mxfp8, nvfp4
from quant.checkpoint import quantize_checkpoint
from quant.config import _MXFP8_WEIGHTS, _NVFP4_WEIGHTS

ROOT = Path(__file__).resolve().parent.parent


def weight(rows=48, columns=256):
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


@pytest.fixture(scope="module")
def compressed_tensors():
    """{format: (compressor, scheme)} of compressed-tensors for the settings that our checkpoints carry."""
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def scheme(settings):
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs.model_validate(settings))

    return {
        "nvfp4": (NVFP4PackedCompressor, scheme(_NVFP4_WEIGHTS)),
        "mxfp8": (MXFP8QuantizationCompressor, scheme(_MXFP8_WEIGHTS)),
    }


def test_compressed_tensors_decodes_our_bytes_as_we_do(compressed_tensors):
    compressor, scheme = compressed_tensors["nvfp4"]
    ours = nvfp4.quantize(weight())
    state = {
        "weight_packed": ours.packed,
        "weight_scale": ours.scale,
        "weight_global_scale": (1 / ours.global_scale).reshape(1),
    }
    assert torch.equal(compressor.decompress(state, scheme)["weight"], ours.dequantize())
    compressor, scheme = compressed_tensors["mxfp8"]
    ours = mxfp8.quantize(weight())
    decoded = compressor.decompress({"weight": ours.data, "weight_scale": ours.scale}, scheme)["weight"]
    assert torch.equal(decoded.bfloat16(), ours.dequantize())


def test_compressed_tensors_packs_our_values_to_our_bytes(compressed_tensors):
    """Given our scales, its quantise-and-pack must give our codes: the layouts agree, and so does rounding."""
    compressor, scheme = compressed_tensors["nvfp4"]
    ours = nvfp4.quantize(weight().float())
    state = {
        "weight": weight().float(),
        "weight_scale": ours.scale.float(),
        "weight_global_scale": (1 / ours.global_scale).reshape(1),
    }
    theirs = compressor.compress(state, scheme)
    # It loses the sign of values that round to zero (sign(x) * 0), which decodes to the same number.
    theirs = nvfp4.NVFP4Tensor(theirs["weight_packed"], theirs["weight_scale"], ours.global_scale)
    assert torch.equal(theirs.scale.view(torch.uint8), ours.scale.view(torch.uint8))
    assert torch.equal(theirs.dequantize(torch.float32), ours.dequantize(torch.float32))


@pytest.fixture(scope="module")
def vllm():
    """vLLM's reference functions (importing them takes several seconds)."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils, nvfp4_emulation_utils

    return nvfp4_emulation_utils, mxfp8_utils


@pytest.mark.parametrize("global_scale", [None, 0.00123])
def test_vllm_decodes_our_nvfp4_as_we_do(vllm, global_scale):
    for ours in (nvfp4.quantize(weight(), global_scale), nvfp4.quantize(weight().view(3, 16, 256), global_scale)):
        for dtype in (torch.bfloat16, torch.float32):
            theirs = vllm[0].dequantize_to_dtype(ours.packed, ours.scale, ours.global_scale, dtype, 16, swizzle=False)
            assert torch.equal(theirs, ours.dequantize(dtype))


def test_vllm_decodes_and_encodes_mxfp8_as_we_do(vllm):
    ours = mxfp8.quantize(weight())
    assert torch.equal(vllm[1].dequant_mxfp8_to_bf16(ours.data, ours.scale), ours.dequantize())
    data, scale = vllm[1]._mxfp8_e4m3_quantize_torch(weight())
    assert torch.equal(data.view(torch.uint8), ours.data.view(torch.uint8)) and torch.equal(scale, ours.scale)


@pytest.mark.parametrize("divisor", [2688 / 20.0, 64.0, 2688 / 0.37])
def test_vllm_quantises_activations_as_the_emulation_backend_does(vllm, divisor):
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(64, 256, generator=generator) * 5).bfloat16()
    x[3] = 0
    divisor = torch.tensor(divisor)
    values, scale = vllm[0].ref_nvfp4_quant(x, divisor, 16)
    ours, our_scale = activations.nvfp4_quantize(x, 1 / divisor)
    assert torch.equal(our_scale, scale)
    assert torch.equal(ours.view(64, 256), values)
    assert torch.equal(activations.nvfp4_emulated(x, 1 / divisor), vllm[0].ref_nvfp4_quant_dequant(x, divisor, 16))


LOAD = """
import sys
from pathlib import Path
import torch
from rollout.engine import EngineOptions, InProcessEngine
from rollout.worker import canonical_name
from quant.checkpoint import decoded_state

engine = InProcessEngine(Path(sys.argv[1]), EngineOptions(max_model_len=32, max_num_seqs=4, kv_cache_gib=0.05))
expected = decoded_state(sys.argv[1])

def compare(model):
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
    seen = []
    for raw, module in model.named_modules():
        name = canonical_name(raw)
        if hasattr(module, "w13_weight"):
            for engine_name, part in (("w13", "gate_up_proj"), ("w2", "down_proj")):
                pieces = [getattr(module, engine_name + end) for end in ("_weight", "_weight_scale", "_weight_scale_2")]
                decoded = dequantize_to_dtype(*pieces, torch.bfloat16, 16, swizzle=False)
                assert torch.equal(decoded, expected[name + "." + part]), name
                seen.append(name)
        elif name.endswith(("qkv_proj", "o_proj")) and hasattr(module, "weight_scale") and raw == name + ".base_layer":
            decoded = dequant_mxfp8_to_bf16(module.weight.data, module.weight_scale.data)
            parts = ("q_proj", "k_proj", "v_proj") if name.endswith("qkv_proj") else ("o_proj",)
            parent = name.rpartition(".")[0]
            assert torch.equal(decoded, torch.cat([expected[f"{parent}.{part}.weight"] for part in parts])), name
            seen.append(name)
    return seen

seen = engine.llm.apply_model(compare)[0]
assert len(seen) == 8, seen  # two layers of qkv, o, gate_up and down
print("COMPARED", len(seen))
"""


@pytest.mark.slow
def test_vllm_loads_the_checkpoint_and_decodes_the_same_weights(tmp_path):
    pytest.importorskip("vllm")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    state = tensors()
    for layer in range(2):
        for name in ("post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            size = 64 if "layernorm" in name else 32
            state[f"model.layers.{layer}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
    state["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    source = write(tmp_path / "src", state, shards=2, config=config)
    (source / "tokenizer.json").unlink()
    quantize_checkpoint(source, tmp_path / "dst", progress=False)
    code = LOAD.replace("EngineOptions(", "EngineOptions(extra={'skip_tokenizer_init': True}, ")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "dst")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0 and "COMPARED 8" in done.stdout, done.stderr[-4000:]
