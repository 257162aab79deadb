"""The recipe: every setting of a training run, typed, with what it means written under it.

Imports pydantic only (no torch, verl, vLLM or Ray), so that a wrong recipe is refused in well under a second. Loading
a file, overriding keys and wording the errors is `rl.config`; checks that need the disk are `rl.preflight`.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rl.schema_algorithm import OBJECTIVES, AlgorithmConfig, RewardConfig
from rl.schema_base import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from rl.sizes import check_batches, resolve_workers

__all__ = ["ENGINE_LORA_RANKS", "LORA_GROUPS", "OBJECTIVES", "Recipe"]

ENGINE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum adapter ranks that vLLM 0.30 accepts (`vllm.config.lora.MaxLoRARanks`)."""

LORA_GROUPS = ("attention", "experts", "shared_experts", "dense_mlp", "index")
"""Names for whole families of modules in `model.lora_targets`."""


class ModelConfig(Section):
    """The frozen base, and the adapter that is trained on it."""

    path: str
    """Folder of the Hugging Face checkpoint that both the trainer and the engine read."""
    shape: str | None = None
    """A model's config.json to plan memory with (scripts/plan.py) as long as model.path is not there."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of activations and of the tensors that are not quantised, on both sides."""
    backend: Literal["auto", "emulation", "marlin", "flashinfer_w4a4"] = "auto"
    """Whose rounding points the trainer follows; auto: emulation without a GPU, marlin on Hopper, flashinfer_w4a4 on
    Blackwell."""
    lora_rank: Positive = 32
    """Rank of the adapter; one of the ranks that vLLM serves."""
    lora_alpha: PositiveFloat = 32
    """The adapter's output is scaled by lora_alpha / lora_rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before A in the trainer. The engine has none, so any other value than 0 widens the mismatch."""
    lora_targets: Annotated[list[str], Field(min_length=1)] = ["attention"]
    """What is adapted: attention, experts, shared_experts, dense_mlp, index, or names of modules (q_proj, ...)."""
    share_gate_up_a: bool = False
    """Gate and up of an expert use one A matrix."""
    adapter: str | None = None
    """Folder of a PEFT adapter to start from; null starts from a new one, which is zero."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention of the trainer's forward."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    padded_vocab: bool = False
    """The embedding has more rows than the tokenizer has tokens (as in stock Qwen3): both sides give the rest no
    probability. Without it such a checkpoint is refused."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""

    @field_validator("lora_rank")
    @classmethod
    def _rank_is_served(cls, rank: int) -> int:
        if rank not in ENGINE_LORA_RANKS:
            raise ValueError(f"vLLM serves the ranks {', '.join(map(str, ENGINE_LORA_RANKS))}; take one of them")
        return rank

    @field_validator("lora_targets")
    @classmethod
    def _targets_are_known(cls, targets: list[str]) -> list[str]:
        import difflib  # only here: keep the import of this module light

        modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        modules += ("index_q_proj", "index_k_proj")
        for target in targets:
            if target in LORA_GROUPS or target in modules:
                continue
            near = difflib.get_close_matches(target, LORA_GROUPS + modules, n=1, cutoff=0.75)
            if near:
                raise ValueError(f"{target!r} is no group or module; did you mean {near[0]!r}?")
            if not target.replace(".", "").isidentifier():
                raise ValueError(f"{target!r} is no module name; take one of {', '.join(LORA_GROUPS + modules)}")
        if len(set(targets)) != len(targets):
            raise ValueError("a target is listed twice; list each once")
        return targets


class DataConfig(Section):
    """Prompts with known answers (parquet or jsonl in verl's schema)."""

    train: str
    """Training set."""
    val: str
    """Held-out set; never trained on."""
    max_prompt_length: Positive = 512
    """Tokens; a longer prompt is dropped before the run, and the number dropped is printed."""
    max_response_length: Positive = 512
    """Tokens that the engine may sample for one answer."""
    batch_size: Positive = 16
    """Prompts in one step; batch_size * rollout.group_size samples are one optimizer step."""
    shuffle: bool = True
    """Draw the prompts in an order that depends on `seed` only."""
    val_samples: Positive = 1
    """Samples for each held-out problem, at the temperature of training."""
    val_limit: Positive | None = None
    """Use only the first N held-out problems; null uses all."""


