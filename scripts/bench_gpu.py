"""Check the GPU encoders and decoders of quant/ bit for bit, and time them and a packed MoE layer; see --help."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_quant import silu_gate
from transformers import __version__ as transformers_version
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from kernels.format_checks import check_and_time, median_milliseconds
from quant import nvfp4
from quant.experts import QuantExperts

EXAMPLES = """examples:
  python scripts/bench_gpu.py --json docs/benchmarks/gpu_formats.json
exit status: 0 every case equal, 1 a case differs, 2 bad usage or no GPU
"""
EXPERTS, HIDDEN, INTER, TOP_K = 32, 3072, 1536, 4


def layer(tokens: tuple[int, ...] = (512, 4096)) -> dict:
    """Forward + backward of routed experts in bf16, gradient to the input: packed against transformers' grouped_mm.

    Also the largest relative difference between the two outputs when the plain module holds the decoded weights: both
    round to bf16, so it is bounded by a few bf16 steps, not zero.
    """
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INTER, num_experts=EXPERTS)
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        plain = Qwen3MoeExperts(config).requires_grad_(False).bfloat16()
    plain.config = config
    for weight in (plain.gate_up_proj, plain.down_proj):
        torch.nn.init.normal_(weight, std=0.02)
    gate_up, down = nvfp4.quantize(plain.gate_up_proj), nvfp4.quantize(plain.down_proj)
    plain.gate_up_proj.copy_(gate_up.dequantize(torch.bfloat16))
    plain.down_proj.copy_(down.dequantize(torch.bfloat16))
    packed = QuantExperts(gate_up, down, silu_gate)
    result: dict = {"shape": {"experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTER, "top_k": TOP_K}}
    for count in tokens:
        hidden = torch.randn(count, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
        weights, ids = torch.randn(count, EXPERTS, device="cuda").softmax(-1).topk(TOP_K)

        def output(module, hidden=hidden, ids=ids, weights=weights):
            return module(hidden, ids, weights if module is packed else weights.bfloat16())

        difference = (output(packed).float() - output(plain).float()).norm() / output(plain).float().norm()
        entry = {"relative_difference": difference.item()}
        for name, module in (("packed", packed), ("bf16_grouped_mm", plain)):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            entry[f"{name}_ms"] = median_milliseconds(
                lambda module=module, hidden=hidden: torch.autograd.grad(output(module).float().sum(), hidden)
            )
            entry[f"{name}_extra_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        entry["packed_over_bf16"] = entry["packed_ms"] / entry["bf16_grouped_mm_ms"]
        result[f"{count}_tokens"] = entry
    return result


def main() -> int:
    """Run both parts, print and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible: run this on a machine with one")
    results = {
        "torch": torch.__version__,
        "transformers": transformers_version,
        "formats": check_and_time(),
        "layer": layer(),
    }
    text = json.dumps(results, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)
    different = [case for case, equal in results["formats"]["equal"].items() if not equal]
    if different:
        print(f"not equal: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
