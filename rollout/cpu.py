"""What vLLM 0.30.0 lacks to serve an MXFP8 + NVFP4 MoE with LoRA on a machine without a GPU.

Installed by `rollout.plugin` in every vLLM process on the CPU platform. Every replacement computes in float32 on bf16
values and rounds where docs/numerics.md says (the `emulation` backend), which is also ten times faster than bf16
matrix products on processors without AVX512-BF16 or AMX.
"""

import os

import torch
import torch.nn.functional as F
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearKernel

from quant import mxfp8
from rollout.experts import CpuExperts, CpuNvfp4Experts, swigluoai
from rollout.patching import patch_target

ir_ops = patch_target("vllm.ir:ops")


def linear_f32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] (bf16) times weight [N, K] (float32), float32 accumulation, one rounding to x's dtype."""
    return F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


class CpuMxfp8LinearKernel(Mxfp8LinearKernel):
    """MXFP8 linear: the checkpoint's bytes stay on the layer (they are fingerprinted), decoded once to float32."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # Plain parameters: vLLM's parameter subclasses refuse the views that fingerprints take.
        layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data, requires_grad=False)
        layer.decoded_weight = mxfp8.MXFP8Tensor(layer.weight.data, layer.weight_scale.data).dequantize(torch.float32)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear_f32(x, layer.decoded_weight, bias)


class CpuPunicaWrapper(PunicaWrapperCPU):
    """LoRA on linear layers, one adapter slot: y += bf16(bf16(x A^T) B^T), as vLLM's Triton kernels round it."""

    def add_lora_linear(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs):
        if scale != 1.0:
            raise ValueError(f"the adapter's scale must be folded into B (scale 1.0), got {scale}")
        uses = self.token_lora_indices >= 0
        if not bool(uses.any()):
            return
        if lora_a_stacked[0].shape[0] != 1:
            raise NotImplementedError(f"max_loras must be 1 on CPU, got {lora_a_stacked[0].shape[0]}")
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        mask = None if bool(uses.all()) else uses.unsqueeze(1)
        offset = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            delta = linear_f32(linear_f32(x, a[0, 0].float()), b[0, 0].float())
            y[:, offset : offset + width] += delta if mask is None else delta * mask
            offset += width

    def add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None, **kwargs):
        # vLLM wraps lm_head whenever LoRA is on; lockstep never adapts it, and gathering its B a token is slow.
        if bool(lora_b_stacked.any()):
            super().add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, buffer=buffer, **kwargs)


def _dispatch_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Replaces vLLM's choice of a CPU GEMM: float32 products for 2-D bf16 weights (router, lm_head, bf16 models)."""
    if layer.weight.is_meta or layer.weight.ndim != 2:
        layer.cpu_linear = F.linear
        return
    weight = layer.weight.detach().float()
    layer.cpu_linear = lambda x, _weight, bias: linear_f32(x, weight, bias)


