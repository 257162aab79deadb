"""MXFP8: E4M3 values in blocks of 32 along K, one E8M0 (power-of-two) scale a block; the rule is in `kernels.mxfp8`."""

from dataclasses import dataclass

import torch

from kernels.mxfp8 import BLOCK, decode, encode


@dataclass(frozen=True)
class MXFP8Tensor:
    """`data` float8_e4m3fn [..., N, K]; `scale` uint8 E8M0 [..., N, K/32]: 2^(byte - 127); 255 is never written."""

    data: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the decoded weight."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes held: 1 + 1/32 a value."""
        return self.data.numel() + self.scale.numel()

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Decode to `dtype` [..., N, K]: dtype(float32(data) * 2^(scale - 127)); exact in bfloat16's normal range."""
        return decode(self.data, self.scale, dtype)


def quantize(weight: torch.Tensor) -> MXFP8Tensor:
    """Encode a floating `weight` [N, K] (or with leading dimensions, [E, N, K]) by the pinned rule.

    Raises ValueError when K is not a multiple of 32, the weight is not floating or empty, or holds NaN or Inf. Negative
    zero keeps its sign. Values that underflow under their block's scale become (signed) zero.
    """
    check_weight(weight, BLOCK, "MXFP8")
    data, scale = encode(weight)
    bad = int((scale == 255).sum())
    if bad:
        raise ValueError(f"MXFP8 cannot encode NaN or Inf: {bad} of {scale.numel()} blocks hold one")
    return MXFP8Tensor(data, scale)


def check_weight(weight: torch.Tensor, block: int, name: str) -> None:
    """Raise ValueError unless `weight` is a floating matrix (or a stack of them) whose K is a multiple of `block`."""
    if weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(f"{name} encodes matrices [..., N, K]; got shape {tuple(weight.shape)}")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} encodes float32, bfloat16 or float16 weights; got {weight.dtype}")
    if weight.shape[-1] % block:
        raise ValueError(f"{name} needs K a multiple of {block}; got K={weight.shape[-1]} in {tuple(weight.shape)}")
