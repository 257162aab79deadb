"""Triton kernels of `kernels.nvfp4` and `kernels.mxfp8`: the same bits as the torch references, one read and one write.

Imported only when a tensor lies on a GPU (or by tests under Triton's interpreter). A program takes TILE blocks of 16
(32) consecutive values. Roundings are integer arithmetic on float32 bits or a magic-number addition, so that they
depend neither on the device's conversion instructions nor on its handling of subnormals; divisions are correctly
rounded (`div_rn`), as torch's are. Legend: B blocks in the tensor, TILE blocks a program.
"""

import torch
import triton
import triton.language as tl

TILE = 128


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _e4m3_byte(value):
    """Non-negative float32 up to 448 -> E4M3 byte, nearest, ties to even, subnormals included."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponent bias 127 -> 7, 3 mantissa bits
    # Below 2^-6 the grid is 2^-9 wide, as float32's own between 2^14 and 2^15: adding 2^14 rounds to it.
    small = (value + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(value < 0.015625, small, normal)


@triton.jit
def _e4m3_value(byte):
    """E4M3 byte (int32 0..255) -> float32; 127 and 255 are NaN. The sign is set as a bit: -x would lose it on zero."""
    magnitude = byte & 127
    normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 127, float("nan"), value)
    return (value.to(tl.int32, bitcast=True) | ((byte & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_code(magnitude):
    """Non-negative float32 -> E2M1 code 0..7, nearest, ties to the even code, saturating."""
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
    code += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
    code += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    return code + (magnitude > 5.0).to(tl.int32)


@triton.jit
def _e2m1_value(code):
    """E2M1 code with sign (int32 0..15) -> float32, by building the float's bits; 0 and 0.5 are special."""
    magnitude = code & 7
    value = tl.where(
        magnitude < 2, magnitude.to(tl.float32) * 0.5, ((magnitude + 252) << 22).to(tl.float32, bitcast=True)
    )
    return (value.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _nvfp4_encode(weight, global_scale, packed, scale, blocks, blocks_per_matrix, TILE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < blocks
    column = tl.arange(0, 16)
    x = tl.load(weight + block[:, None] * 16 + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    shared = tl.load(global_scale + block // blocks_per_matrix, mask=inside, other=1.0)
    amax = tl.max(tl.abs(x), axis=1)
    byte = _e4m3_byte(tl.minimum(tl.div_rn(tl.div_rn(amax, 6.0), shared), 448.0))
    byte = tl.where(byte < 8, 0, byte)  # Marlin drops subnormal scales, so they are not written
    divisor = _e4m3_value(byte) * shared
    divisor = tl.where(byte == 0, 1.0, divisor)
    code = _e2m1_code(tl.div_rn(tl.abs(x), divisor[:, None] + tl.zeros_like(x)))
    code = code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    code = tl.where(byte[:, None] == 0, 0, code)
    low, high = tl.split(tl.reshape(code, (TILE, 8, 2)))
    pair = tl.arange(0, 8)
    tl.store(packed + block[:, None] * 8 + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
    tl.store(scale + block, byte.to(tl.uint8), mask=inside)


@triton.jit
def _nvfp4_decode(
    packed, scale, global_scale, out, blocks, blocks_per_matrix, HAS_GLOBAL: tl.constexpr, TILE: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < blocks
    pair = tl.arange(0, 8)
    byte = tl.load(packed + block[:, None] * 8 + pair[None, :], mask=inside[:, None], other=0).to(tl.int32)
    scale_byte = tl.load(scale + block, mask=inside, other=0).to(tl.int32)
    factor = _e4m3_value(scale_byte)
    if HAS_GLOBAL:
        factor = factor * tl.load(global_scale + block // blocks_per_matrix, mask=inside, other=1.0)
    values = tl.interleave(_e2m1_value(byte & 15), _e2m1_value(byte >> 4)) * factor[:, None]
    column = tl.arange(0, 16)
    tl.store(out + block[:, None] * 16 + column[None, :], values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _mxfp8_encode(weight, data, scale, blocks, TILE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < blocks
    column = tl.arange(0, 32)
    offsets = block[:, None] * 32 + column[None, :]
    x = tl.load(weight + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    # As integers, so that NaN (above Inf) is not lost in the maximum.
    amax_bits = tl.max(_magnitude_bits(x), axis=1)
    bits = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), 448.0).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    # A subnormal quotient: 2^-127 is the smallest scale, and its bits are 0x400000.
    exponent = tl.where(bits < 0x800000, tl.where(bits > 0x400000, -126, -127), exponent)
    exponent = tl.where(amax_bits == 0, 0, exponent)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    magnitude = tl.minimum(_magnitude_bits(x).to(tl.float32, bitcast=True) * inverse[:, None], 448.0)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    tl.store(data + offsets, (_e4m3_byte(magnitude) | sign).to(tl.uint8), mask=inside[:, None])
    byte = tl.where(amax_bits >= 0x7F800000, 255, exponent + 127)
    tl.store(scale + block, byte.to(tl.uint8), mask=inside)


@triton.jit
def _mxfp8_decode(data, scale, out, blocks, TILE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < blocks
    column = tl.arange(0, 32)
    offsets = block[:, None] * 32 + column[None, :]
    byte = tl.load(data + offsets, mask=inside[:, None], other=0).to(tl.int32)
    exponent = tl.load(scale + block, mask=inside, other=127).to(tl.int32)
    bits = tl.where(exponent == 0, 0x400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    value = _e4m3_value(byte) * bits.to(tl.float32, bitcast=True)[:, None]
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside[:, None])


def nvfp4_encode(weight: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.nvfp4.encode_reference`."""
    weight, shape = weight.contiguous(), weight.shape
    packed = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(*shape[:-1], shape[-1] // 16, dtype=torch.uint8, device=weight.device)
    blocks = scale.numel()
    shared = global_scale.to(weight.device, torch.float32).contiguous()
    _nvfp4_encode[(triton.cdiv(blocks, TILE),)](
        weight, shared, packed, scale, blocks, blocks // shared.numel(), TILE=TILE
    )
    return packed, scale.view(torch.float8_e4m3fn)


def nvfp4_decode(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """As `kernels.nvfp4.decode_reference`."""
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    scale = scale.contiguous().view(torch.uint8)
    blocks = scale.numel()
    has_global = global_scale is not None
    shared = global_scale.to(packed.device, torch.float32).contiguous() if has_global else scale
    per_matrix = blocks // max(1, shared.numel()) if has_global else blocks
    _nvfp4_decode[(triton.cdiv(blocks, TILE),)](
        packed.contiguous(), scale, shared, out, blocks, per_matrix, HAS_GLOBAL=has_global, TILE=TILE
    )
    return out


def mxfp8_encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.mxfp8.encode_reference`."""
    weight, shape = weight.contiguous(), weight.shape
    data = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(*shape[:-1], shape[-1] // 32, dtype=torch.uint8, device=weight.device)
    _mxfp8_encode[(triton.cdiv(scale.numel(), TILE),)](weight, data, scale, scale.numel(), TILE=TILE)
    return data.view(torch.float8_e4m3fn), scale


def mxfp8_decode(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `kernels.mxfp8.decode_reference`."""
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    data = data.contiguous().view(torch.uint8)
    _mxfp8_decode[(triton.cdiv(scale.numel(), TILE),)](data, scale.contiguous(), out, scale.numel(), TILE=TILE)
    return out
