"""Products with frozen packed weights: decode, multiply with float32 accumulation, round once, keep nothing decoded.

`frozen_linear` is x @ W.T for one matrix and `frozen_grouped_linear` the same for rows sorted by expert. Both are
differentiable in x only; what they save for backward are references to the packed bytes. Under a backend that quantises
activations the gradient passes straight through that.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from kernels import mxfp8, nvfp4
from kernels.linear import can_group, grouped_matmul
from quant import activations

BACKENDS = ("emulation", "marlin", "flashinfer_w4a4")
# Decoded weights held at a time in a grouped product; more leaves the cache (and malloc's heap).
_DECODE_BYTES = 8 << 20
# On a GPU, where a group of experts is one call: enough for 128 experts of 2048 x 768.
_DECODE_BYTES_GPU = 1 << 30


def multiply(left: torch.Tensor, right: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
    """left [M, K] @ right [K, N], float32 accumulation, times `factor`, rounded once to the dtype of `left`.

    On CPU a float32 GEMM on the operands' values; on a GPU a 16-bit GEMM that hands out its float32 accumulator where a
    factor comes before the rounding.
    """
    dtype = left.dtype
    with torch.autocast(left.device.type, enabled=False):
        if left.device.type == "cpu" or dtype == torch.float32:
            product = left.float() @ right.float()
        elif factor is None:
            return left @ right.to(dtype)
        else:
            product = torch.mm(left, right.to(dtype), out_dtype=torch.float32)
        return (product if factor is None else product.mul_(factor)).to(dtype)


def as_float(scale_bytes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4] -> float32 [...]."""
    return scale_bytes.contiguous().view(torch.float32).squeeze(-1)


def _powers_of_two(scales: torch.Tensor) -> bool:
    """Whether every float32 scale is one: then it changes exponents alone, and rounds nothing."""
    return not bool((scales.view(torch.int32) & 0x7FFFFF).any())


def operand(hidden: torch.Tensor, is_mxfp8: bool, backend: str, input_scale: torch.Tensor | None) -> torch.Tensor:
    """What the backend multiplies for `hidden` [M, K], without the input's global scale."""
    if is_mxfp8:
        return activations.mxfp8_emulated(hidden) if backend == "flashinfer_w4a4" else hidden
    if input_scale is None or backend == "marlin":
        return hidden
    if backend == "emulation":
        return activations.nvfp4_emulated(hidden, as_float(input_scale))
    return activations.nvfp4_operand(hidden, as_float(input_scale))


