"""MiniMax-M3's text model in vLLM 0.30.0 with LoRA, on GPUs and, with `rollout.attention`, without one.

vLLM's class has no SupportsLoRA, and its fused [q | k | v | index_q | index_k] projection has no LoRA wrapper, so that
an adapter on attention would be dropped with a warning. Registered by name in `rollout.plugin`: only an engine that
serves this architecture imports the module.
"""

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA
from vllm.model_executor.models.interfaces import SupportsLoRA

from rollout.patching import patch_target
from rollout.worker import SyncError

QKV_PARTS = ["q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"]
PROCESSORS = "vllm.transformers_utils.processors.minimax_m3"


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Within it the image processors that vLLM's M3 package imports are a module of empty classes.

    They need torchvision, which a machine for the text model need not have; only the vision model, which fails
    without it anyway, uses them.
    """
    try:
        importlib.import_module("torchvision")
        missing = False
    except (ImportError, RuntimeError):  # RuntimeError: built for another torch
        missing = True
    if missing:
        stub = types.ModuleType(PROCESSORS)
        stub.__getattr__ = lambda name: type(name, (), {})
        sys.modules[PROCESSORS] = stub
    try:
        yield
    finally:
        if missing:
            del sys.modules[PROCESSORS]


with _without_torchvision():
    Base = patch_target("vllm.models.minimax_m3:MiniMaxM3SparseForCausalLM")
FusedQKV = patch_target("vllm.model_executor.layers.linear:MinimaxM3QKVParallelLinearWithIndexer")
DenseQKV = patch_target("vllm.model_executor.layers.linear:QKVParallelLinear")
make_expert_mapping = patch_target("vllm.model_executor.layers.fused_moe:fused_moe_make_expert_params_mapping")


class MiniMaxM3QKVWithLoRA(MergedColumnParallelLinearWithLoRA):
    """LoRA on the fused projection of sparse layers (five parts) and dense ones (the first three).

    vLLM packs an adapter by the name of the fused module alone, so that a dense layer is also given five parts; the
    two that it lacks must be empty.
    """

    def __init__(self, base_layer) -> None:
        super().__init__(base_layer)
        keys = self.tp_rank // base_layer.num_kv_head_replicas
        # index_q is divided as the keys are; the one index key head is whole on every rank.
        self.output_ids = (self.tp_rank, keys, keys, keys, 0)[: self.n_slices]

    def set_lora(self, index: int, lora_a, lora_b) -> None:
        count = self.n_slices
        if any(factor is not None for factor in (*lora_a[count:], *lora_b[count:])):
            raise SyncError(f"the adapter has {' or '.join(QKV_PARTS[count:])} for a layer without sparse attention")
        super().set_lora(index, list(lora_a[:count]), list(lora_b[:count]))

    @classmethod
    def can_replace_layer(cls, source_layer, lora_config, packed_modules_list, model_config=None) -> bool:
        fits = type(source_layer) in (FusedQKV, DenseQKV) and list(packed_modules_list) == QKV_PARTS
        if fits and lora_config.fully_sharded_loras:
            raise NotImplementedError("MiniMax-M3: fully_sharded_loras is not supported")
        return fits


class MiniMaxM3ForCausalLM(Base, SupportsLoRA):
    """vLLM's text model with what its LoRA manager asks for."""

    packed_modules_mapping = {"qkv_proj": QKV_PARTS, "gate_up_proj": ["gate_proj", "up_proj"]}

    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        """Names of the routed experts in an adapter. (The checkpoint's own, w1, w2 and w3, are the inner model's.)"""
        return make_expert_mapping(
            self,
            ckpt_gate_proj_name="gate_proj",
            ckpt_down_proj_name="down_proj",
            ckpt_up_proj_name="up_proj",
            num_experts=self.config.num_local_experts,
        )


def _install() -> None:
    utils = patch_target("vllm.lora.utils")
    utils._all_lora_classes = (*patch_target("vllm.lora.utils:_all_lora_classes"), MiniMaxM3QKVWithLoRA)
    if patch_target("vllm.platforms:current_platform").is_cpu():
        from rollout import attention

        attention.install()


_install()
