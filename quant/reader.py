"""Read a quantised checkpoint into packed tensors under Hugging Face module names, experts stacked.

Accepted: compressed-tensors (NVFP4 `weight_packed`, MXFP8 `weight_scale`), ModelOpt (NVFP4 `weight_scale_2`, a
multiplier; MXFP8) and MiniMax's MXFP8 (`weight_scale_inv`). Refused, with the reason: what the engine would decode to
something else than the file means (parts of a fused matrix under different global scales, ModelOpt MIXED_PRECISION with
MXFP8 layers, negative or NaN block scales), and tensors that belong to no matrix.

Names: a matrix is `....q_proj.weight`; the experts E of a layer are `....experts.gate_up_proj` [E, 2I, H] and
`....experts.down_proj` [E, H, I], whatever the checkpoint calls them (gate/up/down_proj or w1/w3/w2).
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quant.mxfp8 import MXFP8Tensor
from quant.nvfp4 import NVFP4Tensor
from quant.policy import MXFP8, NVFP4, fused_group
from quant.shards import Checkpoint, CheckpointError, Entry, open_checkpoint, read_json

Packed = torch.Tensor | NVFP4Tensor | MXFP8Tensor

_EXPERT = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<leaf>gate_proj|up_proj|down_proj|w1|w2|w3)$")
_SLOTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": None, "w2": None}
# Suffix of a tensor -> its role in a matrix. Input scales serve backends that quantise activations.
_ROLES = {
    "weight": "weight",
    "weight_packed": "packed",
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
    "weight_global_scale": "divisor",
    "weight_scale_2": "multiplier",
    "input_global_scale": "input_divisor",
    "input_scale": "input_multiplier",
}


@dataclass
class Matrix:
    """One matrix of the checkpoint: its tensors by role, and the format they make."""

    name: str
    parts: dict[str, Entry] = field(default_factory=dict)

    @property
    def fmt(self) -> str | None:
        """NVFP4, MXFP8 or None (a plain tensor); CheckpointError when the parts make no known format."""
        roles = frozenset(role for role in self.parts if not role.startswith("input_"))
        weight = self.parts.get("weight")
        if roles == {"weight"}:
            if weight.dtype in (torch.uint8, torch.float8_e4m3fn):
                raise CheckpointError(f"{weight.file}: {self.name} is {weight.dtype} without a scale")
            return None
        data = self.parts.get("packed") or weight
        kinds = (data.dtype, self.parts["scale"].dtype) if "scale" in roles and data else ()
        if roles == {"weight", "scale"} and kinds == (torch.float8_e4m3fn, torch.uint8):
            return MXFP8
        nvfp4_roles = ({"packed", "scale", "divisor"}, {"weight", "scale", "multiplier"})
        if roles in nvfp4_roles and kinds == (torch.uint8, torch.float8_e4m3fn):
            return NVFP4
        kinds = ", ".join(f"{role} {entry.dtype}" for role, entry in self.parts.items())
        entry = next(iter(self.parts.values()))
        raise CheckpointError(f"{entry.file}: {self.name} is in no known format ({kinds}): need NVFP4 or MXFP8")

    def read(self) -> Packed:
        """The packed (or plain) matrix, checked for shapes and scale bytes."""
        if self.fmt is None:
            return self.parts["weight"].read()
        scale = self.parts["scale"].read()
        if self.fmt == MXFP8:
            data = self.parts["weight"].read()
            self._check_shape(data.shape[-1] // 32, data, scale)
            if bool((scale == 255).any()):
                raise CheckpointError(f"{self.parts['scale'].file}: {self.name} has NaN block scales")
            return MXFP8Tensor(data, scale)
        packed = (self.parts.get("packed") or self.parts["weight"]).read()
        self._check_shape(packed.shape[-1] // 8, packed, scale)
        if bool((scale.view(torch.uint8) >= 0x7F).any()):
            raise CheckpointError(f"{self.parts['scale'].file}: {self.name} has negative or NaN block scales")
        return NVFP4Tensor(packed, scale, self.global_scale(), self.input_scale())

    def global_scale(self) -> torch.Tensor:
        """The weight's float32 multiplier []."""
        return self._multiplier("divisor" if "divisor" in self.parts else "multiplier")

    def input_scale(self) -> torch.Tensor | None:
        """The activations' float32 multiplier [], None for weight-only."""
        roles = [role for role in self.parts if role.startswith("input_")]
        return self._multiplier(roles[0]) if roles else None

    def _multiplier(self, role: str) -> torch.Tensor:
        """A float32 multiplier []; a stored divisor D gives 1 / D in float32, as the engine computes it."""
        value = self.parts[role].read().float().reshape(-1)
        if value.numel() != 1 or not bool(torch.isfinite(value).all() & (value > 0).all()):
            raise CheckpointError(f"{self.parts[role].file}: {self.name} has {role} scale {value.tolist()}")
        return (1.0 / value if role.endswith("divisor") else value)[0]

    def _check_shape(self, blocks: int, data: torch.Tensor, scale: torch.Tensor) -> None:
        if tuple(scale.shape) != (*data.shape[:-1], blocks):
            raise CheckpointError(
                f"{self.parts['scale'].file}: {self.name} has scales {list(scale.shape)} for data {list(data.shape)}"
            )


