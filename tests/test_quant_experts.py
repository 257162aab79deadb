"""Unquantised routed experts: rounding points against float64, gradients, and the swap in a Hugging Face model."""

import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from quant.experts import PlainExperts
from quant.modules import is_experts, swap_plain_experts

EXPERTS, HIDDEN, INTER, TOKENS, TOP_K = 4, 32, 16, 24, 2


def silu_gate(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def dyadic(*shape: int, seed: int) -> torch.Tensor:
    """Small multiples of 1/8: products and sums are exact in float32, so that only roundings show."""
    return torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed)).float() / 8


def routed():
    generator = torch.Generator().manual_seed(0)
    weights, ids = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return dyadic(TOKENS, HIDDEN, seed=1), ids, weights


def stacks():
    return dyadic(EXPERTS, 2 * INTER, HIDDEN, seed=2), dyadic(EXPERTS, HIDDEN, INTER, seed=3)


class Delta(torch.nn.Module):
    def gate_up_delta(self, rows, routes):
        return rows.repeat(1, 2 * INTER // HIDDEN)

    def down_delta(self, rows, routes):
        return rows.repeat(1, HIDDEN // INTER)


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize("backend", ["emulation", "marlin"])
def test_experts_round_where_the_engine_does(backend, adapted):
    gate_up, down = stacks()
    module = PlainExperts(gate_up.bfloat16(), down.bfloat16(), silu_gate, backend)
    module.adapter = Delta() if adapted else None
    x, ids, weights = routed()
    x = x.bfloat16()
    expected = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS):
        for slot in range(TOP_K):
            expert, weight = int(ids[token, slot]), weights[token, slot]
            hidden = (x[token].float() @ gate_up[expert].T).bfloat16()
            if adapted:
                hidden = hidden + x[token].repeat(2 * INTER // HIDDEN)
            inner = silu_gate(hidden)
            acc = inner.float() @ down[expert].T
            delta = inner.repeat(HIDDEN // INTER) if adapted else torch.zeros(HIDDEN, dtype=torch.bfloat16)
            if backend == "marlin":
                row = ((acc * weight).bfloat16().float() + weight * delta.float()).bfloat16().float()
            else:
                row = (acc.bfloat16() + delta).float() * weight
            expected[token] += row
    assert torch.equal(module(x, ids, weights), expected.bfloat16())


@pytest.mark.parametrize("backend", ["emulation", "marlin"])
@pytest.mark.parametrize("kind", [Qwen3MoeExperts, MixtralExperts], ids=["Qwen3-MoE", "Mixtral"])
def test_float32_equals_transformers_with_its_gradient(kind, backend):
    config_class = Qwen3MoeConfig if kind is Qwen3MoeExperts else MixtralConfig
    sizes = {"num_experts": EXPERTS} if kind is Qwen3MoeExperts else {"num_local_experts": EXPERTS}
    config = config_class(hidden_size=HIDDEN, intermediate_size=INTER, moe_intermediate_size=INTER, **sizes)
    config._experts_implementation = "eager"
    theirs = kind(config)
    theirs.gate_up_proj.data, theirs.down_proj.data = stacks()
    root = torch.nn.Module()
    root.experts = kind(config)
    root.experts.load_state_dict(theirs.state_dict())
    assert is_experts(root.experts)
    swap_plain_experts(root, backend)
    assert isinstance(root.experts, PlainExperts) and not is_experts(root.experts)
    x, ids, weights = routed()
    ours_in, theirs_in = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, wanted = root.experts(ours_in, ids, weights), theirs(theirs_in, ids, weights)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    ours.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is None for parameter in root.parameters())


def test_swap_keeps_the_weights_and_frees_the_old_module():
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INTER, num_experts=EXPERTS)
    root = torch.nn.Module()
    root.experts = Qwen3MoeExperts(config)
    kept = root.experts.gate_up_proj.data
    swap_plain_experts(root)
    assert root.experts.gate_up_proj.data_ptr() == kept.data_ptr()
    assert set(root.state_dict()) == {"experts.gate_up_proj", "experts.down_proj"}
    with pytest.raises(ValueError, match="backend 'fast' is unknown"):
        PlainExperts(*stacks(), silu_gate, "fast")


def test_tokens_in_chunks_give_the_same_output_and_gradients(monkeypatch):
    module = PlainExperts(*(stack.bfloat16() for stack in stacks()), silu_gate)
    module.adapter = Delta()
    results = []
    for together in (TOKENS, 7):
        monkeypatch.setattr("quant.experts.TOKENS_TOGETHER", together)
        x, ids, weights = routed()
        x, weights = x.bfloat16().requires_grad_(), weights.requires_grad_()
        out = module(x, ids, weights)
        out.backward(dyadic(TOKENS, HIDDEN, seed=4).bfloat16())
        results.append((out.detach(), x.grad, weights.grad))
    for whole, chunked in zip(*results, strict=True):
        assert torch.equal(whole, chunked)
