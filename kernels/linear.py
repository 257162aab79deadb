"""Matrix products of trainable low-rank factors at the engine's rounding points: float32 accumulation, one rounding.

`linear` is x @ W.T and `grouped_linear` the same for rows sorted by expert. On CPU both multiply in float32 on values
of the compute dtype (a CPU without bfloat16 instructions is ten times slower in a bfloat16 GEMM, and as exact); on a
GPU they are the library's GEMM and grouped GEMM. Legend: S rows, K inputs, N outputs, E experts.
"""

import itertools

import torch
import torch.nn.functional as F


class _RoundedLinear(torch.autograd.Function):
    """x [S, K], weight [N, K] -> [S, N]; gradients are float32 products rounded to the dtype of what they belong to."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad32 = grad.float()
        grad_x = (grad32 @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = (grad32.t() @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] @ weight [N, K]^T -> [..., N] in x's dtype; differentiable in both."""
    if x.device.type != "cpu" or x.dtype == torch.float32:
        return F.linear(x, weight.to(x.dtype))
    return _RoundedLinear.apply(x.reshape(-1, x.shape[-1]), weight.to(x.dtype)).view(*x.shape[:-1], weight.shape[0])


def can_group(*tensors: torch.Tensor) -> bool:
    """Whether torch's grouped GEMM takes these operands: bfloat16 on a GPU, inner sizes of whole 16 bytes."""
    return all(t.device.type == "cuda" and t.dtype == torch.bfloat16 and t.shape[-1] % 8 == 0 for t in tensors)


def grouped_matmul(rows: torch.Tensor, weight: torch.Tensor, offsets: tuple[int, ...]) -> torch.Tensor:
    """rows [S, K] sorted by expert @ weight [E, K, N] -> [S, N] in one call; rows beyond the last offset give zeros."""
    used = offsets[-1]
    bounds = torch.tensor(offsets[1:], dtype=torch.int32, device=rows.device)
    if used == 0:
        return rows.new_zeros(rows.shape[0], weight.shape[2])
    out = F.grouped_mm(rows[:used].contiguous(), weight, offs=bounds)
    return out if used == rows.shape[0] else F.pad(out, (0, 0, 0, rows.shape[0] - used))


def _grouped_outer(left: torch.Tensor, right: torch.Tensor, offsets: tuple[int, ...]) -> torch.Tensor:
    """left [S, N]^T @ right [S, K] of each expert's rows -> [E, N, K]; zeros for an expert without rows."""
    used = offsets[-1]
    if used == 0:
        return left.new_zeros(len(offsets) - 1, left.shape[1], right.shape[1])
    bounds = torch.tensor(offsets[1:], dtype=torch.int32, device=left.device)
    out = F.grouped_mm(left[:used].contiguous().t(), right[:used].contiguous(), offs=bounds)
    empty = [start == end for start, end in itertools.pairwise(offsets)]
    return out.masked_fill_(torch.tensor(empty, device=out.device).view(-1, 1, 1), 0.0) if any(empty) else out


class _GroupedLinear(torch.autograd.Function):
    """rows [S, K] sorted by expert, weight [E, N, K], offsets of E + 1 row bounds -> [S, N] of `dtype`."""

    @staticmethod
    def forward(ctx, rows, weight, offsets, dtype):
        ctx.offsets = offsets
        ctx.save_for_backward(rows, weight)
        if dtype == rows.dtype and can_group(rows, weight, weight.mT):
            return grouped_matmul(rows, weight.mT, offsets)
        out = rows.new_zeros(rows.shape[0], weight.shape[1], dtype=dtype)
        for expert, part in _groups(offsets):
            out[part] = _product(rows[part], weight[expert].t(), out.dtype)
        return out

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        grad = grad.to(rows.dtype)
        if can_group(rows, weight, weight.mT):
            grad_rows = grouped_matmul(grad, weight, ctx.offsets) if ctx.needs_input_grad[0] else None
            grad_weight = _grouped_outer(grad, rows, ctx.offsets) if ctx.needs_input_grad[1] else None
            return grad_rows, grad_weight, None, None
        grad_rows = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for expert, part in _groups(ctx.offsets):
            if grad_rows is not None:
                grad_rows[part] = _product(grad[part], weight[expert], rows.dtype)
            if grad_weight is not None:
                grad_weight[expert] = _product(grad[part].t(), rows[part], weight.dtype)
        return grad_rows, grad_weight, None, None


def _groups(offsets: tuple[int, ...]):
    for expert, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end > start:
            yield expert, slice(start, end)


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if left.device.type == "cpu":
        return (left.float() @ right.float()).to(dtype)
    if dtype == torch.float32 and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return left @ right


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, offsets: tuple[int, ...], accumulator: bool = False
) -> torch.Tensor:
    """rows [S, K] sorted by expert @ weight [E, N, K]^T -> [S, N]; expert e owns rows offsets[e]:offsets[e + 1].

    Differentiable in both; an expert without rows gets a zero gradient, and rows beyond the last offset give zeros.
    With `accumulator` the result is the float32 accumulator, unrounded.
    """
    dtype = torch.float32 if accumulator else rows.dtype
    return _GroupedLinear.apply(rows, weight.to(rows.dtype), offsets, dtype)
