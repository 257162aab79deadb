"""Rollouts by group: one request, one reward call and one write for the samples of a prompt.

verl runs every sample as an agent loop of its own: three Ray calls, a reward call and a TransferQueue write each, about
30 ms of CPU a sample. Single-turn prompts need none of that apart. This is verl's own extension point
(`rollout.agent.agent_loop_manager_class`); what is written to TransferQueue is what verl's single-turn loop writes.
"""

import random
import time

import hydra
import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from rollout.patching import patch_target

_tq_module = "verl.trainer.ppo.v1.agent_loop_tq"
_loop_module = "verl.experimental.agent_loop.agent_loop"
AgentLoopManagerTQ = patch_target(f"{_tq_module}:AgentLoopManagerTQ")
AgentLoopWorkerTQ = patch_target(f"{_tq_module}:AgentLoopWorkerTQ").__ray_metadata__.modified_class
AgentLoopOutput = patch_target(f"{_loop_module}:AgentLoopOutput")
AgentLoopMetrics = patch_target(f"{_loop_module}:AgentLoopMetrics")
DictConfigWrap = patch_target(f"{_loop_module}:DictConfigWrap")
ToolListWrap = patch_target(f"{_loop_module}:ToolListWrap")
registry = patch_target(f"{_loop_module}:_agent_loop_registry")
DataProto = patch_target("verl.protocol:DataProto")
list_of_dict_to_tensordict = patch_target("verl.utils.tensordict_utils:list_of_dict_to_tensordict")
for _name in ("_run_prompt", "generate_sequences"):
    patch_target(f"{_tq_module}:AgentLoopWorkerTQ.{_name}")


class GroupLoopWorker(AgentLoopWorkerTQ):
    """Samples the whole group of a prompt at once. Single turn, text only."""

    _tokenising_loop = None

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        """Sample, score and store the group of `prompt`; its tag ends as finished or failure."""
        uid, partition = prompt["uid"], "val" if trajectory["validate"] else "train"
        rollout = self.config.actor_rollout_ref.rollout
        count = prompt.pop("__rollout_n__", rollout.val_kwargs.n if trajectory["validate"] else rollout.n)
        prompt.pop("__do_sample__", None)
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        status = "failure"
        try:
            outputs = await self._sample(prompt, sampling_params, count)
            await self._score(outputs, prompt)
            await self._store(outputs, prompt, partition)
            status = "finished"
        finally:
            await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})

    async def _prompt_ids(self, prompt: dict) -> list[int]:
        """Token ids of the prompt, by the tokenisation of verl's single-turn loop."""
        if self._tokenising_loop is None:
            self._tokenising_loop = hydra.utils.instantiate(
                config=registry["single_turn_agent"],
                trainer_config=DictConfigWrap(config=self.config),
                server_manager=self.llm_client,
                tokenizer=self.tokenizer,
                processor=self.processor,
                hf_model_type=self.hf_model_type,
                dataset_cls=self.dataset_cls,
                data_config=DictConfigWrap(self.config.data),
                tools=ToolListWrap(self.tools),
            )
        return await self._tokenising_loop.ct_build_initial_tokens(
            list(prompt["raw_prompt"]), images=None, videos=None, audios=None, mm_inputs_out={}
        )

    async def _sample(self, prompt: dict, sampling_params: dict, count: int) -> list:
        """`count` AgentLoopOutputs of one prompt."""
        prompt_ids = await self._prompt_ids(prompt)
        started = time.monotonic()
        server_id, server = await self.llm_client._acquire_server(prompt["uid"])
        try:
            samples = await server.generate_group.remote(prompt_ids, sampling_params, count)
        finally:
            self.llm_client._release_server(server_id, request_id=prompt["uid"])
        seconds = time.monotonic() - started
        return [self._output(prompt_ids, sample, seconds) for sample in samples]

    def _output(self, prompt_ids: list[int], sample, seconds: float):
        length = self.config.actor_rollout_ref.rollout.response_length
        response = list(sample.token_ids)[:length]
        steps = sample.extra_fields.get("global_steps")
        return AgentLoopOutput(
            prompt_ids=list(prompt_ids),
            response_ids=response,
            response_mask=[1] * len(response),
            response_logprobs=sample.log_probs[:length],
            routed_experts=sample.routed_experts,
            multi_modal_data={},
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=seconds),
            extra_fields={
                **sample.extra_fields,
                "min_global_steps": steps,
                "max_global_steps": steps,
                "turn_scores": [],
                "tool_rewards": [],
            },
        )

    async def _score(self, outputs: list, prompt: dict) -> None:
        """Rewards of the group by one call of a reward worker (verl's naive manager, the recipe's function)."""
        count = len(outputs)
        responses = [torch.tensor(output.response_ids) for output in outputs]
        padded = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=0)
        mask = torch.zeros_like(padded)
        for row, response in enumerate(responses):
            mask[row, : len(response)] = 1
        fields = {key: prompt[key] for key in ("data_source", "reward_model")}
        per_row = {key: np.array([value] * count, dtype=object) for key, value in fields.items()}
        per_row["extra_info"] = np.array([dict(prompt.get("extra_info") or {}) for _ in outputs], dtype=object)
        batch = TensorDict({"responses": padded, "attention_mask": mask}, batch_size=count)
        worker = random.choice(self.reward_loop_worker_handles)
        started = time.monotonic()
        results = await worker.compute_score_batch.remote(DataProto(batch=batch, non_tensor_batch=per_row))
        seconds = time.monotonic() - started
        for output, result in zip(outputs, results, strict=True):
            output.reward_score = float(result["reward_score"])  # a tensor, if a penalty on length was taken off
            output.extra_fields["reward_extra_info"] = result["reward_extra_info"]
            output.extra_fields["reward_s"] = seconds

    async def _store(self, outputs: list, prompt: dict, partition: str) -> None:
        """One TransferQueue write for the group; keys are {uid}_{sample}_0."""
        keys, fields, tags = [], [], []
        for index, output in enumerate(outputs):
            field = output.as_dict()
            field.update(prompt)
            field.pop("multi_modal_data", None)
            field["session_id"] = index
            field["loss_mask"] = field["response_mask"]
            field["input_ids"] = torch.cat([field["prompts"], field["responses"]])
            field["position_ids"] = torch.arange(field["input_ids"].shape[0])
            field["multi_modal_inputs"] = {}
            fields.append(field)
            keys.append(f"{prompt['uid']}_{index}_0")
            prompt_len, response_len = field["prompts"].shape[0], field["responses"].shape[0]
            tags.append(
                {
                    "status": "success",
                    "prompt_len": prompt_len,
                    "response_len": response_len,
                    "seq_len": prompt_len + response_len,
                    "global_steps": prompt["global_steps"],
                    "min_global_steps": output.extra_fields["min_global_steps"],
                    "max_global_steps": output.extra_fields["max_global_steps"],
                    **reward_tag(output.reward_score, output.extra_fields),
                }
            )
        await tq.async_kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id=partition
        )


def reward_tag(reward: float, extra_fields: dict) -> dict:
    """What `rl.step_metrics.reward_metrics` needs of a judged sample; `reward` has the penalty on length in it."""
    judged = extra_fields["reward_extra_info"]
    return {
        "correct": bool(judged["acc"]),
        "answered": bool(judged["pred"]),
        "reward_error": str(judged["error"]),
        "overlong_penalty": float(reward) - float(judged["score"]),
        "reward_s": extra_fields["reward_s"],
    }


class GroupLoopManager(AgentLoopManagerTQ):
    """verl's TransferQueue manager with `GroupLoopWorker`s."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(GroupLoopWorker)
