"""MiniMax-M3's tensors between the trainer's names and those of transformers' own model (5.13 and later).

The trainer's names are the released ones with experts stacked and the selection bias inside the router; transformers
calls the MoE block `mlp`, keeps the index projections in an `indexer`, and fuses gate and up of dense MLPs.
"""

import re

import torch

from rl.models.minimax_m3_config import MiniMaxM3Config

_RENAMED = (
    (".block_sparse_moe.", ".mlp."),
    (".self_attn.index_q_", ".self_attn.indexer.q_"),
    (".self_attn.index_k_", ".self_attn.indexer.k_"),
)
_FUSED = re.compile(r"^(?P<mlp>.*\.(mlp|shared_experts))\.(gate|up)_proj\.weight$")


def to_transformers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """State of the trainer's model -> that of transformers' `MiniMaxM3VLForCausalLM`; fused parts are copies."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if match := _FUSED.match(name):
            mlp = match["mlp"]
            tensor = torch.cat((state[f"{mlp}.gate_proj.weight"], state[f"{mlp}.up_proj.weight"]))
            name = f"{mlp}.gate_up_proj.weight"
        for ours, theirs in _RENAMED:
            name = name.replace(ours, theirs)
        out[name] = tensor
    return out


def from_transformers(state: dict[str, torch.Tensor], config: MiniMaxM3Config) -> dict[str, torch.Tensor]:
    """The inverse; `config` says which layers have a MoE block."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and config.moe_layer_freq[int(layer[1])]:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        for ours, theirs in _RENAMED[1:]:
            name = name.replace(theirs, ours)
        if name.endswith((".mlp.gate_up_proj.weight", ".shared_experts.gate_up_proj.weight")):
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                out[name.replace("gate_up_proj", f"{part}_proj")] = half
        else:
            out[name] = tensor
    return out


def transformers_config(config: MiniMaxM3Config) -> dict:
    """Keyword arguments of transformers' `MiniMaxM3VLTextConfig` for the same model."""
    sparse = config.sparse_attention_config
    if sparse["sparse_init_block"]:
        raise ValueError("transformers' MiniMax-M3 has no init blocks")
    same = (
        "vocab_size hidden_size intermediate_size dense_intermediate_size shared_intermediate_size num_hidden_layers "
        "num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps rotary_dim swiglu_alpha "
        "swiglu_limit num_local_experts num_experts_per_tok routed_scaling_factor tie_word_embeddings"
    )
    factor = config.rotary_dim / config.head_dim
    return {key: getattr(config, key) for key in same.split()} | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": factor,
        },
        "index_n_heads": sparse["sparse_num_index_heads"],
        "index_head_dim": sparse["sparse_index_dim"],
        "index_block_size": sparse["sparse_block_size"],
        "index_topk_blocks": sparse["sparse_topk_blocks"],
        "index_local_blocks": sparse["sparse_local_block"],
        "layer_types": ["minimax_m3_sparse" if on else "full_attention" for on in sparse["sparse_attention_freq"]],
        "mlp_layer_types": ["sparse" if on else "dense" for on in config.moe_layer_freq],
    }
