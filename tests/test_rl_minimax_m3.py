"""The trainer's MiniMax-M3: against the independent forward of m3_checkpoint, its files, paddings and gradients."""

import json

import m3_checkpoint
import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels import msa
from quant.checkpoint import quantize_checkpoint
from rl import block_replay, lora, modeling
from rl.fingerprint import base_tensors
from rl.models.minimax_m3 import (
    MiniMaxM3Attention,
    MiniMaxM3SparseForCausalLM,
    index_losses,
    train_indexer,
)
from rl.models.minimax_m3_config import MiniMaxM3Config
from rl.models.minimax_m3_layout import from_transformers, to_transformers, transformers_config
from rl.sequences import sequences_of

SIZES = m3_checkpoint.Sizes(layers=3, hidden=64, experts=4, inner=32, dense=64, vocabulary=96)
SPEC = lora.LoRASpec(8, 8.0, ("attention", "experts", "shared_experts", "dense_mlp", "index"))
IDS = torch.randint(0, 96, (420,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def weights():
    return m3_checkpoint.weights(SIZES)


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("m3")
    m3_checkpoint.save(folder, SIZES, weights)
    return folder


@pytest.fixture(scope="module")
def trainer(folder):
    return modeling.build(folder, None)


@torch.no_grad()
def logprobs(model, ids: torch.Tensor, **inputs) -> torch.Tensor:
    model.eval()
    logits = model(input_ids=ids.view(1, -1), **inputs).logits[0].float().log_softmax(-1)
    return logits[:-1].gather(-1, ids[1:].unsqueeze(1)).squeeze(1)


def replay(trainer, reference) -> None:
    """Make the trainer take the reference's experts and blocks."""
    routes = torch.full((len(IDS), SIZES.layers, SIZES.top_k), -1)
    routes[:, 1:] = torch.stack(reference.routes, 1)
    trainer.routing.begin(routes)
    trainer.blocks.known, trainer.blocks.enabled = [torch.stack(reference.blocks, 1)], True


@pytest.fixture
def free(trainer):
    yield trainer
    trainer.routing.begin(None)
    trainer.blocks.known, trainer.blocks.enabled, trainer.blocks.recording = None, False, None


def test_forward_agrees_with_an_independent_one_that_rounds_where_the_engine_does(free, weights):
    reference = m3_checkpoint.Reference(SIZES, weights)
    expected = reference.score(IDS.tolist())
    free.blocks.recording = {}
    gap = (logprobs(free.model, IDS) - expected).abs()
    assert gap.mean() < 0.01
    for number, layer in enumerate(free.blocks.layers):
        own, _ = free.blocks.recording[layer, 0]
        assert (own[256:] >= 0).all() and own.shape == (len(IDS), SIZES.kv_heads, SIZES.blocks)
        assert block_replay.same_blocks(own, reference.blocks[number]).float().mean() > 0.98
    replay(free, reference)
    replayed = (logprobs(free.model, IDS) - expected).abs()
    assert replayed.mean() < 1e-3 and replayed.max() < 0.05


def test_blocks_are_really_dropped(free):
    """With every block the long sequence gives other numbers, and the first two blocks do not."""
    layers = [m for m in free.model.modules() if isinstance(m, MiniMaxM3Attention) and m.selection is not None]
    sparse = logprobs(free.model, IDS)
    kept = layers[0].selection
    try:
        for layer in layers:
            layer.selection = msa.Selection(top_k=4)
        dense = logprobs(free.model, IDS)
    finally:
        for layer in layers:
            layer.selection = kept
    assert torch.allclose(sparse[:255], dense[:255], atol=0.02)
    assert (sparse[256:] - dense[256:]).abs().max() > 0.1


def test_padding_and_packing_do_not_change_a_sequence(folder):
    model = modeling.build(folder, None, dtype=torch.float32).model
    alone = logprobs(model, IDS)
    other = IDS.flip(0)[:300]
    with torch.no_grad():
        for left in (0, 37):
            width = len(IDS) + 50
            ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
            ids[0, left : left + len(IDS)], mask[0, left : left + len(IDS)] = IDS, 1
            ids[1, :300], mask[1, :300] = other, 1
            logits = model(input_ids=ids, attention_mask=mask).logits[0, left : left + len(IDS)].log_softmax(-1)
            padded = logits[:-1].gather(-1, IDS[1:].unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(padded, alone, rtol=0, atol=1e-4)
        packed = torch.cat((other, IDS)).unsqueeze(0)
        positions = torch.cat((torch.arange(300), torch.arange(len(IDS)))).unsqueeze(0)
        logits = model(input_ids=packed, position_ids=positions).logits[0, 300:].log_softmax(-1)
        joined = logits[:-1].gather(-1, IDS[1:].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(joined, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("mask", "positions", "message"),
    [
        ([[1, 0, 1]], None, "one run of tokens"),
        (None, [[3, 4, 5]], "must start at 0"),
    ],
)
def test_rows_that_are_no_sequences_are_refused(mask, positions, message):
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        sequences_of(ids, *(None if x is None else torch.tensor(x) for x in (mask, positions)))


def test_quantised_base_and_adapters_have_the_engines_names(folder, tmp_path):
    quantize_checkpoint(folder, tmp_path / "q", progress=False)
    trainer = modeling.build(tmp_path / "q", SPEC)
    base = dict(base_tensors(trainer.model))
    moe = "model.layers.1.block_sparse_moe"
    assert base[f"{moe}.gate.weight"].dtype == base[f"{moe}.e_score_correction_bias"].dtype == torch.float32
    assert {f"{moe}.experts.gate_up_proj#packed", "model.layers.1.self_attn.index_k_proj.weight#data"} <= base.keys()
    adapters = lora.engine_tensors(trainer.model)
    assert {f"{moe}.experts.up_proj.lora_B", "model.layers.0.mlp.down_proj.lora_A"} <= adapters.keys()
    assert not any(name.startswith("model.layers.0.self_attn.index") for name in adapters)
    assert logprobs(trainer.model, IDS).isfinite().all()


def test_checkpoint_round_trip_keeps_every_tensor_and_the_released_names(weights, trainer, folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again[name]) and tensor.dtype == again[name].dtype, name
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {m3_checkpoint.disk_name(name) for name in weights}


@pytest.mark.parametrize("quantised", [False, True])
def test_text_model_of_a_multimodal_checkpoint(weights, trainer, tmp_path, quantised):
    from safetensors.torch import save_file

    plain = tmp_path / "plain"
    plain.mkdir()
    m3_checkpoint.save(plain, SIZES, weights)
    if quantised:
        quantize_checkpoint(plain, tmp_path / "q", progress=False)
        plain = tmp_path / "q"
    expected = logprobs(modeling.build(plain, None).model, IDS)
    from safetensors.torch import load_file

    state = {
        f"language_model.{name}": tensor
        for file in plain.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    state["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(2, 2)
    text = json.loads((plain / "config.json").read_text())
    config = {"model_type": "minimax_m3_vl", "text_config": text}
    if quantised:
        config["quantization_config"] = text.pop("quantization_config")
    whole = tmp_path / "vl"
    whole.mkdir()
    save_file(state, whole / "model.safetensors", {"format": "pt"})
    (whole / "config.json").write_text(json.dumps(config))
    assert torch.equal(logprobs(modeling.build(whole, None).model, IDS), expected)


def test_transformers_layout_is_undone_exactly(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    state = model.state_dict()
    theirs = to_transformers(state)
    assert "model.layers.1.mlp.shared_experts.gate_up_proj.weight" in theirs
    assert "model.layers.1.self_attn.indexer.q_norm.weight" in theirs and not any("block_sparse" in n for n in theirs)
    back = from_transformers(theirs, model.config)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    assert transformers_config(model.config)["layer_types"] == ["full_attention"] + ["minimax_m3_sparse"] * 2


def test_init_blocks_do_not_exist_in_transformers():
    with pytest.raises(ValueError, match="no init blocks"):
        transformers_config(MiniMaxM3Config(sparse_attention_config={"sparse_init_block": 1}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act must be 'swigluoai'"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq has 1 entries for 60 layers"),
        ({"sparse_attention_config": {"sparse_num_index_heads": 2}}, "must equal num_key_value_heads"),
    ],
)
def test_configuration_that_the_model_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MiniMaxM3Config(**change)


# ---- training ------------------------------------------------------------------------------------------------------


def small(**change) -> MiniMaxM3SparseForCausalLM:
    values = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 8,
        "dense_intermediate_size": 16,
        "shared_intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rotary_dim": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layer_freq": [0, 1],
        "initializer_range": 0.3,
        "sparse_attention_config": {
            "sparse_index_dim": 8,
            "sparse_topk_blocks": 2,
            "sparse_block_size": 4,
            "sparse_attention_freq": [1, 1],
        },
    }
    torch.manual_seed(0)
    return MiniMaxM3SparseForCausalLM._from_config(MiniMaxM3Config(**(values | change)), dtype=torch.float32)


def test_indexer_learns_from_its_loss_alone_and_nothing_else_does():
    model = small().train()
    ids = torch.arange(18).view(1, -1)
    train_indexer(model, 1.0)
    logits = model(input_ids=ids).logits
    (logits.sum() * 0.0).backward()
    for name, parameter in model.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.any())
        assert moved == (".index_" in name), name
    assert len(index_losses(model)) == 2 and all(loss > 0 for loss in index_losses(model))
    train_indexer(model, 0.0)
    model.zero_grad()
    (model(input_ids=ids).logits.sum() * 0.0).backward()
    assert not any(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if ".index_" in n)


def test_indexer_loss_falls_and_gradient_checkpointing_changes_nothing():
    ids = torch.randint(0, 32, (2, 22), generator=torch.Generator().manual_seed(0))

    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = small().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        train_indexer(model, 0.1)
        model(input_ids=ids).logits.log_softmax(-1)[..., 0].mean().backward()
        assert len(index_losses(model)) == 4
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys()
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], rtol=1e-5, atol=1e-7)
    model = small().train()
    index = [p for n, p in model.named_parameters() if ".index_" in n]
    optimizer, seen = torch.optim.Adam(index, lr=1e-2), []
    for _ in range(30):
        train_indexer(model, 1.0, dense=True)
        (model(input_ids=ids).logits.sum() * 0.0).backward()
        seen.append(float(sum(index_losses(model))))
        optimizer.step()
        model.zero_grad()
    assert seen[-1] < 0.7 * seen[0]