def _softmax_or_sigmoid_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
    """Routing as vLLM's GPU kernels do it: scores in float32, selection by score (+ bias), renormalised in float32.

    Stock CPU routing takes softmax over the selected bf16 logits, which rounds the gate weights to bf16.
    Returns (weights float32 [T, K], ids int32 [T, K]).
    """
    logits = router_logits.float()
    if self.scoring_func == "softmax":
        scores = logits.softmax(dim=-1)
    elif self.scoring_func == "sigmoid":
        scores = logits.sigmoid()
    else:
        raise NotImplementedError(f"scoring_func {self.scoring_func!r} has no CPU routing in lockstep")
    selection = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias.float()
    ids = selection.topk(self.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if self.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * self.routed_scaling_factor, ids.to(torch.int32)


def _float32_attention() -> None:
    """Run vLLM's CPU attention in float32 (cache included) and round its output once.

    In bfloat16 its AVX2 build truncates the output where every other implementation rounds: a bias of half a unit in
    the last place, about 0.2 %, in every layer. Keys and values are bf16 values, which float32 holds exactly.
    """
    backend = "vllm.v1.attention.backends.cpu_attn"
    layer = patch_target("vllm.model_executor.layers.attention.attention:Attention")
    builder = patch_target(f"{backend}:CPUAttentionMetadataBuilder")
    impl = patch_target(f"{backend}:CPUAttentionBackendImpl")
    choose_isa = patch_target(f"{backend}:_get_attn_isa")
    spec, build, forward, update = layer.get_kv_cache_spec, builder.__init__, impl.forward, impl.do_kv_cache_update

    def get_kv_cache_spec(self, vllm_config):
        if self.kv_cache_torch_dtype == torch.bfloat16:
            self.kv_cache_torch_dtype = torch.float32
        return spec(self, vllm_config)

    def init(self, kv_cache_spec, layer_names, vllm_config, device):
        build(self, kv_cache_spec, layer_names, vllm_config, device)
        self.dtype = torch.float32
        self.isa = choose_isa(self.dtype, self.block_size, self.head_dim, self.kv_cache_dtype)
        self._set_isa_to_layers(layer_names)

    def forward_f32(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        if attn_metadata is None or output.dtype == torch.float32:
            return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        result = torch.zeros_like(output, dtype=torch.float32)
        forward(self, layer, query.float(), None, None, kv_cache, attn_metadata, result, *args, **kwargs)
        return output.copy_(result)

    def update_f32(self, layer, key, value, kv_cache, slot_mapping):
        update(self, layer, key.to(kv_cache.dtype), value.to(kv_cache.dtype), kv_cache, slot_mapping)

    layer.get_kv_cache_spec, builder.__init__ = get_kv_cache_spec, init
    impl.forward, impl.do_kv_cache_update = forward_f32, update_f32


def _rms_norm(self, x: torch.Tensor, residual: torch.Tensor | None = None):
    """RMSNorm with the residual sum rounded to bf16 before it is normalised, as vLLM's CUDA kernel does.

    vLLM's native path normalises the float32 sum instead, which no other implementation of the model does.
    """
    if self.variance_size_override is not None:
        raise NotImplementedError("RMSNorm over a part of the hidden size has no CPU path in lockstep")
    total = x if residual is None else x + residual
    weight = self.weight.data if self.has_weight else None
    normed = ir_ops.rms_norm(total, weight, self.variance_epsilon, None)
    return normed if residual is None else (normed, total)


def _clamped_swiglu(self, x: torch.Tensor) -> torch.Tensor:
    """SiluAndMulWithClamp.forward_native with the CUDA kernel's two roundings (stock: one an operation)."""
    return swigluoai(*x.chunk(2, dim=-1), self.swiglu_limit, self.alpha, self.beta)


def _keep_uniproc_executor(platform) -> None:
    """Let `distributed_executor_backend=uni` stand on CPU: the worker then lives in the engine process.

    vLLM turns it into a second process that the engine process busy-waits for, which on a small machine takes the
    worker's own core. Thread binding, vLLM's reason, is off here (VLLM_CPU_OMP_THREADS_BIND=nobind).
    """
    original = patch_target("vllm.platforms.cpu:CpuPlatform.check_and_update_config").__func__

    def check_and_update_config(cls, vllm_config) -> None:
        wanted = vllm_config.parallel_config.distributed_executor_backend
        original(cls, vllm_config)
        if wanted == "uni":
            vllm_config.parallel_config.distributed_executor_backend = "uni"

    platform.check_and_update_config = classmethod(check_and_update_config)


def install() -> None:
    """Replace the CPU entries of vLLM's registries; raises PatchError if a name moved."""
    # vLLM forbids torch.set_num_threads later, and for a small model a second thread costs more than it brings.
    if threads := os.environ.get("LOCKSTEP_ENGINE_THREADS"):
        torch.set_num_threads(int(threads))
    from vllm.platforms.interface import PlatformEnum

    linear = "vllm.model_executor.kernels.linear"
    patch_target(f"{linear}:_POSSIBLE_MXFP8_KERNELS")[PlatformEnum.CPU] = [CpuMxfp8LinearKernel]

    oracle = "vllm.model_executor.layers.fused_moe.oracle"
    _replace_experts(f"{oracle}.nvfp4", patch_target(f"{oracle}.nvfp4:NvFp4MoeBackend.EMULATION"), CpuNvfp4Experts)
    _replace_experts(
        f"{oracle}.unquantized", patch_target(f"{oracle}.unquantized:UnquantizedMoeBackend.TRITON"), CpuExperts
    )
    _replace_experts(
        f"{oracle}.unquantized", patch_target(f"{oracle}.unquantized:UnquantizedMoeBackend.CPU"), CpuExperts
    )

    patch_target("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm")
    _set("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", _dispatch_unquantized_gemm)

    router = patch_target("vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter")
    patch_target("vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter._compute_routing")
    router._compute_routing = _softmax_or_sigmoid_routing

    norm = patch_target("vllm.model_executor.layers.layernorm:RMSNorm")
    patch_target("vllm.model_executor.layers.layernorm:RMSNorm.forward_native")
    norm.forward_native = _rms_norm
    clamped = patch_target("vllm.model_executor.layers.activation:SiluAndMulWithClamp")
    patch_target("vllm.model_executor.layers.activation:SiluAndMulWithClamp.forward_native")
    clamped.forward_native = _clamped_swiglu
    # The CPU kernel rounds once; the CUDA kernel and Hugging Face round every product, as forward_native does.
    rotary = patch_target("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding")
    rotary.forward_cpu = patch_target("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_native")

    _float32_attention()

    platform = patch_target("vllm.platforms.cpu:CpuPlatform")
    patch_target("vllm.platforms.cpu:CpuPlatform.get_punica_wrapper")
    _keep_uniproc_executor(platform)
    platform.get_punica_wrapper = classmethod(lambda cls: f"{__name__}.{CpuPunicaWrapper.__name__}")


def _set(module: str, name: str, value) -> None:
    setattr(patch_target(module), name, value)


def _replace_experts(module: str, backend, experts_cls: type) -> None:
    """Make `backend` of a MoE oracle resolve to `experts_cls`, leaving its other backends alone."""
    original = patch_target(f"{module}:backend_to_kernel_cls")
    _set(module, "backend_to_kernel_cls", lambda b: [experts_cls] if b == backend else original(b))