def _check_config(checkpoint: Checkpoint) -> None:
    config = checkpoint.config.get("quantization_config")
    modelopt_file = checkpoint.path / "hf_quant_config.json"
    if config is None and modelopt_file.exists():
        config = {"quant_method": "modelopt", **read_json(modelopt_file).get("quantization", {})}
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: it has no quantization_config: this is no quantised checkpoint; "
            "make one with scripts/quantize_checkpoint.py"
        )
    method = str(config.get("quant_method", "modelopt" if "quant_algo" in config else None))
    if method.startswith("modelopt"):
        algorithm = str(config.get("quant_algo", "")).upper()
        layers = config.get("quantized_layers") or {}
        inner = {str(layer.get("quant_algo", "")).upper() for layer in layers.values() if isinstance(layer, dict)}
        if algorithm == "MIXED_PRECISION" and any("MXFP8" in name for name in inner):
            raise CheckpointError(
                f"{checkpoint.path}: ModelOpt MIXED_PRECISION with MXFP8 layers: the engine loads it without an error "
                "and decodes garbage; convert it to compressed-tensors from the bf16 original"
            )
        allowed = {"NVFP4", "MXFP8", "MIXED_PRECISION"}
        if algorithm not in allowed:
            raise CheckpointError(f"{checkpoint.path}: ModelOpt quant_algo {algorithm!r} is not one of {allowed}")
    elif method not in ("compressed-tensors", "mxfp8"):
        raise CheckpointError(f"{checkpoint.path}: quant_method {method!r} is not read here; need NVFP4 or MXFP8")


def _matrices(checkpoint: Checkpoint) -> dict[str, Matrix]:
    """Matrices by name; a tensor whose suffix is no role is a matrix of its own, under its full name."""
    names = set(checkpoint.entries)
    matrices: dict[str, Matrix] = {}
    for name, entry in checkpoint.entries.items():
        module, _, suffix = name.rpartition(".")
        role = _ROLES.get(suffix)
        if role not in (None, "weight") and not {f"{module}.weight", f"{module}.weight_packed"} & names:
            raise CheckpointError(f"{entry.file}: {name} belongs to no matrix of this checkpoint")
        key = module if role else name
        matrix = matrices.setdefault(key, Matrix(f"{module}.weight" if role else name))
        if (role or "weight") in matrix.parts:
            raise CheckpointError(f"{entry.file}: {name}: {module} has two tensors for the same role")
        matrix.parts[role or "weight"] = entry
    return matrices


def _check_shared_globals(matrices: dict[str, Matrix]) -> None:
    groups: dict[str, dict[str, tuple[float, float | None]]] = defaultdict(dict)
    for module, matrix in matrices.items():
        if matrix.fmt == NVFP4:
            given = matrix.input_scale()
            groups[fused_group(module)][module] = (
                float(matrix.global_scale()),
                given if given is None else float(given),
            )
    for members in groups.values():
        for kind, values in zip(("global", "input"), zip(*members.values(), strict=True), strict=True):
            if len(set(values)) > 1:
                listed = ", ".join(f"{name} {value}" for name, value in zip(members, values, strict=True))
                raise CheckpointError(
                    f"parts that the engine fuses have different {kind} scales, and it would use one for all: {listed}"
                )


