"""The trainer's side of the consistency check, on the tiny model."""

import numpy as np
import pytest
import torch
from tiny_model import build, logits, masters, randomise, spec, token_ids

from rl.probe import TrainerProbe
from rl.replay import ReplayError
from rollout.sampling import Sequence

PROMPT, LENGTHS = 4, (12, 9)


@pytest.fixture
def probe():
    trainer_model = build(spec(), dtype=torch.float32)  # so that nothing hangs on a rounding
    randomise(trainer_model.model)
    return TrainerProbe(trainer_model)


@torch.no_grad()
def sequences(probe: TrainerProbe, wrong_layer: int | None = None) -> list[Sequence]:
    """What an engine that routes as the trainer does would return; in one layer with the other experts, if asked."""
    found = []
    for seed, length in enumerate(LENGTHS):
        ids, routing = token_ids(1, length, seed), probe.trainer_model.routing
        routing.recording = {}
        own = logits(probe.trainer_model, ids)[0].log_softmax(-1)
        used = torch.stack([routing.recording[layer] for layer in range(4)], dim=1)[:-1]
        routing.recording = None
        if wrong_layer is not None:
            used[:, wrong_layer] = (used[:, wrong_layer] + 1) % 8
        logprobs = own[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)[PROMPT - 1 :].tolist()
        row = ids[0].tolist()
        found.append(Sequence(row[:PROMPT], row[PROMPT:], logprobs, used.numpy().astype(np.uint8)))
    return found


def test_score_of_the_same_model_agrees_everywhere(probe):
    known = sequences(probe)
    score = probe.score(known)
    assert score.agreement == score.agreement_replayed == dict.fromkeys(range(4), 1.0)
    for ours, sequence in zip(score.replayed, known, strict=True):
        assert ours == pytest.approx(sequence.logprobs, abs=1e-3) and len(ours) == len(sequence.response_ids)
    assert (score.tokens, score.not_replayed) == (11 + 8, 2)


def test_other_routes_lower_the_free_agreement_of_their_layer_and_are_replayed(probe):
    score = probe.score(sequences(probe, wrong_layer=2))
    assert score.agreement[2] < 0.5 < min(score.agreement[layer] for layer in (0, 1, 3))
    assert score.agreement_replayed == dict.fromkeys(range(4), 1.0)
    assert score.free != score.replayed


def test_score_leaves_the_model_as_it_was(probe):
    model, routing = probe.model, probe.trainer_model.routing
    for training in (True, False):
        model.train(training)
        routing.enabled = not training
        probe.score(sequences(probe))
        assert model.training == training and routing.enabled == (not training)
        assert routing.ids is None and routing.recording is None and routing.counts == {}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_engine_without_expert_ids_is_an_error_and_no_agreement(probe):
    known = sequences(probe)
    known[1].routed_experts = None
    with pytest.raises(ReplayError, match="returned no expert ids; check enable_return_routed_experts"):
        probe.score(known)


def test_test_adapter_is_in_one_kind_of_module_at_a_time(probe):
    parameters = masters(probe.model)
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    assert probe.adapter_kinds() == ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]
    for kind in (*probe.adapter_kinds(), "all", None):
        probe.set_test_adapter(kind, seed=1)
        for name, parameter in parameters.items():
            if name.endswith("A"):
                assert torch.equal(parameter, kept[name])
            else:
                assert bool(parameter.any()) == (kind == "all" or (kind is not None and f".{kind}." in name)), name
        assert probe.adapter_is_zero() == (kind is None)
    probe.restore_adapter()
    assert all(torch.equal(parameter, kept[name]) for name, parameter in parameters.items())
    assert not probe.adapter_is_zero()
    parameters["model.layers.0.self_attn.q_proj.lora_B"].data.add_(1.0)  # trained on
    probe.restore_adapter()
    assert not torch.equal(
        parameters["model.layers.0.self_attn.q_proj.lora_B"], kept["model.layers.0.self_attn.q_proj.lora_B"]
    )


def test_seed_decides_the_test_adapter(probe):
    found = []
    for seed in (1, 1, 2):
        probe.set_test_adapter("experts", seed)
        found.append(probe.adapter_digests()["model.layers.3.mlp.experts.up_proj.lora_B"])
    assert found[0] == found[1] != found[2]


def test_every_kind_moves_the_trainers_log_probs(probe):
    known = sequences(probe)
    probe.set_test_adapter(None, seed=0)
    zero = np.concatenate(probe.score(known).replayed)
    for kind in probe.adapter_kinds():
        probe.set_test_adapter(kind, seed=1)
        assert np.abs(np.concatenate(probe.score(known).replayed) - zero).mean() > 1e-3, kind
