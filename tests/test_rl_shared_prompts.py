"""Rows that begin alike: the layout, and that sharing changes neither log-probs nor gradients."""

from types import SimpleNamespace

import m3_checkpoint
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl_batches import jagged

from quant.checkpoint import quantize_checkpoint
from rl import lora, modeling, shared_prompts
from rl.engine import LockstepEngine

SIZES = m3_checkpoint.Sizes(layers=3, hidden=64, experts=4, inner=32, dense=64, vocabulary=96)
SPEC = lora.LoRASpec(4, 4.0, ("attention", "experts", "shared_experts", "dense_mlp"))


def batch(prompts: list[int], rows: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """ids and mask [B, T] of rows (which prompt, length of the response), padded on the right, and prompt lengths."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(3, 96, (count,), generator=generator)

    texts = [draw(length) for length in prompts]
    whole = [torch.cat((texts[prompt], draw(length))) for prompt, length in rows]
    width = max(map(len, whole))
    ids = torch.stack([torch.cat((row, row.new_zeros(width - len(row)))) for row in whole])
    mask = torch.stack([(torch.arange(width) < len(row)).long() for row in whole])
    return ids, mask, [prompts[prompt] for prompt, _ in rows]


def test_every_token_of_every_row_is_found_at_its_place():
    ids, mask, prompts = batch([300, 40, 7], [(0, 5), (1, 3), (0, 9), (2, 30), (1, 1), (0, 2)])
    shared = shared_prompts.share(ids, mask, prompts)
    assert shared.source.numel() == 300 + 5 + 9 + 2 + 40 + 3 + 1 + 37
    computed = ids.flatten()[shared.source]
    assert torch.equal(shared.spread(computed[None, :, None]).squeeze(-1)[mask.bool()], ids[mask.bool()])
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    assert torch.equal(shared.positions[shared.place][mask.bool()], positions[mask.bool()])
    for part in shared.parts:
        start = 0 if part.before is None else part.before.stop - part.before.start
        assert shared.positions[part.own.start] == start


def test_other_prompts_that_begin_alike_are_other_groups():
    ids, mask, prompts = batch([30, 30], [(0, 5), (1, 3), (0, 7)])
    ids[:, :25] = 5  # a system message
    shared = shared_prompts.share(ids, mask, prompts)
    assert [part.before for part in shared.parts] == [None, slice(0, 30), slice(0, 30), None]
    assert shared.source.numel() == 30 + 5 + 7 + 33


def test_long_answers_share_their_prompt_and_what_they_have_in_common():
    ids, mask, prompts = batch([20], [(0, 100), (0, 120)])
    ids[1, 20:25] = ids[0, 20:25]
    ids[1, 25] = ids[0, 25] + 1
    assert shared_prompts.share(ids, mask, prompts).source.numel() == 25 + 95 + 115


def test_equal_rows_keep_a_token_each():
    ids, mask, prompts = batch([50], [(0, 0), (0, 0)])
    assert shared_prompts.share(ids, mask, prompts).source.numel() == 49 + 2


def test_tokens_with_other_experts_are_not_shared():
    ids, mask, prompts = batch([50], [(0, 4), (0, 4)])
    experts = torch.tensor([0, 1]).expand(ids.numel(), 1, 2).clone()
    experts[ids.shape[1] + 40] = torch.tensor([0, 2])
    experts[ids.shape[1] + 20] = torch.tensor([1, 0])  # the same two
    shared = shared_prompts.share(ids, mask, prompts, experts)
    assert shared.parts[0].own == slice(0, 40)


@pytest.mark.parametrize("column", [0, slice(None)])
def test_left_padding_and_empty_rows_are_refused(column):
    ids, mask, prompts = batch([20], [(0, 4), (0, 4)])
    mask[1, column] = 0
    with pytest.raises(ValueError, match="padded on the right"):
        shared_prompts.share(ids, mask, prompts)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m3")
    (folder / "plain").mkdir()
    m3_checkpoint.save(folder / "plain", SIZES, m3_checkpoint.weights(SIZES))
    quantize_checkpoint(folder / "plain", folder / "quantised", progress=False)
    trainer = modeling.build(folder / "quantised", SPEC, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    for adapter in lora.adapters(trainer.model).values():
        for parameter in adapter.parameters(recurse=False):
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    return trainer


def log_probs(trainer, labels: torch.Tensor, **inputs) -> torch.Tensor:
    trainer.model.lm_head.ask(labels)
    try:
        return trainer.model(**inputs, use_cache=False).logits[..., 0]
    finally:
        trainer.model.lm_head.ask(None)


def gradients(trainer, values: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    trainer.model.zero_grad()
    (values * weights).sum().backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("replayed", "checkpointing"), [(False, False), (True, True)])
def test_log_probs_and_gradients_are_those_of_the_plain_layout(trainer, replayed, checkpointing):
    """Prompts of more blocks than are selected, and a response that begins in a block and ends in the next."""
    ids, mask, prompts = batch([390, 300], [(0, 3), (1, 90), (0, 1), (1, 9)])
    model = trainer.model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    labels = ids.roll(-1, dims=-1)
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(4)) * mask
    experts = None
    if replayed:
        generator = torch.Generator().manual_seed(5)
        choices = torch.rand(ids.numel(), SIZES.layers, SIZES.experts, generator=generator).argsort(-1)
        experts = choices[..., : SIZES.top_k].view(*ids.shape, SIZES.layers, SIZES.top_k)
        experts[2, :390], experts[3, :300] = experts[0, :390], experts[1, :300]
        experts = experts.flatten(0, 1)
    try:
        trainer.routing.begin(experts)
        plain = log_probs(trainer, labels, input_ids=ids, attention_mask=mask)
        expected = gradients(trainer, plain, weights)
        shared = shared_prompts.share(ids, mask, prompts, experts)
        assert shared.source.numel() == 390 + 300 + 3 + 90 + 1 + 9
        trainer.routing.begin(None if experts is None else experts[shared.source])
        found = log_probs(trainer, labels, input_ids=ids.flatten()[shared.source][None], shared=shared)
        torch.testing.assert_close(found[mask.bool()], plain[mask.bool()], rtol=0, atol=2e-5)
        got = gradients(trainer, found, weights)
    finally:
        trainer.routing.begin(None)
        model.gradient_checkpointing_disable()
    assert got.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=2e-4 * scale + 1e-7, msg=name)


def forward_step(trainer, micro_batch, shared: bool, fields: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], int]:
    """What `LockstepEngine` makes of a micro-batch, without verl's set-up around it: log-probs, entropy, and the tokens
    that were computed."""
    engine = object.__new__(LockstepEngine)
    engine.trainer_model, engine.module = trainer, trainer.model
    engine.settings = SimpleNamespace(share_prompts=shared)
    engine.pad_to_length = engine.use_ulysses_sp = False
    micro_batch = micro_batch.select(*fields)
    inputs, args = engine.prepare_model_inputs(micro_batch)
    try:
        output = engine.prepare_model_outputs(trainer.model(**inputs, use_cache=False), args, micro_batch, None)
    finally:
        trainer.model.lm_head.ask(None)
        tokens = trainer.routing.tokens
        trainer.routing.begin(None)
    return {key: output[key].values() for key in ("log_probs", "entropy")}, tokens


def test_the_engine_gives_the_same_log_probs_and_entropy(trainer):
    """With routes to replay, without, and without a response mask, where nothing is shared."""
    ids, mask, prompts = batch([140, 40], [(0, 9), (1, 4), (0, 20)])
    lengths = mask.sum(1).tolist()
    routes = [torch.randint(0, SIZES.experts - 1, (length, SIZES.layers, 1)) for length in lengths]
    routes[2][:140] = routes[0][:140]
    rows = {
        "input_ids": [row[:length] for row, length in zip(ids, lengths, strict=True)],
        "position_ids": [torch.arange(length) for length in lengths],
        "response_mask": [torch.ones(n - prompt, dtype=torch.long) for n, prompt in zip(lengths, prompts, strict=True)],
        "routed_experts": [torch.cat((ids, ids + 1), -1) for ids in routes],
    }
    data = TensorDict({name: jagged(values) for name, values in rows.items()}, batch_size=len(lengths))
    tu.assign_non_tensor(data, temperature=1.0, use_remove_padding=False, calculate_entropy=True, pad_token_id=0)
    extra = ("temperature", "use_remove_padding", "calculate_entropy", "pad_token_id")
    for fields, computed in (
        (("response_mask", "routed_experts"), 140 + 9 + 20 + 44),
        (("response_mask",), 140 + 9 + 20 + 44),
        ((), sum(lengths)),
    ):
        fields = ("input_ids", "position_ids", *fields, *extra)
        with torch.no_grad():
            plain, tokens = forward_step(trainer, data, False, fields)
            found, fewer = forward_step(trainer, data, True, fields)
        assert (tokens, fewer) == (sum(lengths), computed)
        for key, value in plain.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=2e-5, msg=f"{key} of {fields}")
