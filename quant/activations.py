"""Quantise-dequantise of activations, for engines that multiply in FP4 (W4A4) or FP8 (W8A8).

NVFP4 activations use blocks of 16 under a static per-tensor input scale s (G = 1 / s), with the reciprocals that the
engine uses instead of the weights' true division: scale = E4M3(G * (amax * (1/6))), code = E2M1(x * (1 / (scale * s))).
vLLM's emulation computes exactly this in float32 (`ref_nvfp4_quant`); its CUDA encoder (`nvfp4_utils.cuh`) takes
hardware-approximate reciprocals, one unit in the last place off at most, so that a value on a rounding boundary may
take the neighbouring code. Gradients pass straight through (the callers' backward uses the decoded weight alone).
"""

import torch

from kernels import mxfp8, nvfp4


def nvfp4_quantize(hidden: torch.Tensor, input_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode `hidden` [M, K] under the multiplier `input_scale` (float32, one element).

    Returns signed E2M1 values float32 [M, K/16, 16] and block scales (E4M3 values as float32) [M, K/16].
    """
    divisor = 1.0 / input_scale.reshape(())
    blocks = hidden.float().reshape(hidden.shape[0], -1, nvfp4.BLOCK)
    largest = blocks.abs().amax(-1)
    scale = (divisor * (largest * (1.0 / 6.0))).clamp_(max=nvfp4.E4M3_MAX).to(torch.float8_e4m3fn).float()
    inverse = 1.0 / (scale * (1.0 / divisor))
    inverse = torch.where(scale == 0, torch.zeros_like(inverse), inverse)
    scaled = (blocks * inverse.unsqueeze(-1)).clamp_(-nvfp4.E2M1_MAX, nvfp4.E2M1_MAX)
    table = torch.tensor(nvfp4.E2M1_VALUES, device=hidden.device)
    values = table[nvfp4.round_to_e2m1(scaled.abs()).long()]
    return torch.copysign(values, scaled), scale


def nvfp4_emulated(hidden: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """[M, K] -> [M, K] in the dtype of `hidden`: dtype(value * (scale / G)), as vLLM's emulation rounds it."""
    values, scale = nvfp4_quantize(hidden, input_scale)
    decoded = values * (scale / (1.0 / input_scale.reshape(()))).unsqueeze(-1)
    return decoded.reshape(hidden.shape).to(hidden.dtype)


def nvfp4_operand(hidden: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """[M, K] -> value * block scale without the global: what an FP4 tensor core multiplies with, exact in bfloat16."""
    values, scale = nvfp4_quantize(hidden, input_scale)
    return (values * scale.unsqueeze(-1)).reshape(hidden.shape).to(hidden.dtype)


def mxfp8_emulated(hidden: torch.Tensor) -> torch.Tensor:
    """[M, K] -> [M, K]: MXFP8 by the weights' rule, as vLLM quantises activations; exact in bfloat16's normal range."""
    return mxfp8.decode(*mxfp8.encode(hidden), hidden.dtype)
