"""What each kind of failure is said to mean, on hand-made numbers."""

import pytest
import torch

from rl import diagnosis
from rl.consistency import compare_digests
from rl.probe import NEAR_TIE, routing_details
from rl.replay import UNKNOWN
from rollout.fingerprint import digests

EXPERTS = "layers.0.mlp.experts.gate_up_proj"


def base() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.q_proj.weight": torch.randn(4, 4, generator=generator).bfloat16() for i in range(4)}
    tensors[f"{EXPERTS}#packed"] = torch.randint(0, 255, (4, 8, 4), dtype=torch.uint8, generator=generator)
    tensors[f"{EXPERTS}#global_scale"] = 2.0 ** torch.arange(4.0)
    return tensors


def explain(ours: dict, theirs: dict, how=diagnosis.explain_base) -> str:
    ours, theirs = digests(ours, detail=True), digests(theirs, detail=True)
    return how(ours, theirs, compare_digests(ours, theirs))


def edited(name: str, change) -> dict[str, torch.Tensor]:
    tensors = base()
    tensors[name] = change(tensors[name])
    return tensors


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (edited(f"{EXPERTS}#packed", lambda w: w.roll(1, 0)), "another order"),
        (edited(f"{EXPERTS}#packed", lambda w: torch.cat(w.chunk(2, 1)[::-1], 1)), "gate and up are swapped"),
        (edited(f"{EXPERTS}#packed", lambda w: w ^ torch.eye(8, 4, dtype=torch.uint8)), "damaged or edited"),
        (edited(f"{EXPERTS}#global_scale", lambda w: 1 / w), "reciprocals"),
        (edited(f"{EXPERTS}#global_scale", lambda w: 2 * w), "must share one"),
        (edited("layers.1.q_proj.weight", lambda w: w.float()), "bfloat16 in the trainer and float32"),
        ({name: w for name, w in base().items() if "layers.3" not in name}, "one side does not have layers.3"),
        ({name: w.roll(1, -1) if "q_proj" in name else w for name, w in base().items()}, "holds another base"),
    ],
)
def test_base(theirs, words):
    assert words in explain(base(), theirs)


def adapter() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"q.{i}.lora_B": torch.randn(8, 4, generator=generator) for i in range(3)}
    tensors["experts.up.lora_B"] = torch.randn(4, 8, 4, generator=generator)
    return tensors


def noisy(tensors: dict[str, torch.Tensor], size: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: w + size * torch.randn(w.shape, generator=generator) for name, w in tensors.items()}


def without_expert(index: int) -> dict[str, torch.Tensor]:
    tensors = adapter()
    tensors["experts.up.lora_B"][index] = 0
    return tensors


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({name: 0.5 * w for name, w in adapter().items()}, "0.5 times as large"),
        (noisy(adapter(), 0.3), "another step"),
        ({name: w for name, w in adapter().items() if "q.1" not in name}, "no module for q.1.lora_B"),
        ({name: w[..., :2] for name, w in adapter().items()}, "rank was cut"),
        (without_expert(2), "only expert 2 differs"),
    ],
)
def test_adapter(theirs, words):
    assert words in explain(adapter(), theirs, diagnosis.explain_adapter)


def test_norms_of_wide_tensors_with_one_ratio_are_no_scaling():
    ours = {name: w.sign().repeat_interleave(500, -1) for name, w in adapter().items()}
    theirs = noisy(ours, 0.5)
    ratios = [float(theirs[name].norm() / ours[name].norm()) for name in ours]
    assert max(ratios) - min(ratios) < 0.01 < min(ratios) - 1
    assert "another step" in explain(ours, theirs, diagnosis.explain_adapter)


# ---- routing -------------------------------------------------------------------------------------------------------


def routes(rows: int = 400, experts: int = 8) -> torch.Tensor:
    """Random pairs of experts [rows, 2]; neighbours are independent."""
    return torch.rand(rows, experts, generator=torch.Generator().manual_seed(0)).topk(2).indices


def layer(own: torch.Tensor, theirs: torch.Tensor, margin: float = 1.0) -> list[dict]:
    """per_layer of one layer, as the trainer's probe measures it."""
    known = theirs.clone().unsqueeze(1)
    known[-1] = UNKNOWN
    details = routing_details({0: own}, {0: torch.full((len(own),), margin)}, known)[0]
    rows = known[:, 0, 0] != UNKNOWN
    free = (own.sort(-1).values == known[:, 0].sort(-1).values).all(-1)[rows].float().mean()
    return [{"layer": 0, "free": float(free), "replayed": 1.0} | details]


def every_fifth_other(own: torch.Tensor) -> torch.Tensor:
    other = own.clone()
    other[::5] = (other[::5] + 1) % 8
    return other


@pytest.mark.parametrize(
    ("theirs", "margin", "agree", "words"),
    [
        (routes().roll(1, 0), 1.0, False, "one token later"),
        (routes().roll(-1, 0), 1.0, False, "one token earlier"),
        ((routes() + 3) % 8, 1.0, False, "renaming the experts"),
        (routes().flip(0), 1.0, False, "other sequences"),
        (every_fifth_other(routes()), 1.0, False, "because their inputs differ"),
        (every_fifth_other(routes()), 1.0, True, "selection bias"),
        (every_fifth_other(routes()), NEAR_TIE / 2, True, "near-ties"),
    ],
)
def test_routing(theirs, margin, agree, words):
    assert words in diagnosis.explain_routing(layer(routes(), theirs, margin), replayed=False, numbers_agree=agree)


def test_routers_that_ignore_their_ids_are_named():
    entry = layer(routes(), routes())[0] | {"layer": 5, "replayed": 0.9}
    assert "layers [5] do not use the ids" in diagnosis.explain_routing([entry], replayed=True, numbers_agree=True)


# ---- log-probs -----------------------------------------------------------------------------------------------------

LIMITS = {"kl_k3": 1e-3, "mean_abs_logp": 0.02, "max_abs_logp": 0.1}
GOOD = {"kl_k3": 1e-7, "mean_abs": 1e-4, "max_abs": 1e-2, "one_sign": 0.5}
BAD = {"kl_k3": 1e-1, "mean_abs": 0.3, "max_abs": 2.0, "one_sign": 0.55}


def block(**changes) -> dict:
    even = [{"first": 0, "last": 1, "mean_abs": 0.3}, {"first": 2, "last": 3, "mean_abs": 0.3}]
    return {
        "free": BAD,
        "replayed": BAD,
        "prefill": BAD,
        "decode_prefill": GOOD,
        "by_position": even,
    } | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode_prefill": BAD, "prefill": GOOD}, "decode path is wrong, not the trainer"),
        ({"decode_prefill": BAD | {"one_sign": 0.9}, "prefill": GOOD}, "another temperature"),
        ({"replayed": BAD | {"one_sign": 0.9}}, "counts logits that the other does not"),
        ({"by_position": [{"last": 7, "mean_abs": 1e-4}, {"last": 9, "mean_abs": 1.0}]}, "starts after position 7"),
        ({"free": GOOD}, "replayed ids are not those of these tokens"),
        ({"decode_prefill": dict.fromkeys(GOOD, float("nan"))}, "not finite"),
        ({}, "one side computes otherwise"),
    ],
)
def test_logprobs(changes, words):
    assert words in diagnosis.explain_logprobs(block(**changes), LIMITS)
