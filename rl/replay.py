"""Routing replay: the trainer's routers take the expert ids that the engine used, and recompute the gate weights.

One `RoutingReplay` object is shared by all routers of a model. For a micro-batch it holds the ids of every row in the
layout of the model's input; a router replaces its own choice where an id is known, takes the gate weights from its own
scores (gradients flow through them) and counts how often its own choice agreed. Recomputation under gradient
checkpointing sees the same ids. Legend: T rows (tokens incl. padding), L decoder layers, K experts a token, E experts.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

UNKNOWN = -1


class ReplayError(ValueError):
    """The engine's expert ids cannot be used; the message names the sequence, position and layer."""


@dataclass
class LayerCount:
    """Rows of one layer, over response and prompt tokens that the engine routed."""

    rows: int = 0
    agree: int = 0


@dataclass
class RoutingReplay:
    """`ids` int64 [T, L, K] or None (every router decides itself); `enabled` False measures agreement, replays nothing.

    `tokens`: what the routers see without padding. `recording` and `margins`, when dicts, take the ids that each layer
    used in the last forward, and by how much the logit of the last expert that it would choose itself leads the next.
    """

    enabled: bool = True
    ids: torch.Tensor | None = None
    tokens: int = 0
    counts: dict[int, LayerCount] = field(default_factory=dict)
    recording: dict[int, torch.Tensor] | None = None
    margins: dict[int, torch.Tensor] | None = None

    def begin(self, ids: torch.Tensor | None, tokens: int = 0) -> None:
        """Start a micro-batch with its ids; what recomputation counted a second time after the last one is dropped."""
        self.ids, self.tokens, self.counts = ids, tokens, {}

    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """Ids [T, K] that the router of `layer` must use, given its own choice `own` [T, K]."""
        used = own if self.ids is None else self._replayed(layer, own)
        if self.recording is not None:
            self.recording[layer] = used.detach()
        return used

    def _replayed(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        ids = self.ids[:, layer]
        if ids.shape != own.shape:
            raise ReplayError(f"layer {layer}: {tuple(ids.shape)} replayed ids for {tuple(own.shape)} routed rows")
        known = ids[:, 0] != UNKNOWN
        count = self.counts.setdefault(layer, LayerCount())
        count.rows += int(known.sum())
        count.agree += int((own.sort(-1).values == ids.sort(-1).values).all(-1)[known].sum())
        return torch.where(known.unsqueeze(1), ids, own) if self.enabled else own

    def take_counts(self) -> dict[int, LayerCount]:
        counts, self.counts = self.counts, {}
        return counts


class ReplayRouter(nn.Module):
    """Wraps a top-k router (`weight` [E, H], `top_k`; optional: `scoring_func` softmax or sigmoid, `norm_topk_prob`,
    `e_score_correction_bias` [E] that moves the choice only, `routed_scaling_factor`).

    Logits are the compute dtype's product, as the engine's gate is, or float32 for a float32 weight; a frozen one is
    held as bytes so that FSDP2 does not round it. Scores, selection and gate weights are float32, as the engine's
    kernels keep them. Returns (logits [T, E], weights [T, K], ids [T, K]).
    """

    def __init__(self, router: nn.Module, replay: RoutingReplay, layer: int, matmul: Callable) -> None:
        super().__init__()
        exact = router.weight.dtype == torch.float32
        hidden_from_fsdp = exact and not router.weight.requires_grad
        self.weight = as_float32_bytes(router.weight) if hidden_from_fsdp else router.weight
        self.top_k = router.top_k
        self.normalise = getattr(router, "norm_topk_prob", True)
        self.scale = getattr(router, "routed_scaling_factor", 1.0)
        self.score = torch.sigmoid if getattr(router, "scoring_func", "softmax") == "sigmoid" else _softmax
        bias = getattr(router, "e_score_correction_bias", None)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)
        self.replay, self.layer = replay, layer
        self.matmul = (lambda x, w: F.linear(x.float(), self.as_stored(w))) if exact else matmul

    @staticmethod
    def as_stored(weight: torch.Tensor) -> torch.Tensor:
        """The router's matrix [E, H] out of the parameter that holds it."""
        return weight.view(torch.float32) if weight.dtype == torch.uint8 else weight

    def forward(self, hidden_states: torch.Tensor):
        logits = self.matmul(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        scores = self.score(logits.float())
        choice = scores if self.bias is None else scores + self.bias
        ids = self.replay.choose(self.layer, choice.topk(self.top_k, dim=-1).indices)
        if self.replay.margins is not None and scores.shape[-1] > self.top_k:
            # By logits; a biased choice by 4 times its score, the least that its logits can differ by.
            ranked = logits.detach().float() if self.bias is None else 4 * choice.detach()
            last = ranked.topk(self.top_k + 1, dim=-1).values[:, -2:]
            self.replay.margins[self.layer] = last[:, 0] - last[:, 1]
        weights = scores.gather(-1, ids)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * self.scale, ids


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


def as_float32_bytes(weight: torch.Tensor) -> nn.Parameter:
    """A frozen uint8 parameter [E, 4 H] over the bytes of float32 `weight` [E, H]."""
    return nn.Parameter(weight.detach().contiguous().view(torch.uint8), requires_grad=False)


@torch.no_grad()
def _check_kind(router: nn.Module, name: str) -> None:
    """Refuse a router that computes something else than `ReplayRouter`, such as groups of experts."""
    refusal = f"{name}: routing replay knows softmax and sigmoid top-k, and {type(router).__name__} is another kind"
    if not hasattr(router, "weight") or not hasattr(router, "top_k"):
        raise ReplayError(refusal)
    plain = copy.deepcopy(router).float()
    hidden = torch.randn(8, plain.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(plain.weight.device)
    try:
        _, weights, ids = plain(hidden)
    except TypeError:  # it wants more than hidden states
        raise ReplayError(refusal) from None
    _, own_weights, own_ids = ReplayRouter(plain, RoutingReplay(), 0, F.linear)(hidden)
    dense = hidden.new_zeros(8, plain.weight.shape[0])
    if ids.shape != own_ids.shape or not torch.allclose(
        dense.scatter(1, ids, weights.float()), dense.scatter(1, own_ids, own_weights), atol=1e-4
    ):
        raise ReplayError(refusal)


def install(model: nn.Module, replay: RoutingReplay, matmul: Callable) -> int:
    """Put a `ReplayRouter` over every top-k router of `model`; returns how many (0 for a dense model)."""
    found = 0
    for name, module in list(model.named_modules()):
        if not type(module).__name__.endswith("TopKRouter"):
            continue
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if layer is None:
            raise ReplayError(f"{name}: no decoder layer in the name of this router")
        _check_kind(module, name)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, ReplayRouter(module, replay, layer, matmul))
        found += 1
    return found


def check_ids(ids: torch.Tensor, layers: Sequence[int], experts: int, sequence: int) -> None:
    """Refuse engine ids [n, L, K] that cannot be a routing: out of range, or one expert twice for a token.

    Rows that the engine marks as not computed (UNKNOWN throughout) pass. Rows that it never wrote are all zero, which
    is one expert twice: they are an error, not a silent route.
    """
    if ids.shape[1] <= max(layers):
        raise ReplayError(
            f"sequence {sequence}: expert ids of {ids.shape[1]} layers, but layer {max(layers)} has a router"
        )
    used = ids[:, list(layers)]
    known = (used != UNKNOWN).flatten(1).any(1)
    tokens, used = known.nonzero().squeeze(1).tolist(), used[known]
    if not tokens:
        return
    if bool(((used < 0) | (used >= experts)).any()):
        raise ReplayError(
            f"sequence {sequence}: expert ids outside 0..{experts - 1} (found {int(used.min())}..{int(used.max())})"
        )
    if used.shape[-1] < 2:
        return
    ordered = used.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if bool(twice.any()):
        row, column = twice.nonzero()[0].tolist()
        zero = "rows the engine did not write" if not used[row].any() else "a duplicate id"
        raise ReplayError(
            f"sequence {sequence}, token {tokens[row]}, layer {layers[column]}: ids {used[row, column].tolist()}: "
            f"{zero}; check enable_return_routed_experts and prefix caching in the engine"
        )


def layout(
    sequences: Sequence[torch.Tensor], lengths: Sequence[int], width: int | None, layers: Sequence[int], experts: int
) -> torch.Tensor:
    """Ids of a micro-batch in the model's row layout.

    Args:
        sequences: engine ids [n, L, K] a sequence, for its first n tokens (n is length - 1, or length with a last row
            that the engine did not compute).
        lengths: tokens a sequence.
        width: padded length (rows are [B * width]), or None for packed rows.
        layers: the decoder layers that have a router.

    Returns int64 [T, L, K] with UNKNOWN for the last token of each sequence, for padding and for missing rows.
    """
    rows = []
    for index, (ids, length) in enumerate(zip(sequences, lengths, strict=True)):
        ids = ids.long()
        if ids.shape[0] not in (length - 1, length):
            raise ReplayError(f"sequence {index}: {ids.shape[0]} rows of expert ids for {length} tokens")
        ids = ids[: length - 1]  # the last token was sampled but never fed back
        check_ids(ids, layers, experts, index)
        missing = (width if width is not None else length) - ids.shape[0]
        rows.append(torch.cat([ids, ids.new_full((missing, *ids.shape[1:]), UNKNOWN)]))
    return torch.cat(rows)
