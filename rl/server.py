"""verl's vLLM server and replica with answers from the workers, probes, and no silent rollouts of the base.

Imported in Ray actors that run the engine, and by verl's registry when the controller starts replicas.
"""

import asyncio
import uuid

import numpy as np
import ray

from rollout.patching import patch_target
from rollout.sampling import (
    SCORE_TOGETHER,
    Sequence,
    check_finite,
    gather_blocks,
    lora_request,
    sampling_params,
    scored_logprobs,
)

_module = "verl.workers.rollout.vllm_rollout.vllm_async_server"
vLLMHttpServer = patch_target(f"{_module}:vLLMHttpServer")
vLLMReplica = patch_target(f"{_module}:vLLMReplica")
ADAPTER_ID = patch_target("verl.workers.rollout.vllm_rollout.utils:VLLM_LORA_INT_ID")
for _name in (
    "_get_worker_extension_cls",
    "_resolve_sleep_level",
    "_sleep_hybrid",
    "collective_rpc",
    "generate",
    "release_kv_cache",
    "run_server",
    "set_global_steps",
    "wake_up",
):
    patch_target(f"{_module}:vLLMHttpServer.{_name}")


class LockstepServer(vLLMHttpServer):
    """One vLLM server of a replica."""

    _wake_reports: list[dict] = []

    def _get_worker_extension_cls(self) -> str:
        return "rl.extension.LockstepWorkerExtension"

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        """As verl's, without turning tokens into text: nobody reads it, and it costs a third of a CPU step."""
        return await super().generate(prompt_ids, {**sampling_params, "detokenize": False}, request_id, **kwargs)

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        """As verl's, but the workers' answers come back (verl drops them)."""
        return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

    async def run_server(self, args) -> None:
        await super().run_server(args)
        # verl asks the engine for its adapters before every request; the answer changes at a sync only.
        self._ask_loras, self._loras = self.engine.list_loras, None
        self.engine.list_loras = self._known_loras

    async def _known_loras(self):
        if self._loras is None:
            self._loras = await self._ask_loras()
        return self._loras

    def _resolve_sleep_level(self) -> int:
        """The recipe's; verl's own is 1 with adapters, since it could not restore a base from level 2."""
        return self.model_config.lora["lockstep"]["sleep_level"]

    async def _sleep_hybrid(self) -> None:
        self._wake_reports = []
        await self.collective_rpc("lockstep_before_sleep", args=(self._resolve_sleep_level(),))
        await super()._sleep_hybrid()

    async def release_kv_cache(self) -> None:
        """verl's sleep during a sync to engines on GPUs of their own, which goes past the proof."""
        if self.config.free_cache_engine:
            raise NotImplementedError("release_kv_cache: lockstep's engines sleep on the trainer's GPUs only")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As verl's, weights first: no request is served before their proof, since the KV cache is still asleep.

        verl sends the adapter between the two. A SleepError of a worker ends the run.
        """
        if self.node_rank != 0:
            return
        for tag in ("weights", "kv_cache"):
            if tags is None or tag in tags:
                await super().wake_up([tag])
                reports = await self.collective_rpc("lockstep_after_wake", args=(tag,))
                if tag == "weights" and None not in reports:
                    self._wake_reports = reports

    async def wake_reports(self) -> list[dict] | None:
        """Each worker's answer (`SleepWorker.lockstep_after_wake`) to the last wake from a sleep; None from a server of
        a replica's other nodes, whose workers the first one asks."""
        return self._wake_reports if self.node_rank == 0 else None

    async def generate_group(self, prompt_ids: list[int], sampling_params: dict, count: int) -> list:
        """`count` samples (verl TokenOutputs) of one prompt; FloatingPointError if a log-prob is not finite."""
        outputs = await asyncio.gather(
            *(self.generate(prompt_ids, dict(sampling_params), request_id=uuid.uuid4().hex) for _ in range(count))
        )
        for output in outputs:
            check_finite(output.log_probs or [], "rollout")
        return outputs

    async def set_global_steps(self, global_steps: int) -> None:
        """Called by verl after each sync. verl's generate falls back to the base when no adapter is loaded: refuse."""
        self._loras = None
        if self.lora_as_adapter and ADAPTER_ID not in await self.engine.list_loras():
            raise RuntimeError(
                f"after the sync of step {global_steps} the engine has no adapter: rollouts would use the base"
            )
        await super().set_global_steps(global_steps)

    async def probe_generate(self, prompts: list[list[int]], max_tokens: int) -> list[Sequence]:
        """Sample one response a prompt on the path that rollouts take."""

        async def one(prompt_ids: list[int]) -> Sequence:
            params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "max_tokens": max_tokens}
            output = await self.generate(prompt_ids, params, request_id=f"probe-{uuid.uuid4().hex}")
            routed = None if output.routed_experts is None else np.asarray(output.routed_experts)
            return Sequence(list(prompt_ids), list(output.token_ids), list(output.log_probs), routed)

        return await asyncio.gather(*(one(prompt) for prompt in prompts))

    async def probe_score(self, sequences: list[list[int]], adapter: bool) -> list[list[float]]:
        """Log-probs of tokens 1.. of each sequence by prefill, with the adapter or without."""

        outputs = await self._prefill(sequences, adapter)
        return [scored_logprobs(ids, output) for ids, output in zip(sequences, outputs, strict=True)]

    async def _prefill(self, sequences: list[list[int]], adapter: bool) -> list:
        """vLLM's output of each sequence as a prompt with log-probs, SCORE_TOGETHER at a time."""

        async def one(ids: list[int]):
            final = None
            generator = self.engine.generate(
                prompt={"prompt_token_ids": ids},
                sampling_params=sampling_params(max_tokens=1, prompt_logprobs=0),
                request_id=f"probe-{uuid.uuid4().hex}",
                lora_request=lora_request(ADAPTER_ID) if adapter else None,
            )
            async for output in generator:
                final = output
            return final

        outputs = []
        for start in range(0, len(sequences), SCORE_TOGETHER):
            outputs += await asyncio.gather(*(one(ids) for ids in sequences[start : start + SCORE_TOGETHER]))
        return outputs

    async def probe_blocks(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Blocks that sparse attention selects when the sequences are prefilled with the adapter."""
        await self.engine.reset_prefix_cache()  # every position must be computed
        try:
            await self.collective_rpc("lockstep_record_blocks", args=(True,))
            outputs = await self._prefill(sequences, adapter=True)
        finally:
            await self.collective_rpc("lockstep_record_blocks", args=(False,))
        workers = await self.collective_rpc("lockstep_take_blocks")
        lengths = {output.request_id: len(ids) for ids, output in zip(sequences, outputs, strict=True)}
        blocks = gather_blocks(workers, lengths)
        return [blocks[output.request_id] for output in outputs]


class LockstepReplica(vLLMReplica):
    """A replica whose servers are `LockstepServer`s."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(LockstepServer)


def register() -> None:
    """Make verl start `LockstepReplica`s for rollout.name=vllm in this process."""
    patch_target("verl.workers.rollout.replica:RolloutReplicaRegistry").register("vllm", lambda: LockstepReplica)
