"""MoE experts for vLLM on CPU: NVFP4 and bf16 weights with per-expert LoRA, at the `emulation` rounding points.

vLLM 0.30.0 has no CPU class that takes an expert adapter and none that takes NVFP4 weights. These two do, with grouped
float32 matrix products and the roundings that docs/numerics.md lists. Shapes: T tokens, K experts a token, P = T*K
pairs, E experts, H hidden, I intermediate, r rank.
"""

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

from quant import nvfp4

# Up to this many decoded bytes a layer, the float32 weights are kept; above, they are decoded at every call.
KEEP_DECODED_BYTES = 256 << 20


class _Layout:
    """The pairs of a call in expert order, padded to [E, C] (C rows of the busiest expert) unless that wastes much.

    Padded, an expert layer is a batched matrix product, which for the few rows of a decode step is several times
    faster than one product an expert; unbalanced large batches take the loop.
    """

    def __init__(self, topk_ids: torch.Tensor, num_experts: int) -> None:
        flat = topk_ids.flatten().long()
        self.experts, self.order = flat.sort(stable=True)
        counts = torch.bincount(flat, minlength=num_experts)
        self.counts = counts.tolist()
        self.tokens = self.order // topk_ids.shape[1]
        self.width = max(self.counts)
        self.padded = num_experts * self.width <= 3 * flat.numel()
        starts = counts.cumsum(0) - counts
        self.slots = torch.arange(flat.numel()) - starts[self.experts]

    def arrange(self, pairs: torch.Tensor) -> torch.Tensor:
        """[P, N] in expert order -> [E, C, N] when padded."""
        if not self.padded:
            return pairs
        out = pairs.new_zeros(len(self.counts), self.width, pairs.shape[1])
        out[self.experts, self.slots] = pairs
        return out

    def restore(self, arranged: torch.Tensor) -> torch.Tensor:
        """Inverse of `arrange`, and back from expert order to (token, slot) order."""
        pairs = arranged[self.experts, self.slots] if self.padded else arranged
        out = torch.empty_like(pairs)
        out[self.order] = pairs
        return out

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """bf16(x_e @ weight_e^T) with float32 accumulation; weight float32 [E, out, in]."""
        if self.padded:
            return torch.bmm(x.float(), weight.transpose(1, 2)).to(x.dtype)
        out = x.new_empty(x.shape[0], weight.shape[1])
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                out[start : start + count] = x[start : start + count].float() @ weight[expert].t()
                start += count
        return out


def swigluoai(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    """Clamped SwiGLU of bf16 halves, bf16(bf16(g sigmoid(alpha g)) (u + beta)): the roundings of vLLM's CUDA kernel."""
    gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    gated = (gate * torch.sigmoid(alpha * gate)).to(torch.bfloat16).float()
    return (gated * (up + beta)).to(torch.bfloat16)


class CpuExperts(LoRAExpertsMixin, mk.FusedMoEExpertsModular):
    """bf16 experts [E, 2I, H] and [E, H, I] (gate rows before up rows) with an optional adapter."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return mk.current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in (MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE)

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return (weight_key, activation_key) == (None, None)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        return not moe_parallel_config.use_ep

    @staticmethod
    def _supports_routing_method(*_args) -> bool:
        return True

    @staticmethod
    def _supports_router_logits_dtype(*_args) -> bool:
        return True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._decoded: tuple[torch.Tensor, torch.Tensor] | None = None

    def workspace_shapes(self, M, N, K, topk, *_args, **_kwargs):
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def decode(self, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 weights [E, 2I, H] and [E, H, I]; subclasses decode their format here."""
        return w13.float(), w2.float()

    def _weights(self, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if getattr(self, "_decoded", None) is not None:
            return self._decoded
        decoded = self.decode(w13, w2)
        if sum(w.numel() * 4 for w in decoded) <= KEEP_DECODED_BYTES:
            self._decoded = decoded
        return decoded

    def _add_lora(self, y: torch.Tensor, x: torch.Tensor, layout: _Layout, a_stacked, b_stacked, mask) -> None:
        """y[..., slice] += bf16(bf16(x A_e^T) B_e^T) for each slice, on the pairs whose request carries the adapter."""
        offset = 0
        for a, b in zip(a_stacked, b_stacked, strict=True):
            delta = layout.linear(layout.linear(x, a[0].float()), b[0].float())
            if mask is not None:
                delta = delta * mask
            y[..., offset : offset + delta.shape[-1]] += delta
            offset += delta.shape[-1]

    def _activate(self, gate: torch.Tensor, up: torch.Tensor, activation: MoEActivation) -> torch.Tensor:
        if activation == MoEActivation.SILU:
            return F.silu(gate) * up
        config = self.activation_config
        if config.clamp_limit is None:
            raise ValueError("swigluoai needs a clamp limit, and the model's configuration has none")
        return swigluoai(gate, up, config.clamp_limit, config.alpha, config.beta)

    def _adapter_mask(self, layout: _Layout, dtype: torch.dtype) -> tuple[bool, torch.Tensor | None]:
        """(whether any pair uses the adapter, mask in the layout or None when all do); one adapter slot only."""
        context = self._lora_context
        if context is None:
            return False, None
        if context.max_loras != 1:
            raise NotImplementedError(f"max_loras must be 1 on CPU, got {context.max_loras}")
        uses = context.punica_wrapper.token_lora_indices >= 0
        if not bool(uses.any()):
            return False, None
        if bool(uses.all()):
            return True, None
        return True, layout.arrange(uses[layout.tokens].unsqueeze(1).to(dtype))

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        *_args,
        **_kwargs,
    ) -> None:
        w13_weight, w2_weight = self._weights(w1, w2)
        top_k = topk_ids.shape[1]
        layout = _Layout(topk_ids, w13_weight.shape[0])
        x = layout.arrange(hidden_states[layout.tokens])
        any_lora, mask = self._adapter_mask(layout, x.dtype)

        gate_up = layout.linear(x, w13_weight)
        if any_lora:
            context = self._lora_context
            self._add_lora(gate_up, x, layout, context.w13_lora_a_stacked, context.w13_lora_b_stacked, mask)
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = self._activate(gate, up, activation)
        down = layout.linear(hidden, w2_weight)
        if any_lora:
            self._add_lora(down, hidden, layout, context.w2_lora_a_stacked, context.w2_lora_b_stacked, mask)

        pairs = layout.restore(down).view(-1, top_k, hidden_states.shape[1])
        output.copy_((pairs.float() * topk_weights.float().unsqueeze(-1)).sum(dim=1))


class CpuNvfp4Experts(CpuExperts):
    """NVFP4 experts: uint8 codes [E, 2I, H/2], e4m3 scales [E, 2I, H/16], float32 global scale [E], kept packed."""

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return weight_key == kNvfp4Static and activation_key is None

    def decode(self, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.quant_config
        return (
            nvfp4.NVFP4Tensor(w13, config.w1_scale, config.g1_alphas).dequantize(torch.float32),
            nvfp4.NVFP4Tensor(w2, config.w2_scale, config.g2_alphas).dequantize(torch.float32),
        )
