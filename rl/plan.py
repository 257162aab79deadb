"""What a recipe needs in memory and what a sync sends, from the model's config.json alone: arithmetic, no torch.

Every number is in bytes unless its name says GiB. docs/planning.md has the formulas, where each constant comes from and
what was measured. One plan is for one device: a GPU, or, without one, the RAM of a node (then every item counts once
for each of the node's workers). Trainer and engine share the device.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rl.plan_shapes import Factor, Group, Matrix, Shape, adapter_factors, matrix_bytes, planned_rule
from rl.schema import Recipe

GIB = 2**30
GATHERED_GROUPS = 3
"""FSDP2 with several workers: the layer at work, its all-gather buffer, and the one of the layer that comes next."""
LOGITS_TOGETHER = 1 << 28
"""Most logits that exist at once: the head takes so many a chunk, in the backward pass again (rl.modeling)."""
LOGITS_BYTES = 12
"""Of a logit of a chunk at the peak, in its backward pass: float32 log-probs and two gradients."""
ENTROPY_LOGITS_BYTES = 24
"""The same where an entropy bonus is trained."""
DECODED_BYTES = GIB
"""Weights of one layer that are decoded at a time on a GPU (quant.matmul)."""
RESERVED_BYTES = {"gpu": 4 * GIB, "cpu": 1 * GIB}
"""Assumed. GPU: two CUDA contexts, NCCL and what the allocators lose; CPU: Ray and the controller."""
PROCESS_BYTES = GIB * 3 // 4
"""A CPU worker or engine process before it holds any weight."""
GRAPHS_BYTES = GIB
"""Assumed for CUDA graphs."""
BUCKET_BYTES = {"gpu": 2 * GIB, "cpu": 64 << 20}
"""Buffer through which verl sends an adapter (update_weights_bucket_megabytes)."""
CPU_KV_BYTES = GIB
"""Of an engine without a GPU, where the recipe does not say (rl.verl_config)."""
CPU_KEPT_BYTES = 256 << 20
"""Experts of a layer whose decoded weights the CPU engine keeps (rollout.experts)."""
CHUNK_ELEMENTS = 1 << 22
"""Most pairs of query and key whose mask is made at once (kernels.msa); up to it, it stays for the backward pass."""
EXPERT_TOKENS = 8192
"""Most tokens that a layer's experts take at once (quant.experts); the backward pass makes each chunk again."""


@dataclass(frozen=True)
class Machine:
    """What there is: `kind` is gpu or cpu, `gib` a GPU's memory or the node's RAM, `host_gib` a node's RAM if known."""

    kind: str
    gib: float
    source: str
    host_gib: float | None = None

    @property
    def unit(self) -> str:
        return "GPU" if self.kind == "gpu" else "node"


@dataclass
class Plan:
    """Bytes by item, for one device, and the verdict."""

    recipe: str
    machine: Machine
    parameters: dict[str, int]
    base_bytes: int
    adapter_parameters: int
    tokens: int
    """Of a micro-batch, without padding."""
    workers: int
    trainer: dict[str, int] = field(default_factory=dict)
    """Held all the time."""
    update: dict[str, int] = field(default_factory=dict)
    """On top of it while a micro-batch runs."""
    sync: dict[str, int] = field(default_factory=dict)
    """On top of it while the adapter is sent."""
    engine: dict[str, int] = field(default_factory=dict)
    reserved: int = 0
    kv_token_bytes: int = 0
    kv_model_token_bytes: int = 0
    """The same over all devices of an engine copy, each byte once."""
    sequences: int = 0
    """Of maximal length, that the KV cache of an engine copy holds."""
    sequence_bytes: int = 0
    """KV cache of one sequence of maximal length, for one device."""
    kv_missing: int = 0
    """Bytes that a cache for one sequence lacks."""
    sync_bytes: int = 0
    full_sync_bytes: int = 0
    host_bytes: int = 0
    """RAM of a node while its workers load the base; 0 without a GPU."""

    @property
    def peak(self) -> str:
        """The phase with the larger need: update or sync."""
        return "update" if sum(self.update.values()) >= sum(self.sync.values()) else "sync"

    @property
    def needed(self) -> int:
        """At the peak."""
        static = sum(self.trainer.values()) + sum(self.engine.values()) + self.reserved
        return static + max(sum(self.update.values()), sum(self.sync.values()))

    @property
    def missing(self) -> int:
        """Bytes by which it does not fit: device, host and the KV cache of one sequence, added up."""
        device = max(0, self.needed - int(self.machine.gib * GIB))
        host = 0 if self.machine.host_gib is None else max(0, self.host_bytes - int(self.machine.host_gib * GIB))
        return device + host + self.kv_missing

    @property
    def fits(self) -> bool:
        return self.missing == 0

    def as_dict(self) -> dict[str, Any]:
        """For --json and config.json."""
        return {"schema": 1, "fits": self.fits, "peak": self.peak, "needed": self.needed, **asdict(self)}


