"""The checkpoint's bytes out of vLLM's Marlin layouts (GPUs without FP4 units): an exact inverse, proved at each use.

At load vLLM repacks NVFP4 experts and MXFP8 linears for its Marlin kernels: values are permuted inside tiles of 16 x
64, scales are permuted, and those of NVFP4 are re-encoded with a power of two that moves between them and the global
scale. Undoing values and scales ends with vLLM's own function on the result, and LayoutError unless that gives exactly
what the engine holds; biases are only reordered, and global scales divided by a power of two, which is exact.
Legend: N rows (outputs), K columns (inputs) of a weight, E experts.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rollout.fingerprint import EngineError
from rollout.patching import patch_target

_utils = "vllm.model_executor.layers.quantization.utils"
repack_op = patch_target("vllm._custom_ops:gptq_marlin_repack")
permute_scales = patch_target(f"{_utils}.marlin_utils:marlin_permute_scales")
permute_bias = patch_target(f"{_utils}.marlin_utils:marlin_permute_bias")
process_mxfp8_scales = patch_target(f"{_utils}.marlin_utils_fp8:mxfp8_marlin_process_scales")
process_nvfp4_scales = patch_target(f"{_utils}.marlin_utils_fp4:nvfp4_marlin_process_scales")
process_global_scale = patch_target(f"{_utils}.marlin_utils_fp4:nvfp4_marlin_process_global_scale")
_oracle = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"
_prepare_experts = patch_target(f"{_oracle}:prepare_nvfp4_moe_layer_for_marlin")

TILE_K, TILE_N = 16, 64
SCALE_FACTORS = "lockstep_marlin_scale_factors"


class LayoutError(EngineError):
    """The engine holds a weight in a layout that this inverse does not explain."""


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Within it a LayoutError begins with `name`."""
    try:
        yield
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error


def is_repacked(weight: torch.Tensor) -> bool:
    """Whether a weight of a quantised layer is in Marlin's layout (int32 words)."""
    return weight.dtype == torch.int32


# ---- values --------------------------------------------------------------------------------------------------------


