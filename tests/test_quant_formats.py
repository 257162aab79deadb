"""NVFP4 and MXFP8 encoders against float64 references by exhaustion: every code, tie, E4M3 scale and E8M0 exponent."""

import math

import pytest
import torch

from kernels.mxfp8 import ceil_log2, decode_e8m0
from kernels.nvfp4 import E2M1_VALUES, round_to_e2m1
from quant import mxfp8, nvfp4

CODES = torch.tensor(E2M1_VALUES, dtype=torch.float64)
POSITIVE_E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # 0 .. 448, in code order


def nearest(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Index of the nearest grid value (float64), ties to the even index, saturating: the definition, by brute force."""
    middle = (grid[1:] + grid[:-1]) / 2
    low = (values[..., None] > middle).sum(-1)
    high = (values[..., None] >= middle).sum(-1)
    return torch.where(low == high, low, torch.where(low % 2 == 0, low, high))


def reference_nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Codes with sign [N, K], scales [N, K/16] and global scale of design.md's rule in float64 (float32 quotients)."""
    w = weight.double()
    amax = float(w.abs().max())
    global_scale = 1.0 if amax == 0 else 2.0 ** math.ceil(math.log2(amax / 2688))
    blocks = w.view(w.shape[0], -1, 16)
    quotient = (blocks.abs().amax(-1).float() / 6 / torch.tensor(global_scale)).double()
    scale = POSITIVE_E4M3[nearest(quotient, POSITIVE_E4M3)]
    scale[scale < 2**-6] = 0
    divisor = (scale.float() * torch.tensor(global_scale)).unsqueeze(-1)
    ratio = torch.where(divisor > 0, blocks.float() / divisor, torch.zeros(())).double()
    codes = nearest(ratio.abs(), CODES) + 8 * torch.signbit(blocks)
    codes[(scale == 0).unsqueeze(-1).expand_as(codes)] = 0
    return codes.view(w.shape), scale, global_scale


def unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(48, 256, generator=generator)
    return {
        "gaussian": normal * 0.02,
        "bfloat16": (normal * 0.02).bfloat16(),
        "float16": (normal * 3).half(),
        "heavy": normal.sign() * normal.abs() ** 4,
        "spread": normal * torch.exp2(torch.arange(48) - 40.0).unsqueeze(1),  # most blocks flush
        "tiny": normal * 2.0**-100,
        "huge": normal * 2.0**110,
        "zero_rows": normal * (torch.arange(48) % 2).unsqueeze(1),
    }


@pytest.mark.parametrize("kind", weights())
def test_nvfp4_encoder_equals_the_float64_rule(kind):
    weight = weights()[kind]
    encoded = nvfp4.quantize(weight)
    codes, scale, global_scale = reference_nvfp4(weight)
    assert float(encoded.global_scale) == global_scale
    assert torch.equal(encoded.scale.double(), scale)
    assert torch.equal(unpack(encoded.packed).long(), codes.long())
    exact = torch.where(codes >= 8, -1.0, 1.0) * CODES[codes.long() % 8]
    exact = (exact.view(48, -1, 16) * scale.unsqueeze(-1) * global_scale).view(weight.shape)
    assert torch.equal(encoded.dequantize(torch.float32).double(), exact)
    assert torch.equal(encoded.dequantize().double(), exact), "a power-of-two global scale decodes to bf16 exactly"


def test_every_float16_magnitude_rounds_to_the_nearest_code():
    values = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()  # every finite float16, ties included
    near_ties = ((CODES[1:] + CODES[:-1]) / 2).float()
    infinity = torch.tensor(math.inf)
    neighbours = [torch.nextafter(near_ties, -infinity), near_ties, torch.nextafter(near_ties, infinity)]
    values = torch.cat([values, *neighbours])
    assert torch.equal(round_to_e2m1(values).long(), nearest(values.double(), CODES))


def test_every_tie_goes_to_the_even_code_and_large_values_saturate():
    values = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6], dtype=torch.float32)
    expected = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 7])
    positive = nvfp4.quantize(values.unsqueeze(0), global_scale=1.0)
    negative = nvfp4.quantize(-values.unsqueeze(0), global_scale=1.0)
    assert unpack(positive.packed)[0].tolist() == expected.tolist()
    assert unpack(negative.packed)[0].tolist() == (expected + 8).tolist(), "a negative zero keeps its sign bit"
    saturated = nvfp4.quantize(torch.full((1, 16), 1e6), global_scale=1.0)
    assert float(saturated.scale.float()) == 448 and unpack(saturated.packed)[0].tolist() == [7] * 16