class RolloutConfig(Section):
    """Sampling, and the vLLM engine that does it."""

    group_size: int = 8
    """Samples for one prompt; the advantage compares a sample with the others of its group."""
    temperature: float = 1.0
    """Must stay 1: the engine's log-probabilities have to be those of the trained distribution."""
    top_p: float = 1.0
    """Must stay 1, for the same reason."""
    top_k: int = -1
    """Must stay -1 (off), for the same reason."""
    tensor_parallel_size: Positive = 1
    """Devices that hold one copy of the engine together."""
    replicas: Positive | None = None
    """Copies of the engine; null: as many as fit on the trainer's devices."""
    max_num_seqs: Positive = 128
    """Sequences that one engine decodes together."""
    max_num_batched_tokens: Positive = 8192
    """Tokens in one forward of the engine."""
    enforce_eager: bool = True
    """No CUDA graphs (always so without a GPU)."""
    kv_cache_gib: PositiveFloat | None = None
    """Size of the KV cache in GiB; null lets gpu_memory_utilization decide (1 GiB without a GPU)."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    """auto: the model's dtype, which is what the trainer's attention sees."""
    prefix_caching: bool = False
    """Reuse the prompt's keys and values within a group. Prompt rows that come from the cache have no recorded
    routes: the trainer routes them itself, and counts them."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the GPU's memory that the engine may take (the trainer lives on the same GPU)."""
    sleep_level: Annotated[int, Field(ge=0, le=2)] = 0
    """What the engine gives back while the trainer updates. 0: nothing. 1: the KV cache, and its weights move to host
    memory. 2: both are dropped, and the weights are read from the checkpoint again. After each wake every tensor of the
    base is compared with the start's. Above 0 a GPU is needed."""

    @model_validator(mode="after")
    def _is_the_trained_distribution(self) -> "RolloutConfig":
        for key, value, only in (
            ("temperature", self.temperature, 1),
            ("top_p", self.top_p, 1),
            ("top_k", self.top_k, -1),
        ):
            if value != only:
                raise ValueError(
                    f"rollout.{key} = {value}: importance sampling needs samples of the trained distribution; "
                    f"set rollout.{key}={only}"
                )
        if self.group_size < 2:
            raise ValueError(
                f"rollout.group_size = {self.group_size}: a group of one has no one to compare with, so every "
                "advantage is 0; set rollout.group_size=2 or more"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"rollout.max_num_batched_tokens = {self.max_num_batched_tokens}: vLLM needs at least one token a "
                f"sequence; set it to rollout.max_num_seqs ({self.max_num_seqs}) or more"
            )
        return self


class OptimConfig(Section):
    """AdamW over the adapter."""

    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: stay, or fall to 0 at the last step."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """AdamW's two decay rates."""
    clip_grad: PositiveFloat = 1.0
    """Largest norm of the gradient."""


class TrainerConfig(Section):
    """How long, how often, on what."""

    steps: Positive
    """Optimizer steps."""
    val_every: NonNegative = 10
    """Steps between two held-out evaluations; 0 evaluates only at the end."""
    val_before_train: bool = True
    """Evaluate before step 1 (the summary's initial accuracy)."""
    save_every: NonNegative = 0
    """Steps between two saved states; 0 saves the adapter at the end only."""
    micro_batch_size: Positive = 16
    """Sequences that one worker runs forward and backward at a time; at most its share of a step."""
    max_tokens_per_micro_batch: Positive | None = None
    """Token budget of a micro-batch; given, micro-batches are built by tokens and micro_batch_size is not used."""
    share_prompts: bool = False
    """Samples of one prompt in a micro-batch compute it once (MiniMax-M3 only). Pays where prompts are long and a
    micro-batch holds whole groups; with max_tokens_per_micro_batch verl scatters them, and counts each prompt."""
    fsdp_workers: Positive | None = None
    """Trainer processes in all; null: nodes * gpus_per_node."""
    gpus_per_node: Positive | None = None
    """Devices on one node; null: fsdp_workers / nodes. Without a GPU each worker is a CPU process."""
    nodes: Positive = 1
    """Machines in the Ray cluster."""
    logger: Annotated[list[Literal["console", "wandb", "tensorboard"]], Field(min_length=1)] = ["console"]
    """Where metrics go besides the run folder; tensorboard writes event files to its folder tensorboard/."""
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"
    """offline writes below the run folder; online needs an account."""
    project_name: str = "lockstep"
    """Project in wandb."""
    stall_minutes: PositiveFloat = 10.0
    """Minutes without any event after which the run names the stage that hangs and dumps all stacks; after three
    times as long it ends."""
    resume: str | None = None
    """auto: the newest state of the last run of this recipe; a path: that run folder; null: a new run."""


