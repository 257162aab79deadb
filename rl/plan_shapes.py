"""A model's matrices from its config.json alone: how many, how large, in which format, and what an adapter adds.

For the planner (`rl.plan`); imports no torch. Model types: qwen3_moe, mixtral, minimax_m3_text, and minimax_m3_vl by
its text_config. Legend: N/K rows and columns of a matrix, E experts, H hidden, I expert intermediate, r rank.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quant.policy import MXFP8, NVFP4, POLICIES
from rl.config import ConfigError

LINEARS = ("attention", "index", "dense_mlp", "shared_experts", "lm_head")
"""Kinds whose matrices are linear layers: `lora_targets` finds them by group or by the module's own name."""
FORMAT_BYTES = {NVFP4: 0.5 + 1 / 16, MXFP8: 1 + 1 / 32}
"""Bytes of a weight with its share of the block scales."""
GLOBAL_SCALE_BYTES = 4
MULTIMODAL = {"minimax_m3_vl"}
PLANNED_POLICY = "nvfp4_mxfp8"
"""The formats of a checkpoint that is not there yet."""


class PlanError(ConfigError):
    """A model's configuration from which nothing can be planned; one line."""


@dataclass(frozen=True)
class Matrix:
    """`count` matrices [rows, columns] of one kind (count > 1: a stack of experts); a vector has columns 0."""

    kind: str
    module: str
    """A checkpoint's name; of a stack, that of expert 0."""
    rows: int
    columns: int = 0
    count: int = 1
    float32: bool = False
    """Stays float32, whatever the model's dtype."""
    buffer: bool = False
    """Held and sent, but no parameter."""

    @property
    def elements(self) -> int:
        return self.rows * max(1, self.columns) * self.count

    @property
    def leaf(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def first_dimension(self) -> int:
        """What FSDP2 shards: experts of a stack, or rows."""
        return self.count if self.kind == "experts" else self.rows


@dataclass(frozen=True)
class Group:
    """What FSDP2 gathers together: the embedding, one layer, the head, or the rest."""

    name: str
    matrices: tuple[Matrix, ...]


@dataclass(frozen=True)
class Shape:
    """A model as the planner needs it."""

    model_type: str
    groups: tuple[Group, ...]
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inner: int
    """I of a routed expert."""
    dense_inner: int
    shared_inner: int
    """0 without a shared expert."""
    moe_layers: int
    index_dims: tuple[int, ...] = ()
    """Width of the index key of each layer with block-sparse attention."""

    def matrices(self) -> Iterator[Matrix]:
        """All of them."""
        for group in self.groups:
            yield from group.matrices

    def parameters(self) -> dict[str, int]:
        """Parameters by kind."""
        total: dict[str, int] = {}
        for matrix in self.matrices():
            if not matrix.buffer:
                total[matrix.kind] = total.get(matrix.kind, 0) + matrix.elements
        return total


class _Config:
    """A config.json whose missing keys are one clear line."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there; PlanError if there is neither one nor a default."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise PlanError(f"{self.source}: {name} = {value!r}: expected a whole number")
                return value
        if default is None:
            raise PlanError(f"{self.source}: {names[0]} is missing; nothing can be planned without it")
        return default

    def layers(self, name: str, values: Any, count: int) -> list[bool]:
        """A switch for each layer."""
        if not isinstance(values, list) or len(values) != count:
            raise PlanError(f"{self.source}: {name} = {values!r}: expected a list of {count} (num_hidden_layers)")
        return [bool(value) for value in values]


def read_shape(config: dict[str, Any], source: str = "config.json") -> Shape:
    """Shape of the model that a config.json describes; PlanError for a type or a value that is not understood."""
    if config.get("model_type") in MULTIMODAL:
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise PlanError(f"{source}: text_config is missing; nothing can be planned without it")
        config = {"model_type": "minimax_m3_text", **text}
    kind = config.get("model_type")
    if kind not in _READERS:
        raise PlanError(f"{source}: model_type = {kind!r}: the planner knows {', '.join(_READERS)}")
    return _READERS[kind](_Config(config, source), str(kind))


def _head_dim(config: _Config) -> int:
    heads = config.size("num_attention_heads")
    return config.size("head_dim", default=config.size("hidden_size") // max(1, heads))


def _attention(path: str, config: _Config, qk_norm: bool, bias: bool = False) -> list[Matrix]:
    hidden, dim = config.size("hidden_size"), _head_dim(config)
    query, key = config.size("num_attention_heads") * dim, config.size("num_key_value_heads") * dim
    rows = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
    found = [Matrix("attention", f"{path}.{name}", *shape) for name, shape in rows.items()]
    if bias:
        found += [Matrix("attention", f"{path}.{name}.bias", shape[0]) for name, shape in rows.items()]
    if qk_norm:
        found += [Matrix("norm", f"{path}.{name}", dim) for name in ("q_norm", "k_norm")]
    return found


def _mlp(kind: str, path: str, hidden: int, inner: int) -> list[Matrix]:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return [Matrix(kind, f"{path}.{name}", *shape) for name, shape in shapes.items()]


def _experts(path: str, hidden: int, inner: int, count: int, names: tuple[str, str, str]) -> list[Matrix]:
    gate, up, down = names
    shapes = {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    return [Matrix("experts", f"{path}.experts.0.{name}", *shape, count) for name, shape in shapes.items()]


def _model(config: _Config, layers: list[list[Matrix]]) -> tuple[Group, ...]:
    """Embedding, layers with their two norms, head, final norm."""
    hidden, vocabulary = config.size("hidden_size"), config.size("vocab_size")
    groups = [Group("embed_tokens", (Matrix("embedding", "model.embed_tokens", vocabulary, hidden),))]
    for number, matrices in enumerate(layers):
        path = f"model.layers.{number}"
        norms = [Matrix("norm", f"{path}.{name}", hidden) for name in ("input_layernorm", "post_attention_layernorm")]
        groups.append(Group(path, (*matrices, *norms)))
    if not config.values.get("tie_word_embeddings", False):
        groups.append(Group("lm_head", (Matrix("lm_head", "lm_head", vocabulary, hidden),)))
    return (*groups, Group("", (Matrix("norm", "model.norm", hidden),)))


def _sizes(config: _Config) -> dict[str, int]:
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden": config.size("hidden_size"),
        "vocabulary": config.size("vocab_size"),
        "heads": config.size("num_attention_heads"),
        "kv_heads": config.size("num_key_value_heads"),
        "head_dim": _head_dim(config),
        "top_k": config.size("num_experts_per_tok"),
    }


def _qwen3_moe(config: _Config, kind: str) -> Shape:
    sizes = _sizes(config)
    hidden, inner = sizes["hidden"], config.size("moe_intermediate_size")
    experts, dense_inner = config.size("num_experts", "num_local_experts"), config.size("intermediate_size")
    step, dense_only = config.size("decoder_sparse_step", default=1), config.values.get("mlp_only_layers") or []
    layers, moe_layers = [], 0
    for number in range(sizes["layers"]):
        path = f"model.layers.{number}"
        matrices = _attention(f"{path}.self_attn", config, True, bool(config.values.get("attention_bias", False)))
        if number not in dense_only and experts > 0 and (number + 1) % step == 0:
            moe_layers += 1
            matrices.append(Matrix("router", f"{path}.mlp.gate", experts, hidden))
            matrices += _experts(f"{path}.mlp", hidden, inner, experts, ("gate_proj", "up_proj", "down_proj"))
        else:
            matrices += _mlp("dense_mlp", f"{path}.mlp", hidden, dense_inner)
        layers.append(matrices)
    rest = {"experts": experts, "inner": inner, "dense_inner": dense_inner, "shared_inner": 0}
    return Shape(kind, _model(config, layers), **sizes, **rest, moe_layers=moe_layers)


def _mixtral(config: _Config, kind: str) -> Shape:
    sizes = _sizes(config)
    hidden, inner, experts = sizes["hidden"], config.size("intermediate_size"), config.size("num_local_experts")
    layers = []
    for number in range(sizes["layers"]):
        path = f"model.layers.{number}"
        moe = f"{path}.block_sparse_moe"
        matrices = _attention(f"{path}.self_attn", config, False)
        matrices.append(Matrix("router", f"{moe}.gate", experts, hidden))
        layers.append(matrices + _experts(moe, hidden, inner, experts, ("w1", "w3", "w2")))
    rest = {"experts": experts, "inner": inner, "dense_inner": 0, "shared_inner": 0}
    return Shape(kind, _model(config, layers), **sizes, **rest, moe_layers=len(layers))


def _minimax_m3(config: _Config, kind: str) -> Shape:
    sizes = _sizes(config)
    hidden, inner, experts = sizes["hidden"], config.size("intermediate_size"), config.size("num_local_experts")
    count, dense_inner = sizes["layers"], config.size("dense_intermediate_size")
    shared_inner = config.size("shared_intermediate_size") * config.size("n_shared_experts", default=1)
    sparse = config.values.get("sparse_attention_config") or {}
    index_dim = _Config(sparse, f"{config.source}: sparse_attention_config").size("sparse_index_dim", default=128)
    after_dense = [0] * min(3, count) + [1] * max(0, count - 3)
    routed = config.layers("moe_layer_freq", config.values.get("moe_layer_freq") or after_dense, count)
    indexed = config.layers("sparse_attention_freq", sparse.get("sparse_attention_freq") or after_dense, count)
    layers = []
    for number in range(count):
        path = f"model.layers.{number}"
        attention, moe = f"{path}.self_attn", f"{path}.block_sparse_moe"
        matrices = _attention(attention, config, True)
        if indexed[number]:
            rows = {"index_q_proj": sizes["kv_heads"] * index_dim, "index_k_proj": index_dim}
            matrices += [Matrix("index", f"{attention}.{name}", extent, hidden) for name, extent in rows.items()]
            matrices += [Matrix("norm", f"{attention}.{name}", index_dim) for name in ("index_q_norm", "index_k_norm")]
        if routed[number]:
            matrices.append(Matrix("router", f"{moe}.gate", experts, hidden, float32=True))
            bias = f"{moe}.e_score_correction_bias"
            matrices.append(Matrix("router", bias, experts, float32=True, buffer=True))
            matrices += _experts(moe, hidden, inner, experts, ("w1", "w3", "w2"))
            matrices += _mlp("shared_experts", f"{moe}.shared_experts", hidden, shared_inner)
        else:
            matrices += _mlp("dense_mlp", f"{path}.mlp", hidden, dense_inner)
        layers.append(matrices)
    rest = {"experts": experts, "inner": inner, "dense_inner": dense_inner, "shared_inner": shared_inner}
    dims = tuple(index_dim for switch in indexed if switch)
    return Shape(kind, _model(config, layers), **sizes, **rest, moe_layers=sum(routed), index_dims=dims)


_READERS: dict[str, Callable[[_Config, str], Shape]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "minimax_m3_text": _minimax_m3,
}


# ---- formats -------------------------------------------------------------------------------------------------------


def format_rule(quantisation: dict[str, Any] | None, source: str = "config.json") -> Callable[[str], str | None]:
    """Module name -> format, by a quantization_config (compressed-tensors or ModelOpt NVFP4); None: unquantised."""
    if quantisation is None:
        return lambda module: None
    method = quantisation.get("quant_method")
    if method == "modelopt":
        kept = quantisation.get("exclude_modules") or quantisation.get("ignore") or []
        return lambda module: None if any(fnmatch.fnmatch(module, pattern) for pattern in kept) else NVFP4
    if method != "compressed-tensors":
        raise PlanError(f"{source}: quant_method = {method!r}: the planner knows compressed-tensors and modelopt")
    ignored, groups = quantisation.get("ignore") or [], []
    for group in (quantisation.get("config_groups") or {}).values():
        form = str(group.get("format") or quantisation.get("format"))
        groups.append((NVFP4 if form.startswith("nvfp4") else MXFP8, group.get("targets") or []))

    def rule(module: str) -> str | None:
        if any(_matches(target, module) for target in ignored):
            return None
        return next((form for form, targets in groups if any(_matches(t, module) for t in targets)), None)

    return rule


def planned_rule() -> Callable[[str], str | None]:
    """Formats of a checkpoint that is not there yet."""
    return POLICIES[PLANNED_POLICY].format_of


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in (module, "Linear")


def matrix_bytes(matrix: Matrix, fmt: str | None, itemsize: int) -> int:
    """Bytes of the whole stack or matrix on disk, scales included; `itemsize` of what is not quantised."""
    if fmt is None or not matrix.columns or matrix.buffer:
        return matrix.elements * (4 if matrix.float32 else itemsize)
    scales = matrix.count * GLOBAL_SCALE_BYTES if fmt == NVFP4 else 0
    return int(matrix.elements * FORMAT_BYTES[fmt]) + scales


# ---- adapters ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factor:
    """One trainable tensor: `first` is the dimension that FSDP2 shards, `rest` the elements of each of its entries."""

    group: str
    kind: str
    first: int
    rest: int

    @property
    def elements(self) -> int:
        return self.first * self.rest


def adapter_factors(shape: Shape, targets: list[str], rank: int, share_gate_up_a: bool) -> list[Factor]:
    """The tensors that `rl.lora.inject` adds; PlanError for a target that matches nothing in the model."""
    found, used = [], set()
    for group in shape.groups:
        for matrix in group.matrices:
            if matrix.kind not in LINEARS or not matrix.columns:
                continue
            hits = {target for target in targets if target in (matrix.leaf, matrix.kind)}
            used |= hits
            if hits:
                found.append(Factor(group.name, matrix.kind, rank, matrix.columns))
                found.append(Factor(group.name, matrix.kind, matrix.rows, rank))
        stack = [matrix for matrix in group.matrices if matrix.kind == "experts"]
        if stack and "experts" in targets:
            used.add("experts")
            inner, hidden = stack[0].rows, stack[0].columns
            per_expert = [(1 if share_gate_up_a else 2) * hidden, 2 * inner, inner, hidden]
            found += [Factor(group.name, "experts", stack[0].count, rank * extent) for extent in per_expert]
    missing = [target for target in targets if target not in used]
    if missing:
        raise PlanError(f"model.lora_targets: {missing[0]!r} matches no module of {shape.model_type}; leave it out")
    return found
