"""Frozen layers: rounding points of each backend against float64, gradients, what autograd keeps, bad input."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from quant import activations, matmul, mxfp8, nvfp4
from quant.experts import QuantExperts
from quant.layers import QuantLinear

EXPERTS, HIDDEN, INTER, TOKENS, TOP_K = 6, 64, 32, 40, 2
BACKENDS = ("emulation", "marlin", "flashinfer_w4a4")
ODD_GLOBAL = 0.00123  # no power of two: the backends' weights then differ
STACKS = ((EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER))


def silu_gate(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def generator():
    return torch.Generator().manual_seed(0)


def nvfp4_weight(*shape, global_scale=ODD_GLOBAL, input_scale=None):
    weight = nvfp4.quantize(torch.randn(*shape, generator=generator()) * 0.1, global_scale)
    return nvfp4.NVFP4Tensor(weight.packed, weight.scale, weight.global_scale, input_scale)


def same_up_to_accumulation(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """`actual` is bf16 of a float32 sum whose exact value is `exact` (float64): equal but for sums next to a rounding
    boundary, where it may be one bf16 unit off."""
    rounded = exact.to(torch.bfloat16)
    off = actual != rounded
    assert off.float().mean() < 0.01, f"{off.float().mean():.2%} differ"
    step = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-30))) - 7)
    assert ((actual.double() - exact).abs() <= 0.51 * step + 1e-6 * exact.abs().max()).all()


def bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).double()


def exact_weight(weight, backend):
    """Weight in float64 that the backend multiplies with, and the factor of the accumulator."""
    if isinstance(weight, mxfp8.MXFP8Tensor):
        return weight.dequantize(torch.float32).double(), 1.0
    codes = nvfp4.NVFP4Tensor(weight.packed, weight.scale, torch.ones_like(weight.global_scale))
    unscaled = codes.dequantize(torch.float32).double()
    shape = (*weight.global_scale.shape, 1, 1)
    if backend == "emulation":
        scale = weight.scale.float() * weight.global_scale.reshape(shape)
        values = unscaled / weight.scale.double().repeat_interleave(16, -1).clamp(min=1e-9)
        return bf16(values.float() * scale.repeat_interleave(16, -1)), 1.0
    return unscaled, weight.global_scale.double().reshape(shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_linear_rounds_where_the_backend_does(fmt, backend):
    x = torch.randn(TOKENS, 128, generator=generator()).bfloat16()
    input_scale = torch.tensor(0.004) if backend == "flashinfer_w4a4" else None
    if fmt == "mxfp8":
        weight = mxfp8.quantize(torch.randn(48, 128, generator=generator()))
        operand = activations.mxfp8_emulated(x) if backend == "flashinfer_w4a4" else x
        factor = 1.0
    else:
        weight = nvfp4_weight(48, 128, input_scale=input_scale)
        operand = x if input_scale is None else activations.nvfp4_operand(x, input_scale)
        factor = 1.0 if input_scale is None else float(input_scale)
    module = QuantLinear(weight, backend=backend)
    exact, scale = exact_weight(weight, backend)
    same_up_to_accumulation(module(x), operand.double() @ exact.T * scale * factor)


def test_power_of_two_globals_make_emulation_and_marlin_linears_equal():
    weight = nvfp4_weight(48, 128, global_scale=None)
    x = torch.randn(TOKENS, 128).bfloat16()
    assert torch.equal(QuantLinear(weight)(x), QuantLinear(weight, backend="marlin")(x))
    odd = nvfp4_weight(48, 128)
    assert not torch.equal(QuantLinear(odd)(x), QuantLinear(odd, backend="marlin")(x))


def routed(dtype=torch.bfloat16, missing=False):
    rng = generator()
    x = torch.randn(TOKENS, HIDDEN, generator=rng).to(dtype)
    weights, ids = torch.randn(TOKENS, EXPERTS, generator=rng).softmax(-1).topk(TOP_K)
    ids[ids == 3] = 4 if not missing else EXPERTS  # expert 3 gets no row
    return x, ids, weights


def experts(backend, input_scale=None, gate=silu_gate):
    gate_up = nvfp4_weight(EXPERTS, 2 * INTER, HIDDEN, input_scale=input_scale)
    down = nvfp4_weight(EXPERTS, HIDDEN, INTER, input_scale=input_scale)
    return QuantExperts(gate_up, down, gate, backend), gate_up, down


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_round_where_the_backend_does(backend):
    """Stage by stage, each fed with the module's own bf16 input, so that one stage's noise does not hide the next's."""
    scale = torch.tensor(0.004) if backend == "flashinfer_w4a4" else None
    module, gate_up, down = experts(backend, scale)
    x, ids, weights = routed()
    routes = module.sort(ids)
    tokens = routes.order // TOP_K
    rows = x[tokens]
    outputs = module.gate_up(rows, routes)
    inner = module.act(outputs)
    y = module.down(inner, routes)
    for stage_in, stage_out, weight in ((rows, outputs, gate_up), (inner, y, down)):
        operand = stage_in if scale is None else activations.nvfp4_operand(stage_in, scale)
        exact, factor = exact_weight(weight, backend)
        left_for_combine = backend == "marlin" and weight is down
        for expert in range(EXPERTS):
            part = slice(routes.offsets[expert], routes.offsets[expert + 1])
            if part.start == part.stop:
                continue
            alpha = 1.0 if isinstance(factor, float) or left_for_combine else float(factor[expert])
            alpha *= 1.0 if scale is None else float(scale)
            same_up_to_accumulation(stage_out[part], operand[part].double() @ exact[expert].T * alpha)
    delta = torch.randn(y.shape, generator=generator()).bfloat16() * y.std()
    combined = module.combine(y, routes, weights, delta, torch.bfloat16)
    weight = weights.reshape(-1)[routes.order].unsqueeze(-1)
    if backend == "marlin":
        factor = bf16(weight * down.global_scale[routes.experts].unsqueeze(-1))
        row = bf16(bf16(y.double() * factor).float() + weight * delta.float())
    else:
        row = bf16(y.float() + delta.float()) * weight.double()
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64).index_add(0, tokens, row)
    same_up_to_accumulation(combined, exact)