def make_plan(
    recipe: Recipe,
    shape: Shape,
    machine: Machine,
    rule: Callable[[str], str | None] | None = None,
) -> Plan:
    """The plan of a recipe on a machine; `rule` names each module's format (None: those of a checkpoint to come).

    PlanError for `lora_targets` that match nothing.
    """
    return _Planner(recipe, shape, machine, rule or planned_rule()).plan()


class _Planner:
    def __init__(self, recipe: Recipe, shape: Shape, machine: Machine, rule: Callable[[str], str | None]) -> None:
        self.recipe, self.shape, self.machine, self.rule = recipe, shape, machine, rule
        self.gpu = machine.kind == "gpu"
        self.workers = recipe.trainer.fsdp_workers
        self.copies = 1 if self.gpu else recipe.trainer.gpus_per_node  # of every item in the RAM of a node
        self.itemsize = 2 if recipe.model.dtype == "bfloat16" else 4
        model = recipe.model
        self.targets = list(model.lora_targets)
        self.factors = adapter_factors(shape, self.targets, model.lora_rank, model.share_gate_up_a)
        budget = recipe.trainer.max_tokens_per_micro_batch
        self.tokens = budget or recipe.trainer.micro_batch_size * recipe.max_model_len
        self.sequences = recipe.trainer.micro_batch_size if budget is None else self.tokens  # at most, in a micro-batch

    def bytes_of(self, matrix: Matrix) -> int:
        """A matrix or stack as the checkpoint has it."""
        return matrix_bytes(matrix, self.rule(matrix.module) if matrix.columns else None, self.itemsize)

    def plan(self) -> Plan:
        shape, recipe = self.shape, self.recipe
        parameters = shape.parameters()
        wire = adapter_factors(shape, self.targets, recipe.model.lora_rank, False)  # gate's and up's A go apart
        plan = Plan(
            recipe=recipe.name,
            machine=self.machine,
            parameters=parameters,
            base_bytes=sum(self.bytes_of(matrix) for matrix in shape.matrices()),
            adapter_parameters=sum(factor.elements for factor in self.factors),
            tokens=self.tokens,
            workers=self.workers,
            sync_bytes=2 * sum(factor.elements for factor in wire),
            full_sync_bytes=2 * sum(parameters.values()),
        )
        self._trainer(plan)
        self._engine(plan)
        plan.reserved = RESERVED_BYTES[self.machine.kind] + (0 if self.gpu else 2 * PROCESS_BYTES * self.copies)
        if self.gpu:
            plan.host_bytes = recipe.trainer.gpus_per_node * (plan.base_bytes + 4 * plan.adapter_parameters)
        for items in (plan.trainer, plan.update, plan.sync, plan.engine):
            for name in items:
                items[name] *= self.copies
        return plan

    # ---- trainer ---------------------------------------------------------------------------------------------------

    def _trainer(self, plan: Plan) -> None:
        shards = sum(_shard(factor, self.workers) for factor in self.factors)
        plan.trainer = {
            "frozen base": sum(self._base_shard(matrix) for matrix in self.shape.matrices()),
            "adapter, float32": 4 * shards,
            "gradients, float32": 4 * shards,
            "Adam moments, float32": 8 * shards,
        }
        gathered = {group.name: self._gathered(group) for group in self.shape.groups}
        largest = max(gathered, key=gathered.__getitem__)
        groups = GATHERED_GROUPS if self.workers > 1 else 1
        layer = sum(factor.elements for factor in self.factors if factor.group == largest)
        vocabulary, longest = self.shape.vocabulary, self.recipe.max_model_len
        # A micro-batch of one longest sequence, or of many whose masks are kept.
        lengths = (longest, min(longest, math.isqrt(CHUNK_ELEMENTS)))
        kept, peak = max((self._activations(length) for length in lengths), key=sum)
        logits = min(self.tokens, max(1, LOGITS_TOGETHER // vocabulary)) * vocabulary * self._logit_bytes()
        last = "logits of a chunk" if logits >= peak else "backward of one layer"
        plan.update = {
            "gathered layers": groups * gathered[largest],
            "gradients of a layer": (self.itemsize + 4) * layer,
            "activations kept": kept,
            last: max(logits, peak),
        }
        # verl clones what it receives twice before vLLM takes it (vllm_rollout/utils.py).
        plan.sync = {
            "adapter on its way": 2 * plan.sync_bytes,
            "transfer buffer": min(BUCKET_BYTES[self.machine.kind], plan.sync_bytes),
        }

    def _base_shard(self, matrix: Matrix) -> int:
        """FSDP2 splits dimension 0 and pads: every worker holds as much as the one with most."""
        if matrix.buffer:
            return self.bytes_of(matrix)
        each = math.ceil(matrix.first_dimension / self.workers)
        return math.ceil(self.bytes_of(matrix) / matrix.first_dimension * each)

    def _gathered(self, group: Group) -> int:
        """A group whole, with its adapter in the compute dtype."""
        base = sum(self.workers * self._base_shard(matrix) for matrix in group.matrices if not matrix.buffer)
        mine = [factor for factor in self.factors if factor.group == group.name]
        return base + self.itemsize * sum(self.workers * _shard(factor, self.workers) for factor in mine)

    def _logit_bytes(self) -> int:
        return ENTROPY_LOGITS_BYTES if self.recipe.algorithm.entropy_coef > 0 else LOGITS_BYTES

    def _activations(self, length: int) -> tuple[int, int]:
        """(kept until the backward pass, what the backward pass of the worst layer needs on top), of sequences of
        `length` tokens."""
        shape, tokens = self.shape, self.tokens
        double = 1 if self.gpu else 2  # without a GPU products are computed in float32
        kept, peaks, overs = 0, [], []
        for (routed, sparse), count in self._layer_kinds().items():
            saved, peak = layer_bytes(shape, self.targets, routed, tokens)
            attention, pairs = self._attention_bytes(length, sparse)
            masks = min(tokens, self.sequences * length) * self._mask_bytes(length, sparse)
            kept += double * count * (saved + masks)
            overs += [double * (peak - saved), pairs]
            peaks += [double * (peak + masks), double * (attention + masks) + pairs]
        decoded = min(DECODED_BYTES, self._decoded_layer()) if self.gpu else self._decoded_layer()
        if self.recipe.model.gradient_checkpointing:
            inputs = (2 if shape.model_type == "minimax_m3_text" else 1) * shape.hidden * self.itemsize
            return tokens * (shape.layers + 1) * inputs, max(peaks) + decoded  # 1: the final norm's input
        return kept, max(overs) + decoded

    def _layer_kinds(self) -> Counter[tuple[bool, bool]]:
        """How many layers have (routed experts, selected blocks)."""
        kinds = [{matrix.kind for matrix in group.matrices} for group in self.shape.groups]
        return Counter(("experts" in kind, "index" in kind) for kind in kinds if "attention" in kind)

    def _mask_bytes(self, length: int, sparse: bool) -> int:
        """Bytes a token of the mask that attention keeps for its backward pass (kernels.msa.attend, sdpa's bias)."""
        shape = self.shape
        if not sparse:
            return 0 if shape.model_type == "minimax_m3_text" else 2 * length
        # And the output of each sequence beside that of the batch.
        return 2 * shape.heads * (length + shape.head_dim) if length**2 <= CHUNK_ELEMENTS else 0

    def _attention_bytes(self, length: int, sparse: bool) -> tuple[int, int]:
        """Of the backward pass of attention itself, a kept mask not included: (of all tokens, of the pairs of query and
        key that exist at once)."""
        shape = self.shape
        query, key, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
        if not sparse:
            return self.tokens * (8 * hidden + 24 * query), 0
        bias = 0 if self._mask_bytes(length, sparse) else self.itemsize if self.gpu else 4
        state = max(12 * hidden + 14 * query + 11 * key, 6 * hidden + 18 * query + 5 * key)
        return self.tokens * state, shape.heads * min(length**2, CHUNK_ELEMENTS) * (1 + bias)

    def _decoded_layer(self) -> int:
        """One layer's largest stack of experts, decoded to bf16 (float32 without a GPU)."""
        stacks = [m.elements for m in self.shape.matrices() if m.kind == "experts" and self.rule(m.module)]
        return max(stacks, default=0) * 2 * (self.itemsize if self.gpu else 4)

    # ---- engine ----------------------------------------------------------------------------------------------------

    def _engine(self, plan: Plan) -> None:
        shape, rollout = self.shape, self.recipe.rollout
        width = rollout.tensor_parallel_size
        items = {
            "base": sum(self._base_part(matrix, width) for matrix in shape.matrices()),
            "adapter buffers": self._adapter_buffers(width),
        }
        if self.gpu:
            items["workspace"] = self._workspace(width)
            if not rollout.enforce_eager:
                items["CUDA graphs"] = GRAPHS_BYTES
        else:
            items["decoded weights"] = self._decoded_engine(width)
        item = (1 if rollout.kv_cache_dtype == "fp8" else self.itemsize) if self.gpu else 4
        heads = math.ceil(shape.kv_heads / width)
        index = sum(shape.index_dims)
        plan.kv_token_bytes = item * (2 * shape.layers * heads * shape.head_dim + index)
        plan.kv_model_token_bytes = item * (2 * shape.layers * shape.kv_heads * shape.head_dim + index)
        if rollout.kv_cache_gib is not None or not self.gpu:
            room = CPU_KV_BYTES if rollout.kv_cache_gib is None else int(rollout.kv_cache_gib * GIB)
        else:
            room = int(rollout.gpu_memory_utilization * self.machine.gib * GIB) - sum(items.values())
        sequence = plan.sequence_bytes = plan.kv_token_bytes * self.recipe.max_model_len
        plan.sequences, plan.kv_missing = max(0, room // sequence), max(0, sequence - room)
        items["KV cache"] = max(0, room)
        plan.engine = items

    def _base_part(self, matrix: Matrix, width: int) -> int:
        whole = matrix.kind in ("router", "norm")
        return self.bytes_of(matrix) if whole else math.ceil(self.bytes_of(matrix) / width)

    def _adapter_buffers(self, width: int) -> int:
        """vLLM has a slot for every module that it could adapt, whatever the targets; A is whole, B is split (for
        down_proj and o_proj the other way round)."""
        rank, total = self.recipe.model.lora_rank, 0
        for matrix in self.shape.matrices():
            if not matrix.columns or matrix.kind in ("router", "embedding", "norm"):
                continue
            rows, columns = matrix.rows, matrix.columns
            if matrix.leaf in ("o_proj", "down_proj", "w2"):
                columns = math.ceil(columns / width)
            else:
                rows = math.ceil(rows / width)
            total += matrix.count * rank * (rows + columns)
        return self.itemsize * total

    def _workspace(self, width: int) -> int:
        """Estimate: a forward of max_num_batched_tokens, and float32 logits of max_num_seqs with their log-softmax."""
        shape, rollout = self.shape, self.recipe.rollout
        token = 12 * shape.hidden + 2 * shape.top_k * (2 * shape.hidden + 6 * math.ceil(shape.inner / width))
        return rollout.max_num_batched_tokens * token + 8 * rollout.max_num_seqs * shape.vocabulary

    def _decoded_engine(self, width: int) -> int:
        """Float32 weights that the CPU engine keeps beside the bytes (rollout.cpu, rollout.experts)."""
        kept = 0
        for group in self.shape.groups:
            matrices = [matrix for matrix in group.matrices if matrix.columns and matrix.kind != "embedding"]
            stacks = 4 * sum(matrix.elements for matrix in matrices if matrix.kind == "experts")
            kept += 4 * sum(matrix.elements for matrix in matrices if matrix.kind != "experts")
            kept += stacks if stacks <= CPU_KEPT_BYTES * width else 0
        return math.ceil(kept / width)


def _shard(factor: Factor, workers: int) -> int:
    """Elements that each worker holds of a trainable tensor, with FSDP2's padding."""
    return math.ceil(factor.first / workers) * factor.rest


def layer_bytes(shape: Shape, targets: list[str], routed: bool, tokens: int) -> tuple[int, int]:
    """(saved for the backward pass, peak of its own backward pass, those included) in bytes, of one layer.

    Counted on rl.models.minimax_m3 in bf16, along a GPU's path: tests/test_rl_plan_memory.py. Masks are not included.
    """
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention, hidden = 12 * query + 4 * key, shape.hidden
    if not routed:
        adapted = "dense_mlp" in targets
        saved = (12 if adapted else 10) * hidden + (26 if adapted else 24) * shape.dense_inner
        return tokens * (attention + saved), tokens * (attention + 16 * hidden + 40 * shape.dense_inner)
    adapted = "experts" in targets
    outside = attention + (26 if "shared_experts" in targets else 24) * shape.shared_inner
    wide, narrow = (28 if adapted else 14) * hidden + 30 * shape.inner, 6 * hidden + 40 * shape.inner
    experts = shape.top_k * max(wide, narrow)
    if tokens > EXPERT_TOKENS:
        peak = tokens * (outside + 16 * hidden) + EXPERT_TOKENS * (experts - 2 * hidden)
        return tokens * (outside + 12 * hidden), peak
    kept = (8 * hidden + 26 * shape.inner) if adapted else (2 * hidden + 24 * shape.inner)
    saved = outside + (12 if adapted else 10) * hidden + shape.top_k * kept
    return tokens * saved, tokens * (outside + 18 * hidden + experts)
