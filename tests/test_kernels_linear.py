"""Products of trainable factors: one rounding of the exact sum, gradients of the same kind, experts without rows."""

import pytest
import torch

from kernels import linear as module
from kernels.linear import grouped_linear, linear

OFFSETS = (0, 5, 5, 12, 13)  # expert 1 has no rows; rows 13.. belong to no expert


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(actual: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """bfloat16 `actual` is left @ right (float64) but for half a unit in its last place and float32 accumulation."""
    assert actual.dtype == torch.bfloat16
    left, right = left.double(), right.double()
    exact = left @ right
    half_unit = torch.exp2(exact.abs().clamp(min=2.0**-126).log2().floor() - 8)
    accumulation = left.abs() @ right.abs() * left.shape[-1] * 2.0**-24
    excess = (actual.double() - exact).abs() - half_unit - accumulation
    assert excess.max() <= 0, f"off by {excess.max():.3e} more than one rounding"


def test_the_check_notices_a_product_that_is_rounded_twice():
    x, weight = random(9, 64), random(7, 64, seed=1)
    halves = (x[:, :32].double() @ weight[:, :32].double().T).bfloat16() + (
        x[:, 32:].double() @ weight[:, 32:].double().T
    ).bfloat16()
    with pytest.raises(AssertionError, match="more than one rounding"):
        assert_rounded_once(halves, x, weight.T)


def test_linear_rounds_the_float32_sum_once():
    x, weight = random(9, 64), random(7, 64, seed=1)
    assert_rounded_once(linear(x, weight), x, weight.T)


def test_linear_keeps_leading_dimensions_and_float32():
    x, weight = random(2, 3, 64), random(7, 64, seed=1)
    assert torch.equal(linear(x, weight), linear(x.view(6, 64), weight).view(2, 3, 7))
    torch.testing.assert_close(
        linear(x.float(), weight), (x.double() @ weight.double().T).float(), rtol=1e-5, atol=1e-5
    )


def test_linear_gradients_are_rounded_once_and_reach_float32_masters():
    x = random(9, 64).requires_grad_()
    master = random(7, 64, seed=1, dtype=torch.float32).requires_grad_()
    grad = random(9, 7, seed=2)
    linear(x, master.bfloat16()).backward(grad)
    assert_rounded_once(x.grad, grad, master.detach().bfloat16())
    assert master.grad.dtype == torch.float32
    assert_rounded_once(master.grad.bfloat16(), grad.T, x.detach())


def test_linear_spares_the_gradient_that_nobody_wants():
    x, weight = random(9, 64), random(7, 64, seed=1).requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad is None and weight.grad is not None


def test_grouped_linear_multiplies_each_row_by_its_expert():
    rows, weight = random(15, 64), random(4, 6, 64, seed=1)
    out = grouped_linear(rows, weight, OFFSETS)
    for expert in (0, 2, 3):
        part = slice(OFFSETS[expert], OFFSETS[expert + 1])
        assert_rounded_once(out[part], rows[part], weight[expert].T)
        assert torch.equal(out[part], linear(rows[part], weight[expert]))


def test_rows_beyond_the_last_offset_give_zeros_and_get_no_gradient():
    rows = random(15, 64).requires_grad_()
    out = grouped_linear(rows, random(4, 6, 64, seed=1), OFFSETS)
    assert not out[13:].any() and out[:13].any(-1).all()
    out.backward(random(15, 6, seed=2))
    assert not rows.grad[13:].any() and rows.grad[:13].any(-1).all()


def test_grouped_gradients_are_rounded_once_and_zero_for_an_expert_without_rows():
    rows = random(15, 64).requires_grad_()
    weight = random(4, 6, 64, seed=1).requires_grad_()
    grad = random(15, 6, seed=2)
    grouped_linear(rows, weight, OFFSETS).backward(grad)
    for expert in (0, 2, 3):
        part = slice(OFFSETS[expert], OFFSETS[expert + 1])
        assert_rounded_once(rows.grad[part], grad[part], weight.detach()[expert])
        assert_rounded_once(weight.grad[expert], grad[part].T, rows.detach()[part])
    assert weight.grad.shape == weight.shape and not weight.grad[1].any()


def test_grouped_linear_takes_a_slice_of_a_float32_stack_and_no_rows_at_all():
    stack = random(4, 2, 6, 64, seed=1, dtype=torch.float32).requires_grad_()
    rows = random(15, 64)
    out = grouped_linear(rows, stack[:, 1], OFFSETS)
    assert torch.equal(out, grouped_linear(rows, stack.detach()[:, 1].bfloat16().contiguous(), OFFSETS))
    out.sum().backward()
    assert stack.grad.dtype == torch.float32 and not stack.grad[:, 0].any() and stack.grad[0, 1].any()
    assert grouped_linear(rows[:0], stack[:, 1], (0, 0, 0, 0, 0)).shape == (0, 6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_grouped_gemm_gives_what_the_loop_gives(monkeypatch, device):
    """torch's grouped GEMM, on CPU by its own fallback; sums in another order may round to the neighbouring value."""
    offsets = (0, 5, 5, 11, 14)  # one expert without rows, two rows without an expert
    results = []
    for grouped in (True, False):
        monkeypatch.setattr(module, "can_group", lambda *tensors, grouped=grouped: grouped)
        rows, weight = (random(*shape, seed=seed).to(device) for seed, shape in enumerate(((16, 64), (4, 24, 64))))
        rows.requires_grad_()
        weight.requires_grad_()
        out = grouped_linear(rows, weight, offsets)
        out.backward(random(16, 24, seed=3).to(device))
        results.append((out, rows.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-3)
    out, grad_rows, grad_weight = results[0]
    assert not out[14:].any() and not grad_rows[14:].any() and not grad_weight[1].any() and grad_weight[0].any()
