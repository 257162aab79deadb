"""NVFP4 encode and decode: the pinned rule as torch reference, and the same rule in Triton.

Shapes: N output rows, K input columns (leading dimensions allowed), one block = 16 values along K.
The rule (all float32, round to nearest even, true division):

    scale  = E4M3(block amax / 6 / global_scale), saturating at 448; a scale below 2^-6 becomes 0
    code   = E2M1(w / (scale * global_scale)), ties to the even code, saturating at 6; sign bit = sign bit of w
    a block whose scale is 0 has codes 0 (and no sign bits)
    w'     = code * (scale * global_scale)

Marlin flushes subnormal block scales to zero, so the bytes must not hold what one backend keeps and another drops.
Codes are E2M1 (1 sign, 2 exponent, 1 mantissa bit: 0 .5 1 1.5 2 3 4 6); the low nibble of a byte holds the even k.
Layout: NVIDIA's NVFP4 as in compressed-tensors' `nvfp4-pack-quantized`.
"""

import torch

BLOCK = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
MIN_SCALE = 2.0**-6


_CHUNK = 1 << 16  # values a pass: the float32 temporaries stay in cache (on a GPU the Triton kernel runs instead)
_tables: dict[torch.device, torch.Tensor] = {}


def _pair_table(device: torch.device) -> torch.Tensor:
    """int64 [256]: the float32 values of a byte's low and high nibble side by side, so that one gather decodes both."""
    if device not in _tables:
        one = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32)
        byte = torch.arange(256)
        pairs = torch.stack((one[byte & 15], one[byte >> 4]), -1).contiguous()
        _tables[device] = pairs.view(torch.int64).view(-1).to(device)
    return _tables[device]


def block_amax(blocks: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of the last dimension (a power of two long); NaN passes on. A tree of vector maxima on CPU."""
    width = blocks.shape[-1] // 2
    largest = torch.maximum(blocks[..., :width], blocks[..., width:])
    while width > 1:
        width //= 2
        largest = torch.maximum(largest[..., :width], largest[..., width:])
    return largest.squeeze(-1)


def round_to_e2m1(magnitude: torch.Tensor) -> torch.Tensor:
    """Codes 0..7 (as float32) of non-negative float32 values: E2M1, nearest, ties to the even code, saturating.

    The code of an exact E2M1 value a is min(2a, a + 2, a/2 + 4), one line for each spacing (.5, 1, 2). Rounding each
    line to an integer, ties to even, commutes with the minimum and with adding 2 or 4: nothing is rounded twice.
    """
    code = (magnitude * 2.0).round_()
    code = torch.minimum(code, magnitude.round().add_(2.0), out=code)
    code = torch.minimum(code, (magnitude * 0.5).round_().add_(4.0), out=code)
    return code.clamp_(max=7.0)


def encode_reference(weight: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode `weight` [..., N, K] (floating) under `global_scale` (float32, [] or the leading dimensions' shape).

    Returns packed codes uint8 [..., N, K/2] and block scales float8_e4m3fn [..., N, K/16]. K must be a multiple of 16
    and the weight finite: `quant.nvfp4.quantize` checks both.
    """
    shape = weight.shape
    packed = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(*shape[:-1], shape[-1] // BLOCK, dtype=torch.float8_e4m3fn, device=weight.device)
    rows = weight.reshape(-1, shape[-1])
    row_globals = global_scale.reshape(-1, 1).expand(-1, rows.shape[0] // global_scale.numel()).reshape(-1, 1)
    flat_packed, flat_scale = packed.view(-1, packed.shape[-1]), scale.view(-1, scale.shape[-1])
    step = max(1, _CHUNK // max(1, shape[-1]))
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        flat_packed[part], flat_scale[part] = _encode_rows(rows[part], row_globals[part])
    return packed, scale


def _encode_rows(rows: torch.Tensor, row_globals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = rows.to(torch.float32).contiguous()
    magnitude = values.abs().view(rows.shape[0], -1, BLOCK)
    scale = block_amax(magnitude).div_(E2M1_MAX).div_(row_globals).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    flushed = scale < MIN_SCALE
    scale.masked_fill_(flushed, 0.0)
    # x / inf = 0: a flushed block gets magnitude code 0 without a mask over all its values.
    divisor = (scale * row_globals).masked_fill_(flushed, float("inf"))
    code = round_to_e2m1(magnitude.div_(divisor.unsqueeze(-1))).to(torch.uint8)
    sign = (values.view(torch.int32) >> 28).bitwise_and_(8).to(torch.uint8).view_as(code)
    if bool(flushed.any()):
        sign.masked_fill_(flushed.unsqueeze(-1), 0)
    pairs = code.bitwise_or_(sign).view(rows.shape).view(torch.int16)  # low byte = even k
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8), scale.to(torch.float8_e4m3fn)


def decode_reference(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Decode packed uint8 [..., N, K/2] with scales e4m3 [..., N, K/16] to `dtype` [..., N, K].

    float32 inside, one rounding at the end: dtype(code * (scale * global_scale)), vLLM's emulation order. With
    `global_scale` None the result is dtype(code * scale), the weight that Marlin multiplies with: exact in bfloat16.
    """
    factor = scale.float()
    if global_scale is not None:
        factor = factor * global_scale.reshape(global_scale.shape + (1,) * (scale.dim() - global_scale.dim()))
    pairs = _pair_table(packed.device).index_select(0, packed.reshape(-1).int())
    values = pairs.view(torch.float32).view(*scale.shape, BLOCK)
    values *= factor.unsqueeze(-1)
    return values.view(*packed.shape[:-1], packed.shape[-1] * 2).to(dtype)


def encode(weight: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`encode_reference`, in one Triton kernel for a tensor on a GPU: the same bits."""
    if weight.device.type == "cuda":
        from kernels import triton_formats

        return triton_formats.nvfp4_encode(weight, global_scale)
    return encode_reference(weight, global_scale)


def decode(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`decode_reference`, in one Triton kernel for tensors on a GPU: the same bits."""
    if packed.device.type == "cuda":
        from kernels import triton_formats

        return triton_formats.nvfp4_decode(packed, scale, global_scale, dtype)
    return decode_reference(packed, scale, global_scale, dtype)
