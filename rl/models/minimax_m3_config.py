"""The configuration of MiniMax-M3's text model, as released, with what the trainer and the planner read from it."""

import json
from pathlib import Path

from transformers import PreTrainedConfig

from kernels import msa

MODEL_TYPE = "minimax_m3_text"


class MiniMaxM3Config(PreTrainedConfig):
    """The released text configuration under its own keys; the defaults are MiniMax-M3's."""

    model_type = MODEL_TYPE

    def __init__(
        self,
        vocab_size: int = 200064,
        hidden_size: int = 6144,
        intermediate_size: int = 3072,
        dense_intermediate_size: int = 12288,
        shared_intermediate_size: int = 3072,
        num_hidden_layers: int = 60,
        num_attention_heads: int = 64,
        num_key_value_heads: int = 4,
        head_dim: int = 128,
        max_position_embeddings: int = 524288,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 5000000.0,
        rotary_dim: int = 64,
        swiglu_alpha: float = 1.702,
        swiglu_beta: float = 1.0,
        swiglu_limit: float = 7.0,
        num_local_experts: int = 128,
        num_experts_per_tok: int = 4,
        n_shared_experts: int = 1,
        routed_scaling_factor: float = 2.0,
        moe_layer_freq: list[int] | None = None,
        sparse_attention_config: dict | None = None,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = False,
        **kwargs,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.dense_intermediate_size = dense_intermediate_size
        self.shared_intermediate_size = shared_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.rotary_dim = rotary_dim
        self.partial_rotary_factor = rotary_dim / head_dim
        self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit = swiglu_alpha, swiglu_beta, swiglu_limit
        self.num_local_experts = num_local_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.n_shared_experts = n_shared_experts
        self.routed_scaling_factor = routed_scaling_factor
        dense = min(3, num_hidden_layers)
        after_dense = [0] * dense + [1] * (num_hidden_layers - dense)
        self.moe_layer_freq = after_dense if moe_layer_freq is None else list(moe_layer_freq)
        self.sparse_attention_config = {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": num_key_value_heads,
            "sparse_topk_blocks": 16,
            "sparse_block_size": msa.BLOCK_SIZE,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": after_dense,
            "sparse_disable_index_value": after_dense,
            **(sparse_attention_config or {}),
        }
        self.initializer_range = initializer_range
        # What only has one value here; written out because the engine reads it.
        only = {"hidden_act": "swigluoai", "scoring_func": "sigmoid", "use_routing_bias": True, "use_gemma_norm": True}
        only |= {"use_qk_norm": True, "qk_norm_type": "per_head", "attention_output_gate": False}
        for key, value in only.items():
            if kwargs.pop(key, value) != value:
                raise ValueError(f"{MODEL_TYPE}: {key} must be {value!r}")
            setattr(self, key, value)
        kwargs.pop("partial_rotary_factor", None)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self._check()

    def _check(self) -> None:
        sparse = self.sparse_attention_config
        for key, freq in (
            ("moe_layer_freq", self.moe_layer_freq),
            ("sparse_attention_freq", sparse["sparse_attention_freq"]),
        ):
            if len(freq) != self.num_hidden_layers:
                raise ValueError(f"{MODEL_TYPE}: {key} has {len(freq)} entries for {self.num_hidden_layers} layers")
        if sparse["sparse_num_index_heads"] != self.num_key_value_heads:
            raise ValueError(f"{MODEL_TYPE}: sparse_num_index_heads must equal num_key_value_heads")
        if not sparse["use_sparse_attention"]:
            raise ValueError(
                f"{MODEL_TYPE}: use_sparse_attention must be true; sparse_attention_freq says in which layers"
            )
        if getattr(self, "rope_scaling", None):
            raise ValueError(f"{MODEL_TYPE}: rope_scaling is not supported")
        if sparse["sparse_score_type"] != "max":
            raise ValueError(f"{MODEL_TYPE}: sparse_score_type must be 'max'")

    @property
    def selection(self) -> msa.Selection:
        """How the sparse layers choose blocks."""
        sparse = self.sparse_attention_config
        return msa.Selection(
            sparse["sparse_topk_blocks"],
            sparse["sparse_init_block"],
            sparse["sparse_local_block"],
            sparse["sparse_block_size"],
        )

    @property
    def sparse_layers(self) -> list[int]:
        """Layers with MSA; the others attend to everything."""
        return [layer for layer, on in enumerate(self.sparse_attention_config["sparse_attention_freq"]) if on]


def text_config(path: Path) -> MiniMaxM3Config | None:
    """The configuration of the text model in a multimodal MiniMax-M3 checkpoint; None for any other checkpoint."""
    config = json.loads((Path(path) / "config.json").read_text())
    if config.get("model_type") != "minimax_m3_vl":
        return None
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    if "quantization_config" in config:
        text["quantization_config"] = config["quantization_config"]
    return MiniMaxM3Config(**text)
