"""Run by test_rollout_minimax_m3.py in its own process: a tiny random MiniMax-M3 in vLLM against torch; prints JSON."""

import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from m3_checkpoint import Reference, Sizes, adapter, save, stacked, weights, wire

from rollout.engine import EngineOptions, InProcessEngine
from rollout.fingerprint import digests

SIZES = Sizes()
RANK = 8
KINDS = {
    **{kind: f".{kind}" for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "index_q_proj", "index_k_proj")},
    "dense": ".mlp.",
    "shared": ".shared_experts.",
    "routed": ".block_sparse_moe.experts.",
}


def sequences() -> list[list[int]]:
    """The last two are longer than the 256 tokens of a step, so that they are prefilled in chunks with decodes."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 600, (n,), generator=generator).tolist() for n in (20, 31, 150, 330, 460)]


def send(engine: InProcessEngine, factors: dict[str, torch.Tensor]) -> None:
    targets = sorted({name.split(".")[-2] for name in factors})
    engine.sync_adapter(wire(factors), {"r": RANK, "lora_alpha": RANK, "target_modules": targets, "peft_type": "LORA"})


def compare(engine: InProcessEngine, reference: Reference, use_adapter: bool) -> list[dict]:
    """Of every sequence: how far log-probs are from torch's, free and with the engine's experts and blocks."""
    rows = []
    for ids, scored in zip(sequences(), engine.score_with_blocks(sequences(), use_adapter), strict=True):
        theirs = torch.tensor(scored.logprobs)
        free = (theirs - reference.score(ids)).abs()
        blocks, routes = torch.stack(reference.blocks, 1), torch.stack(reference.routes, 1)
        same_blocks = (blocks.sort(-1).values == torch.as_tensor(scored.blocks).sort(-1).values).all(-1)
        engine_routes = torch.as_tensor(scored.routed_experts)
        same_routes = (routes.sort(-1).values == engine_routes[:, 1:].sort(-1).values).all(-1)
        replayed = (theirs - reference.score(ids, scored.blocks, engine_routes)).abs()
        rows.append(
            {
                "tokens": len(ids),
                "free": float(free.mean()),
                "replayed": float(replayed.mean()),
                "replayed_max": float(replayed.max()),
                "blocks": float(same_blocks.float().mean()),
                "routes": float(same_routes.float().mean()),
                "first_blocks_missing": int((scored.blocks[..., 0] < 0).sum()),
                "dense_routes": int(engine_routes[:, 0].abs().sum()),
            }
        )
    return rows


def decode_gap(engine: InProcessEngine) -> dict:
    """Log-probs of sampled tokens when sampled and when scored; the prompts are answered together."""
    sampled = engine.generate([ids[:140] for ids in sequences()[:3]], 24)
    scores = engine.score([sequence.ids for sequence in sampled])
    gaps = torch.cat([torch.tensor(s.logprobs) - torch.tensor(x[-24:]) for s, x in zip(sampled, scores, strict=True)])
    return {"mean": float(gaps.abs().mean()), "median": float(gaps.abs().median())}


def refused(engine: InProcessEngine, factors: dict[str, torch.Tensor]) -> str:
    try:
        send(engine, factors)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def effects(engine: InProcessEngine, factors: dict[str, torch.Tensor], base: list[float]) -> dict[str, float]:
    """Mean |change| of a sequence's log-probs by an adapter on one kind of module alone."""
    found = {}
    for kind, keep in KINDS.items():
        send(engine, {name: tensor for name, tensor in factors.items() if keep in name})
        found[kind] = float((torch.tensor(engine.score(sequences()[3:4])[0]) - torch.tensor(base)).abs().mean())
    return found


def main() -> None:
    torch.set_num_threads(1)
    tensors, factors = weights(SIZES), adapter(SIZES, RANK)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), SIZES, tensors)
        options = EngineOptions(
            max_model_len=512, max_num_batched_tokens=256, lora_rank=RANK, extra={"skip_tokenizer_init": True}
        )
        engine = InProcessEngine(Path(folder), options)
    expected = stacked(tensors, ".weight")
    for layer in range(1, SIZES.layers):
        path = f"model.layers.{layer}.block_sparse_moe.experts"
        gate, up = (expected.pop(f"{path}.{part}.weight") for part in ("gate_proj", "up_proj"))
        expected[f"{path}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        expected[f"{path}.down_proj"] = expected.pop(f"{path}.down_proj.weight")
    result = {"base_equal": engine.base_digests()[0] == digests(expected)}
    plain = engine.score(sequences(), adapter=False)
    result["base"] = compare(engine, Reference(SIZES, tensors), use_adapter=False)
    send(engine, {name: t if name.endswith("A") else torch.zeros_like(t) for name, t in factors.items()})
    result["zero_equal"] = engine.score(sequences()) == plain
    send(engine, factors)
    held = {name: tensor for leaf in (".lora_A", ".lora_B") for name, tensor in stacked(factors, leaf).items()}
    result["adapter_equal"] = engine.adapter_digests()[0] == digests(held)
    result["adapted"] = compare(engine, Reference(SIZES, tensors, factors), use_adapter=True)
    result["decode"] = decode_gap(engine)
    part = {name: tensor for name, tensor in factors.items() if "index_k_proj" in name or ".v_proj" in name}
    send(engine, part)
    result["parts_tensors"] = len(engine.adapter_digests()[0]) == len(part)
    result["parts"] = compare(engine, Reference(SIZES, tensors, part), use_adapter=True)
    result["effects"] = effects(engine, factors, plain[3])
    dense = {name.replace(".1.", ".0."): t for name, t in factors.items() if ".1.self_attn.index_q_proj" in name}
    result["refused_dense"] = refused(engine, dense)
    other = {name.replace(".1.", ".9."): t for name, t in factors.items() if ".1.self_attn.q_proj" in name}
    result["refused_layer"] = refused(engine, other)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
