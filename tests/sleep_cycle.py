"""Run by test_rollout_sleep.py in its own process: sleep, wake and proof of a real engine; prints JSON.

On a GPU: python tests/sleep_cycle.py assets/tiny_math/nvfp4_mxfp8
Without one vLLM cannot sleep: the weights are overwritten instead and come back as after level 2.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from in_process_pair import SETTINGS, prompts

from rl.consistency import compare_digests
from rl.in_process import InProcessPair
from rl.train import resolve_backend
from rollout.engine import EngineOptions
from rollout.fingerprint import EngineError

CUDA = torch.cuda.is_available()
TOKENS = 24
CORRUPTED = ("w13_weight", "qkv_proj.base_layer.weight", "norm.weight")


def overwrite(worker) -> None:
    """Every parameter to other bytes, as a dropped pool leaves them."""
    for parameter in worker.model_runner.model.parameters():
        parameter.data.view(-1).view(torch.uint8).add_(85)
    for module in worker.model_runner.model.modules():
        if hasattr(module, "_moe_kernel"):
            module._moe_kernel.fused_experts._decoded = None  # what rollout.experts keeps of the weights


def stock_reload(worker) -> None:
    worker.reload_weights()


def our_reload(worker) -> None:
    from rollout.sleep import reload_base

    reload_base(worker)


def flip(worker, name: str) -> None:
    """One bit of the first parameter whose name ends with `name`."""
    parameters = worker.model_runner.model.named_parameters()
    tensor = next(parameter for found, parameter in parameters if found.endswith(name))
    tensor.data.view(-1).view(torch.uint8)[3].bitwise_xor_(1)


def free_mib() -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**20


def changed(pair: InProcessPair, before: list[dict]) -> int | str:
    """How many base tensors differ; why the engine's cannot be read, if they cannot."""
    try:
        after = pair.engine.base_digests()
    except EngineError as error:
        return str(error)
    return sum(before[0][name] != after[0].get(name) for name in before[0])


class Answers:
    """Greedy tokens, and log-probs of given sequences, with the adapter and without."""

    def __init__(self, pair: InProcessPair, inputs: list[list[int]], fixed: list[list[int]] | None = None) -> None:
        engine = pair.engine
        sampled = [engine.generate(inputs, TOKENS, adapter, temperature=0.0) for adapter in (False, True)]
        self.tokens = [[sequence.response_ids for sequence in group] for group in sampled]
        self.fixed = fixed or [sequence.ids for sequence in sampled[0]]
        scored = [engine.score(self.fixed, adapter) for adapter in (False, True)]
        self.scores = [[value for sequence in group for value in sequence] for group in scored]

    def against(self, other: "Answers") -> dict:
        """Without and with the adapter: are tokens equal, mean |delta log-prob|; and what the adapter does."""
        means = [mean_abs(a, b) for a, b in zip(self.scores, other.scores, strict=True)]
        equal = [a == b for a, b in zip(self.tokens, other.tokens, strict=True)]
        return {"greedy_equal": equal, "mean_abs": means, "adapter_effect": mean_abs(*self.scores)}


def mean_abs(a: list[float], b: list[float]) -> float:
    return float((torch.tensor(a) - torch.tensor(b)).abs().mean())


def adapter_differs(pair: InProcessPair) -> int:
    """Adapter tensors that are not the trainer's."""
    return len(compare_digests(pair.probe.adapter_digests(), pair.engine.adapter_digests()[0]))


def cycle(pair: InProcessPair, level: int, before: list[dict], first: Answers, inputs: list[list[int]]) -> dict:
    """One sleep and wake on a GPU; at level 2 also what the base is before it is restored."""
    engine, free = pair.engine, free_mib()
    engine.sleep(level)
    freed = free_mib() - free
    unrestored = None
    if level == 2:
        engine.llm.wake_up(tags=["weights"])
        unrestored = changed(pair, before)
    report = engine.wake()[0]
    kept = adapter_differs(pair) if level == 1 else None
    pair.engine_side.sync()
    return {
        **report,
        "freed_mib": freed,
        "lost_mib": free - free_mib(),
        "unrestored": unrestored,
        "adapter_differs_before_sync": kept,
        "adapter_differs": adapter_differs(pair),
        "changed": changed(pair, before),
        **first.against(Answers(pair, inputs, first.fixed)),
    }


def corrupted(pair: InProcessPair, name: str) -> str:
    """What the proof says of one flipped bit after a wake; the bit is put right again."""
    pair.engine.sleep(1)
    pair.engine.llm.wake_up(tags=["weights"])
    pair.engine.llm.collective_rpc(flip, args=(name,))
    try:
        pair.engine.wake()
        message = ""
    except EngineError as error:
        message = f"{type(error).__name__}: {error}"
    pair.engine.llm.collective_rpc(flip, args=(name,))
    pair.engine.wake()
    return message


def main() -> None:
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_DEEP_GEMM"):
        os.environ.setdefault(name, "0")
    settings = dataclasses.replace(SETTINGS, backend=resolve_backend("auto", CUDA))
    pair = InProcessPair(
        Path(sys.argv[1]).resolve(), settings, EngineOptions(sleep=CUDA), device="cuda" if CUDA else "cpu"
    )
    inputs = prompts(pair.engine.llm.get_tokenizer())
    pair.probe.set_test_adapter("all", 0)
    pair.engine_side.sync()
    before, first = pair.engine.base_digests(), Answers(pair, inputs)
    out = {"tensors": len(before[0]), "repeat": first.against(Answers(pair, inputs, first.fixed))}
    if CUDA:
        out["cycles"] = [cycle(pair, level, before, first, inputs) for level in (1, 2, 2, 1)]
        out["corrupted"] = {name: corrupted(pair, name) for name in CORRUPTED}
        out["end"] = first.against(Answers(pair, inputs, first.fixed)) | {"changed": changed(pair, before)}
    else:
        for name, reload in (("overwritten", None), ("stock", stock_reload), ("ours", our_reload)):
            pair.engine.llm.collective_rpc(overwrite)
            if reload:
                pair.engine.llm.collective_rpc(reload)
            out[name] = changed(pair, before)
        pair.engine_side.sync()
        out |= {"adapter_differs": adapter_differs(pair)} | first.against(Answers(pair, inputs, first.fixed))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
