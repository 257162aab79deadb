"""The tiny MiniMax-M3's own training: recall batches, balance of the experts, what it makes of solutions."""

import re
from dataclasses import replace
from itertools import islice

import pytest
import torch

from rl import long_math
from rl.models import tiny_m3
from rl.models.minimax_m3 import MiniMaxM3TopKRouter
from rl.models.tiny_assets import family_of, load_plain, make_assets
from rl.models.tiny_m3_tokenizer import build_tokenizer
from rl.models.tiny_training import IGNORE


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_m3.build_model(tokenizer)


def test_only_the_numbers_of_the_repetition_carry_loss(tokenizer):
    for batch in islice(tiny_m3.recalls(tokenizer, 0, 4), 3):
        for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
            told, _, said = tokenizer.decode(ids[ids != tokenizer.pad_token_id]).partition("\n")
            facts = dict(re.findall(r"(\w+)'s (\d+) \w+\.", told))
            names = re.findall(r"(\w+)'s ", said)
            assert len(facts) == tiny_m3.RECALLED and sorted(names) == sorted(facts)
            assert tokenizer.decode(labels[labels != IGNORE]) == "".join(facts[name] for name in names)


def test_shape_is_what_the_recipe_promises(model):
    assert 4e6 <= model.num_parameters() <= 6e6
    config = model.config
    assert config.sparse_layers == [1, 2, 3] == [n for n, moe in enumerate(config.moe_layer_freq) if moe]
    assert config.selection.top_k * config.selection.block_size < 350  # the shortest long prompt drops blocks


def test_bias_moves_away_from_busy_experts_and_not_the_weights(model):
    balance = tiny_m3.Balance(model, 0.5)
    router = next(module for module in model.modules() if isinstance(module, MiniMaxM3TopKRouter))
    before = router.weight.clone()
    load = torch.zeros(16, dtype=torch.long)
    load[:2] = 8
    balance.loads = {router: load}
    worst = balance.step()
    assert worst == 8.0 and torch.equal(router.weight, before)
    assert router.e_score_correction_bias.tolist() == [-0.5] * 2 + [0.5] * 14
    router.e_score_correction_bias.zero_()


class Oracle(torch.nn.Module):
    """Gives the right token of a solution all but a hundredth of the probability; in some problems one token not."""

    device = torch.device("cpu")

    def __init__(self, wrong: set[int]) -> None:
        super().__init__()
        self.wrong, self.calls = wrong, 0

    def forward(self, ids, logits_to_keep):
        follow = ids[0, -logits_to_keep:].roll(-1)
        logits = torch.full((1, logits_to_keep, 640), float(torch.tensor(0.01 / 639).log()))
        logits[0, torch.arange(logits_to_keep), follow] = float(torch.tensor(0.99).log())
        if self.calls in self.wrong:
            logits[0, 2, (follow[2] + 1) % 640] = 1.0
        self.calls += 1
        return type("Output", (), {"logits": logits})


def test_solutions_are_judged_whole(tokenizer):
    problems = long_math.generate("test", 4, 0, long_math.SHORT)
    lengths = [len(tokenizer.encode(long_math.worked_solution(problem))) + 1 for problem in problems]
    seen = tiny_m3.solves(Oracle(set()), tokenizer, problems)
    assert seen["greedy"] == 1.0 and seen["sampled"] == pytest.approx(sum(0.99**n for n in lengths) / 4, rel=1e-4)
    assert tiny_m3.solves(Oracle({1}), tokenizer, problems)["greedy"] == 0.75


@pytest.mark.slow
def test_assets_are_made_whole_and_load_on_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.models.tiny_m3.FAMILY", replace(tiny_m3.FAMILY, rows=(6, 3)))
    plan = tiny_m3.LongPlan(steps=4, batch_size=4, short_batch_size=2, long_batch_size=1)
    summary = make_assets(tmp_path / "out", plan, show_progress=False)
    assert summary["steps"] == 4 and summary["bf16"]["problems"] == 3
    assert family_of("tiny_m3").generate("test", 1, 0)[0].facts
    plain, quantised = (load_plain(tmp_path / "out" / name) for name in ("bf16", "nvfp4_mxfp8"))
    for (name, a), b in zip(plain.state_dict().items(), quantised.state_dict().values(), strict=True):
        same = torch.equal(a, b)
        assert same == (not name.endswith("_proj.weight") and ".experts." not in name), name
    router = plain.model.layers[1].block_sparse_moe.gate
    assert router.weight.dtype == torch.float32 and not torch.equal(router.weight.bfloat16().float(), router.weight)
