"""Which module gets which format, and that the table of rules imports without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from quant.policy import POLICIES, fused_group, get_policy

QWEN = "model.layers.3"
M3 = "language_model.model.layers.7"
EXPECTED = {
    f"{QWEN}.mlp.experts.5.gate_proj": "nvfp4",
    f"{QWEN}.mlp.experts.5.down_proj": "nvfp4",
    f"{QWEN}.mlp.experts.gate_up_proj": "nvfp4",
    f"{QWEN}.mlp.gate": None,
    f"{QWEN}.mlp.shared_expert_gate": None,
    f"{QWEN}.mlp.shared_expert.up_proj": "mxfp8",
    f"{QWEN}.mlp.gate_proj": "mxfp8",
    f"{QWEN}.self_attn.q_proj": "mxfp8",
    f"{QWEN}.self_attn.q_norm": None,
    f"{QWEN}.input_layernorm": None,
    f"{M3}.block_sparse_moe.experts.127.w1": "nvfp4",
    f"{M3}.block_sparse_moe.experts.127.w2": "nvfp4",
    f"{M3}.block_sparse_moe.gate": None,
    f"{M3}.block_sparse_moe.e_score_correction_bias": None,
    f"{M3}.block_sparse_moe.shared_experts.down_proj": "mxfp8",
    f"{M3}.self_attn.index_q_proj": "mxfp8",
    f"{M3}.self_attn.index_k_norm": None,
    f"{M3}.self_attn.o_proj": "mxfp8",
    "language_model.model.embed_tokens": None,
    "language_model.lm_head": None,
    "lm_head": None,
    "model.norm": None,
    "vision_tower.encoder.layers.0.self_attn.q_proj": None,
    "multi_modal_projector.up_proj": None,
}


@pytest.mark.parametrize("module", EXPECTED)
def test_default_policy(module):
    assert get_policy("nvfp4_mxfp8").format_of(module) == EXPECTED[module]


def test_other_policies_keep_what_they_do_not_name():
    for name, policy in POLICIES.items():
        assert policy.name == name
        for module, fmt in EXPECTED.items():
            if fmt is None:
                assert policy.format_of(module) is None
    assert get_policy("nvfp4_experts").format_of(f"{QWEN}.self_attn.q_proj") is None
    assert get_policy("mxfp8_dense").format_of(f"{QWEN}.mlp.experts.5.gate_proj") is None
    assert get_policy("nvfp4_all").format_of(f"{QWEN}.self_attn.q_proj") == "nvfp4"


def test_fused_groups():
    layer = f"{QWEN}.self_attn"
    assert {fused_group(f"{layer}.{leaf}_proj") for leaf in "qkv"} == {f"{layer}.qkv_proj"}
    assert fused_group(f"{layer}.o_proj") == f"{layer}.o_proj"
    expert = f"{M3}.block_sparse_moe.experts.1"
    assert fused_group(f"{expert}.w1") == fused_group(f"{expert}.w3") == f"{expert}.gate_up_proj"
    assert fused_group(f"{expert}.w2") == f"{expert}.w2"
    assert fused_group(f"{QWEN}.mlp.experts.1.up_proj") != fused_group(f"{QWEN}.mlp.experts.2.up_proj")


def test_policy_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("rules:\n  - ['lm_head', null]\n  - ['experts', nvfp4]\n  - ['.*', mxfp8]\n")
    policy = get_policy(str(file))
    assert [policy.format_of(name) for name in ("lm_head", "a.experts.0.w1", "a.b")] == [None, "nvfp4", "mxfp8"]
    assert get_policy(policy) is policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: 3", "expected `rules:`"),
        ("- a", "expected `rules:`"),
        ("rules: [[a, fp3]]", "unknown format 'fp3'"),
        ("rules: [['(', nvfp4]]", "bad pattern"),
        ("rules: [", "cannot read it"),
    ],
)
def test_bad_policy_files(tmp_path, text, message):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        get_policy(str(file))
    with pytest.raises(ValueError, match="cannot read it"):
        get_policy(str(tmp_path / "missing.yaml"))


def test_policy_imports_without_torch():
    code = "import sys; import quant.policy; assert 'torch' not in sys.modules and 'yaml' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parent.parent, check=True)
