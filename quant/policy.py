"""Which module gets which format: first matching pattern wins. Imports without torch.

A policy is a tuple of (regular expression, format) rules, searched (`re.search`) in the module's name as the checkpoint
writes it (`model.layers.0.mlp.experts.3.gate_proj`, `model.layers.0.mlp.experts.gate_up_proj`). A format is "nvfp4",
"mxfp8" or None (kept as it is). Only `.weight` matrices of modules and stacked expert tensors are ever asked about, so
that norms, biases and buffers need no rule. The default follows MiniMax-M3.1-Flash: routed experts in NVFP4, every
other projection in MXFP8; router, embeddings, lm_head, norms and all outside the language model stay as they are.
"""

import re
from dataclasses import dataclass
from pathlib import Path

NVFP4 = "nvfp4"
MXFP8 = "mxfp8"
FORMATS = (NVFP4, MXFP8)
BLOCK_SIZES = {NVFP4: 16, MXFP8: 32}

_EXPERTS = r"(^|\.)experts\."
_KEPT = (
    (r"(^|\.)lm_head(\.|$)", None),
    (r"embed", None),
    (r"norm", None),
    (r"(^|\.)(gate|router|shared_expert_gate|e_score_correction_bias)(\.|$)", None),
    (r"(^|\.)(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|patch_merge_mlp)(\.|$)", None),
)
_PROJECTION = r"(^|\.)(\w+_proj|w[123])$"

# Parts that the engine fuses into one matrix and decodes with one global scale.
_FUSED = (
    (re.compile(r"(^|\.)(gate_proj|up_proj)$"), "gate_up_proj"),
    (re.compile(r"(^|\.)(w1|w3)$"), "gate_up_proj"),
    (re.compile(r"(^|\.)(q_proj|k_proj|v_proj|index_q_proj|index_k_proj)$"), "qkv_proj"),
)


@dataclass(frozen=True)
class Policy:
    """A named list of rules; `source` says where it came from."""

    name: str
    rules: tuple[tuple[str, str | None], ...]

    def __post_init__(self) -> None:
        for pattern, fmt in self.rules:
            if fmt is not None and fmt not in FORMATS:
                raise ValueError(f"policy {self.name!r}: unknown format {fmt!r} for {pattern!r}: use {FORMATS} or null")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"policy {self.name!r}: bad pattern {pattern!r}: {error}") from error

    def format_of(self, module: str) -> str | None:
        """Format of the module named `module` (no `.weight` suffix): "nvfp4", "mxfp8" or None for untouched."""
        for pattern, fmt in self.rules:
            if re.search(pattern, module):
                return fmt
        return None


POLICIES = {
    "nvfp4_mxfp8": Policy("nvfp4_mxfp8", (*_KEPT, (_EXPERTS, NVFP4), (_PROJECTION, MXFP8))),
    "nvfp4_experts": Policy("nvfp4_experts", (*_KEPT, (_EXPERTS, NVFP4))),
    "mxfp8_dense": Policy("mxfp8_dense", (*_KEPT, (_EXPERTS, None), (_PROJECTION, MXFP8))),
    "nvfp4_all": Policy("nvfp4_all", (*_KEPT, (_EXPERTS, NVFP4), (_PROJECTION, NVFP4))),
}


def get_policy(policy: "str | Policy") -> Policy:
    """A built-in policy by name, one read from a YAML file (`rules: [[pattern, format or null], ...]`), or itself.

    Raises ValueError naming the known policies, or what is wrong in the file.
    """
    if isinstance(policy, Policy):
        return policy
    if policy in POLICIES:
        return POLICIES[policy]
    path = Path(policy)
    if path.suffix in (".yaml", ".yml"):
        return _read_policy(path)
    raise ValueError(f"policy {policy!r} is unknown: use one of {', '.join(POLICIES)} or a .yaml file")


def _read_policy(path: Path) -> Policy:
    import yaml  # only here: the built-in policies need no dependency

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"policy {path}: cannot read it: {error}") from error
    rules = content.get("rules") if isinstance(content, dict) else None
    well_formed = isinstance(rules, list) and all(isinstance(r, list) and len(r) == 2 for r in rules)
    if not well_formed:
        raise ValueError(f"policy {path}: expected `rules:`, a list of [pattern, format] pairs")
    return Policy(path.stem, tuple((str(pattern), fmt) for pattern, fmt in rules))


def fused_group(module: str) -> str:
    """Name shared by the modules that the engine fuses with `module` (`...q_proj` gives `...qkv_proj`), else itself."""
    for pattern, fused in _FUSED:
        match = pattern.search(module)
        if match:
            return module[: match.start()] + match.group(1) + fused
    return module
