"""MXFP8 encode and decode: the pinned rule as torch reference, and the same rule in Triton.

Shapes: N output rows, K input columns (leading dimensions allowed), one block = 32 values along K.
The rule (all float32, round to nearest even):

    scale = 2^ceil(log2(block amax / 448)), exponent at least -127; 1 for a zero block; stored as exponent + 127 (E8M0)
    data  = E4M3(w / scale): exact division by a power of two; nothing is above 448 afterwards (below 2^-126 the float32
            quotient of the scale rounds, and saturation takes off at most that rounding)
    w'    = data * scale

A block with NaN or Inf gets the scale byte 255 (E8M0's NaN), which `quant.mxfp8.quantize` turns into an error.
Sources: OCP Microscaling Formats v1.0 (layout); vLLM 0.30 `mxfp8_utils.py` (the same ceil rule, by float log2).
"""

import torch

from kernels.nvfp4 import block_amax

BLOCK = 32
E4M3_MAX = 448.0
E8M0_BIAS = 127
_CHUNK = 1 << 16


def ceil_log2(value: torch.Tensor) -> torch.Tensor:
    """Exact ceil(log2(value)) of positive float32 values as int32 (no logarithm is evaluated); 0 gives 0."""
    mantissa, exponent = torch.frexp(value)  # value = mantissa * 2^exponent, mantissa in [0.5, 1)
    return exponent - (mantissa == 0.5).to(exponent.dtype)


def encode_reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode floating `weight` [..., K] (K a multiple of 32) to float8_e4m3fn [..., K] and E8M0 bytes [..., K/32]."""
    data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(*weight.shape[:-1], weight.shape[-1] // BLOCK, dtype=torch.uint8, device=weight.device)
    rows, flat_data, flat_scale = weight.reshape(-1, BLOCK), data.view(-1, BLOCK), scale.view(-1)
    step = _CHUNK // BLOCK
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        values = rows[part].to(torch.float32)
        amax = block_amax(values.abs())
        exponent = ceil_log2(amax / E4M3_MAX).clamp_(min=-E8M0_BIAS)
        inverse = torch.ldexp(torch.ones_like(amax), -exponent)
        scaled = values * inverse.unsqueeze(-1)
        flat_data[part] = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        byte = exponent.add_(E8M0_BIAS).masked_fill_(~torch.isfinite(amax), 255)
        flat_scale[part] = byte.to(torch.uint8)
    return data, scale


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes to float32: exactly 2^(byte - 127) for 0..254 (2^-127 is subnormal), NaN for 255."""
    bits = scale.to(torch.int32) << 23
    bits.masked_fill_(scale == 0, 0x00400000)
    bits.masked_fill_(scale == 255, 0x7FC00000)
    return bits.view(torch.float32)


def decode_reference(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Decode e4m3 `data` [..., K] (or its uint8 bytes) with E8M0 bytes `scale` [..., K/32]; byte 255 gives NaN.

    float32 inside, one rounding to `dtype`; exact in bfloat16's normal range.
    """
    if data.dtype == torch.uint8:
        data = data.view(torch.float8_e4m3fn)
    values = data.to(torch.float32).view(*scale.shape, BLOCK)
    return values.mul_(decode_e8m0(scale).unsqueeze(-1)).view(data.shape).to(dtype)


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`encode_reference`, in one Triton kernel for a tensor on a GPU: the same bits."""
    if weight.device.type == "cuda":
        from kernels import triton_formats

        return triton_formats.mxfp8_encode(weight)
    return encode_reference(weight)


def decode(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`decode_reference`, in one Triton kernel for tensors on a GPU: the same bits."""
    if data.device.type == "cuda":
        from kernels import triton_formats

        return triton_formats.mxfp8_decode(data, scale, dtype)
    return decode_reference(data, scale, dtype)