def dense_twin(x, ids, weights, gate_up, down, adapter=None):
    """The same layer in plain torch with decoded float32 weights, one expert at a time."""
    wide, narrow = gate_up.dequantize(torch.float32), down.dequantize(torch.float32)
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        hidden = x[token] @ wide[expert].T
        if adapter is not None:
            hidden = hidden + x[token] @ adapter.up.T
        inner = silu_gate(hidden)
        y = inner @ narrow[expert].T
        if adapter is not None:
            y = y + inner @ adapter.down.T
        out = out.index_add(0, token, y * weights[token, slot, None])
    return out


class Adapter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(2 * INTER, HIDDEN, generator=generator()) * 0.05)
        self.down = torch.nn.Parameter(torch.randn(HIDDEN, INTER, generator=generator()) * 0.05)

    def gate_up_delta(self, rows, routes):
        return rows @ self.up.T

    def down_delta(self, rows, routes):
        return rows @ self.down.T


@pytest.mark.parametrize("backend", ["emulation", "marlin"])
@pytest.mark.parametrize("missing", [False, True])
def test_float32_equals_the_dense_layer_forward_and_backward(backend, missing):
    module, gate_up, down = experts(backend)
    module.adapter = Adapter()
    x, ids, weights = routed(torch.float32, missing)
    inputs = [x.requires_grad_(), weights.requires_grad_()]
    parameters = list(module.adapter.parameters())
    expected = dense_twin(x, ids, weights, gate_up, down, module.adapter)
    actual = module(x, ids, weights)
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * float(expected.detach().abs().max())}
    torch.testing.assert_close(actual, expected, **tolerance)
    grad = torch.randn(x.shape, generator=generator())
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs + parameters, grad),
        torch.autograd.grad(expected, inputs + parameters, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_w4a4_gradient_passes_straight_through():
    weight = nvfp4_weight(48, 128, input_scale=torch.tensor(0.004))
    module = QuantLinear(weight, backend="flashinfer_w4a4")
    x = torch.randn(TOKENS, 128, requires_grad=True)
    grad = torch.randn(TOKENS, 48)
    module(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ weight.dequantize(torch.float32), rtol=1e-4, atol=1e-6)


def test_nothing_decoded_is_saved_and_the_bytes_are_the_parameters_themselves():
    module, *_ = experts("emulation")
    linear = QuantLinear(mxfp8.quantize(torch.randn(HIDDEN, HIDDEN)))
    x, ids, _ = routed()
    storages = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *linear.parameters())}
    kept = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in storages:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = linear(x.requires_grad_())
        module.gate_up(hidden[module.sort(ids).order // TOP_K], module.sort(ids)).sum()
    decoded = {HIDDEN * HIDDEN, EXPERTS * 2 * INTER * HIDDEN, 2 * INTER * HIDDEN}
    assert not [tensor.shape for tensor in kept if tensor.numel() in decoded and tensor.is_floating_point()]
    assert all(p.dtype == torch.uint8 and not p.requires_grad for p in (*module.parameters(), *linear.parameters()))


def test_recomputation_gives_the_same_bits():
    module, *_ = experts("emulation")
    x, ids, weights = routed()
    x.requires_grad_()
    plain = torch.autograd.grad(module(x, ids, weights).float().sum(), x)[0]
    again = torch.utils.checkpoint.checkpoint(module, x, ids, weights, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.float().sum(), x)[0], plain)


def test_routes_are_a_stable_grouping_and_undo():
    module, *_ = experts("emulation")
    _, ids, _ = routed(missing=True)
    routes = module.sort(ids)
    flat = ids.reshape(-1)
    assert torch.equal(routes.experts, flat[routes.order])
    assert torch.equal(routes.order[routes.inverse], torch.arange(flat.numel()))
    for expert in range(EXPERTS):
        rows = routes.order[routes.offsets[expert] : routes.offsets[expert + 1]]
        assert torch.equal(rows, (flat == expert).nonzero().squeeze(1))
    assert routes.offsets[-1] == int((flat < EXPERTS).sum())


def test_no_rows_and_bias_and_autocast():
    module, *_ = experts("emulation")
    empty = torch.zeros(0, TOP_K, dtype=torch.long)
    assert module(torch.zeros(0, HIDDEN).bfloat16(), empty, torch.zeros(0, TOP_K)).shape == (0, HIDDEN)
    bias = torch.randn(48)
    linear = QuantLinear(mxfp8.quantize(torch.randn(48, 128)), bias=bias)
    x = torch.randn(2, 3, 128)
    torch.testing.assert_close(
        linear(x) - bias,
        QuantLinear(mxfp8.MXFP8Tensor(linear.weight_data.view(torch.float8_e4m3fn), linear.weight_scale))(x),
        rtol=1e-4,
        atol=1e-4,
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x), linear(x.bfloat16())) and linear(x).dtype == torch.bfloat16


