"""The trainer's answers to the consistency check, for a `modeling.TrainerModel` (in process or in the verl engine)."""

import numpy as np
import torch

from rl import fingerprint, lora, replay
from rl.consistency_report import TrainerScore
from rl.modeling import TrainerModel
from rollout.fingerprint import digests
from rollout.sampling import Sequence

TEST_ADAPTER_STD = 0.03


class TrainerProbe:
    """`consistency.TrainerSide` over a trainer model. Under FSDP2 every method is collective: call it on all ranks."""

    def __init__(self, trainer_model: TrainerModel) -> None:
        self.trainer_model = trainer_model
        self._kept: dict[str, torch.Tensor] = {}

    @property
    def model(self) -> torch.nn.Module:
        return self.trainer_model.model

    def base_digests(self, detail: bool = False, shards: dict[str, dict] | None = None) -> dict[str, dict]:
        return digests(fingerprint.base_tensors(self.model), detail, shards)

    def adapter_digests(self, detail: bool = False, shards: dict[str, dict] | None = None) -> dict[str, dict]:
        return digests(lora.engine_tensors(self.model), detail, shards)

    def _factors(self):
        """Yield (kind, parameter name, this rank's part of B) of every adapted module."""
        for name, adapter in lora.adapters(self.model).items():
            kind = "experts" if isinstance(adapter, lora.LoRAExperts) else name.rpartition(".")[2]
            for leaf, parameter in adapter.named_parameters(recurse=False):
                if leaf.endswith("B"):
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    yield kind, f"{name}.{leaf}", local

    def adapter_kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _, _ in self._factors()))

    @torch.no_grad()
    def set_test_adapter(self, kind: str | None, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for own, name, local in self._factors():
            if name not in self._kept:
                self._kept[name] = local.clone()
            local.zero_()
            if kind in (own, "all"):
                # Each rank fills its own shard; the values need not be the same for another number of ranks.
                local.copy_(torch.randn(local.shape, generator=generator) * TEST_ADAPTER_STD)

    @torch.no_grad()
    def restore_adapter(self) -> None:
        for _, name, local in self._factors():
            if name in self._kept:
                local.copy_(self._kept[name])
        self._kept = {}

    def adapter_is_zero(self) -> bool:
        return not any(
            bool(tensor.any()) for name, tensor in lora.engine_tensors(self.model).items() if name.endswith("B")
        )

    def selects_blocks(self) -> bool:
        return self.trainer_model.blocks is not None

    @torch.no_grad()
    def score(
        self, sequences: list[Sequence], blocks: list[np.ndarray] | None = None, replay_blocks: bool = False
    ) -> TrainerScore:
        """One padded forward free and one replayed; the model is left in the mode it was in.

        `blocks`: the engine's selected blocks, int32 [tokens, layers, heads, top_k] a sequence, to compare with; with
        `replay_blocks` the replayed forward uses them.
        """
        routing, selection = self.trainer_model.routing, self.trainer_model.blocks
        ids, mask = _pad([sequence.ids for sequence in sequences], self._device())
        known = None
        if self.trainer_model.moe_layers:
            if any(sequence.routed_experts is None for sequence in sequences):
                raise replay.ReplayError("the engine returned no expert ids; check enable_return_routed_experts")
            known = replay.layout(
                [torch.as_tensor(np.asarray(sequence.routed_experts)) for sequence in sequences],
                [len(sequence.ids) for sequence in sequences],
                ids.shape[1],
                self.trainer_model.moe_layers,
                self.trainer_model.num_experts,
            ).to(ids.device)
        was_training, was_enabled = self.model.training, routing.enabled
        self.model.eval()
        outcomes, selected, flipped = [], {}, []
        if blocks is not None:
            selection.known = [torch.tensor(ids) for ids in blocks]
        try:
            for enabled in (False, True):
                routing.begin(known)
                routing.enabled, routing.recording, routing.margins = enabled, {}, {}
                if blocks is not None:
                    selection.enabled = enabled and replay_blocks
                    selection.recording = None if enabled else {}
                logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
                outcomes.append((self._response_logprobs(logits, ids, sequences), routing.recording))
                if not enabled:
                    details = routing_details(routing.recording, routing.margins, known)
                    selected, flipped = selection.compare() if blocks is not None else ({}, [])
        finally:
            if blocks is not None:
                selection.enabled, selection.known, selection.recording = False, None, None
            routing.begin(None)
            routing.enabled, routing.recording, routing.margins = was_enabled, None, None
            self.model.train(was_training)
        (free, own), (replayed, used) = outcomes
        rows = int((known[:, 0, 0] != replay.UNKNOWN).sum()) if known is not None else 0
        return TrainerScore(
            free,
            replayed,
            agreement=_agreement(own, known),
            agreement_replayed=_agreement(used, known),
            tokens=rows,
            not_replayed=int(mask.sum()) - rows,
            details=details,
            selected=selected,
            # The log-prob of a token comes from the position before it.
            flipped=[
                flips[len(sequence.prompt_ids) - 1 : len(sequence.ids) - 1]
                for flips, sequence in zip(flipped, sequences if blocks is not None else [], strict=True)
            ],
        )

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @staticmethod
    def _response_logprobs(logits, ids, sequences: list[Sequence]) -> list[list[float]]:
        logprobs = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        return [
            logprobs[row, len(sequence.prompt_ids) - 1 : len(sequence.ids) - 1].tolist()
            for row, sequence in enumerate(sequences)
        ]


def _agreement(used: dict[int, torch.Tensor], known: torch.Tensor | None) -> dict[int, float]:
    """Share of known rows of each layer on which the expert set that was used equals the engine's."""
    if known is None:
        return {}
    rows = known[:, 0, 0] != replay.UNKNOWN
    return {layer: _share(_same_sets(ids, known[:, layer])[rows]) for layer, ids in used.items()}


def _share(flags: torch.Tensor) -> float:
    """Of what is true; exactly 1 if all are (a GPU's float32 mean of ones may be less)."""
    return int(flags.sum()) / flags.numel() if flags.numel() else 0.0


def _same_sets(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool [T]: whether the ids [T, K] of each row are the same set."""
    return (a.sort(-1).values == b.sort(-1).values).all(-1)


NEAR_TIE = 1 / 16
"""A k-th expert whose logit leads the next by less than this is a near-tie: two bfloat16 steps at logits of 4 to 8."""


def routing_details(
    own: dict[int, torch.Tensor], margins: dict[int, torch.Tensor], known: torch.Tensor | None
) -> dict[int, dict]:
    """What explains disagreement, a layer: `disagree` and `near_ties` among those rows, and agreement of the trainer's
    own choice with the engine's ids one row later, one row earlier, and renamed by the most frequent partner."""
    if known is None:
        return {}
    rows = known[:, 0, 0] != replay.UNKNOWN
    found = {}
    for layer, ids in own.items():
        theirs = known[:, layer]
        same = _same_sets(ids, theirs)
        shifted = []
        for shift in (1, -1):
            moved = theirs.roll(-shift, 0)
            both = rows & (moved[:, 0] != replay.UNKNOWN)
            shifted.append(_share(_same_sets(ids, moved)[both]))
        differ = rows & ~same
        found[layer] = {
            "disagree": int(differ.sum()),
            # With top-k of all experts there is no next one, and nothing can differ.
            "near_ties": int((differ & (margins[layer] < NEAR_TIE)).sum()) if layer in margins else 0,
            "later": shifted[0],
            "earlier": shifted[1],
            "renamed": _renamed_agreement(ids[rows], theirs[rows]),
        }
    return found


def _renamed_agreement(own: torch.Tensor, theirs: torch.Tensor) -> float:
    """Agreement after renaming each of the trainer's experts to the engine's expert that it meets most often."""
    experts = int(max(own.max(), theirs.max())) + 1
    pairs = own.unsqueeze(2) * experts + theirs.unsqueeze(1)
    counts = torch.bincount(pairs.reshape(-1), minlength=experts * experts).view(experts, experts)
    # By how much more often than its share: a popular expert meets everybody.
    expected = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / counts.sum().clamp(min=1)
    partner = (counts - expected).argmax(1)
    return _share(_same_sets(partner[own], theirs))


def _pad(sequences: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, T] and attention mask [B, T]; padding is token 0."""
    width = max(len(ids) for ids in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return ids.to(device), mask.to(device)
