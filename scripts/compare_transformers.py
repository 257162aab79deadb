"""Compare the trainer's MiniMax-M3 with transformers' own eager model, which lives in transformers 5.13 and later."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

EXAMPLES = """examples:
  python3.12 -m venv /tmp/newer && /tmp/newer/bin/pip install torch 'transformers>=5.13'
  python scripts/compare_transformers.py --python /tmp/newer/bin/python --json docs/benchmarks/transformers_m3.json

exit status: 0 they agree, 1 they do not, 2 the other environment cannot do it
"""

THEIRS = """
import json, sys, torch, transformers
from safetensors.torch import load_file, save_file
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m
folder = sys.argv[1]
config = m.MiniMaxM3VLTextConfig(**json.load(open(folder + "/config.json")))
config._attn_implementation = "eager"
model = m.MiniMaxM3VLForCausalLM(config).eval()
model.set_experts_implementation("eager")
inputs = load_file(folder + "/inputs.safetensors")
state = load_file(folder + "/model.safetensors")
missing, unexpected = model.load_state_dict(state, strict=False)
assert not missing and not unexpected, (missing, unexpected)
found = {}
for number, layer in enumerate(model.model.layers):
    if layer.self_attn.indexer is not None:
        layer.self_attn.indexer.register_forward_hook(
            lambda _m, _i, out, number=number: found.update({f"blocks.{number}": out.int().contiguous()}))
with torch.no_grad():
    found["logits"] = model(input_ids=inputs["ids"]).logits
save_file(found, folder + "/theirs.safetensors")
print(transformers.__version__)
"""
TOLERANCE = 1e-4
TOKENS = 700


def compare(python: str) -> dict:
    """Largest difference of the logits, and the share of selections with the same set of blocks."""
    from rl import block_replay
    from rl.models.minimax_m3_layout import to_transformers, transformers_config

    model = random_model()
    ids = torch.randint(0, model.config.vocab_size, (2, TOKENS))
    blocks = block_replay.install(model)
    blocks.recording = {}
    with torch.no_grad():
        logits = model(ids).logits
    with tempfile.TemporaryDirectory() as folder:
        state = {name: tensor.contiguous() for name, tensor in to_transformers(model.state_dict()).items()}
        save_file(state, f"{folder}/model.safetensors")
        save_file({"ids": ids}, f"{folder}/inputs.safetensors")
        Path(folder, "config.json").write_text(json.dumps(transformers_config(model.config)))
        child = subprocess.run([python, "-c", THEIRS, folder], capture_output=True, text=True, check=False)
        if child.returncode:
            raise RuntimeError(child.stderr.strip().splitlines()[-1])
        theirs = load_file(f"{folder}/theirs.safetensors")
    same = total = 0
    for (layer, row), (own, _) in blocks.recording.items():
        agree = block_replay.same_blocks(own, theirs[f"blocks.{layer}"][row].transpose(0, 1))
        same, total = same + int(agree.sum()), total + agree.numel()
    return {
        "transformers": child.stdout.strip().splitlines()[-1],
        "tokens": ids.numel(),
        "logits_std": float(logits.std()),
        "logits_max_difference": float((logits - theirs["logits"]).abs().max()),
        "selections": total,
        "selections_equal": same,
    }


def random_model():
    """Four layers, the first dense, in float32; long enough texts drop blocks."""
    from rl.models.minimax_m3 import MiniMaxM3SparseForCausalLM
    from rl.models.minimax_m3_config import MiniMaxM3Config

    config = MiniMaxM3Config(
        vocab_size=640,
        hidden_size=128,
        intermediate_size=96,
        dense_intermediate_size=256,
        shared_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        moe_layer_freq=[0, 1, 1, 1],
        initializer_range=0.08,
        sparse_attention_config={"sparse_topk_blocks": 2, "sparse_attention_freq": [0, 1, 1, 1]},
    )
    torch.manual_seed(0)
    model = MiniMaxM3SparseForCausalLM._from_config(config, dtype=torch.float32).eval()
    for name, tensor in model.state_dict().items():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.1)
    return model


def main() -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter of an environment with transformers 5.13 or later")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    try:
        found = compare(options.python)
    except (OSError, RuntimeError) as error:
        print(f"--python {options.python}: {error}; it needs torch and transformers 5.13 or later", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))
    agree = found["logits_max_difference"] <= TOLERANCE and found["selections_equal"] == found["selections"]
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
