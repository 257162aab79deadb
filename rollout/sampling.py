"""vLLM sampling parameters, sampled sequences and scored prompts, for callers that must not import vLLM."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np


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


def scored_logprobs(ids: list[int], output) -> list[float]:
    """Log-probs of ids[1:] from a RequestOutput with prompt_logprobs=0."""
    return [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
