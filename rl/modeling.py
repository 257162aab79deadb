"""The trainer's model: the engine's bytes in Hugging Face's module graph, with replayable routers and LoRA.

Used by the verl engine (sharded afterwards) and by the in-process checks (as it is).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kernels.linear import linear
from quant.experts import RoutedExperts
from quant.modules import load_model, swap_plain_experts
from rl import adapter_files, block_replay, lora, replay
from rl.models import minimax_m3  # noqa: F401 - registers the model with transformers
from rl.models.minimax_m3_config import MODEL_TYPE as MINIMAX_M3
from rl.models.minimax_m3_config import text_config
from rl.settings import EngineSettings

CPU_ATTENTION = "lockstep_float32"


def _float32_attention(module, query, key, value, attention_mask, **kwargs):
    """sdpa in float32 with one rounding of the output, as the engine's CPU attention is run."""
    output, weights = sdpa_attention_forward(
        module, query.float(), key.float(), value.float(), attention_mask, **kwargs
    )
    return output.to(query.dtype), weights


AttentionInterface.register(CPU_ATTENTION, _float32_attention)
AttentionMaskInterface.register(CPU_ATTENTION, sdpa_mask)


@dataclass
class TrainerModel:
    """`model` (frozen base + adapters), the shared `routing` state, names of adapted modules, layers with a router.

    `blocks`: the shared state of its sparse attention, None for a model without.
    """

    model: nn.Module
    routing: replay.RoutingReplay
    blocks: block_replay.BlockReplay | None
    spec: lora.LoRASpec | None
    adapted: list[str]
    moe_layers: list[int]
    num_experts: int


class FrozenLinear(nn.Module):
    """An unquantised frozen linear layer (lm_head, bf16 models) with float32 accumulation on CPU (kernels.linear)."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        if source.bias is not None:
            raise ValueError(
                "a frozen linear layer with bias has no rounding point defined; add it to docs/numerics.md"
            )
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight = source.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


NO_TOKEN = -1e30
"""The logit of an id that is no token; finite, because an entropy multiplies logits by probabilities."""
LOGITS_TOGETHER = 1 << 28
"""Most logits (rows times vocabulary) that `FloatLogits` holds at once when it is asked for log-probs: 1 GiB."""


class FloatLogits(nn.Module):
    """lm_head whose logits are bf16-rounded and returned as float32, the dtype the engine takes log-softmax in.

    Ids from `vocabulary` on (padding of the embedding) get no probability, as in the engine.

    Asked for log-probs (`ask`), the next forwards give float32 [..., 2], the log-prob of each row's label and the
    entropy (0 unless it was asked for), and make the logits chunk by chunk, in the backward pass again: those of a long
    micro-batch over a large vocabulary are several times the model.
    """

    def __init__(self, head: nn.Module, vocabulary: int | None = None) -> None:
        super().__init__()
        self.head = head
        self.vocabulary = vocabulary
        self.labels: torch.Tensor | None = None
        self.entropy = False

    @property
    def weight(self) -> torch.Tensor:
        return self.head.weight

    def ask(self, labels: torch.Tensor | None, entropy: bool = False) -> None:
        """Give log-probs of int64 `labels` [...] instead of logits from now on; None: logits again."""
        self.labels, self.entropy = labels, entropy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.labels is None:
            return self._logits(x)
        rows, labels = x.reshape(-1, x.shape[-1]), self.labels.reshape(-1)
        step = max(1, LOGITS_TOGETHER // self.head.weight.shape[0])
        if step >= rows.shape[0]:
            return self._log_probs(rows, labels, self.entropy).view(*x.shape[:-1], 2)
        parts = [
            checkpoint(self._log_probs, part, of, self.entropy, use_reentrant=False)
            for part, of in zip(rows.split(step), labels.split(step), strict=True)
        ]
        return torch.cat(parts).view(*x.shape[:-1], 2)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x).float()
        if self.vocabulary is not None:
            logits[..., self.vocabulary :] = NO_TOKEN
        return logits

    def _log_probs(self, rows: torch.Tensor, labels: torch.Tensor, entropy: bool) -> torch.Tensor:
        logits = self._logits(rows)
        log_probs = -F.cross_entropy(logits, labels, reduction="none")
        if not entropy:
            return torch.stack((log_probs, torch.zeros_like(log_probs)), -1)
        spread = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
        return torch.stack((log_probs, spread), -1)


def load_base(path: Path, dtype: torch.dtype, attn_implementation: str, backend: str) -> nn.Module:
    """The frozen base of the checkpoint at `path`: packed modules where it is quantised, plain ones elsewhere.

    Rotary frequencies stay float32 (verl's module.to(bfloat16) would round them).
    """
    config = text_config(path) or AutoConfig.from_pretrained(path)
    config._attn_implementation = attn_implementation
    quantised = getattr(config, "quantization_config", None) is not None
    if quantised:
        model = load_model(path, config, dtype=dtype, attn_implementation=attn_implementation, backend=backend)
    else:
        names = {r"^language_model\.": ""} if config.model_type == MINIMAX_M3 else None
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, key_mapping=names)
    return swap_plain_experts(model, backend).requires_grad_(False)


def build_from(path: Path, settings: EngineSettings) -> TrainerModel:
    """The model of a run's settings, with the adapter that it starts from."""
    trainer_model = build(
        path,
        settings.lora_spec(),
        dtype=getattr(torch, settings.dtype),
        attn_implementation=settings.attn_implementation,
        backend=settings.backend,
        replay_enabled=settings.routing_replay,
        vocabulary=settings.vocabulary,
    )
    if settings.adapter is not None:
        adapter_files.load_peft(trainer_model.model, Path(settings.adapter))
    return trainer_model


def build(
    path: Path,
    spec: lora.LoRASpec | None,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str = "sdpa",
    backend: str = "emulation",
    replay_enabled: bool = True,
    vocabulary: int | None = None,
) -> TrainerModel:
    """Base, adapters and replayable routers; the adapter is zero until it is trained or loaded."""
    if backend == "emulation" and attn_implementation == "sdpa":
        attn_implementation = CPU_ATTENTION
    model = load_base(path, dtype, attn_implementation, backend)
    adapted = lora.inject(model, spec) if spec is not None else []
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, FrozenLinear(module))
    model.lm_head = FloatLogits(model.lm_head, vocabulary)
    routing = replay.RoutingReplay(enabled=replay_enabled)
    replay.install(model, routing, linear)
    routers = [module for module in model.modules() if isinstance(module, replay.ReplayRouter)]
    layers = sum(isinstance(module, RoutedExperts) for module in model.modules())
    if layers != len(routers):
        raise replay.ReplayError(
            f"{type(model).__name__} has {layers} layers of experts, routing replay knows {len(routers)} of its routers"
        )
    experts = routers[0].weight.shape[0] if routers else 0
    layers = sorted(router.layer for router in routers)
    return TrainerModel(model, routing, block_replay.install(model), spec, adapted, layers, experts)