def test_every_code_of_every_e4m3_scale_decodes_exactly():
    scale = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = torch.arange(256, dtype=torch.uint8).view(1, 32, 8).expand(127, 32, 8).reshape(127, 256)
    tensor = nvfp4.NVFP4Tensor(packed, scale.unsqueeze(1).expand(127, 32).contiguous(), torch.tensor(2.0**-10))
    codes = unpack(packed).long()
    exact = torch.where(codes >= 8, -1.0, 1.0).double() * CODES[codes % 8] * scale.double().unsqueeze(1) * 2.0**-10
    assert torch.equal(tensor.dequantize(torch.float32).double(), exact)
    assert torch.equal(tensor.dequantize(torch.bfloat16).double(), exact)


def test_every_e4m3_block_scale_is_reached_and_subnormal_scales_become_zero():
    scales = POSITIVE_E4M3[1:]
    blocks = torch.zeros(126, 16, dtype=torch.float64)
    blocks[:, 3] = scales * 6
    blocks[:, 5] = -scales * 6
    encoded = nvfp4.quantize(blocks.float(), global_scale=1.0)
    kept = scales >= 2**-6
    assert torch.equal(encoded.scale.double().squeeze(1), torch.where(kept, scales, torch.zeros(())))
    codes = unpack(encoded.packed)
    assert (codes[kept][:, 3] == 7).all() and (codes[kept][:, 5] == 15).all()
    assert (codes[~kept] == 0).all(), "a flushed block has codes 0, without sign bits"
    rounds_up = torch.full((1, 16), 6 * 2.0**-6 * 0.97)
    assert float(nvfp4.quantize(rounds_up, global_scale=1.0).scale.float()) == 2**-6, (
        "the rule looks at the rounded scale"
    )


@pytest.mark.parametrize("exponent", range(-116, 115))
def test_global_scale_is_the_exact_power_of_two(exponent):
    top = torch.tensor(2688.0) * 2.0**exponent
    infinity = torch.tensor(math.inf)
    below, above = torch.nextafter(top, -infinity), torch.nextafter(top, infinity)
    chosen = nvfp4.choose_global_scale(torch.stack((below, top, above)))
    assert chosen.tolist() == [2.0**exponent, 2.0**exponent, 2.0 ** (exponent + 1)]


def test_zero_and_tiny_tensors():
    zero = nvfp4.quantize(torch.zeros(2, 32))
    assert float(zero.global_scale) == 1 and not zero.packed.any() and not zero.scale.float().any()
    smallest = nvfp4.quantize(torch.full((1, 16), 1e-38))
    assert float(smallest.global_scale) == 2.0**-116 and not smallest.dequantize().any()


def test_a_stack_equals_its_matrices_and_shared_globals_are_used():
    stack = torch.randn(5, 24, 64) * torch.exp2(torch.arange(5.0)).view(5, 1, 1)
    stacked = nvfp4.quantize(stack)
    assert stacked.global_scale.shape == (5,) and stacked.shape == stack.shape
    for index, matrix in enumerate(stack):
        single = nvfp4.quantize(matrix)
        assert single.global_scale.shape == ()
        assert torch.equal(single.packed, stacked.packed[index])
        assert torch.equal(single.scale.view(torch.uint8), stacked.scale[index].view(torch.uint8))
        assert float(single.global_scale) == float(stacked.global_scale[index])
    shared = nvfp4.quantize(stack, stacked.global_scale.max())
    assert shared.global_scale.tolist() == [float(stacked.global_scale.max())] * 5
    mx = mxfp8.quantize(stack)
    assert torch.equal(mx.data[3].view(torch.uint8), mxfp8.quantize(stack[3]).data.view(torch.uint8))


def test_encoding_is_idempotent_and_layout_independent():
    weight = torch.randn(64, 96)
    once = nvfp4.quantize(weight)
    again = nvfp4.quantize(once.dequantize(torch.float32), once.global_scale)
    assert torch.equal(once.packed, again.packed)
    transposed = nvfp4.quantize(weight.t().contiguous().t())
    assert torch.equal(once.packed, transposed.packed)
    assert once.nbytes == 64 * 96 // 2 + 64 * 6 + 4
    twice = mxfp8.quantize(mxfp8.quantize(weight).dequantize(torch.float32))
    assert torch.equal(twice.dequantize(torch.float32), mxfp8.quantize(weight).dequantize(torch.float32))


