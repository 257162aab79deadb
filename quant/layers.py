"""Frozen modules that hold the engine's bytes: `QuantLinear`, and what it shares with `quant.experts`.

Legend: T tokens, S = T * top_k routed rows sorted by expert, E experts, H hidden, I expert intermediate, N/K matrix.

The bytes are uint8 parameters without gradient: FSDP2 shards them along dimension 0 and never casts them, so they stay
bit-identical through training. e4m3 scales and float32 globals are held as their bytes for the same reason. A forward
decodes, multiplies and drops the decoded weight; a backward decodes again and gives a gradient to the input only.

Rounding points (docs/numerics.md): operands are values of the compute dtype (bfloat16 in training), products accumulate
in float32, one rounding to the compute dtype follows. On CPU that is a float32 GEMM on bfloat16 values (a CPU without
bfloat16 instructions is several times slower in a bfloat16 GEMM); on a GPU it is a bfloat16 GEMM.
`backend` is the engine's:
    emulation   W = bf16(code * (scale * global));  y = bf16(acc)
                experts: out = bf16(sum over top_k in float32 of topk_weight * bf16(y + delta))
    marlin      W = bf16(code * scale), exact;      y = bf16(global * acc)
                experts' down: r = bf16(bf16(acc) * bf16(topk_weight * global)), r = bf16(r + topk_weight * delta),
                out = bf16(sum over top_k in float32 of r)
                (vLLM 0.30's adapter kernel for decode; the one for prefill rounds topk_weight * delta before it adds)
    flashinfer_w4a4
                NVFP4: x and W as their E2M1 * E4M3 products, exact; y = bf16(global * input_scale * acc); the rest
                as emulation. MXFP8: x quantised per 32 at run time. A model of the fused kernels, which keep the
                activation in float32 between the two GEMMs
An NVFP4 weight that comes with an input scale makes `emulation` quantise activations too, as the engine then does.
A float32 input is computed in float32 throughout (no rounding): for references and tests.
"""

import torch
from torch import nn

from quant.fsdp import allow_integer_parameters
from quant.matmul import BACKENDS, frozen_linear
from quant.mxfp8 import MXFP8Tensor
from quant.nvfp4 import NVFP4Tensor

allow_integer_parameters()  # before anybody shards these modules


def as_bytes(tensor: torch.Tensor) -> nn.Parameter:
    """A frozen uint8 parameter over the bytes of `tensor`; a float32 [E] becomes [E, 4] and a scalar [1, 4]."""
    if tensor.dtype == torch.float32:
        tensor = tensor.reshape(-1, 1)
    return nn.Parameter(tensor.contiguous().view(torch.uint8), requires_grad=False)


def check_backend(backend: str, *weights: MXFP8Tensor | NVFP4Tensor) -> str:
    """`backend`, if it is one and can compute with `weights`; ValueError otherwise."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown: use one of {', '.join(BACKENDS)}")
    if backend == "flashinfer_w4a4" and any(getattr(weight, "input_scale", ()) is None for weight in weights):
        raise ValueError(
            "backend 'flashinfer_w4a4' quantises activations, but the checkpoint is weight-only (it has no "
            "input_global_scale): use a W4A4 checkpoint, or the backend 'marlin'"
        )
    return backend


def input_bytes(weight: MXFP8Tensor | NVFP4Tensor) -> nn.Parameter | None:
    """The bytes of the weight's input scale; None for a weight-only format."""
    scale = getattr(weight, "input_scale", None)
    return None if scale is None else as_bytes(scale)


def compute_input(hidden: torch.Tensor) -> torch.Tensor:
    """Cast as a linear layer under autocast would."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return hidden.to(torch.get_autocast_dtype(kind))
    return hidden


class QuantLinear(nn.Module):
    """y = x @ W.T (+ bias) with a frozen MXFP8 or NVFP4 weight [N, K].

    Parameters (uint8): MXFP8 `weight_data` [N, K], `weight_scale` [N, K/32]; NVFP4 `weight_packed` [N, K/2],
    `weight_scale` [N, K/16], `weight_global` [1, 4], `input_scale` [1, 4] or None. A bias stays in its own dtype and is
    added after the rounding.
    """

    def __init__(
        self,
        weight: MXFP8Tensor | NVFP4Tensor,
        bias: torch.Tensor | None = None,
        backend: str = "emulation",
    ) -> None:
        super().__init__()
        self.backend = check_backend(backend, weight)
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, MXFP8Tensor):
            self.format = "mxfp8"
            self.weight_data = as_bytes(weight.data)
        else:
            self.format = "nvfp4"
            self.weight_packed = as_bytes(weight.packed)
            self.weight_global = as_bytes(weight.global_scale)
        self.weight_scale = as_bytes(weight.scale)
        self.input_scale = input_bytes(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def packed_bytes(self) -> tuple[torch.Tensor, ...]:
        """The weight's byte tensors in decoding order (what a fingerprint covers)."""
        if self.format == "mxfp8":
            return self.weight_data, self.weight_scale
        return self.weight_packed, self.weight_scale, self.weight_global

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in the dtype of `hidden` (the autocast dtype under autocast)."""
        hidden = compute_input(hidden)
        output = frozen_linear(hidden, self.packed_bytes(), self.backend, self.input_scale)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, format={self.format}, backend={self.backend}"
