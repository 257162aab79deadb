"""A plan as text, for scripts/plan.py and `train_grpo.py --dry-run`."""

from rl.config import Recipe
from rl.plan import GIB, Plan
from rl.plan_fit import find_config, gib, verdict

KINDS = ("experts", "shared_experts", "attention", "index", "dense_mlp", "embedding", "lm_head", "router", "norm")
WIDTH = 34


def render(recipe: Recipe, plan: Plan) -> str:
    """The plan as text: model, adapter, a device's memory by item, sync, verdict."""
    lines = [*_model_lines(recipe, plan), "", *_memory_lines(recipe, plan), "", *_sync_lines(plan), ""]
    if plan.host_bytes and plan.machine.host_gib is None:
        lines.append(
            f"loading: {gib(plan.host_bytes)} GiB of a node's RAM (each of its {recipe.trainer.gpus_per_node} workers "
            "reads the whole base); not judged without --host-gib"
        )
    if recipe.trainer.max_tokens_per_micro_batch is not None:
        lines.append("tokens of a micro-batch are counted without padding; verl pads to its longest sequence")
    return "\n".join([*lines, verdict(recipe, plan)])


def _model_lines(recipe: Recipe, plan: Plan) -> list[str]:
    known = find_config(recipe)
    source = "nothing" if known is None else known.source
    planned = " (model.path is not there yet)" if known is not None and known.planned else ""
    total, base = sum(plan.parameters.values()), plan.base_bytes
    kinds = ", ".join(f"{kind} {_count(plan.parameters[kind])}" for kind in KINDS if plan.parameters.get(kind))
    return [
        f"{plan.recipe}: planned from {source}{planned}",
        f"base     {_count(total)} parameters, {_bytes(base)} ({kinds})",
        f"adapter  {_count(plan.adapter_parameters)} parameters: rank {recipe.model.lora_rank} on "
        f"{', '.join(recipe.model.lora_targets)}",
        f"devices  {plan.workers} workers ({recipe.trainer.nodes} x {recipe.trainer.gpus_per_node}), engine copies of "
        f"{recipe.rollout.tensor_parallel_size}; {plan.machine.gib:.1f} GiB a {plan.machine.unit} "
        f"({plan.machine.source})",
    ]


def _memory_lines(recipe: Recipe, plan: Plan) -> list[str]:
    lines = [_row(f"GiB a {plan.machine.unit}", "")]
    phases = (
        ("trainer, always", plan.trainer, True),
        (f"trainer, update of {plan.tokens} tokens", plan.update, plan.peak == "update"),
        ("sync", plan.sync, plan.peak == "sync"),
        ("engine, always", plan.engine, True),
    )
    for title, items, counts in phases:
        note = "" if counts else "  (not at the peak)"
        lines.append(_row(title, gib(sum(items.values()))) + note)
        lines += [_row(f"  {name}", gib(value)) for name, value in items.items()]
    lines.append(_row("reserved", gib(plan.reserved)))
    lines.append(_row("at the peak", gib(plan.needed)) + f"  of {plan.machine.gib:.1f}")
    cache = (
        f"KV cache: {plan.kv_model_token_bytes} bytes a token, {plan.kv_token_bytes} on each device of a copy; room "
        f"for {plan.sequences} sequences of {recipe.max_model_len} tokens (max_num_seqs {recipe.rollout.max_num_seqs})"
    )
    return [*lines, "", cache]


def _sync_lines(plan: Plan) -> list[str]:
    ratio, served = plan.full_sync_bytes / plan.sync_bytes, plan.base_bytes / plan.sync_bytes
    return [
        f"sync: {_bytes(plan.sync_bytes)} of adapter in bf16; all weights would be {_bytes(plan.full_sync_bytes)} in "
        f"bf16 ({ratio:.3g} times as much) or {_bytes(plan.base_bytes)} as served ({served:.3g} times)"
    ]


def _row(name: str, value: str) -> str:
    return f"{name:<{WIDTH}}{value:>8}".rstrip()


def _count(number: int) -> str:
    """1234567 as 1.23 M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    """In GB or GiB as the facts have them: decimal."""
    return f"{number / 1e9:.2f} GB" if number >= GIB else f"{number / 1e6:.2f} MB"
