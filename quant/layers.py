"""Frozen modules that hold the engine's bytes: `QuantLinear` and `QuantExperts`.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from quant.fsdp import allow_integer_parameters
from quant.matmul import BACKENDS, frozen_grouped_linear, frozen_linear
from quant.mxfp8 import MXFP8Tensor
from quant.nvfp4 import NVFP4Tensor

allow_integer_parameters()  # before anybody shards these modules


def as_bytes(tensor: torch.Tensor) -> nn.Parameter:
    """A frozen uint8 parameter over the bytes of `tensor`; a float32 [E] becomes [E, 4] and a scalar [1, 4]."""
    if tensor.dtype == torch.float32:
        tensor = tensor.reshape(-1, 1)
    return nn.Parameter(tensor.contiguous().view(torch.uint8), requires_grad=False)


def _check_backend(backend: str, *weights: MXFP8Tensor | NVFP4Tensor) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown: use one of {', '.join(BACKENDS)}")
    if backend == "flashinfer_w4a4" and any(getattr(weight, "input_scale", ()) is None for weight in weights):
        raise ValueError(
            "backend 'flashinfer_w4a4' quantises activations, but the checkpoint is weight-only (it has no "
            "input_global_scale): use a W4A4 checkpoint, or the backend 'marlin'"
        )
    return backend


def _input_bytes(weight: MXFP8Tensor | NVFP4Tensor) -> nn.Parameter | None:
    scale = getattr(weight, "input_scale", None)
    return None if scale is None else as_bytes(scale)


def _compute_input(hidden: torch.Tensor) -> torch.Tensor:
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
        self.backend = _check_backend(backend, weight)
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, MXFP8Tensor):
            self.format = "mxfp8"
            self.weight_data = as_bytes(weight.data)
        else:
            self.format = "nvfp4"
            self.weight_packed = as_bytes(weight.packed)
            self.weight_global = as_bytes(weight.global_scale)
        self.weight_scale = as_bytes(weight.scale)
        self.input_scale = _input_bytes(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def packed_bytes(self) -> tuple[torch.Tensor, ...]:
        """The weight's byte tensors in decoding order (what a fingerprint covers)."""
        if self.format == "mxfp8":
            return self.weight_data, self.weight_scale
        return self.weight_packed, self.weight_scale, self.weight_global

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in the dtype of `hidden` (the autocast dtype under autocast)."""
        hidden = _compute_input(hidden)
        output = frozen_linear(hidden, self.packed_bytes(), self.backend, self.input_scale)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, format={self.format}, backend={self.backend}"


def _add(output: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """output + delta, rounded once to the dtype of `output`."""
    return output + delta if delta.dtype == output.dtype else (output.float() + delta.float()).to(output.dtype)


@dataclass(frozen=True)
class Routes:
    """Rows sorted by expert. `order` int64 [S]: flat (token, slot) index of each sorted row; `inverse` [S] undoes it.

    `experts` int64 [S]: expert of each sorted row; `offsets`: E + 1 row bounds as Python ints (expert e owns rows
    offsets[e]:offsets[e + 1]). Rows routed to no expert (id >= E) sort to the end, beyond offsets[-1].
    """

    order: torch.Tensor
    inverse: torch.Tensor
    experts: torch.Tensor
    offsets: tuple[int, ...]


class ExpertDelta(Protocol):
    """What an adapter on experts provides: low-rank updates of both projections for rows sorted by expert.

    An update in the compute dtype was rounded by the adapter and is rounded again with the sum; one in float32 is
    rounded with the sum alone.
    """

    def gate_up_delta(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[S, H] -> [S, 2I], added to the gate_up output before the activation."""

    def down_delta(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[S, I] -> [S, H], added to the down output."""


class QuantExperts(nn.Module):
    """Routed experts with frozen NVFP4 weights; same call signature as transformers' experts modules.

    Parameters (uint8): `gate_up_packed` [E, 2I, H/2], `gate_up_scale` [E, 2I, H/16], `gate_up_global` [E, 4],
    `down_packed` [E, H, I/2], `down_scale` [E, H, I/16], `down_global` [E, 4], and `gate_up_input`, `down_input` [1, 4]
    or None. `apply_gate` maps [S, 2I] ([gate; up] halves) to [S, I]. `adapter` (an `ExpertDelta`, usually a module of
    trainable LoRA weights) is None at first.
    """

    def __init__(
        self,
        gate_up: NVFP4Tensor,
        down: NVFP4Tensor,
        apply_gate: Callable[[torch.Tensor], torch.Tensor],
        backend: str = "emulation",
    ) -> None:
        super().__init__()
        self.backend = _check_backend(backend, gate_up, down)
        self.num_experts, width, self.hidden_dim = gate_up.shape
        self.intermediate_dim = width // 2
        if tuple(down.shape) != (self.num_experts, self.hidden_dim, self.intermediate_dim):
            raise ValueError(f"experts: down {tuple(down.shape)} does not fit gate_up {tuple(gate_up.shape)}")
        self.gate_up_packed = as_bytes(gate_up.packed)
        self.gate_up_scale = as_bytes(gate_up.scale)
        self.gate_up_global = as_bytes(gate_up.global_scale)
        self.down_packed = as_bytes(down.packed)
        self.down_scale = as_bytes(down.scale)
        self.down_global = as_bytes(down.global_scale)
        self.gate_up_input, self.down_input = _input_bytes(gate_up), _input_bytes(down)
        self.apply_gate = apply_gate
        self.adapter: ExpertDelta | None = None

    def sort(self, top_k_index: torch.Tensor) -> Routes:
        """Group the (token, slot) pairs of `top_k_index` [T, top_k] by expert; stable, so rows keep token order."""
        flat = top_k_index.reshape(-1).long()
        experts, order = torch.sort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        counts = torch.bincount(flat.clamp(max=self.num_experts), minlength=self.num_experts + 1)
        offsets = (0, *counts[: self.num_experts].cumsum(0).tolist())
        return Routes(order, inverse, experts, offsets)

    def gate_up(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Rows sorted by expert [S, H] -> [S, 2I]."""
        packed = (self.gate_up_packed, self.gate_up_scale, self.gate_up_global)
        return frozen_grouped_linear(rows, packed, routes.offsets, self.backend, True, self.gate_up_input)

    def act(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[S, 2I] -> [S, I], by the model's own gate."""
        return self.apply_gate(gate_up)

    def down(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[S, I] -> [S, H]; under `marlin` without the global scale, which `combine` applies with the top-k weight."""
        packed = (self.down_packed, self.down_scale, self.down_global)
        apply_global = self.backend != "marlin"
        return frozen_grouped_linear(rows, packed, routes.offsets, self.backend, apply_global, self.down_input)

    def combine(
        self,
        output: torch.Tensor,
        routes: Routes,
        top_k_weights: torch.Tensor,
        delta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Weight and sum [S, H] over each token's slots -> [T, H] in the dtype of `output`.

        `top_k_weights` [T, top_k], used in float32. `delta` [S, H] is the adapter's update of `output`; where it enters
        and what is rounded follows the backend (module docstring). Rows without an expert contribute zero.
        """
        dtype = output.dtype
        weight = top_k_weights.reshape(-1)[routes.order].float().unsqueeze(-1)
        if self.backend == "marlin":
            factor = self.down_global.view(torch.float32).view(-1)[routes.experts.clamp(max=self.num_experts - 1)]
            output = output * (weight * factor.unsqueeze(-1)).to(dtype)
            if delta is not None:
                output = (output.float() + weight * delta.float()).to(dtype)
            output = output.float()
        else:
            output = (output if delta is None else _add(output, delta)).float() * weight
        if routes.offsets[-1] < output.shape[0]:
            output = output.masked_fill((routes.experts >= self.num_experts).unsqueeze(-1), 0.0)
        return output[routes.inverse].view(*top_k_weights.shape, self.hidden_dim).sum(1).to(dtype)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """`hidden_states` [T, H], ids [T, top_k] and weights [T, top_k] -> [T, H]."""
        hidden_states = _compute_input(hidden_states)
        routes = self.sort(top_k_index)
        rows = hidden_states[routes.order // top_k_index.shape[-1]]
        gate_up = self.gate_up(rows, routes)
        if self.adapter is not None:
            gate_up = _add(gate_up, self.adapter.gate_up_delta(rows, routes))
        inner = self.act(gate_up)
        output = self.down(inner, routes)
        delta = None if self.adapter is None else self.adapter.down_delta(inner, routes)
        return self.combine(output, routes, top_k_weights, delta)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.hidden_dim}, {self.intermediate_dim}), nvfp4, backend={self.backend}"
