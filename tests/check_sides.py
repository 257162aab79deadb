"""Small stand-ins for the trainer and the engine of a consistency check."""

import numpy as np
import torch

from rl.consistency import check
from rl.consistency_report import Limits, TrainerScore, resolve_limits
from rollout.fingerprint import digests
from rollout.sampling import Sequence

KINDS = ("q_proj", "o_proj", "experts")
PROMPTS = [[5, 6, 7], [8, 9]]
LIMITS = resolve_limits({"kl_k3": 1e-3, "mean_abs_logp": 0.02, "max_abs_logp": 0.1}, "emulation")


class Trainer:
    """A trainer of one number a kind of module: log-probs are a base plus the adapters' numbers."""

    def __init__(self, **adapter: float) -> None:
        self.base = {f"layers.{i}.{name}#data": torch.arange(16) + i for i in range(2) for name in KINDS}
        self.adapter = {kind: torch.tensor(adapter.get(kind, 0.25)) for kind in KINDS}
        self.kept: dict | None = None
        self.agreement, self.agreement_replayed = {0: 0.95, 1: 1.0}, {0: 1.0, 1: 1.0}
        self.gap = 0.0  # what the trainer computes otherwise than the engine
        self.selected: dict[int, dict] | None = None  # a layer's counts, of a model with sparse attention
        self.flip_gap = 0.0  # at the first response token of each sequence, whose blocks differ, unless replayed
        self.fails_at: int | None = None
        self.scored = 0

    def base_digests(self, detail=False, shards=None):
        return digests(self.base, detail, shards)

    def adapter_digests(self, detail=False, shards=None):
        return digests({f"layers.0.{kind}.lora_B": value for kind, value in self.adapter.items()}, detail, shards)

    def adapter_kinds(self):
        return list(KINDS)

    def set_test_adapter(self, kind, seed):
        self.kept = self.kept or dict(self.adapter)
        self.adapter = {k: torch.tensor((1.0 + seed) if kind in (k, "all") else 0.0) for k in KINDS}

    def restore_adapter(self):
        self.adapter, self.kept = self.kept, None

    def adapter_is_zero(self):
        return not any(self.adapter.values())

    def selects_blocks(self):
        return self.selected is not None

    def score(self, sequences, blocks=None, replay_blocks=False):
        self.scored += 1
        if self.scored == self.fails_at:
            raise RuntimeError("out of memory")
        shift = 0.01 * sum(float(value) for value in self.adapter.values())
        own = [
            [logprob(t) + shift + self.gap * (-1) ** t for t in range(len(s.prompt_ids), len(s.ids))] for s in sequences
        ]
        details = {"disagree": 1, "near_ties": 1, "later": 0.1, "earlier": 0.1, "renamed": 0.2}
        score = TrainerScore(
            own, own, self.agreement, self.agreement_replayed, 20, 2, details=dict.fromkeys((0, 1), details)
        )
        if blocks is not None:
            assert [len(ids) for ids in blocks] == [len(s.ids) for s in sequences]
            score.selected = self.selected
            score.flipped = [np.arange(len(row)) == 0 for row in own]
            flipped = [[row[0] + self.flip_gap, *row[1:]] for row in own]
            score.free, score.replayed = flipped, own if replay_blocks else flipped
        return score


class Engine:
    """An engine that holds what was sent to it."""

    def __init__(self, trainer: Trainer, workers: int = 1) -> None:
        self.trainer, self.workers = trainer, workers
        self.base, self.drops, self.deaf = dict(trainer.base), set(), set()
        self.leak = 0.0  # what any adapter adds, be it zero
        self.syncs = 0
        self.sync()
        self.fails_at: int | None = None
        self.scored = 0

    def sync(self):
        self.syncs += 1
        self.held = {kind: value.clone() for kind, value in self.trainer.adapter.items() if kind not in self.drops}

    def base_digests(self, detail=False):
        return [digests(self.base, detail)] * self.workers

    def adapter_digests(self, detail=False):
        return [digests({f"layers.0.{kind}.lora_B": value for kind, value in self.held.items()}, detail)] * self.workers

    def _shift(self, adapter):
        effect = sum(float(value) for kind, value in self.held.items() if kind not in self.deaf)
        return 0.01 * effect + self.leak if adapter else 0.0

    def generate(self, prompts, max_tokens):
        shift = self._shift(True)
        return [
            Sequence(p, [1] * max_tokens, [logprob(t) + shift for t in range(len(p), len(p) + max_tokens)], None)
            for p in prompts
        ]

    def score(self, sequences, adapter):
        self.scored += 1
        if self.scored == self.fails_at:
            raise RuntimeError("engine died")
        return [[logprob(t) + self._shift(adapter) for t in range(1, len(ids))] for ids in sequences]

    def selected_blocks(self, sequences):
        return [np.zeros((len(ids), 2, 2, 3), dtype=np.int32) for ids in sequences]


def logprob(position: int) -> float:
    return -0.5 - 0.1 * position


def run(trainer: Trainer, engine: Engine, limits: Limits = LIMITS, **options):
    return check(trainer, engine, PROMPTS, 8, limits, **options)
