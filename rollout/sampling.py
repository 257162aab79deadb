"""vLLM sampling parameters, sampled sequences and scored prompts, for callers that must not import vLLM."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCORE_TOGETHER = 16
"""Sequences that an engine scores by prefill at a time. With 64 at once vLLM 0.30.0 on an H200 returned log-probs of
other tokens, NaN, or failed with an illegal memory access in the next step; 16 and 32 at once never did. Sampling is
not concerned."""


@dataclass
class Sequence:
    """A sequence as the engine sampled it: response log-probs [n], expert ids [len - 1, L, K] (or None)."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    routed_experts: np.ndarray | None

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids


@dataclass
class ScoredSequence:
    """A sequence of n tokens as the engine scored it by prefill: log-probs of tokens 1.. [n - 1], expert ids
    [n, L, K] (or None), selected blocks int32 [n, sparse layers, index heads, top_k], -1 for none."""

    logprobs: list[float]
    routed_experts: np.ndarray | None
    blocks: np.ndarray


def gather_blocks(workers: list[list[dict]], lengths: dict[str, int]) -> dict[str, np.ndarray]:
    """Selected blocks by request, from every worker's `EngineWorker.lockstep_take_blocks`.

    `lengths` are the tokens of each request of interest. Tensor-parallel workers hold the index heads in their order.
    Returns int32 [length, sparse layers, index heads, top_k] a request, layers in the order of the model; ValueError if
    anything of it was not recorded.
    """
    parts = [_of_worker(records, lengths) for records in workers]
    return {request: np.concatenate([part[request] for part in parts], axis=2) for request in lengths}


def packed(record: dict[str, np.ndarray]) -> dict:
    """A record whose arrays (`requests` [T], `positions` [T], `blocks` [T, Hi, K]) are int32 bytes, as vLLM's calls of
    a worker let them through."""
    arrays = {name: np.ascontiguousarray(record[name], dtype=np.int32) for name in ("requests", "positions", "blocks")}
    return {
        **record,
        **{name: array.tobytes() for name, array in arrays.items()},
        "shape": list(arrays["blocks"].shape),
    }


def unpacked(record: dict) -> dict:
    """The inverse of `packed`."""
    arrays = {name: np.frombuffer(record[name], dtype=np.int32) for name in ("requests", "positions", "blocks")}
    return {**record, **arrays, "blocks": arrays["blocks"].reshape(record["shape"])}


def _of_worker(records: list[dict], lengths: dict[str, int]) -> dict[str, np.ndarray]:
    if not records:
        raise ValueError("the engine recorded no forward call")
    layers = {layer: i for i, layer in enumerate(sorted({record["layer"] for record in records}))}
    shape = (len(layers), *records[0]["shape"][1:])
    found = {request: np.full((length, *shape), -1, dtype=np.int32) for request, length in lengths.items()}
    for record in map(unpacked, records):
        for row, engine_id in enumerate(record["request_ids"]):
            request = engine_id.rpartition("-")[0]  # vLLM adds a random suffix to the caller's id
            tokens = record["requests"] == row
            if request in found and tokens.any():
                positions, blocks = record["positions"][tokens], record["blocks"][tokens]
                inside = positions < lengths[request]
                found[request][positions[inside], layers[record["layer"]]] = blocks[inside]
    for request, blocks in found.items():
        missing = int((blocks < 0).all((2, 3)).sum())
        if missing:
            raise ValueError(
                f"request {request}: the engine recorded no blocks for {missing} of {blocks[..., 0, 0].size} tokens "
                "and layers; it must compute every position eagerly"
            )
    return found


def sampling_params(**values):
    """vllm.SamplingParams(**values)."""
    from vllm import SamplingParams

    return SamplingParams(**values)


def lora_request(adapter_id: int, folder: Path | None = None):
    """A request for the adapter under `adapter_id`: one that was loaded from memory, or that of `folder`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(str(adapter_id), adapter_id, "in-memory" if folder is None else str(folder))


def check_finite(logprobs: list[float], what: str) -> None:
    """Refuse log-probs that are not finite: one NaN would go through the importance weights into every adapter.

    Raises:
        FloatingPointError: the message names the first position.
    """
    bad = np.flatnonzero(~np.isfinite(np.asarray(logprobs, dtype=np.float64)))
    if bad.size:
        raise FloatingPointError(f"{what}: the engine's log-prob of token {bad[0]} is {logprobs[bad[0]]}")


def scored_logprobs(ids: list[int], output) -> list[float]:
    """Log-probs of ids[1:] from a RequestOutput with prompt_logprobs=0.

    Raises:
        ValueError: the engine answered for other tokens.
    """
    scores = []
    for position, (token, entry) in enumerate(zip(ids[1:], output.prompt_logprobs[1:], strict=True), start=1):
        if token not in entry:
            raise ValueError(f"the engine scored {sorted(entry)} at position {position}, not token {token}")
        scores.append(entry[token].logprob)
    return scores
