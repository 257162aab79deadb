"""What lockstep asks of a vLLM worker: fingerprints of its weights and adapter, and proof that an adapter is bound.

`EngineWorker` is mixed into vLLM's worker class (`worker_extension_cls`), so its methods are reachable through
collective_rpc on every worker. It answers with digests under canonical names, which are the trainer's: Hugging Face
module names, experts stacked, and `name#part` for the byte tensors of a quantised matrix.
"""

from collections.abc import Iterator

import torch
from torch import nn

from rollout import marlin
from rollout.fingerprint import EngineError, digests
from rollout.patching import patch_target
from rollout.sampling import packed
from rollout.sleep import SleepWorker

PEFTHelper = patch_target("vllm.lora.peft_helper:PEFTHelper")
tensor_parallel_rank = patch_target("vllm.distributed:get_tensor_model_parallel_rank")
tensor_parallel_size = patch_target("vllm.distributed:get_tensor_model_parallel_world_size")


class SyncError(EngineError):
    """An adapter that the engine did not take whole; the message names the tensors."""


def canonical_name(name: str) -> str:
    """Engine module or parameter name without the segments that LoRA and the MoE runner add."""
    return name.replace(".base_layer", "").replace(".routed_experts", "")


def _row_parts(model: nn.Module, name: str, module: nn.Module, rows: int) -> list[tuple[str, int]]:
    """(canonical name, rows) of the matrices fused along the `rows` rows of a linear `module`."""
    parent, _, leaf = name.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(leaf)
    if parts is None:
        return [(name, rows)]
    sizes = module.output_partition_sizes
    return [(f"{parent}.{part}", size) for part, size in zip(_fused(parts, len(sizes)), sizes, strict=True)]


def _fused(parts: list[str], count: int) -> list[str]:
    """The parts of one fused module: MiniMax-M3's dense layers lack the last two that its sparse layers fuse."""
    return parts[:3] if (count, len(parts)) == (3, 5) else parts