class Thresholds(Section):
    """What the consistency gate lets pass; null takes the backend's default (rl.consistency_report.DEFAULTS).

    Weights have no threshold: every hash must be equal.
    """

    kl_k3: PositiveFloat | None = None
    """Largest mean of r - 1 - log r over the probe's tokens, with replayed routes."""
    max_abs_logp: PositiveFloat | None = None
    """Largest |delta logp| of a token, with replayed routes."""
    mean_abs_logp: PositiveFloat | None = None
    """Largest mean |delta logp|, with replayed routes."""
    routing_replayed: Fraction | None = None
    """Least agreement of expert sets with replay."""
    routing_free: Fraction | None = None
    """Least agreement of expert sets when the trainer routes by itself."""
    selection: Fraction | None = None
    """Least agreement of the blocks that sparse attention selects, near-ties left out."""
    adapter_effect: PositiveFloat | None = None
    """Least mean |delta logp| by which a non-zero test adapter must move the engine."""
    zero_adapter_effect: NonNegativeFloat | None = None
    """Largest median |delta logp| by which a zero adapter may move the engine (the mean: mean_abs_logp); 0: no token
    may move."""


class ConsistencyConfig(Section):
    """The gate: the three checks and the probe, before step 1 and later."""

    enabled: bool = True
    """false trains without any check; the run says so."""
    every: NonNegative = 20
    """Steps between two checks after the first; 0 checks before step 1 only."""
    probe_sequences: Positive = 8
    """Sequences that both sides score."""
    probe_tokens: Positive = 64
    """Tokens sampled for each of them."""
    thresholds: Thresholds = Field(default_factory=Thresholds)
    """What passes."""
    replay_blocks: bool = False
    """Also replay the engine's selected attention blocks (models with block-sparse attention)."""


class RunConfig(Section):
    """Where results go."""

    root: str = "runs"
    """Folder in which each run gets its own folder; `latest` there links to the newest."""


class Recipe(Section):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Begins the run folder's name."""
    seed: NonNegative = 0
    """Seeds data order, adapter, and sampling."""
    model: ModelConfig
    """The frozen base and the adapter."""
    data: DataConfig
    """The problems."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """The engine."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """The objective."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """What a sample is worth."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The optimizer."""
    trainer: TrainerConfig
    """Length, intervals and devices."""
    consistency: ConsistencyConfig = Field(default_factory=ConsistencyConfig)
    """The gate."""
    run: RunConfig = Field(default_factory=RunConfig)
    """The run folder."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def samples_per_step(self) -> int:
        """Samples in one optimizer step."""
        return self.data.batch_size * self.rollout.group_size

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        resolve_workers(self)
        check_batches(self)
        adapts_index = any(target.startswith("index") for target in self.model.lora_targets)
        if adapts_index != (self.algorithm.index_loss_coef > 0):
            remedy = (
                "set it above 0, or take them out"
                if adapts_index
                else "add index to model.lora_targets, or set it to 0"
            )
            raise ValueError(
                f"algorithm.index_loss_coef = {self.algorithm.index_loss_coef}: nothing but this loss trains the index "
                f"projections of model.lora_targets; {remedy}"
            )
        check_sharing(self)
        return self


def check_sharing(recipe: Recipe) -> None:
    """ValueError for trainer.share_prompts where it would change the loss, or nothing at all."""
    if not recipe.trainer.share_prompts:
        return
    for key, value, problem in (
        ("algorithm.index_loss_coef", recipe.algorithm.index_loss_coef, "the indexer's loss counts each row's prompt"),
        ("model.lora_dropout", recipe.model.lora_dropout, "each sample has a dropout mask of its own"),
        (
            "trainer.micro_batch_size",
            recipe.trainer.micro_batch_size == 1 and recipe.trainer.max_tokens_per_micro_batch is None,
            "one sequence shares with none",
        ),
    ):
        if value:
            raise ValueError(
                f"trainer.share_prompts = true with this {key}: {problem}; set trainer.share_prompts=false"
            )
