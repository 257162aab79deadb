"""What the rows of a micro-batch begin with in common, computed once: the samples of a group share their prompt.

The trainer's MiniMax-M3 takes the tokens in another layout: of each group the common beginning, then what is left of
every row, which attends to that beginning and to itself. Losses, gradients and metrics are those of the plain layout
up to the order of additions; only tokens whose whole past is equal, experts included, are shared.

Shape suffixes: B rows, T tokens of a row, N computed tokens, L layers, K experts a token.
"""

from dataclasses import dataclass

import torch

from rl.sequences import Place

LEAST_SHARE = 0.5
"""Rows are put together if they have at least this share of the shorter one in common: a chat template's first words
are common to all rows, and would cut a group's beginning to nothing."""


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


def share(input_ids: torch.Tensor, attention_mask: torch.Tensor, experts: torch.Tensor | None) -> SharedRows:
    """Find the common beginnings of rows that are padded on the right.

    Args:
        input_ids, attention_mask: [B, T]; experts: int64 [B * T, L, K] that will be replayed, or None.

    Raises:
        ValueError: a row is padded on the left, or empty.
    """
    lengths = attention_mask.sum(1).tolist()
    if min(lengths) < 1 or not bool(attention_mask[:, 0].all()):
        raise ValueError("rows must be padded on the right, and not empty")
    routes = None if experts is None else experts.sort(-1).values.view(*input_ids.shape, -1)
    parts, source, start = [], [], 0
    place = torch.zeros(input_ids.shape, dtype=torch.long)
    width = input_ids.shape[1]
    for rows, common in _groups(input_ids, routes, lengths):
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


def _groups(input_ids: torch.Tensor, routes: torch.Tensor | None, lengths: list[int]) -> list[tuple[list[int], int]]:
    """(rows, length of their common beginning) of every group; of a row alone 0."""
    groups: list[tuple[list[int], int]] = []
    for row, length in enumerate(lengths):
        best, longest = None, 0
        for number, (members, _) in enumerate(groups):
            common = _common(input_ids, routes, members[0], row, min(length, lengths[members[0]]))
            if common > longest and common >= LEAST_SHARE * min(length, lengths[members[0]]):
                best, longest = number, common
        if best is None:
            groups.append(([row], 0))
        else:
            members, common = groups[best]
            groups[best] = ([*members, row], min(longest, common) if common else longest)
    return groups


def _common(input_ids: torch.Tensor, routes: torch.Tensor | None, a: int, b: int, shorter: int) -> int:
    """Tokens that rows `a` and `b` begin with in common; each keeps one of its own."""
    same = input_ids[a, : shorter - 1] == input_ids[b, : shorter - 1]
    if routes is not None:
        same = same & (routes[a, : shorter - 1] == routes[b, : shorter - 1]).all(-1)
    return int(same.long().cumprod(0).sum())