def decode_weight(
    packed: tuple[torch.Tensor, ...], backend: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight values of `dtype` (a matrix or a stack) and the global scale left for the accumulator (None, [] or [E]).

    `packed`: MXFP8's (data, scale) bytes or NVFP4's (packed, scale, global) bytes. On CPU, which multiplies in float32,
    the values come as float32 and are rounded to `dtype` only where that changes them: code * scale has at most six
    significant bits, so a power-of-two global scale leaves nothing to round.
    """
    on_cpu = packed[0].device.type == "cpu"
    decoded = torch.float32 if on_cpu else dtype
    if len(packed) == 2:
        return mxfp8.decode(*packed, decoded), None
    values, scale, global_bytes = packed
    factor = as_float(global_bytes).reshape(values.shape[:-2])
    in_weight = factor if backend == "emulation" else None
    weight = nvfp4.decode(values, scale.view(torch.float8_e4m3fn), in_weight, decoded)
    if in_weight is None:
        return weight, factor
    if on_cpu and dtype != torch.float32 and not _powers_of_two(factor):
        weight = weight.to(dtype).float()
    return weight, None


def _alpha(factor: torch.Tensor | None, backend: str, input_scale: torch.Tensor | None) -> torch.Tensor | None:
    """Factor of the accumulator in the forward: the weight's global scale, times the input's under W4A4."""
    if factor is None or backend != "flashinfer_w4a4" or input_scale is None:
        return factor
    return factor * as_float(input_scale).reshape(())


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, backend, input_scale, *packed):
        ctx.backend = backend
        ctx.save_for_backward(*packed)
        weight, factor = decode_weight(packed, backend, hidden.dtype)
        left = operand(hidden, len(packed) == 2, backend, input_scale)
        return multiply(left, weight.T, _alpha(factor, backend, input_scale))

    @staticmethod
    def backward(ctx, grad):
        packed = ctx.saved_tensors  # read once: under activation checkpointing torch 2.11 refuses a second time
        weight, factor = decode_weight(packed, ctx.backend, grad.dtype)
        return multiply(grad, weight, factor), None, None, *(None for _ in packed)


def frozen_linear(
    hidden: torch.Tensor,
    packed: tuple[torch.Tensor, ...],
    backend: str = "emulation",
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`hidden` [..., K] -> [..., N] with the bytes of one matrix; see `decode_weight` for `packed`.

    `input_scale`: uint8 [1, 4], the NVFP4 activations' float32 multiplier, or None for weight-only.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    output = _FrozenLinear.apply(flat, backend, input_scale, *packed)
    return output.view(*hidden.shape[:-1], packed[0].shape[0])


class _FrozenGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, offsets, backend, apply_global, input_scale, *packed):
        ctx.offsets, ctx.backend, ctx.apply_global = offsets, backend, apply_global
        ctx.save_for_backward(*packed)
        left = operand(rows, False, backend, input_scale)
        if _can_group(left, packed, backend, input_scale):
            return _grouped(left, packed, offsets, backend, apply_global, transposed=True)
        out = rows.new_zeros(rows.shape[0], packed[0].shape[1])
        for part, weight, factor in _active_weights(packed, offsets, backend, rows.dtype):
            factor = _alpha(factor, backend, input_scale) if apply_global else None
            out[part] = multiply(left[part], weight.T, factor)
        return out

    @staticmethod
    def backward(ctx, grad):
        packed = ctx.saved_tensors
        if _can_group(grad, packed, ctx.backend, None):
            grad = _grouped(grad, packed, ctx.offsets, ctx.backend, ctx.apply_global, transposed=False)
            return grad, None, None, None, None, None, None, None
        out = grad.new_zeros(grad.shape[0], packed[0].shape[2] * 2)
        for part, weight, factor in _active_weights(packed, ctx.offsets, ctx.backend, grad.dtype):
            out[part] = multiply(grad[part], weight, factor if ctx.apply_global else None)
        return out, None, None, None, None, None, None, None


def _can_group(left: torch.Tensor, packed: tuple[torch.Tensor, ...], backend: str, input_scale) -> bool:
    """Whether one grouped GEMM a chunk of experts gives the backend's roundings.

    It hands out rounded sums, on which a global scale is exact if it is a power of two (as quant.nvfp4 chooses it).
    """
    if input_scale is not None or not can_group(left) or packed[0].shape[1] % 8 or packed[0].shape[2] % 4:
        return False
    return backend == "emulation" or _powers_of_two(as_float(packed[2]))


def _grouped(
    left: torch.Tensor,
    packed: tuple[torch.Tensor, ...],
    offsets: tuple[int, ...],
    backend: str,
    apply_global: bool,
    transposed: bool,
) -> torch.Tensor:
    """left [S, .] sorted by expert times the decoded weights [E, N, K] (transposed: times their transposes)."""
    count, rows, half = packed[0].shape
    out = left.new_zeros(left.shape[0], rows if transposed else half * 2)
    step = max(1, _DECODE_BYTES_GPU // (rows * half * 4))
    for first in range(0, count, step):
        last = min(first + step, count)
        part = slice(offsets[first], offsets[last])
        if part.start == part.stop:
            continue
        weight, factor = decode_weight(tuple(tensor[first:last] for tensor in packed), backend, left.dtype)
        weight = weight.to(left.dtype)
        local = tuple(offset - part.start for offset in offsets[first : last + 1])
        product = grouped_matmul(left[part], weight.mT if transposed else weight, local)
        if factor is not None and apply_global:
            sizes = torch.tensor([b - a for a, b in pairwise(local)], device=left.device)
            product *= factor.to(left.dtype).repeat_interleave(sizes, output_size=part.stop - part.start).unsqueeze(1)
        out[part] = product
    return out


def _active_weights(
    stack: tuple[torch.Tensor, ...], offsets: tuple[int, ...], backend: str, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
    """Yield (rows, weight [N, K], global scale or None) of the experts that have rows, decoding some at a time."""
    active = [(expert, slice(*rows)) for expert, rows in enumerate(pairwise(offsets)) if rows[0] < rows[1]]
    step = max(1, _DECODE_BYTES // (stack[0][0].numel() * 8))
    for start in range(0, len(active), step):
        run = active[start : start + step]
        experts = [expert for expert, _ in run]
        # A run of consecutive experts is a view; a gap costs one copy of the packed bytes.
        consecutive = experts[-1] - experts[0] + 1 == len(experts)
        index = slice(experts[0], experts[-1] + 1) if consecutive else torch.tensor(experts, device=stack[0].device)
        weights, factors = decode_weight(tuple(part[index] for part in stack), backend, dtype)
        for position, (_, part) in enumerate(run):
            yield part, weights[position], None if factors is None else factors[position]


def frozen_grouped_linear(
    rows: torch.Tensor,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    offsets: tuple[int, ...],
    backend: str = "emulation",
    apply_global: bool = True,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rows` [S, K] sorted by expert -> [S, N] with NVFP4 bytes of a stack [E, N, K]; expert e owns offsets[e:e + 2].

    Rows beyond the last offset give zeros and get no gradient. With `apply_global` False the caller applies the global
    scale (Marlin multiplies it into the top-k weight). `input_scale` as in `frozen_linear`, one for all experts.
    """
    return _FrozenGroupedLinear.apply(rows, offsets, backend, apply_global, input_scale, *packed)
