"""Routing replay: ids in the model's row layout, refusals, and routers that take them in forward and recomputation."""

import importlib

import pytest
import torch
from tiny_model import build, logits, masters, randomise, spec, token_ids
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from kernels.linear import linear
from rl import replay, stats
from rl.replay import UNKNOWN, ReplayError, RoutingReplay, layout

LAYERS, EXPERTS, TOP_K = 4, 8, 2
ALL = range(LAYERS)


def engine_ids(rows: int, seed: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random distinct expert ids [rows, L, K] as the engine returns them."""
    scores = torch.rand(rows, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(TOP_K, dim=-1).indices.to(dtype)


def replayed(trainer_model, ids: torch.Tensor, known: torch.Tensor | None, **inputs):
    """(logits, ids that each layer used)."""
    routing = trainer_model.routing
    routing.begin(known)
    routing.recording = {}
    return logits(trainer_model, ids, **inputs), routing.recording


# ---- layout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64], ids=str)
def test_padded_layout_puts_every_row_at_its_token(dtype):
    first, second = engine_ids(2, dtype=dtype), engine_ids(4, seed=1, dtype=dtype)
    out = layout([first, second], [3, 5], 6, ALL, EXPERTS).view(2, 6, LAYERS, TOP_K)
    assert out.dtype == torch.int64
    assert torch.equal(out[0, :2], first.long()) and torch.equal(out[1, :4], second.long())
    assert (out[0, 2:] == UNKNOWN).all() and (out[1, 4:] == UNKNOWN).all()


def test_packed_layout_has_one_row_a_token():
    first, second = engine_ids(2), engine_ids(4, seed=1)
    out = layout([first, second], [3, 5], None, ALL, EXPERTS)
    assert out.shape == (8, LAYERS, TOP_K)
    assert torch.equal(out[:2], first.long()) and torch.equal(out[3:7], second.long())
    assert (out[[2, 7]] == UNKNOWN).all()


def test_last_token_is_unknown_even_if_the_engine_sent_a_row_for_it():
    ids = engine_ids(5)
    with_row = torch.cat([ids[:4], torch.zeros_like(ids[:1])])
    assert torch.equal(layout([with_row], [5], 7, ALL, EXPERTS), layout([ids[:4]], [5], 7, ALL, EXPERTS))


def test_sequence_of_one_token_has_no_known_row():
    assert (layout([engine_ids(0)], [1], 3, ALL, EXPERTS) == UNKNOWN).all()


def test_rows_that_the_engine_marks_stay_unknown():
    ids = engine_ids(5, dtype=torch.int16)
    ids[:2] = UNKNOWN  # a prompt that came from the prefix cache
    out = layout([ids], [6], None, ALL, EXPERTS)
    assert (out[[0, 1, 5]] == UNKNOWN).all() and torch.equal(out[2:5], ids[2:].long())


def test_layers_without_a_router_are_not_looked_at():
    ids = engine_ids(5)
    ids[:, 0] = 0  # a dense layer
    assert torch.equal(layout([ids], [6], None, (1, 2, 3), EXPERTS)[:5], ids.long())
    with pytest.raises(ReplayError, match="layer 0"):
        layout([ids], [6], None, ALL, EXPERTS)


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 6])
def test_length_mismatch_is_an_error(rows):
    with pytest.raises(ReplayError, match=f"sequence 1: {rows} rows of expert ids for 5 tokens"):
        layout([engine_ids(4), engine_ids(rows)], [5, 5], 6, ALL, EXPERTS)


def test_number_of_sequences_must_match():
    with pytest.raises(ValueError, match="zip"):
        layout([engine_ids(4)], [5, 5], 6, ALL, EXPERTS)


def test_duplicate_id_is_an_error_that_names_the_token_and_layer():
    ids = engine_ids(4)
    ids[3, 2] = 7
    with pytest.raises(ReplayError, match=r"sequence 0, token 3, layer 2: ids \[7, 7\]: a duplicate id"):
        layout([ids], [5], None, ALL, EXPERTS)


def test_duplicate_after_unknown_rows_is_named_by_its_own_token():
    ids = engine_ids(4, dtype=torch.int16)
    ids[:2], ids[3, 2] = UNKNOWN, 7
    with pytest.raises(ReplayError, match="sequence 0, token 3, layer 2"):
        layout([ids], [5], None, ALL, EXPERTS)


def test_all_zero_block_is_an_error_and_no_route():
    ids = engine_ids(6)
    ids[:3] = 0
    with pytest.raises(ReplayError, match=r"token 0, layer 0: ids \[0, 0\]: rows the engine did not write.*prefix"):
        layout([ids], [7], None, ALL, EXPERTS)


@pytest.mark.parametrize("value", [EXPERTS, 255])
def test_id_out_of_range_is_an_error(value):
    ids = engine_ids(4)
    ids[1, 3, 0] = value
    with pytest.raises(ReplayError, match=rf"sequence 0: expert ids outside 0..7 \(found \d+..{value}\)"):
        layout([ids], [5], None, ALL, EXPERTS)


def test_row_that_is_unknown_in_part_is_an_error():
    ids = engine_ids(4, dtype=torch.int16)
    ids[1, 3] = UNKNOWN
    with pytest.raises(ReplayError, match=r"expert ids outside 0\.\.7"):
        layout([ids], [5], None, ALL, EXPERTS)


def test_ids_of_fewer_layers_are_an_error():
    with pytest.raises(ReplayError, match="expert ids of 3 layers, but layer 3 has a router"):
        layout([engine_ids(4)[:, :3]], [5], None, ALL, EXPERTS)


def test_another_number_of_rows_than_the_model_routes_is_an_error():
    trainer_model = build(None)
    known = layout([engine_ids(19)], [20], None, ALL, EXPERTS)
    with pytest.raises(ReplayError, match=r"layer 0: \(20, 2\) replayed ids for \(40, 2\) routed rows"):
        replayed(trainer_model, token_ids(2, 20), known)


def router_of(model_type: str, class_name: str, **config) -> nn.Module:
    """A router of transformers with random weights, as layer 0 of a model."""
    torch.manual_seed(0)
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    router = getattr(module, class_name)(AutoConfig.for_model(model_type, hidden_size=16, **config))
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    return nn.ModuleDict({"0": nn.ModuleDict({"gate": router})})


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    "model_type, class_name, count",
    [
        ("qwen3_moe", "Qwen3MoeTopKRouter", "num_experts"),
        ("qwen2_moe", "Qwen2MoeTopKRouter", "num_experts"),
        ("olmoe", "OlmoeTopKRouter", "num_experts"),
        ("mixtral", "MixtralTopKRouter", "num_local_experts"),
    ],
)
def test_softmax_routers_are_replaced_by_an_equal_one(model_type, class_name, count, normalise):
    model = router_of(model_type, class_name, **{count: 8, "num_experts_per_tok": 2}, norm_topk_prob=normalise)
    hidden = torch.randn(5, 16)
    _, weights, ids = model["0"]["gate"](hidden)
    assert replay.install(model, RoutingReplay(), linear) == 1
    _, own_weights, own_ids = model["0"]["gate"](hidden)
    assert torch.equal(ids, own_ids)
    torch.testing.assert_close(own_weights, weights)


@pytest.mark.parametrize(
    "model_type, class_name",
    [("gpt_oss", "GptOssTopKRouter"), ("minimax_m2", "MiniMaxM2TopKRouter")],
    ids=["bias", "sigmoid with a selection bias"],
)
def test_router_of_another_kind_is_refused(model_type, class_name):
    model = router_of(model_type, class_name, num_local_experts=8, num_experts_per_tok=2)
    with pytest.raises(ReplayError, match=f"0.gate: routing replay knows softmax and sigmoid top-k, and {class_name}"):
        replay.install(model, RoutingReplay(), linear)


def test_experts_whose_router_is_not_found_are_refused(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = AutoConfig.for_model(
        "glm4_moe", **sizes, **heads, vocab_size=32, n_routed_experts=4, first_k_dense_replace=1
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ReplayError, match=r"Glm4MoeForCausalLM has 1 layers of experts, .* knows 0 of its routers"):
        build(None, tmp_path)


# ---- replay --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_routers_use_the_engines_experts_where_they_are_known():
    trainer_model, ids = build(None), token_ids(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    free, own = replayed(trainer_model, ids, None, attention_mask=mask)
    known = layout([engine_ids(3), engine_ids(5, seed=1)], [4, 6], 6, ALL, EXPERTS)
    forced, used = replayed(trainer_model, ids, known, attention_mask=mask)
    rows = known[:, 0, 0] != UNKNOWN
    assert rows.sum() == 8 and sorted(used) == list(ALL)
    for layer in ALL:
        assert torch.equal(used[layer][rows], known[rows, layer])
    # The first layer's inputs are the same, so the rows that it routes itself are too.
    assert torch.equal(used[0][~rows], own[0][~rows])
    assert not torch.equal(free, forced)


@torch.no_grad()
def test_own_routes_replayed_are_the_free_forward():
    trainer_model, ids = build(None, dtype=torch.float32), token_ids(2, 6)
    free, own = replayed(trainer_model, ids, None)
    known = torch.stack([own[layer] for layer in ALL], dim=1)
    again, _ = replayed(trainer_model, ids, known)
    assert torch.equal(free, again)
    swapped, _ = replayed(trainer_model, ids, known.flip(-1))  # the order of a token's experts means nothing
    torch.testing.assert_close(swapped, free, rtol=1e-3, atol=1e-3)
    assert trainer_model.routing.take_counts()[3] == replay.LayerCount(rows=12, agree=12)


@torch.no_grad()
def test_padding_is_routed_by_the_trainer_to_distinct_experts():
    trainer_model, ids = build(None), token_ids(2, 9)
    mask = torch.ones_like(ids)
    ids[0, 4:], mask[0, 4:] = 0, 0
    known = layout([engine_ids(3), engine_ids(8, seed=1)], [4, 9], 9, ALL, EXPERTS)
    _, used = replayed(trainer_model, ids, known, attention_mask=mask)
    for layer in ALL:
        padding = used[layer].view(2, 9, TOP_K)[0, 4:]
        assert ((padding >= 0) & (padding < EXPERTS)).all() and (padding[:, 0] != padding[:, 1]).all()
    assert all(count.rows == 11 for count in trainer_model.routing.take_counts().values())


def test_gradient_flows_through_the_gate_weights_of_the_replayed_experts():
    class TopKRouter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.top_k = nn.Parameter(torch.randn(EXPERTS, 16)), TOP_K

    torch.manual_seed(0)
    state = RoutingReplay(ids=torch.tensor([[[5, 1]], [[0, 7]], [[UNKNOWN, UNKNOWN]]]))
    router = replay.ReplayRouter(TopKRouter(), state, 0, linear)
    hidden, grad = torch.randn(3, 16, requires_grad=True), torch.randn(3, TOP_K)
    _, weights, ids = router(hidden)
    weights.backward(grad)
    copy = hidden.detach().double().requires_grad_()
    scores = (copy @ router.weight.detach().double().T).softmax(-1)
    assert torch.equal(ids[:2], state.ids[:2, 0]) and torch.equal(ids[2], scores[2].topk(2).indices)
    expected = scores.gather(-1, ids)
    (expected / expected.sum(-1, keepdim=True)).backward(grad.double())
    torch.testing.assert_close(hidden.grad.double(), copy.grad, rtol=1e-5, atol=1e-6)
    assert hidden.grad.any(-1).all() and router.weight.grad.any()


@pytest.mark.parametrize("enabled", [True, False])
def test_recomputation_replays_the_same_routes(enabled):
    """A known route that the trainer would not take: recomputation without it could not match the forward."""
    ids, results = token_ids(2, 6), []
    known = layout([engine_ids(5), engine_ids(5, seed=1)], [6, 6], 6, ALL, EXPERTS)
    for checkpointing in (False, True):
        trainer_model = build(spec(), replay_enabled=enabled)
        randomise(trainer_model.model)
        if checkpointing:
            trainer_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trainer_model.model.train()
        out, used = replayed(trainer_model, ids, known)
        used = dict(used)
        out.float().logsumexp(-1).sum().backward()
        assert all(torch.equal(used[layer], trainer_model.routing.recording[layer]) for layer in ALL)
        results.append((out, {name: p.grad for name, p in masters(trainer_model.model).items()}, used))
    (out, grads, used), (out_again, grads_again, used_again) = results
    assert torch.equal(out, out_again) and all(torch.equal(grads[name], grads_again[name]) for name in grads)
    assert all(torch.equal(used[layer], used_again[layer]) for layer in ALL)
    assert torch.equal(used[0].view(2, 6, 2)[:, :5], known.view(2, 6, 4, 2)[:, :5, 0]) == enabled


# ---- counts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_agreement_counts_sets_of_known_rows_and_is_measured_without_replay_too(enabled):
    state = RoutingReplay(enabled=enabled)
    state.begin(torch.tensor([[[0, 1]], [[2, 3]], [[4, 5]], [[UNKNOWN, UNKNOWN]]]))
    own = torch.tensor([[1, 0], [2, 3], [4, 6], [7, 0]])  # same set, same, one of two, not known
    used = state.choose(0, own)
    assert state.take_counts() == {0: replay.LayerCount(rows=3, agree=2)} and state.counts == {}
    assert used.tolist() == ([[0, 1], [2, 3], [4, 5], [7, 0]] if enabled else own.tolist())


def test_rows_counted_again_by_recomputation_do_not_reach_the_next_micro_batch():
    trainer_model, ids = build(spec()), token_ids(2, 6)
    trainer_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer_model.model.train()
    known = layout([engine_ids(5), engine_ids(5, seed=1)], [6, 6], 6, ALL, EXPERTS)
    batch = {"input_ids": torch.nested.as_nested_tensor(list(ids), layout=torch.jagged)}
    for _ in range(2):  # as verl drives it: forward, metrics, backward, and again
        out, _ = replayed(trainer_model, ids, known)
        trainer_model.routing.tokens = 12
        metrics = stats.routing_metrics(trainer_model.routing, batch)
        values = stats.finish({name: metric.aggregate() for name, metric in metrics.items()})
        assert values["replayed_fraction"] == 10 / 12
        out.float().logsumexp(-1).sum().backward()
    assert trainer_model.routing.counts[0].rows == 10  # what the check above must not see
