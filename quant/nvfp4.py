"""NVFP4: E2M1 codes in blocks of 16 along K, one E4M3 scale a block, one float32 global scale a tensor.

The pinned encoder (float32, RNE, true division; the block rule is in `kernels.nvfp4`):

    global_scale = 2^ceil(log2(amax / (6 * 448))), 1 for a zero tensor, at least 2^-116

A power of two, so that decoding to bfloat16 is exact and every backend multiplies with the same weight; the floor keeps
all decoded values normal float32 numbers. A stack [E, N, K] has one global scale an expert; rows that the engine fuses
(gate and up, q and k and v) are encoded in one call, or with the shared `global_scale` passed in.
"""

from dataclasses import dataclass

import torch

from kernels.mxfp8 import ceil_log2
from kernels.nvfp4 import BLOCK, E2M1_MAX, E4M3_MAX, decode, encode
from quant.mxfp8 import check_weight

MIN_GLOBAL_EXPONENT = -116
MAX_MAGNITUDE = 2.0**126


@dataclass(frozen=True)
class NVFP4Tensor:
    """`packed` uint8 [..., N, K/2] (low nibble = even k), `scale` float8_e4m3fn [..., N, K/16], `global_scale` float32.

    `global_scale` is a multiplier (decoded w = code * scale * global_scale), shape [] for a matrix and [E] for a stack.
    `input_scale` (float32 [], a multiplier) is there when the checkpoint fixes one for NVFP4 activations.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    input_scale: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the decoded weight."""
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))

    @property
    def nbytes(self) -> int:
        """Bytes held: 1/2 + 1/16 a value and 4 a tensor."""
        return self.packed.numel() + self.scale.numel() + 4 * self.global_scale.numel()

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Decode to `dtype` [..., N, K]: dtype(code * (scale * global_scale)) in float32, vLLM's emulation order."""
        return decode(self.packed, self.scale, self.global_scale, dtype)


def choose_global_scale(amax: torch.Tensor) -> torch.Tensor:
    """Power-of-two global scale (float32, shape of `amax`) of tensors whose largest magnitude is `amax` (0 gives 1)."""
    exponent = ceil_log2(amax.float() / (E2M1_MAX * E4M3_MAX)).clamp(min=MIN_GLOBAL_EXPONENT)
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def tensor_amax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude a matrix (float32, shape of the leading dimensions); ValueError on NaN, Inf or above 2^126."""
    check_weight(weight, BLOCK, "NVFP4")
    # A reduction over everything is many times faster on CPU than one over a dimension, hence the loop over matrices.
    matrices = weight.reshape(-1, *weight.shape[-2:])
    ranges = [torch.stack(torch.aminmax(matrix)) for matrix in matrices]
    amax = torch.stack(ranges).abs().amax(-1).float().reshape(weight.shape[:-2])
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("NVFP4 cannot encode NaN or Inf: the weight holds one")
    if bool((amax > MAX_MAGNITUDE).any()):
        raise ValueError("NVFP4 encodes magnitudes up to 2^126: rounding a larger one up would overflow float32")
    return amax


def quantize(weight: torch.Tensor, global_scale: torch.Tensor | float | None = None) -> NVFP4Tensor:
    """Encode a floating `weight` [N, K] or [E, N, K] by the pinned rule.

    `global_scale`: a float32 multiplier, a scalar or one a matrix ([E]), for tensors that share one; by default chosen
    from the weight. Raises ValueError when K is not a multiple of 16, the weight is empty, not floating, not finite or
    above 2^126, or the global scale is outside 2^-116..2^118. Values above 6 * 448 * global_scale saturate.
    """
    amax = tensor_amax(weight)
    if global_scale is None:
        global_scale = choose_global_scale(amax)
    else:
        global_scale = torch.as_tensor(global_scale, dtype=torch.float32, device=weight.device)
        if global_scale.numel() != amax.numel() and global_scale.numel() != 1:
            raise ValueError(
                f"NVFP4 global_scale of shape {tuple(global_scale.shape)} does not fit {tuple(weight.shape)}: "
                "give a scalar or one a matrix"
            )
        global_scale = global_scale.reshape(-1).expand(amax.numel()).reshape(amax.shape).contiguous()
        if not bool(((global_scale >= 2.0**MIN_GLOBAL_EXPONENT) & (global_scale <= 2.0**118)).all()):
            raise ValueError(f"NVFP4 global_scale must lie in 2^-116..2^118; got {global_scale.tolist()}")
    packed, scale = encode(weight, global_scale)
    return NVFP4Tensor(packed, scale, global_scale)
