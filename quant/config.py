"""The `quantization_config` of a mixed checkpoint: written for compressed-tensors, read also in ModelOpt's form."""

import re
from collections import defaultdict

from quant.policy import MXFP8, NVFP4

_NVFP4_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
    "observer": "minmax",
}
_MXFP8_WEIGHTS = {
    **_NVFP4_WEIGHTS,
    "num_bits": 8,
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
}
_GROUPS = {
    NVFP4: ("nvfp4-pack-quantized", _NVFP4_WEIGHTS),
    MXFP8: ("mxfp8-quantized", _MXFP8_WEIGHTS),
}
_FUSED_NAMES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
EXPERTS_TARGET = r"re:.*\.experts\..*"


def quantization_config(plan) -> dict:
    """config.json's entry for a conversion plan: one weight-only config group a format, targets as regular expressions.

    Routed experts are matched by `re:.*\\.experts\\..*` (the engine looks for experts.0.gate_proj under every naming);
    the rest by parent and leaf (`re:(.*\\.)?self_attn\\.(q_proj|...)$`), or by full names where the same leaf has
    different formats in different layers. Matrices that stay as they are go to `ignore`, which the engine reads first.
    """
    modules: dict[str | None, set[str]] = defaultdict(set)
    for job in plan.all_jobs():
        if job.fmt is not None or (job.name.endswith(".weight") and len(job.shape) == 2):
            modules[job.fmt].add(job.module)
    groups = {}
    for number, fmt in enumerate(fmt for fmt in (NVFP4, MXFP8) if fmt in modules):
        form, weights = _GROUPS[fmt]
        groups[f"group_{number}"] = {
            "targets": _targets(fmt, modules),
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": form,
        }
    single = len(groups) == 1
    return {
        "quant_method": "compressed-tensors",
        "format": groups["group_0"]["format"] if single else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _targets(None, modules),
        "kv_cache_scheme": None,
    }


def _kind(module: str) -> tuple[str, str]:
    """(parent's last name, leaf); all routed experts are one kind."""
    if ".experts." in f".{module}.":
        return "", EXPERTS_TARGET
    parent, _, leaf = module.rpartition(".")
    return parent.rpartition(".")[2], leaf


def _targets(fmt: str | None, modules: dict[str | None, set[str]]) -> list[str]:
    """Targets that match the modules of `fmt` and none of another format."""
    elsewhere = {_kind(module) for other, names in modules.items() if other != fmt for module in names}
    leaves: dict[str, set[str]] = defaultdict(set)
    targets = set()
    for module in modules[fmt]:
        parent, leaf = _kind(module)
        if (parent, leaf) in elsewhere or not parent:
            targets.add(leaf if leaf == EXPERTS_TARGET and (parent, leaf) not in elsewhere else module)
        else:
            leaves[parent].add(leaf)
    for parent, names in leaves.items():
        fused = {name for name, parts in _FUSED_NAMES.items() if names.issuperset(parts)}
        targets.add(rf"re:(.*\.)?{re.escape(parent)}\.({'|'.join(sorted(names | fused))})$")
    return sorted(targets)
