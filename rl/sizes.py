"""Checks of a recipe that concern several sections: devices, engine copies and batches must divide."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl.schema import Recipe


def resolve_workers(recipe: "Recipe") -> None:
    """Fill in the device counts that a recipe leaves null (it is frozen for everyone else), and check that they fit."""
    trainer, rollout = recipe.trainer, recipe.rollout
    workers, per_node = trainer.fsdp_workers, trainer.gpus_per_node
    if workers is None:
        workers = (per_node or 1) * trainer.nodes
    if workers % trainer.nodes or (per_node is not None and per_node * trainer.nodes != workers):
        raise ValueError(
            f"trainer.fsdp_workers = {workers}: nodes ({trainer.nodes}) * gpus_per_node ({per_node}) must give this "
            "number; set one of fsdp_workers and gpus_per_node and leave the other null"
        )
    per_node = workers // trainer.nodes
    width = rollout.tensor_parallel_size
    if workers % width or (rollout.replicas is not None and rollout.replicas * width != workers):
        raise ValueError(
            f"rollout.tensor_parallel_size = {width}, replicas = {rollout.replicas}: the engine shares the trainer's "
            f"devices, so their product must be trainer.fsdp_workers ({workers}); leave rollout.replicas null"
        )
    object.__setattr__(trainer, "fsdp_workers", workers)
    object.__setattr__(trainer, "gpus_per_node", per_node)
    object.__setattr__(rollout, "replicas", workers // width)


def check_batches(recipe: "Recipe") -> None:
    """A step's samples must divide over workers and micro-batches."""
    trainer, workers, samples = recipe.trainer, recipe.trainer.fsdp_workers, recipe.samples_per_step
    if samples % workers:
        raise ValueError(
            f"data.batch_size = {recipe.data.batch_size}: {samples} samples a step do not divide over "
            f"{workers} workers (trainer.fsdp_workers); take a multiple"
        )
    if trainer.max_tokens_per_micro_batch is not None:
        if trainer.max_tokens_per_micro_batch < recipe.max_model_len:
            raise ValueError(
                f"trainer.max_tokens_per_micro_batch = {trainer.max_tokens_per_micro_batch}: the longest sequence has "
                f"{recipe.max_model_len} tokens (data.max_prompt_length + max_response_length); set at least that"
            )
        return
    object.__setattr__(trainer, "micro_batch_size", min(trainer.micro_batch_size, samples // workers))
    if samples // workers % trainer.micro_batch_size:
        raise ValueError(
            f"trainer.micro_batch_size = {trainer.micro_batch_size}: a worker has {samples // workers} samples a "
            "step (data.batch_size * rollout.group_size / workers); take a divisor of it"
        )
