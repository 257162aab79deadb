"""vLLM sampling parameters and the reading of scored prompts, for callers that must not import vLLM themselves."""


def sampling_params(**values):
    """vllm.SamplingParams(**values)."""
    from vllm import SamplingParams

    return SamplingParams(**values)


def lora_request(adapter_id: int):
    """A request for an adapter that was loaded from memory under `adapter_id`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(str(adapter_id), adapter_id, "in-memory")


def scored_logprobs(ids: list[int], output) -> list[float]:
    """Log-probs of ids[1:] from a RequestOutput with prompt_logprobs=0."""
    return [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
