"""A vLLM engine inside the caller's process: for consistency checks, evaluation and tests. No Ray, no server."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rollout.sampling import (
    SCORE_TOGETHER,
    ScoredSequence,
    Sequence,
    gather_blocks,
    lora_request,
    sampling_params,
    scored_logprobs,
)

ADAPTER_ID = 1


@dataclass
class EngineOptions:
    """Sizes of an in-process engine."""

    max_model_len: int = 256
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    lora_rank: int = 32
    kv_cache_gib: float = 0.25
    seed: int = 0
    dtype: str = "bfloat16"
    vocabulary: int | None = None
    sleep: bool = False
    """Let the engine `sleep`; needs a GPU."""
    enforce_eager: bool = True
    extra: dict = field(default_factory=dict)


def set_environment(eager: bool) -> None:
    """vLLM's environment for an in-process engine; call before vLLM is imported."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    if eager:
        # vLLM compiles helpers of its sampler with inductor even in eager mode: 20-40 s of C++ compiler on CPU.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


class InProcessEngine:
    """vLLM's `LLM` with one adapter slot, routed-expert capture and in-memory adapter sync."""

    def __init__(self, path: Path, options: EngineOptions) -> None:
        set_environment(options.enforce_eager)
        from vllm import LLM

        self.options = options
        self.llm = LLM(
            model=str(path),
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enforce_eager=options.enforce_eager,
            enable_lora=True,
            max_loras=1,
            max_lora_rank=options.lora_rank,
            enable_return_routed_experts=True,
            load_format="safetensors",
            kv_cache_memory_bytes=int(options.kv_cache_gib * 2**30),
            seed=options.seed,
            logprobs_mode="processed_logprobs",
            worker_extension_cls="rollout.worker.EngineWorker",
            enable_sleep_mode=options.sleep,
            **options.extra,
        )
        if options.vocabulary is not None:
            self.llm.collective_rpc("lockstep_limit_vocabulary", args=(options.vocabulary,))

    def sync_adapter(self, tensors: dict[str, torch.Tensor], config: dict) -> None:
        """Replace the adapter by `tensors` (wire names) in memory and drop cached prefixes."""
        self.llm.collective_rpc("lockstep_load_adapter", args=(ADAPTER_ID, tensors, config))
        self.llm.reset_prefix_cache()

    def load_adapter(self, folder: Path) -> None:
        """Replace the adapter by the one that vLLM itself reads from `folder` (its own names, one pair an expert)."""
        self.llm.llm_engine.remove_lora(ADAPTER_ID)
        self.llm.llm_engine.add_lora(lora_request(ADAPTER_ID, folder))
        self.llm.reset_prefix_cache()

    def base_digests(self, detail: bool = False) -> list[dict[str, dict]]:
        """Of every worker."""
        return self.llm.collective_rpc("lockstep_base_digests", args=(detail,))

    def adapter_digests(self, detail: bool = False) -> list[dict[str, dict]]:
        """Of every worker."""
        return self.llm.collective_rpc("lockstep_adapter_digests", args=(ADAPTER_ID, detail))

    def sleep(self, level: int) -> None:
        """Give the KV cache back, and the weights: to host memory (level 1) or altogether (level 2)."""
        self.llm.collective_rpc("lockstep_before_sleep", args=(level,))
        self.llm.sleep(level)

    def wake(self) -> list[dict]:
        """Undo `sleep`; after level 2 the adapter has to be sent again. What each worker says of it:
        `rollout.sleep.SleepWorker.lockstep_after_wake`.

        Raises SleepError if the base is not that of the start; the engine then serves nothing.
        """
        self.llm.wake_up(tags=["weights"])
        reports = self.llm.collective_rpc("lockstep_after_wake", args=("weights",))
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.collective_rpc("lockstep_after_wake", args=("kv_cache",))
        return reports

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        adapter: bool = True,
        seed: int = 0,
        temperature: float = 1.0,
    ) -> list[Sequence]:
        """Sample one response a prompt, prompt i with seed + i; temperature 0 is greedy decoding."""
        params = [
            sampling_params(max_tokens=max_tokens, logprobs=0, seed=seed + i, temperature=temperature)
            for i in range(len(prompts))
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            params,
            lora_request=lora_request(ADAPTER_ID) if adapter else None,
            use_tqdm=False,
        )
        sampled = []
        for output in outputs:
            completion = output.outputs[0]
            ids = list(completion.token_ids)
            logprobs = [entry[token].logprob for token, entry in zip(ids, completion.logprobs, strict=True)]
            routed = completion.routed_experts
            sampled.append(
                Sequence(list(output.prompt_token_ids), ids, logprobs, None if routed is None else np.asarray(routed))
            )
        return sampled

    def _prefill(self, sequences: list[list[int]], adapter: bool) -> list:
        """A RequestOutput with prompt log-probs of each sequence, SCORE_TOGETHER at a time."""
        outputs = []
        for start in range(0, len(sequences), SCORE_TOGETHER):
            outputs += self.llm.generate(
                [{"prompt_token_ids": ids} for ids in sequences[start : start + SCORE_TOGETHER]],
                sampling_params(max_tokens=1, prompt_logprobs=0),
                lora_request=lora_request(ADAPTER_ID) if adapter else None,
                use_tqdm=False,
            )
        return outputs

    def score(self, sequences: list[list[int]], adapter: bool = True) -> list[list[float]]:
        """Log-probs of tokens 1.. of each sequence, by prefill."""
        outputs = self._prefill(sequences, adapter)
        return [scored_logprobs(ids, output) for ids, output in zip(sequences, outputs, strict=True)]

    def score_with_blocks(self, sequences: list[list[int]], adapter: bool = True) -> list[ScoredSequence]:
        """`score`, with the experts and sparse attention blocks that the engine chose for every token.

        Only for a model with MiniMax Sparse Attention. Cached prefixes are dropped first, so that every
        position is computed; prefill may be chunked.
        """
        self.llm.reset_prefix_cache()
        try:
            self.llm.collective_rpc("lockstep_record_blocks", args=(True,))
            outputs = self._prefill(sequences, adapter)
        finally:
            self.llm.collective_rpc("lockstep_record_blocks", args=(False,))
        workers = self.llm.collective_rpc("lockstep_take_blocks")
        lengths = {output.request_id: len(ids) for ids, output in zip(sequences, outputs, strict=True)}
        blocks = gather_blocks(workers, lengths)
        return [
            ScoredSequence(scored_logprobs(ids, output), output.outputs[0].routed_experts, blocks[output.request_id])
            for ids, output in zip(sequences, outputs, strict=True)
        ]
