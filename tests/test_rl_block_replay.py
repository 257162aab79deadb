"""Selected blocks of sparse attention: compared, replayed, and judged in the consistency check."""

import pytest
import torch
from check_sides import PROMPTS, Engine, Trainer, run

from rl.block_replay import BlockReplay, BlockReplayError

# ---- comparing and replaying ----------------------------------------------------------------------------------------


def ids(*rows: list[list[int]]) -> torch.Tensor:
    """[T, heads, top_k] of one layer."""
    return torch.tensor(rows, dtype=torch.int32)


OWN = ids([[0, -1], [0, -1]], [[1, 0], [1, 0]], [[2, 1], [2, 0]])
MARGIN = torch.tensor([[float("inf")] * 2, [float("inf")] * 2, [5.0, 0.1]])


def test_only_computed_rows_count_order_has_no_meaning_and_near_ties_stand_apart():
    theirs = ids([[-1, -1], [-1, -1]], [[0, 1], [1, 0]], [[2, 0], [2, 1]])
    state = BlockReplay([3], heads=2, known=[theirs.unsqueeze(1)], recording={})
    assert torch.equal(state.choose(3, 0, OWN, MARGIN), OWN)  # not enabled
    layers, flipped = state.compare()
    assert layers == {3: {"selections": 4, "disagree": 2, "near_ties": 1}}
    assert [flips.tolist() for flips in flipped] == [[False, False, True]]


def test_two_foreign_blocks_are_no_tie():
    own, margin = ids([[5, 1], [5, 1]]), torch.tensor([[0.1, 0.1]])
    theirs = ids([[5, 0], [3, 0]])
    state = BlockReplay([3], heads=2, known=[theirs.unsqueeze(1)], recording={(3, 0): (own, margin)})
    assert state.compare()[0] == {3: {"selections": 2, "disagree": 2, "near_ties": 1}}


def test_replay_takes_what_the_engine_computed_and_the_own_choice_elsewhere():
    theirs = ids([[-1, -1], [-1, -1]], [[1, 0], [1, 0]], [[2, 0], [2, 1]])
    state = BlockReplay([3], heads=2, enabled=True, known=[theirs.unsqueeze(1)])
    assert state.active
    used = state.choose(3, 0, OWN, MARGIN)
    assert torch.equal(used[0], OWN[0]) and torch.equal(used[1:], theirs[1:])


def test_ids_of_another_shape_are_refused():
    state = BlockReplay([3], heads=2, enabled=True, known=[OWN[:2].unsqueeze(1)])
    with pytest.raises(BlockReplayError, match=r"sequence 0, layer 3: \(2, 2, 2\) block ids for \(3, 2, 2\)"):
        state.choose(3, 0, OWN, MARGIN)


# ---- in the check ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    trainer = Trainer()
    return trainer, Engine(trainer)


def counts(disagree: int, near_ties: int) -> dict:
    return {"selections": 100, "disagree": disagree, "near_ties": near_ties}


@pytest.mark.parametrize("replayed", [False, True])
def test_replayed_blocks_close_the_gap_of_the_tokens_that_flipped(pair, replayed):
    trainer, engine = pair
    trainer.selected, trainer.flip_gap = {1: counts(5, 5), 3: counts(1, 0)}, 0.02
    report = run(trainer, engine, probe=False, replay_blocks=replayed)
    assert report.verdict == "pass"  # 6 of 200 differ, but 5 of them are near-ties
    assert report.selection["agreement"] == pytest.approx(0.97)
    assert report.selection["per_layer"] == [{"layer": 1, **counts(5, 5)}, {"layer": 3, **counts(1, 0)}]
    flipped = report.selection["flipped"]
    assert flipped["tokens"] == len(PROMPTS) and flipped["free"] == pytest.approx(0.02)
    assert flipped["replayed"] == pytest.approx(0.0 if replayed else 0.02, abs=1e-12)


@pytest.mark.parametrize(
    ("selected", "cause"),
    [
        ({1: counts(0, 0), 3: counts(9, 1)}, "the indexer differs in layer 3 only"),
        ({1: counts(9, 1), 3: counts(40, 2)}, "compare sparse_attention_config on both sides"),
    ],
)
def test_blocks_that_differ_by_more_than_near_ties_fail_with_their_cause(pair, selected, cause):
    trainer, engine = pair
    trainer.selected = selected
    report = run(trainer, engine, probe=False)
    assert report.verdict == "fail" and "selection" in report.reasons[0] and cause in report.diagnosis[0]


def test_blocks_of_no_token_are_no_agreement(pair):
    trainer, engine = pair
    trainer.selected = {1: {"selections": 0, "disagree": 0, "near_ties": 0}}
    report = run(trainer, engine, probe=False)
    assert report.verdict == "fail" and "the engine's blocks are of no token" in report.reasons[0]