@pytest.mark.parametrize("exponent", range(-127, 120))
def test_mxfp8_every_exponent_that_float32_reaches(exponent):
    block = torch.zeros(3, 32)
    top = torch.tensor(448 * 2.0**exponent, dtype=torch.float64).float()
    block[:, 0] = torch.stack(
        (top, torch.nextafter(top, torch.tensor(math.inf)), torch.nextafter(top, torch.tensor(0.0)))
    )
    scale = mxfp8.quantize(block[:, :]).scale.flatten().tolist()
    above = exponent + 1 if exponent > -127 else exponent  # a subnormal quotient rounds back to the power of two
    assert scale == [exponent + 127, above + 127, exponent + 127]


def test_mxfp8_equals_the_float64_rule():
    weight = torch.randn(64, 256) * torch.exp2(torch.randint(-60, 60, (64, 1)))
    encoded = mxfp8.quantize(weight)
    blocks = weight.double().view(64, -1, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1) / 448))
    assert torch.equal(encoded.scale.double() - 127, exponent)
    ratio = blocks / torch.exp2(exponent).unsqueeze(-1)
    value = POSITIVE_E4M3[nearest(ratio.abs(), POSITIVE_E4M3)] * torch.sign(ratio)
    assert torch.equal(encoded.data.double().view_as(value), value)
    exact = (value * torch.exp2(exponent).unsqueeze(-1)).view(weight.shape)
    assert torch.equal(encoded.dequantize(torch.float32).double(), exact)
    assert torch.equal(encoded.dequantize().double(), exact)


def test_mxfp8_decodes_every_data_byte_and_every_scale_byte():
    data = torch.arange(256, dtype=torch.uint8).view(8, 32).repeat(255, 1)
    scale = torch.arange(255, dtype=torch.uint8).repeat_interleave(8).view(-1, 1)
    decoded = mxfp8.MXFP8Tensor(data.view(torch.float8_e4m3fn), scale).dequantize(torch.float32)
    exact = data.view(torch.float8_e4m3fn).double() * torch.exp2(scale.double() - 127)
    assert torch.equal(decoded.nan_to_num(nan=0.5), exact.float().nan_to_num(nan=0.5))
    factors = decode_e8m0(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert factors[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and factors[4].isnan()


def test_ceil_log2_is_exact_around_powers_of_two():
    exponents = torch.arange(-126, 127)
    powers = torch.ldexp(torch.ones(len(exponents)), exponents)
    assert torch.equal(ceil_log2(powers).long(), exponents)
    assert torch.equal(ceil_log2(torch.nextafter(powers, torch.tensor(math.inf))).long(), exponents + 1)
    assert torch.equal(ceil_log2(torch.nextafter(powers, torch.tensor(0.0)))[1:].long(), exponents[1:])
    assert int(ceil_log2(torch.zeros(1))) == 0


@pytest.mark.parametrize("encode", [nvfp4.quantize, mxfp8.quantize])
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4, 40), "K a multiple of"),
        (torch.zeros(32), "matrices"),
        (torch.zeros(0, 32), "matrices"),
        (torch.zeros(4, 32, dtype=torch.int32), "float32, bfloat16 or float16"),
        (torch.zeros(4, 32, dtype=torch.float64), "float32, bfloat16 or float16"),
        (torch.full((4, 32), math.nan), "NaN or Inf"),
        (torch.tensor([[0.0] * 31 + [-math.inf]]), "NaN or Inf"),
    ],
)
def test_what_cannot_be_encoded_is_an_error(encode, weight, message):
    with pytest.raises(ValueError, match=message):
        encode(weight)


def test_nvfp4_range_and_global_scale_are_checked():
    with pytest.raises(ValueError, match=r"2\^126"):
        nvfp4.quantize(torch.full((1, 16), 2.0**127))
    for bad in (0.0, -1.0, math.nan, math.inf, 2.0**-120):
        with pytest.raises(ValueError, match="global_scale must lie"):
            nvfp4.quantize(torch.ones(1, 16), bad)
    with pytest.raises(ValueError, match="does not fit"):
        nvfp4.quantize(torch.ones(3, 1, 16), torch.ones(2))