def _linear_tensors(model: nn.Module, name: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    quantised = hasattr(module, "weight_scale")
    weight, scale, bias = module.weight, getattr(module, "weight_scale", None), module._parameters.get("bias")
    if quantised and marlin.is_repacked(weight):
        with marlin.naming(name):
            weight, scale, bias = marlin.linear_tensors(module)
    start = 0
    for part, rows in _row_parts(model, name, module, weight.shape[0]):
        block = slice(start, start + rows)
        if quantised:
            yield f"{part}.weight#data", weight[block]
            yield f"{part}.weight#scale", scale[block]
        else:
            yield f"{part}.weight", weight[block]
        if bias is not None:
            yield f"{part}.bias", bias[block]
        start += rows


def _expert_tensors(name: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for engine, part in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        weight = getattr(module, f"{engine}_weight")
        if weight.is_floating_point():
            yield f"{name}.{part}", weight
            continue
        if marlin.is_repacked(weight):
            with marlin.naming(f"{name}.{part}"):
                tensors = marlin.expert_tensors(module, engine)
        else:
            tensors = (weight, *(getattr(module, f"{engine}_weight_{scale}") for scale in ("scale", "scale_2")))
        for kind, tensor in zip(("packed", "scale", "global_scale"), tensors, strict=True):
            yield f"{name}.{part}#{kind}", tensor


def base_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight tensor of a vLLM model under its canonical name, in the checkpoint's own layout.

    For layouts that keep the checkpoint's bytes (the CPU platform, unquantised models) and for Marlin's, which is
    undone exactly (`rollout.marlin`). Tensors in another layout come as they are, and differ from the trainer's.
    """
    seen: set[int] = set()
    for raw_name, module in model.named_modules():
        name = canonical_name(raw_name)
        if id(module) in seen:
            continue
        if hasattr(module, "w13_weight"):
            seen.add(id(module))
            yield from _expert_tensors(name, module)
        elif hasattr(module, "output_partition_sizes") and "weight" in module._parameters:
            seen.add(id(module))
            yield from _linear_tensors(model, name, module)
        else:
            for leaf, parameter in module._parameters.items():
                # KV-cache scales of vLLM's attention are parameters of the engine, not of the model.
                if parameter is not None and not leaf.startswith("_"):
                    seen.add(id(module))
                    if hasattr(module, "shard_indices"):  # rows beyond are padding
                        parameter = parameter[: module.shard_indices.num_org_elements]
                    yield f"{name}.{leaf}" if name else leaf, parameter


def adapter_tensors(manager, adapter_id: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (canonical name, tensor) of an active adapter from the buffers that the LoRA kernels use, at its true rank.

    Raises SyncError if the adapter is in no slot, or brought tensors that no module took.
    """
    if adapter_id not in manager.lora_index_to_id:
        raise SyncError(f"adapter {adapter_id} is in no slot of the engine (slots: {manager.lora_index_to_id})")
    slot = manager.lora_index_to_id.index(adapter_id)
    adapter = manager.get_adapter(adapter_id)
    unbound = sorted(set(adapter.loras) - set(manager.modules))
    if unbound:
        raise SyncError(f"the engine has no module for {len(unbound)} parts of the adapter: {', '.join(unbound[:5])}")
    for raw_name, weights in adapter.loras.items():
        yield from _layer_tensors(
            canonical_name(raw_name), manager, manager.modules[raw_name], weights, slot, adapter.rank
        )


def _layer_tensors(name: str, manager, layer: nn.Module, weights, slot: int, rank: int):
    parent, _, leaf = name.rpartition(".")
    if hasattr(layer, "w13_lora_a_stacked"):
        stacked_a = (*layer.w13_lora_a_stacked, *layer.w2_lora_a_stacked)
        stacked_b = (*layer.w13_lora_b_stacked, *layer.w2_lora_b_stacked)
        for part, a, b in zip(("gate_proj", "up_proj", "down_proj"), stacked_a, stacked_b, strict=True):
            yield f"{name}.{part}.lora_A", a[slot, :, :rank]
            yield f"{name}.{part}.lora_B", b[slot, :, :, :rank]
        return
    parts = _fused(manager.packed_modules_mapping.get(leaf, [leaf]), len(layer.lora_a_stacked))
    given = weights.lora_a[: len(parts)] if isinstance(weights.lora_a, list) else [weights.lora_a]
    for part, source, a, b in zip(parts, given, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
        if source is not None:  # a fused matrix of which the adapter targets other parts
            yield f"{parent}.{part}.lora_A", a[slot, 0, :rank]
            yield f"{parent}.{part}.lora_B", b[slot, 0, :, :rank]


COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "index_q_proj", "gate_proj", "up_proj")
KEY_PARALLEL = ("k_proj", "v_proj", "index_q_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


def shard_of(name: str, shape: tuple[int, ...], rank: int, kv_replicas: int, vocabulary_start: int) -> dict | None:
    """Which part of a whole tensor `rank` holds (`fingerprint.cut`), by its canonical name; None: all of it.

    Outputs of q, k, v, index_q, gate and up and rows of embeddings are divided, inputs of o and down; an adapter's
    factor follows the side of its matrix that is divided. A wrong answer cannot pass: the hashes would differ.
    """
    module, _, leaf = name.partition("#")[0].rpartition(".")
    projection = module.rpartition(".")[2] if leaf in ("weight", "bias", "lora_A", "lora_B") else leaf
    if name.endswith("global_scale"):
        return None
    if projection in ("embed_tokens", "lm_head"):
        return {"dim": 0, "start": vocabulary_start, "stop": vocabulary_start + shape[0], "halves": False}
    if projection in COLUMN_PARALLEL and leaf != "lora_A":
        dim = len(shape) - 2 if leaf == "lora_B" else 0
    elif projection in ROW_PARALLEL and leaf not in ("lora_B", "bias"):
        dim = len(shape) - 1
    elif projection == "gate_up_proj":
        dim = 1
    else:
        return None
    part = rank // kv_replicas if projection in KEY_PARALLEL else rank
    length = shape[dim] // 2 if projection == "gate_up_proj" else shape[dim]
    return {"dim": dim, "start": part * length, "stop": (part + 1) * length, "halves": projection == "gate_up_proj"}


class EngineWorker(SleepWorker):
    """Methods that vLLM's worker gains; every name starts with lockstep_ so that none can clash with vLLM's."""

    def lockstep_base_digests(self, detail: bool = False) -> dict[str, dict]:
        """Digest of every base tensor that this worker holds now; under tensor parallelism with its `shard_of`."""
        return self._with_shards(digests(base_tensors(self.model_runner.model), detail))

    def lockstep_adapter_digests(self, adapter_id: int, detail: bool = False) -> dict[str, dict]:
        """Digest of every tensor of the active adapter as the LoRA kernels see it; SyncError if it is not whole."""
        manager = self.model_runner.lora_manager._adapter_manager
        return self._with_shards(digests(adapter_tensors(manager, adapter_id), detail))

    def _with_shards(self, found: dict[str, dict]) -> dict[str, dict]:
        if tensor_parallel_size() == 1:
            return found
        modules = list(self.model_runner.model.modules())
        replicas = next((m.num_kv_head_replicas for m in modules if hasattr(m, "num_kv_head_replicas")), 1)
        start = next(m.shard_indices.org_vocab_start_index for m in modules if hasattr(m, "shard_indices"))
        for name, entry in found.items():
            shard = shard_of(name, tuple(entry["shape"]), tensor_parallel_rank(), replicas, start)
            if shard is not None:
                entry["shard"] = shard
        return found

    def lockstep_limit_vocabulary(self, vocabulary: int) -> None:
        """Give ids from `vocabulary` on (padding of the embedding) no probability, as verl does in its servers."""
        model = self.model_runner.model
        compute_logits = model.compute_logits

        def limited(*args, **kwargs):
            logits = compute_logits(*args, **kwargs)
            logits[..., vocabulary:] = float("-inf")
            return logits

        model.compute_logits = limited

    def lockstep_record_blocks(self, on: bool) -> None:
        """Note the blocks that every sparse attention layer selects (`attention.BlockRecorder`), or stop."""
        if on:
            if not hasattr(self, "_lockstep_blocks"):
                from rollout.attention import BlockRecorder

                self._lockstep_blocks = BlockRecorder(self.model_runner)
            self._lockstep_blocks.start()
        elif hasattr(self, "_lockstep_blocks"):
            self._lockstep_blocks.stop()

    def lockstep_take_blocks(self) -> list[dict]:
        """Records since the last call, one a forward call and layer, `sampling.packed`: {"layer": of the model,
        "request_ids": list of str, "requests" [T] (of request_ids), "positions" [T], "blocks" [T, Hi, K], -1 for none}.
        """
        return [packed(record) for record in self._lockstep_blocks.take()] if hasattr(self, "_lockstep_blocks") else []

    def lockstep_load_adapter(self, adapter_id: int, tensors: dict[str, torch.Tensor], config: dict) -> None:
        """Replace adapter `adapter_id` by `tensors` (vLLM's adapter names) from memory and activate it.

        Raises SyncError when nothing was sent or a tensor binds to no module.
        """
        if not any("lora_A" in name for name in tensors):
            raise SyncError(f"{len(tensors)} tensors were sent and none is of an adapter")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the engine may still compute with the adapter that is replaced
        lora_manager = self.model_runner.lora_manager
        lora_manager.remove_adapter(adapter_id)
        manager = lora_manager._adapter_manager
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(lora_manager.lora_config)
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapter = lora_manager._lora_model_cls.from_lora_tensors(
            lora_model_id=adapter_id,
            tensors=tensors,
            peft_helper=helper,
            device="cpu",
            dtype=lora_manager.lora_config.lora_dtype,
            model_vocab_size=lora_manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter_id)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        next(adapter_tensors(manager, adapter_id))