def _to_words(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [N, bytes of K values] -> int32 [words of K, N], the layout that the repacking op reads."""
    return codes.view(torch.int32).T.contiguous()


def _unpack(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Words or bytes [..., W] -> uint8 values [..., values], the lowest bits first."""
    held = data.contiguous().view(torch.uint8)
    return held if bits == 8 else torch.stack((held & 15, held >> 4), dim=-1).flatten(-2)


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 values [..., V] -> bytes, the inverse of `_unpack`."""
    return values if bits == 8 else values[..., ::2] | values[..., 1::2] << 4


@functools.cache
def _tile_order(bits: int, device: torch.device) -> torch.Tensor:
    """int64 [TILE_K * TILE_N]: which value k * TILE_N + n stands at each position of a repacked tile.

    Found by repacking matrices whose values are digits of the positions, so that it is the op's own permutation.
    """
    size_k, size_n = 128, TILE_N  # the smallest that the op takes; its first tile is enough
    position = torch.arange(size_k * size_n, device=device).view(size_k, size_n)
    order = torch.zeros(TILE_K * TILE_N, dtype=torch.int64, device=device)
    for shift in range(0, 10, bits):
        digit = (position >> shift & (1 << bits) - 1).to(torch.uint8)
        words = repack_op(_to_words(_pack(digit.T.contiguous(), bits)), size_k, size_n, bits)
        order += _unpack(words, bits)[0].long() << shift
    return order & TILE_K * TILE_N - 1


def codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Marlin words int32 [K/16, N*16*bits/32] -> the checkpoint's bytes uint8 [N, K*bits/8]."""
    values = _unpack(words, bits)
    size_k, size_n = words.shape[0] * TILE_K, values.shape[1] // TILE_K
    tiles = values.view(size_k // TILE_K, size_n // TILE_N, TILE_K * TILE_N)
    natural = torch.empty_like(tiles)
    natural[..., _tile_order(bits, words.device)] = tiles
    matrix = natural.view(size_k // TILE_K, size_n // TILE_N, TILE_K, TILE_N).permute(1, 3, 0, 2)
    packed = _pack(matrix.reshape(size_n, size_k), bits).contiguous()
    if not torch.equal(repack_op(_to_words(packed), size_k, size_n, bits), words):
        raise LayoutError(f"Marlin words {tuple(words.shape)} of {bits}-bit values are in an unknown order")
    return packed


# ---- scales --------------------------------------------------------------------------------------------------------


def _natural_order(held: torch.Tensor, size_k: int, group: int) -> torch.Tensor:
    """Scales [K/group, N] in Marlin's order -> the same values in the checkpoint's order [N, K/group]."""
    groups, size_n = held.shape
    index = torch.arange(groups * size_n, device=held.device).view(groups, size_n)
    order = permute_scales(index, size_k, size_n, group).view(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)
    natural = torch.empty_like(held).view(-1)
    natural[order] = held.reshape(-1)
    return natural.view(groups, size_n).T.contiguous()


def mxfp8_scales(held: torch.Tensor) -> torch.Tensor:
    """E8M0 [K/32, N] in Marlin's order -> uint8 [N, K/32]."""
    size_k = held.shape[0] * 32
    natural = _natural_order(held.view(torch.uint8), size_k, 32)
    values = natural.view(torch.float8_e8m0fnu).to(torch.bfloat16).T.contiguous()
    again = process_mxfp8_scales(permute_scales(values, size_k, held.shape[1], 32))
    if not torch.equal(again.view(torch.uint8), held.view(torch.uint8)):
        raise LayoutError(f"Marlin MXFP8 scales {tuple(held.shape)} are in an unknown order")
    return natural


def nvfp4_scales(held: torch.Tensor, factor: float) -> torch.Tensor:
    """Marlin's S0E5M3 scales [K/16, N], multiplied by `factor` at load -> E4M3 [N, K/16]."""
    size_k = held.shape[0] * 16
    # A held byte is bits 7..14 of the float16 scale * factor * 2^7.
    half = (held.view(torch.uint8).to(torch.int16) << 7).view(torch.float16)
    natural = _natural_order(half, size_k, 16)
    scales = (natural.float() / (factor * 2**7)).to(torch.float8_e4m3fn)
    permuted = permute_scales(scales.to(torch.bfloat16).T.contiguous(), size_k, held.shape[1], 16)
    again, _ = process_nvfp4_scales(permuted, scale_factor=factor, a_dtype=torch.bfloat16)
    if not torch.equal(again.view(torch.uint8), held.view(torch.uint8)):
        raise LayoutError(f"Marlin NVFP4 scales {tuple(held.shape)} are no E4M3 scales times {factor}")
    return scales


# ---- modules -------------------------------------------------------------------------------------------------------


def linear_tensors(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(data uint8 [N, K], scale uint8 [N, K/32], bias [N] or None) of a repacked MXFP8 linear layer of vLLM."""
    rows, columns = module.output_size_per_partition, module.input_size_per_partition
    bias = module._parameters.get("bias")
    if bias is not None:
        order = permute_bias(torch.arange(bias.numel(), device=bias.device))
        bias = torch.empty_like(bias).index_copy_(0, order, bias)[:rows]
    return codes(module.weight, 8)[:rows, :columns], mxfp8_scales(module.weight_scale)[:rows, : columns // 32], bias


def expert_tensors(module: nn.Module, engine: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed uint8 [E, N, K/2], scale E4M3 [E, N, K/16], global scale float32 [E]) of repacked experts.

    `engine`: "w13" or "w2". Padding of the intermediate size, which vLLM adds to each of gate and up, is cut off.
    """
    inner, factor = module.intermediate_size_per_partition, getattr(module, SCALE_FACTORS)[engine]

    def cut(matrices: list[torch.Tensor], values: int) -> torch.Tensor:
        stack = torch.stack(matrices)
        if engine == "w2":
            return stack[..., : inner // values].contiguous()
        return stack.unflatten(1, (2, -1))[:, :, :inner].flatten(1, 2)

    packed = cut([codes(expert, 4) for expert in getattr(module, f"{engine}_weight")], 2)
    scale = cut([nvfp4_scales(expert, factor) for expert in getattr(module, f"{engine}_weight_scale")], 16)
    one = torch.ones((), dtype=torch.float32)
    multiplier = float(process_global_scale(one, torch.bfloat16)) / factor
    return packed, scale, getattr(module, f"{engine}_weight_scale_2") / multiplier


def _scale_factor(before: torch.Tensor, after: torch.Tensor) -> float:
    """The power of two that vLLM moved from the global scales to the block scales of a layer."""
    factor = (process_global_scale(before.float(), torch.bfloat16) / after).unique()
    if factor.numel() != 1 or float(factor) != 2.0 ** round(torch.log2(factor).item()):
        raise LayoutError(f"Marlin changed the global scales of a layer by {factor.tolist()}, expected a power of two")
    return float(factor)


def install() -> None:
    """Make vLLM keep each layer's scale factor, which its bytes alone do not show (a power of two can sit on either
    side of the product block scale * global scale)."""

    @functools.wraps(_prepare_experts)
    def prepare(layer, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, is_act_and_mul):
        out = _prepare_experts(layer, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, is_act_and_mul)
        factors = {"w13": _scale_factor(w13_scale_2, out[2]), "w2": _scale_factor(w2_scale_2, out[5])}
        setattr(layer, SCALE_FACTORS, factors)
        return out

    patch_target(_oracle).prepare_nvfp4_moe_layer_for_marlin = prepare
