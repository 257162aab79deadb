"""Run by test_in_process.py in its own process: check, train one step, sync, check again; prints JSON."""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.adapter_files import save_engine_format
from rl.consistency import check
from rl.consistency_report import resolve_limits
from rl.in_process import InProcessPair
from rl.lora import adapters, engine_tensors, wire_tensors
from rl.replay import layout
from rl.settings import EngineSettings
from rollout.engine import EngineOptions

MODEL = Path(__file__).resolve().parent.parent / "assets/tiny_math/nvfp4_mxfp8"


SETTINGS = EngineSettings(
    backend="emulation",
    dtype="bfloat16",
    attn_implementation="sdpa",
    lora_rank=32,
    lora_alpha=32,
    lora_targets=("attention", "experts"),
    lora_dropout=0.0,
    share_gate_up_a=True,
    adapter=None,
    routing_replay=True,
    seed=0,
)


def prompts(tokenizer) -> list[list[int]]:
    problems = [f"Ann has {10 + i} pens and buys {23 + 2 * i} more. How many pens does Ann have now?" for i in range(6)]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, return_dict=False)
        for p in problems
    ]


def train_step(pair: InProcessPair, sequences) -> float:
    """One policy-gradient step on the sampled sequences with random advantages, routes replayed; returns the loss."""
    model, routing = pair.trainer_model.model, pair.trainer_model.routing
    masters = [p for a in adapters(model).values() for p in a.parameters(recurse=False)]
    optimizer = torch.optim.AdamW(masters, lr=5e-3)
    width = max(len(s.ids) for s in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, s in enumerate(sequences):
        ids[row, : len(s.ids)] = torch.tensor(s.ids)
    routing.ids = layout(
        [torch.as_tensor(s.routed_experts) for s in sequences],
        [len(s.ids) for s in sequences],
        width,
        pair.trainer_model.moe_layers,
        pair.trainer_model.num_experts,
    )
    logits = model(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False).logits
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    advantages = torch.randn(len(sequences), 1, generator=torch.Generator().manual_seed(0))
    loss = -(advantages * logprobs * (ids[:, 1:] != 0)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    routing.ids = None
    return float(loss)


def main() -> None:
    started = time.monotonic()
    torch.manual_seed(0)
    pair = InProcessPair(MODEL, SETTINGS, EngineOptions(extra={"enable_prefix_caching": True}))
    inputs = prompts(pair.engine.llm.get_tokenizer())
    limits = resolve_limits({}, SETTINGS.backend)
    before = pair.probe.base_digests()
    first = check(pair.probe, pair.engine_side, inputs, 24, limits, probe=True)
    sequences = pair.engine_side.generate(inputs, 24)
    stale = pair.engine.adapter_digests()
    loss = train_step(pair, sequences)
    unsynced = check(pair.probe, pair.engine_side, inputs, 24, limits, probe=False)
    pair.engine_side.sync()
    second = check(pair.probe, pair.engine_side, inputs, 24, limits, probe=False, step=1)
    model = pair.trainer_model
    with tempfile.TemporaryDirectory() as folder:
        save_engine_format(wire_tensors(engine_tensors(model.model)), model.spec, model.adapted, Path(folder))
        sent = pair.engine.adapter_digests()
        pair.engine.load_adapter(Path(folder))
        from_disk = pair.engine.adapter_digests()
    third = check(pair.probe, pair.engine_side, inputs, 24, limits, probe=False, step=1)
    print(
        json.dumps(
            {
                "first": first.as_dict(),
                "unsynced": unsynced.as_dict(),
                "second": second.as_dict(),
                "third": third.as_dict(),
                "disk_equals_sent": from_disk == sent,
                "loss": loss,
                "base_unchanged": pair.probe.base_digests() == before,
                "adapter_changed": pair.engine.adapter_digests() != stale,
                "master_dtypes": sorted(
                    {
                        str(p.dtype)
                        for a in adapters(pair.trainer_model.model).values()
                        for p in a.parameters(recurse=False)
                    }
                ),
                "seconds": time.monotonic() - started,
            }
        )
    )


if __name__ == "__main__":
    main()
