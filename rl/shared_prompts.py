"""Samples of one prompt in a micro-batch, with what they begin with in common computed once.

The trainer's MiniMax-M3 takes the tokens in another layout: of each group the common beginning, then what is left of
every row, which attends to that beginning and to itself. Log-probs, losses and gradients are those of the plain layout
up to the order of additions: only tokens whose whole past is equal, replayed experts included, are shared. Metrics of
routing count a shared token once.

Shape suffixes: B rows, T tokens of a row, N computed tokens, L layers, K experts a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl.sequences import Place


@dataclass(frozen=True)
class SharedRows:
    """The layout, one row of N tokens: `parts` in order, `source` int64 [N] (the token b * T + t that each one is) and
    `place` int64 [B, T] (where each token is; 0 for padding)."""

    parts: list[Place]
    source: torch.Tensor
    place: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        """int64 [N]: place of each computed token in its sequence (rows are padded on the right)."""
        return self.source % self.place.shape[1]

    def spread(self, computed: torch.Tensor) -> torch.Tensor:
        """[1, N, ...] -> [B, T, ...]."""
        return computed[0, self.place]


def share(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prompts: Sequence[int],
    experts: torch.Tensor | None = None,
) -> SharedRows:
    """The layout of rows that are padded on the right.

    Args:
        input_ids, attention_mask: [B, T]; prompts: length of each row's prompt, and rows with the same one are a group;
        experts: int64 [B * T, L, K] that will be replayed, or None.

    Raises:
        ValueError: a row is padded on the left, or empty.
    """
    lengths = attention_mask.sum(1).tolist()
    if min(lengths) < 1 or not bool(attention_mask[:, 0].all()):
        raise ValueError("rows must be padded on the right, and not empty")
    routes = None if experts is None else experts.view(*input_ids.shape, *experts.shape[1:])
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(input_ids[row, :prompt].cpu().numpy().tobytes(), []).append(row)
    parts, source, start = [], [], 0
    place = torch.zeros(input_ids.shape, dtype=torch.long)
    width = input_ids.shape[1]
    for rows in groups.values():
        common = min((_common(input_ids, routes, lengths, rows[0], row) for row in rows[1:]), default=0)
        before = slice(start, start + common) if common else None
        if before is not None:
            parts.append(Place(0, before))
            source.append(torch.arange(rows[0] * width, rows[0] * width + common))
            start += common
        for row in rows:
            own = lengths[row] - common
            parts.append(Place(0, slice(start, start + own), before))
            source.append(torch.arange(row * width + common, row * width + lengths[row]))
            if before is not None:
                place[row, :common] = torch.arange(before.start, before.stop)
            place[row, common : lengths[row]] = torch.arange(start, start + own)
            start += own
    return SharedRows(parts, torch.cat(source).to(input_ids.device), place.to(input_ids.device))


def _common(input_ids: torch.Tensor, routes: torch.Tensor | None, lengths: list[int], a: int, b: int) -> int:
    """Tokens that rows `a` and `b` begin with in common; each keeps one of its own."""
    end = min(lengths[a], lengths[b]) - 1
    same = input_ids[a, :end] == input_ids[b, :end]
    if routes is not None:
        chosen = (routes[row, :end].sort(-1).values.flatten(1) for row in (a, b))
        same = same & torch.eq(*chosen).all(-1)
    return int(same.long().cumprod(0).sum())
