"""Frozen routed experts with an adapter: `QuantExperts` over NVFP4 bytes, `PlainExperts` over an unquantised stack.

Legend: T tokens, S = T * top_k routed rows sorted by expert, E experts, H hidden, I expert intermediate.
Rounding points of NVFP4 experts follow `backend` as `quant.layers` lists them. Unquantised experts have two kinds:
    emulation   y = bf16(acc); out = bf16(sum over top_k in float32 of topk_weight * bf16(y + delta))
    marlin      (any GPU engine: vLLM's Triton experts) down: r = bf16(topk_weight * acc), r = bf16(r + topk_weight *
                delta), out = bf16(sum over top_k in float32 of r)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels.linear import grouped_linear
from quant.layers import as_bytes, check_backend, compute_input, input_bytes
from quant.matmul import frozen_grouped_linear
from quant.nvfp4 import NVFP4Tensor

TOKENS_TOGETHER = 8192
"""The backward pass of a layer's adapted experts needs about 1.3 MB a token at MiniMax-M3's size."""


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


class RoutedExperts(nn.Module):
    """What all kinds share: sorting by expert, the order of adapter, activation and combination.

    Same call signature as transformers' experts modules. `apply_gate` maps [S, 2I] ([gate; up] halves) to [S, I].
    `adapter` (an `ExpertDelta`, usually a module of trainable LoRA weights) is None at first.
    """

    num_experts: int
    hidden_dim: int
    intermediate_dim: int

    def __init__(self, apply_gate: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.apply_gate = apply_gate
        self.adapter: ExpertDelta | None = None

    def gate_up(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Rows sorted by expert [S, H] -> [S, 2I]."""
        raise NotImplementedError

    def down(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[S, I] -> [S, H], as `weigh` wants it."""
        raise NotImplementedError

    def weigh(self, output: torch.Tensor, weight: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Under `marlin`: the rounded product of `output` [S, H] with the top-k `weight` float32 [S, 1]."""
        raise NotImplementedError

    def sort(self, top_k_index: torch.Tensor) -> Routes:
        """Group the (token, slot) pairs of `top_k_index` [T, top_k] by expert; stable, so rows keep token order."""
        flat = top_k_index.reshape(-1).long()
        experts, order = torch.sort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        counts = torch.bincount(flat.clamp(max=self.num_experts), minlength=self.num_experts + 1)
        offsets = (0, *counts[: self.num_experts].cumsum(0).tolist())
        return Routes(order, inverse, experts, offsets)

    def act(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[S, 2I] -> [S, I], by the model's own gate."""
        return self.apply_gate(gate_up)

    def combine(
        self,
        output: torch.Tensor,
        routes: Routes,
        top_k_weights: torch.Tensor,
        delta: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Weight and sum [S, H] over each token's slots -> [T, H] in `dtype`.

        `top_k_weights` [T, top_k], used in float32. `delta` [S, H] is the adapter's update of `output`; where it enters
        and what is rounded follows the backend (module docstring). Rows without an expert contribute zero.
        """
        weight = top_k_weights.reshape(-1)[routes.order].float().unsqueeze(-1)
        if self.backend == "marlin":
            output = self.weigh(output, weight, routes)
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
        """`hidden_states` [T, H], ids [T, top_k] and weights [T, top_k] -> [T, H].

        More than `TOKENS_TOGETHER` tokens go in chunks, whose intermediates are made again in the backward pass.
        """
        hidden_states = compute_input(hidden_states)
        inputs = (hidden_states, top_k_index, top_k_weights)
        if hidden_states.shape[0] <= TOKENS_TOGETHER:
            return self._of_tokens(*inputs)
        chunks = zip(*(x.split(TOKENS_TOGETHER) for x in inputs), strict=True)
        return torch.cat([checkpoint(self._of_tokens, *chunk, use_reentrant=False) for chunk in chunks])

    def _of_tokens(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        routes = self.sort(top_k_index)
        rows = hidden_states[routes.order // top_k_index.shape[-1]]
        gate_up = self.gate_up(rows, routes)
        if self.adapter is not None:
            gate_up = _add(gate_up, self.adapter.gate_up_delta(rows, routes))
        inner = self.act(gate_up)
        output = self.down(inner, routes)
        delta = None if self.adapter is None else self.adapter.down_delta(inner, routes)
        return self.combine(output, routes, top_k_weights, delta, inner.dtype)


class QuantExperts(RoutedExperts):
    """Routed experts with frozen NVFP4 weights.

    Parameters (uint8): `gate_up_packed` [E, 2I, H/2], `gate_up_scale` [E, 2I, H/16], `gate_up_global` [E, 4],
    `down_packed` [E, H, I/2], `down_scale` [E, H, I/16], `down_global` [E, 4], and `gate_up_input`, `down_input` [1, 4]
    or None.
    """

    def __init__(
        self,
        gate_up: NVFP4Tensor,
        down: NVFP4Tensor,
        apply_gate: Callable[[torch.Tensor], torch.Tensor],
        backend: str = "emulation",
    ) -> None:
        super().__init__(apply_gate, check_backend(backend, gate_up, down))
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
        self.gate_up_input, self.down_input = input_bytes(gate_up), input_bytes(down)

    def gate_up(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Rows sorted by expert [S, H] -> [S, 2I]."""
        packed = (self.gate_up_packed, self.gate_up_scale, self.gate_up_global)
        return frozen_grouped_linear(rows, packed, routes.offsets, self.backend, True, self.gate_up_input)

    def down(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[S, I] -> [S, H]; under `marlin` without the global scale, which `combine` applies with the top-k weight."""
        packed = (self.down_packed, self.down_scale, self.down_global)
        apply_global = self.backend != "marlin"
        return frozen_grouped_linear(rows, packed, routes.offsets, self.backend, apply_global, self.down_input)

    def weigh(self, output: torch.Tensor, weight: torch.Tensor, routes: Routes) -> torch.Tensor:
        """bf16(bf16(acc) * bf16(topk_weight * global))."""
        factor = self.down_global.view(torch.float32).view(-1)[routes.experts.clamp(max=self.num_experts - 1)]
        return output * (weight * factor.unsqueeze(-1)).to(output.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.hidden_dim}, {self.intermediate_dim}), nvfp4, backend={self.backend}"


class PlainExperts(RoutedExperts):
    """Routed experts with frozen unquantised stacks `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        apply_gate: Callable[[torch.Tensor], torch.Tensor],
        backend: str = "emulation",
    ) -> None:
        super().__init__(apply_gate, check_backend(backend))
        self.num_experts, width, self.hidden_dim = gate_up.shape
        self.intermediate_dim = width // 2
        self.gate_up_proj = nn.Parameter(gate_up.detach(), requires_grad=False)
        self.down_proj = nn.Parameter(down.detach(), requires_grad=False)

    def gate_up(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Rows sorted by expert [S, H] -> [S, 2I]."""
        return grouped_linear(rows, self.gate_up_proj, routes.offsets)

    def down(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[S, I] -> [S, H]; under `marlin` the float32 accumulator, which `weigh` rounds."""
        return grouped_linear(rows, self.down_proj, routes.offsets, accumulator=self.backend == "marlin")

    def weigh(self, output: torch.Tensor, weight: torch.Tensor, routes: Routes) -> torch.Tensor:
        """bf16(topk_weight * acc)."""
        return (output * weight).to(self.down_proj.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.hidden_dim}, {self.intermediate_dim}), unquantised, backend={self.backend}"
