"""What the verl engine needs of the recipe beyond verl's own configuration.

It travels as `model.lora.lockstep`: verl passes that dict (its Megatron settings) to the worker as it is.
"""

from dataclasses import asdict, dataclass

from rl.lora import LoRASpec


@dataclass(frozen=True)
class EngineSettings:
    """Numbers, adapter and replay of the training engine."""

    backend: str
    dtype: str
    attn_implementation: str
    lora_rank: int
    lora_alpha: float
    lora_targets: tuple[str, ...]
    lora_dropout: float
    share_gate_up_a: bool
    adapter: str | None
    routing_replay: bool
    seed: int
    index_loss_coef: float = 0.0
    vocabulary: int | None = None
    """Ids from here on are padding of the embedding and have no probability; None: all are tokens."""
    share_prompts: bool = False
    """Compute what rows of a micro-batch begin with once (`rl.shared_prompts`)."""
    sleep_level: int = 0
    """vLLM's level of sleep during an update; 0: none (`rollout.sleep_level`)."""

    def lora_spec(self) -> LoRASpec:
        return LoRASpec(
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            targets=tuple(self.lora_targets),
            dropout=self.lora_dropout,
            share_gate_up_a=self.share_gate_up_a,
            seed=self.seed,
        )

    def to_verl(self) -> dict:
        return {**asdict(self), "lora_targets": list(self.lora_targets)}

    @classmethod
    def from_verl(cls, lora_config) -> "EngineSettings":
        values = dict(lora_config["lockstep"])
        values["lora_targets"] = tuple(values["lora_targets"])
        return cls(**values)
