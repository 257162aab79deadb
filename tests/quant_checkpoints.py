"""Small checkpoints for the tests of quant/: one decoder layer of each kind, written shard by shard."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTER, EXPERTS, VOCAB = 64, 32, 4, 96


def tensors(layers: int = 2, fused: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """bf16 tensors of a Qwen3-MoE-like model, with per-expert matrices or fused stacks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).bfloat16()

    out = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN), "lm_head.weight": normal(VOCAB, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        out[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            out[f"{prefix}.self_attn.{name}.weight"] = normal(HIDDEN, HIDDEN)
        out[f"{prefix}.mlp.gate.weight"] = normal(EXPERTS, HIDDEN)
        scale = torch.exp2(torch.arange(EXPERTS).float()).view(-1, 1, 1).bfloat16()
        gate_up = normal(EXPERTS, 2 * INTER, HIDDEN) * scale
        gate_up[:, INTER:] *= 3  # up is larger than gate: the shared global scale is not gate's own
        down = normal(EXPERTS, HIDDEN, INTER)
        if fused:
            out[f"{prefix}.mlp.experts.gate_up_proj"], out[f"{prefix}.mlp.experts.down_proj"] = gate_up, down
            continue
        for expert in range(EXPERTS):
            base = f"{prefix}.mlp.experts.{expert}"
            out[f"{base}.gate_proj.weight"] = gate_up[expert, :INTER].contiguous()
            out[f"{base}.up_proj.weight"] = gate_up[expert, INTER:].contiguous()
            out[f"{base}.down_proj.weight"] = down[expert].contiguous()
    return out


def write(folder: Path, state: dict[str, torch.Tensor], shards: int = 1, config: dict | None = None) -> Path:
    """Write `state` as `shards` files, round robin (fused parts lie in different files), with config and index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "qwen3_moe"}))
    (folder / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: value for number, (key, value) in enumerate(state.items()) if number % shards == shard}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