def packed_items(path: str | Path) -> Iterator[tuple[str, Packed]]:
    """Yield (Hugging Face name, packed or plain tensor) of a quantised checkpoint, one layer's experts at a time.

    Matrices are NVFP4Tensor or MXFP8Tensor ([N, K], experts [E, N, K] with global_scale [E]) on CPU; everything else is
    a tensor as stored. Every tensor of the checkpoint is used exactly once. Raises CheckpointError, naming the file or
    tensor, for the cases in the module docstring and every damage.
    """
    checkpoint = open_checkpoint(path)
    _check_config(checkpoint)
    matrices = _matrices(checkpoint)
    _check_shared_globals(matrices)
    experts: dict[str, dict[tuple[int, int | None], Matrix]] = defaultdict(dict)
    for module, matrix in matrices.items():
        match = _EXPERT.match(module)
        if match is None:
            yield matrix.name, matrix.read()
            continue
        slot = _SLOTS[match["leaf"]]
        stack = f"{match['prefix']}.{'down_proj' if slot is None else 'gate_up_proj'}"
        experts[stack][int(match["expert"]), slot] = matrix
    for name, members in experts.items():
        yield name, _stack(name, members)


def _stack(name: str, members: dict[tuple[int, int | None], Matrix]) -> Packed:
    """Experts 0..E-1 of one projection as one tensor; gate above up."""
    count = 1 + max(expert for expert, _ in members)
    slots = (None,) if name.endswith("down_proj") else (0, 1)
    missing = [(expert, slot) for expert in range(count) for slot in slots if (expert, slot) not in members]
    if missing:
        raise CheckpointError(f"{name}: expert {missing[0][0]} is missing or incomplete ({len(missing)} of {count})")
    first = members[0, slots[0]].read()
    pieces = _fields(first)
    rows = pieces[0].shape[0]
    stacked = [p.new_empty(count, len(slots) * rows, *p.shape[1:]) for p in pieces]
    globals_, inputs = torch.ones(count), []
    for expert in range(count):
        for position, slot in enumerate(slots):
            value = members[expert, slot].read()
            if type(value) is not type(first) or value.shape != first.shape:
                raise CheckpointError(f"{members[expert, slot].name}: format or shape differs from expert 0's")
            for target, piece in zip(stacked, _fields(value), strict=True):
                target[expert, position * rows : (position + 1) * rows] = piece
            if isinstance(value, NVFP4Tensor):
                globals_[expert] = value.global_scale
                inputs.append(value.input_scale)
    if isinstance(first, NVFP4Tensor):
        if any((scale is None) != (inputs[0] is None) for scale in inputs):
            raise CheckpointError(f"{name}: some experts have input scales and some have none")
        # One for all experts, the largest multiplier: what the engine's fused kernels take.
        largest = None if inputs[0] is None else torch.stack(inputs).max()
        return NVFP4Tensor(stacked[0], stacked[1], globals_, largest)
    return MXFP8Tensor(*stacked) if isinstance(first, MXFP8Tensor) else stacked[0]


def _fields(value: Packed) -> list[torch.Tensor]:
    if isinstance(value, NVFP4Tensor):
        return [value.packed, value.scale]
    return [value.data, value.scale] if isinstance(value, MXFP8Tensor) else [value]


def packed_state(path: str | Path) -> dict[str, Packed]:
    """`packed_items` as a dict: what `quant.modules.swap_modules` fills a model with."""
    return dict(packed_items(path))


def decoded_state(path: str | Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The same names with every matrix decoded to `dtype`: the plain twin of the quantised model."""
    return {
        name: value if isinstance(value, torch.Tensor) else value.dequantize(dtype)
        for name, value in packed_items(path)
    }


def load_quantized(path: str | Path, decoded: bool = False) -> dict[str, Packed]:
    """`packed_state`, or `decoded_state` in bfloat16."""
    return decoded_state(path) if decoded else packed_state(path)
