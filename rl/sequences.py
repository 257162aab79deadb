"""Where the sequences are in a model's input, for attention that counts from a sequence's start.

Shape suffixes: B rows, T tokens of a row.
"""

import itertools
from typing import NamedTuple

import torch


class Place(NamedTuple):
    """Where a sequence is in [B, T, ...]: `own` in `row`, after `before` there if that is not None."""

    row: int
    own: slice
    before: slice | None = None

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Its own part of x."""
        return x[self.row, self.own]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """All of it, from its start."""
        own = self.queries(x)
        return own if self.before is None else torch.cat((x[self.row, self.before], own))


def sequences_of(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> tuple[list[Place], torch.Tensor]:
    """(place of every sequence, positions [B, T] counted from its start).

    A row is one sequence with padding on the left or right where `attention_mask` is 0, or, without a mask, sequences
    that `position_ids` counts from 0 each.
    """
    rows, width = input_ids.shape
    count = torch.arange(width, device=input_ids.device).expand(rows, width)
    if attention_mask is None and position_ids is None:
        return [Place(row, slice(0, width)) for row in range(rows)], count
    if attention_mask is None:
        if position_ids.dim() == 1:
            position_ids = position_ids.unsqueeze(0)
        starts = [[*(position_ids[row] == 0).nonzero().flatten().tolist(), width] for row in range(rows)]
        if any(start[0] != 0 for start in starts):
            raise ValueError(
                "position_ids of packed sequences must start at 0: MSA counts blocks from a sequence's start"
            )
        places = [
            Place(row, slice(begin, end))
            for row, bounds in enumerate(starts)
            for begin, end in itertools.pairwise(bounds)
        ]
        return places, position_ids
    mask = attention_mask.bool()
    first, length = mask.int().argmax(1), mask.sum(1)
    inside = (count >= first.unsqueeze(1)) & (count < (first + length).unsqueeze(1))
    if not torch.equal(inside, mask):
        raise ValueError("attention_mask: a row must be one run of tokens, with padding before and after only")
    places = [
        Place(row, slice(a, a + n)) for row, (a, n) in enumerate(zip(first.tolist(), length.tolist(), strict=True)) if n
    ]
    return places, (count - first.unsqueeze(1)).clamp(min=0)
