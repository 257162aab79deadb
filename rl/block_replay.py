"""The blocks of MSA that each layer selects: recorded, compared with the engine's, and replayed on request.

As `rl.replay` does for experts. One `BlockReplay` is shared by all sparse attention layers of a model. Legend: T tokens
of a sequence, L sparse layers, Hi index heads, K blocks a head. A row of ids that is -1 throughout was not computed by
the engine; elsewhere -1 is a slot that was not needed.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

NEAR_TIE = 0.25
"""A selected block that leads the best one left out by less than this may be a near-tie: index scores are dot products
of 128 values of about 1, and one rounding of each to bfloat16 moves such a sum by about 0.05."""


class BlockReplayError(ValueError):
    """The engine's block ids cannot be used; the message names the sequence and layer."""


@dataclass
class BlockReplay:
    """`known`: the engine's ids of the sequences of a batch, each int32 [T, L, Hi, K], or None.

    `enabled` replays them, which the consistency check does and training never; `recording`, when a dict, takes
    {(layer, sequence): (own ids [T, Hi, K], margin [T, Hi])}.
    """

    layers: list[int]
    heads: int
    """Index heads of a layer."""
    enabled: bool = False
    known: list[torch.Tensor] | None = None
    recording: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] | None = field(default=None, repr=False)

    @property
    def active(self) -> bool:
        """Whether anything is recorded or replayed."""
        return self.recording is not None or (self.enabled and self.known is not None)

    def theirs(self, layer: int, sequence: int, own: torch.Tensor) -> torch.Tensor:
        """The engine's ids for `sequence` in `layer`, of the shape of the trainer's `own`."""
        ids = self.known[sequence][:, self.layers.index(layer)].to(own.device)
        if ids.shape != own.shape:
            raise BlockReplayError(
                f"sequence {sequence}, layer {layer}: {tuple(ids.shape)} block ids for {tuple(own.shape)} selections"
            )
        return ids

    def choose(self, layer: int, sequence: int, own: torch.Tensor, margin: torch.Tensor) -> torch.Tensor:
        """Ids [T, Hi, K] that `layer` must use for `sequence`, given its own choice and margin."""
        if self.recording is not None:
            self.recording[layer, sequence] = (own, margin)
        if not self.enabled or self.known is None:
            return own
        ids = self.theirs(layer, sequence, own)
        return torch.where(computed(ids), ids, own)

    def compare(self) -> tuple[dict[int, dict], list[np.ndarray]]:
        """What was recorded against what is known.

        Returns, for each layer, `selections` (token and head) and how many of them `disagree`, `near_ties` among those;
        and for each sequence bool [T]: whether any selection of the token disagrees.
        """
        layers = {layer: {"selections": 0, "disagree": 0, "near_ties": 0} for layer in self.layers}
        flipped: dict[int, torch.Tensor] = {}
        for (layer, sequence), (own, margin) in self.recording.items():
            ids = self.theirs(layer, sequence, own)
            known = computed(ids).squeeze(-1)
            differ = known & ~same_blocks(own, ids)
            layers[layer]["selections"] += int(known.sum()) * own.shape[1]
            layers[layer]["disagree"] += int(differ.sum())
            # One block instead of another may be a tie; two others are another opinion.
            foreign = (~(ids.unsqueeze(-1) == own.unsqueeze(-2)).any(-1) & (ids >= 0)).sum(-1)
            layers[layer]["near_ties"] += int((differ & (margin < NEAR_TIE) & (foreign <= 1)).sum())
            flipped[sequence] = flipped.get(sequence, False) | differ.any(-1)
        return layers, [flipped[sequence].cpu().numpy() for sequence in sorted(flipped)]


def computed(ids: torch.Tensor) -> torch.Tensor:
    """bool [T, 1, 1]: whether the engine selected anything for the token."""
    return (ids >= 0).flatten(1).any(1).view(-1, 1, 1)


def same_blocks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool [..., Hi]: whether the ids [..., Hi, K] of each head are the same set; their order has no meaning."""
    return (a.sort(-1).values == b.sort(-1).values).all(-1)


def install(model: nn.Module) -> BlockReplay | None:
    """Give every sparse attention of `model` one shared `BlockReplay`; None for a model without any."""
    sparse = [module for module in model.modules() if getattr(module, "selection", None) is not None]
    if not sparse:
        return None
    replay = BlockReplay([module.layer for module in sparse], sparse[0].index_heads)
    for module in sparse:
        module.block_replay = replay
    return replay
