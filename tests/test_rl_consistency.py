"""The consistency check on small stand-ins for trainer and engine: what passes, and what each fault is called."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from check_sides import LIMITS, Engine, Trainer, run

from rl.consistency import compare_digests
from rl.mismatch import logprob_stats
from rollout.fingerprint import digests, sha256


@pytest.fixture
def pair():
    trainer = Trainer()
    return trainer, Engine(trainer)


# ---- verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", [True, False])
def test_same_model_on_both_sides_passes(pair, probe):
    report = run(*pair, probe=probe, step=20)
    assert (report.verdict, report.reasons, report.step) == ("pass", [], 20)
    assert report.weights["base"] == {"tensors": 6, "bytes": 6 * 16 * 8, "mismatched": [], "workers": 1}
    assert report.weights["adapter"] == {"tensors": 3, "bytes": 12, "mismatched": [], "unbound": [], "workers": 1}
    assert report.routing["free_agreement"] == pytest.approx(0.975) and report.routing["replayed_agreement"] == 1.0
    assert report.routing["per_layer"][0].items() >= {"layer": 0, "free": 0.95, "replayed": 1.0}.items()
    assert (report.routing["tokens"], report.routing["not_replayed"]) == (20, 2)
    assert report.logprobs["tokens"] == 16 and report.logprobs["replayed"]["max_abs"] < 1e-12
    assert report.thresholds == asdict(LIMITS)


def test_probe_reports_the_effect_of_each_kind_and_of_nothing(pair):
    probe = run(*pair).probe
    assert probe["by_kind"] == pytest.approx({"q_proj": 0.02, "o_proj": 0.03, "experts": 0.04})
    assert probe["adapter_effect"] == pytest.approx(0.02) and probe["zero_adapter_effect"] == 0.0


def test_report_is_json_of_the_documented_shape(pair):
    report = json.loads(json.dumps(run(*pair).as_dict()))
    assert report["schema"] == 1
    keys = {"verdict", "reasons", "weights", "routing", "logprobs", "probe", "thresholds", "environment", "recipe"}
    assert keys <= report.keys()
    numbers = {"mean_abs", "p99_abs", "max_abs", "kl_k1", "kl_k3", "pearson"}
    assert numbers <= report["logprobs"]["free"].keys() == report["logprobs"]["replayed"].keys()
    assert run(*pair).summary().startswith("pass: 6 base and 3 adapter tensors")


def test_flipped_byte_of_the_base_is_named_and_ends_the_check(pair):
    trainer, engine = pair
    engine.base["layers.1.o_proj#data"] = engine.base["layers.1.o_proj#data"].clone()
    engine.base["layers.1.o_proj#data"].view(torch.uint8)[77] ^= 1
    report = run(trainer, engine)
    assert report.verdict == "fail"
    assert report.reasons == ["weights: 1 base tensors differ, first layers.1.o_proj#data"]
    assert report.weights["base"]["mismatched"] == ["layers.1.o_proj#data"] and engine.scored == 0


def test_worker_that_differs_from_the_others_is_found(pair):
    trainer, engine = pair
    other = dict(engine.base, **{"layers.0.experts#data": torch.zeros(16, dtype=torch.long)})
    engine.base_digests = lambda detail=False: [digests(engine.base), digests(other)]
    assert run(trainer, engine).reasons == ["weights: 1 base tensors differ, first layers.0.experts#data"]


def test_adapter_tensor_that_the_engine_lacks_is_named_as_unbound(pair):
    trainer, engine = pair
    engine.drops = {"experts"}
    engine.sync()
    report = run(trainer, engine)
    assert report.verdict == "fail" and "layers.0.experts.lora_B (engine lacks it)" in report.reasons[0]
    assert report.weights["adapter"]["unbound"] == ["layers.0.experts.lora_B (engine lacks it)"]


def test_adapter_that_was_trained_but_not_sent_is_named(pair):
    trainer, engine = pair
    trainer.adapter["o_proj"] = torch.tensor(0.26)
    assert run(trainer, engine, probe=False).reasons == [
        "weights: 1 adapter tensors differ, first layers.0.o_proj.lora_B"
    ]


@pytest.mark.parametrize("nothing", ["no workers", "no base", "no adapter"])
def test_comparing_nothing_is_no_pass(pair, nothing):
    trainer, engine = pair
    if nothing == "no workers":
        engine.workers = 0
    elif nothing == "no base":
        trainer.base = engine.base = {}
    else:
        trainer.adapter = engine.held = {}
    report = run(trainer, engine, probe=False)
    assert report.verdict == "fail" and report.reasons[0].startswith("weights: no ")


@pytest.mark.parametrize("value", [0.75, math.nan])
@pytest.mark.parametrize("kind", ["replayed", "free"])
def test_layer_that_routes_otherwise_is_named(pair, kind, value):
    trainer, engine = pair
    (trainer.agreement_replayed if kind == "replayed" else trainer.agreement)[1] = value
    with_or_without = "with" if kind == "replayed" else "without"
    report = run(trainer, engine)
    assert report.verdict == "fail" and len(report.reasons) == 1
    assert report.reasons[0].startswith(f"routing: layer 1 agrees on {value:.4f} of tokens {with_or_without} replay")
    assert f"threshold routing_{kind}" in report.reasons[0]


@pytest.mark.parametrize(
    "gap, named",
    [
        (0.05, ["kl_k3", "mean_abs"]),
        (0.2, ["kl_k3", "max_abs", "mean_abs"]),
        (0.03, ["mean_abs"]),
        (math.nan, ["kl_k3"]),
    ],
)
def test_log_probs_that_differ_are_a_failure_of_the_named_statistic(pair, gap, named):
    trainer, engine = pair
    trainer.gap = gap
    report = run(trainer, engine, probe=False)
    assert report.verdict == "fail"
    assert all(any(f"replayed {name} " in reason for reason in report.reasons) for name in named)
    if math.isfinite(gap):
        assert len(report.reasons) == len(named)


def test_kind_of_module_whose_adapter_the_engine_ignores_is_named(pair):
    trainer, engine = pair
    engine.deaf = {"experts"}
    report = run(trainer, engine)
    assert report.verdict == "fail"
    assert any("probe: a random adapter on experts moves log-probs by 0.00e+00" in reason for reason in report.reasons)
    assert report.probe["adapter_effect"] == 0.0 and not any("on q_proj" in reason for reason in report.reasons)


def test_trained_adapter_without_effect_fails_the_short_check_and_a_zero_one_does_not():
    trainer = Trainer()
    engine = Engine(trainer)
    engine._shift = lambda adapter: 0.0075  # the same with and without: what both sides agree on
    assert run(trainer, engine, probe=False).reasons == [
        "probe: the trained adapter does not change the engine's log-probs; is it bound?"
    ]
    zero = Trainer(q_proj=0.0, o_proj=0.0, experts=0.0)
    assert run(zero, Engine(zero), probe=False).verdict == "pass"


def test_zero_adapter_that_moves_log_probs_fails(pair):
    trainer, engine = pair
    engine.leak = 0.05
    report = run(trainer, engine)
    assert report.verdict == "fail"
    assert [
        reason for reason in report.reasons if reason.startswith("probe: a zero adapter moves log-probs by 5.00e-02")
    ]


def test_a_few_tokens_that_a_zero_adapter_flips_fail_only_where_engines_repeat(pair, monkeypatch):
    trainer, engine = pair
    score = engine.score

    def flipping(ids, adapter):
        rows = [list(row) for row in score(ids, adapter)]
        rows[0][0] += 0.5 if adapter else 0.0
        return rows

    monkeypatch.setattr(engine, "score", flipping)

    def complaints(**limits) -> list[str]:
        report = run(trainer, engine, limits=replace(LIMITS, **limits))
        assert report.probe["zero_adapter_median"] == 0.0 < report.probe["zero_adapter_effect"]
        return [reason for reason in report.reasons if "zero adapter" in reason]

    assert len(complaints()) == 1
    assert complaints(zero_adapter_effect=1e-3, mean_abs_logp=0.1) == []
    assert len(complaints(zero_adapter_effect=1e-3, mean_abs_logp=0.01)) == 1


def test_engine_that_answers_nan_fails_every_check_of_it(pair):
    trainer, engine = pair
    engine.leak = math.nan
    reasons = " ".join(run(trainer, engine).reasons)
    for part in ("replayed kl_k3", "on q_proj", "on o_proj", "on experts", "a zero adapter", "with a random adapter"):
        assert part in reasons


def test_gap_that_only_an_adapter_shows_fails(pair):
    """Both sides agree on the trained adapter, which is small; with a large one they do not."""
    trainer, engine = pair
    score = trainer.score

    def drifting(sequences, *blocks):
        trainer.gap = 0.1 if trainer.kept else 0.0
        return score(sequences)

    trainer.score = drifting
    assert [r.split(" is ")[0] for r in run(trainer, engine).reasons] == ["probe: with a random adapter replayed kl_k3"]


# ---- the adapter comes back ----------------------------------------------------------------------------------------


def test_probe_leaves_the_trained_adapter_on_both_sides(pair):
    trainer, engine = pair
    before = trainer.adapter_digests()
    run(trainer, engine)
    assert trainer.adapter_digests() == before == engine.adapter_digests()[0] and trainer.kept is None


@pytest.mark.parametrize("engine_call", [2, 3, 4, 5])
def test_adapter_is_restored_and_sent_again_when_the_engine_raises(pair, engine_call):
    trainer, engine = pair
    before, engine.fails_at = trainer.adapter_digests(), engine_call
    with pytest.raises(RuntimeError, match="engine died"):
        run(trainer, engine)
    assert trainer.adapter_digests() == before == engine.adapter_digests()[0]


def test_adapter_is_restored_and_sent_again_when_the_trainer_raises(pair):
    trainer, engine = pair
    before, trainer.fails_at = trainer.adapter_digests(), 2
    with pytest.raises(RuntimeError, match="out of memory"):
        run(trainer, engine)
    assert trainer.adapter_digests() == before == engine.adapter_digests()[0]


def test_adapter_that_did_not_come_back_to_the_engine_fails(pair):
    trainer, engine = pair
    restore = trainer.restore_adapter
    trainer.restore_adapter = lambda: (restore(), setattr(engine, "drops", {"q_proj"}))
    report = run(trainer, engine)
    assert report.reasons == ["weights: 1 adapter tensors differ, first layers.0.q_proj.lora_B (engine lacks it)"]


# ---- parts ---------------------------------------------------------------------------------------------------------


def test_logprob_statistics_are_their_formulas():
    trainer, engine = [[-1.0, -2.0, -0.5], [-3.0]], [[-1.1, -1.7, -0.5], [-2.0]]
    stats = logprob_stats(trainer, engine)
    delta = np.array([0.1, -0.3, 0.0, -1.0])
    assert stats["mean_abs"] == pytest.approx(1.4 / 4) and stats["max_abs"] == pytest.approx(1.0)
    assert stats["p99_abs"] == pytest.approx(0.3 + 0.97 * 0.7)  # between the third and the fourth of four
    assert stats["kl_k1"] == pytest.approx(0.3)
    assert stats["kl_k3"] == pytest.approx(np.mean([math.exp(d) - 1 - d for d in delta]))
    a, b = np.array([-1.0, -2.0, -0.5, -3.0]), np.array([-1.1, -1.7, -0.5, -2.0])
    covariance = np.mean((a - a.mean()) * (b - b.mean()))
    assert stats["pearson"] == pytest.approx(covariance / (a.std() * b.std()))
    assert stats["sequence_worst"] == pytest.approx(1.0)  # the second sequence; the first has 0.4 / 3


def test_equal_log_probs_have_no_divergence_and_lengths_must_agree():
    stats = logprob_stats([[-1.0, -1.0]], [[-1.0, -1.0]])
    assert {stats[name] for name in ("mean_abs", "max_abs", "kl_k1", "kl_k3")} == {0.0} and stats["pearson"] == 1.0
    for engine in ([[-1.0]], [[-1.0], [-1.0]], [[-1.0, -1.0], []]):
        with pytest.raises(ValueError, match=r"\[2\] tokens a sequence"):
            logprob_stats([[-1.0, -1.0]], engine)


def test_compare_digests_names_what_differs_and_what_is_lacking():
    trainer = digests({"a": torch.tensor([1.0]), "b": torch.tensor([2.0]), "only": torch.tensor([3.0])})
    engine = digests({"a": torch.tensor([1.0]), "b": torch.tensor([-2.0]), "extra": torch.tensor([3.0])})
    assert compare_digests(trainer, engine) == ["only (engine lacks it)", "extra (trainer lacks it)", "b"]
    assert compare_digests(trainer, trainer) == []


def test_fingerprint_is_of_the_bytes_in_row_major_order():
    matrix = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert sha256(matrix) == sha256(matrix.view(torch.uint8)) == sha256(matrix.t().contiguous().t())
    assert sha256(matrix) != sha256(matrix.t())
    assert sha256(torch.zeros(2)) != sha256(-torch.zeros(2))  # equal values, other bytes
    assert digests({"x": matrix[:0].bfloat16()})["x"]["bytes"] == 0
    entry = digests([("x", matrix.to(torch.float8_e4m3fn))])["x"]
    assert (entry["bytes"], entry["shape"], entry["dtype"]) == (6, [2, 3], "float8_e4m3fn")
