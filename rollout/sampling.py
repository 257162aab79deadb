"""vLLM sampling parameters, sampled sequences and scored prompts, for callers that must not import vLLM."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

GPU_ENGINE_ARGS = {"fully_sharded_loras": True}
"""vLLM arguments of every engine on a GPU. vLLM 0.30.0's one-launch kernel for adapters of experts accesses memory out
of bounds for some batch sizes (seen on an H200: a crash, or NaN); with this setting it takes the two kernels it has for
sharded adapters, which compute the same on one GPU."""


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
    """Log-probs of ids[1:] from a RequestOutput with prompt_logprobs=0."""
    return [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