def test_decoding_in_several_runs_gives_the_same_result(monkeypatch):
    module, *_ = experts("marlin")
    x, ids, weights = routed(missing=True)
    whole = module(x, ids, weights)
    monkeypatch.setattr("quant.matmul._DECODE_BYTES", 1)
    assert torch.equal(module(x, ids, weights), whole)


def test_bad_arguments_are_refused():
    weight = nvfp4_weight(48, 128)
    with pytest.raises(ValueError, match="backend 'cutlass' is unknown"):
        QuantLinear(weight, backend="cutlass")
    with pytest.raises(ValueError, match="weight-only"):
        QuantLinear(weight, backend="flashinfer_w4a4")
    with pytest.raises(ValueError, match="does not fit gate_up"):
        QuantExperts(nvfp4_weight(2, 64, 64), nvfp4_weight(2, 64, 64), partial(silu_gate))


def test_a_float32_delta_is_rounded_once_with_the_sum():
    module, *_ = experts("emulation")
    x, ids, weights = routed()
    routes = module.sort(ids)
    rows = x[routes.order // TOP_K]
    delta = torch.randn(rows.shape[0], 2 * INTER, generator=generator()) * 0.3

    class Delta(torch.nn.Module):
        def gate_up_delta(self, rows, routes):
            return delta

        def down_delta(self, rows, routes):
            return torch.zeros(rows.shape[0], HIDDEN, dtype=rows.dtype)

    seen = []
    module.adapter, module.apply_gate = Delta(), lambda gate_up: seen.append(gate_up) or silu_gate(gate_up)
    module(x, ids, weights)
    assert torch.equal(seen[0], (module.gate_up(rows, routes).float() + delta).bfloat16())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("chunk", [1, 1 << 30], ids=["chunks", "whole"])
@pytest.mark.parametrize("backend", ["emulation", "marlin"])
def test_one_grouped_gemm_gives_what_the_loop_gives(monkeypatch, backend, chunk, device):
    """torch's grouped GEMM, on CPU by its own fallback; sums in another order may round to the neighbouring value."""
    monkeypatch.setattr(matmul, "_DECODE_BYTES_GPU", chunk)
    gate_up, down = (nvfp4.quantize(torch.randn(*shape, generator=generator())) for shape in STACKS)
    module = QuantExperts(gate_up, down, silu_gate, backend).to(device)
    x, ids, weights = (tensor.to(device) for tensor in routed(missing=True))
    results = []
    for grouped in (True, False):
        monkeypatch.setattr(matmul, "can_group", lambda *tensors, grouped=grouped: grouped)
        hidden = x.clone().requires_grad_()
        out = module(hidden, ids, weights)
        out.float().square().sum().backward()
        results.append((out, hidden.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6 * float(other.detach().abs().max()))
        assert one.any()


def test_grouped_gemm_is_for_global_scales_that_keep_the_rounding(monkeypatch):
    monkeypatch.setattr(matmul, "can_group", lambda *tensors: True)
    odd, even = (
        QuantExperts(nvfp4.quantize(torch.randn(*STACKS[0]), scale), nvfp4.quantize(torch.randn(*STACKS[1])), silu_gate)
        for scale in (ODD_GLOBAL, None)
    )
    x = routed()[0]
    for module, backend, expected in ((odd, "emulation", True), (odd, "marlin", False), (even, "marlin", True)):
        packed = (module.gate_up_packed, module.gate_up_scale, module.gate_up_global)
        assert matmul._can_group(x, packed, backend, None) == expected
    assert not matmul._can_group(x, packed, "marlin", torch.ones(1, 4, dtype=torch.uint8))
