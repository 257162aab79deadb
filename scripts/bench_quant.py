"""Figures of quant/: memory under FSDP2, time of a packed MoE layer, encode speed, encoder quality; see --help."""

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from quant import mxfp8, nvfp4
from quant.bench_tables import markdown
from quant.experts import QuantExperts
from quant.layers import QuantLinear

EXAMPLES = """examples:
  python scripts/bench_quant.py --json docs/benchmarks/quant.json --markdown docs/benchmarks/quant.md
  python scripts/bench_quant.py --only quality --real model.safetensors
ModelOpt and torchao take part in `quality` where they are installed. exit status: 0 done, 2 bad usage
"""
PARTS = ("memory", "layer", "encode", "quality")
EXPERTS, HIDDEN, INTER, TOP_K = 16, 1024, 512, 4


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """[gate; up] -> silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def best_seconds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Fastest of `repeats` calls of each, taken in turns so that a busy moment hits all alike."""
    for run in runs.values():
        run()
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


# ---- memory ----------------------------------------------------------------------------------------------------------


class PlainExperts(torch.nn.Module):
    """The bf16 stacks that a QuantExperts replaces."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(gate_up.bfloat16(), requires_grad=False)
        self.down_proj = torch.nn.Parameter(down.bfloat16(), requires_grad=False)


def memory_worker(store: str, rank: int) -> None:
    """One of two processes: shard each module with FSDP2 and print the bytes that this process allocates for it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    gate_up, down = torch.randn(EXPERTS, 2 * INTER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTER)
    weight = torch.randn(HIDDEN, HIDDEN)
    linear = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    modules = {
        "experts_bf16": PlainExperts(gate_up, down),
        "experts_nvfp4": QuantExperts(nvfp4.quantize(gate_up), nvfp4.quantize(down), silu_gate),
        "linear_bf16": linear,
        "linear_mxfp8": QuantLinear(mxfp8.quantize(weight)),
    }
    values = {"experts": gate_up.numel() + down.numel(), "linear": weight.numel()}
    result = {}
    for name, module in modules.items():
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        storages = {}
        for parameter in module.parameters():
            storage = parameter.to_local().untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        result[name] = sum(storages.values()) / values[name.split("_")[0]]
    print(json.dumps(result))
    dist.destroy_process_group()


def memory() -> dict:
    """Bytes a parameter that the two processes together hold (storage, padding included)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", f"{folder}/store"]
        workers = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
        outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError("a memory worker failed; its error is above")
    both = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {name: both[0][name] + both[1][name] for name in both[0]}


# ---- layer -----------------------------------------------------------------------------------------------------------


def layer(tokens: tuple[int, ...] = (64, 256)) -> dict:
    """Forward + backward of routed experts, gradient to the input: packed against transformers' module.

    That one in bf16 (both of its implementations) is what a plain trainer runs; in float32 it is what a CPU without
    bf16 instructions does fastest, with four bytes a parameter.
    """
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INTER, num_experts=EXPERTS)
    wide = Qwen3MoeExperts(config).requires_grad_(False)
    torch.nn.init.normal_(wide.gate_up_proj, std=0.02)
    torch.nn.init.normal_(wide.down_proj, std=0.02)
    plain = copy.deepcopy(wide).bfloat16()
    packed = QuantExperts(nvfp4.quantize(plain.gate_up_proj), nvfp4.quantize(plain.down_proj), silu_gate)
    results = {}
    for count in tokens:
        hidden = torch.randn(count, HIDDEN)
        weights, ids = torch.randn(count, EXPERTS).softmax(-1).topk(TOP_K)

        def run(module, dtype=torch.bfloat16, how=None, hidden=hidden, ids=ids, weights=weights):
            config._experts_implementation = how
            x = hidden.to(dtype).requires_grad_()
            weights = weights if module is packed else weights.to(dtype)
            torch.autograd.grad(module(x, ids, weights).float().sum(), x)

        for module in (wide, plain):
            module.config = config
        runs = {
            "packed": lambda run=run: run(packed),
            "bf16_eager": lambda run=run: run(plain, how="eager"),
            "bf16_grouped_mm": lambda run=run: run(plain, how="grouped_mm"),
            "float32_grouped_mm": lambda run=run: run(wide, torch.float32, "grouped_mm"),
        }
        seconds = best_seconds(runs, 5)
        fastest = min(seconds["bf16_eager"], seconds["bf16_grouped_mm"])
        results[f"{count}_tokens"] = {
            **{f"{name}_ms": value * 1e3 for name, value in seconds.items()},
            "packed_over_fastest_bf16": seconds["packed"] / fastest,
            "packed_over_float32": seconds["packed"] / seconds["float32_grouped_mm"],
        }
    return {"shape": {"experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTER, "top_k": TOP_K}, **results}


# ---- encode ----------------------------------------------------------------------------------------------------------


def compressed_tensors_encoders() -> dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]]:
    """compressed-tensors' own path from a weight to the tensors on disk: observer statistics, scales, compression."""
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    from quant.config import _MXFP8_WEIGHTS, _NVFP4_WEIGHTS

    def encoder(compressor, settings, with_global):
        arguments = QuantizationArgs.model_validate(settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)

        def encode(weight):
            state = {"weight": weight}
            blocks = weight.view(weight.shape[0], -1, arguments.group_size)
            shared = generate_gparam(weight.min(), weight.max()) if with_global else None
            state["weight_scale"], _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, shared)
            if with_global:
                state["weight_global_scale"] = shared
            return compressor.compress(state, scheme)

        return encode

    return {
        "nvfp4": encoder(NVFP4PackedCompressor, _NVFP4_WEIGHTS, True),
        "mxfp8": encoder(MXFP8QuantizationCompressor, _MXFP8_WEIGHTS, False),
    }


def encode(rows: int = 1024, columns: int = 4096) -> dict:
    """GB/s of bf16 weight read, ours against compressed-tensors, on the same tensor in turns."""
    weight = torch.randn(rows, columns).bfloat16() * 0.02
    theirs = compressed_tensors_encoders()
    results = {}
    for name, ours in (("nvfp4", nvfp4.quantize), ("mxfp8", mxfp8.quantize)):
        runs = {"ours": lambda ours=ours: ours(weight), "compressed_tensors": lambda name=name: theirs[name](weight)}
        speed = {who: weight.numel() * 2e-9 / seconds for who, seconds in best_seconds(runs, 4).items()}
        results[name] = {f"{who}_gb_per_s": value for who, value in speed.items()}
        results[name]["ratio"] = speed["ours"] / speed["compressed_tensors"]
    return {"shape": [rows, columns], **results}


# ---- quality ---------------------------------------------------------------------------------------------------------

Decoded = Callable[[torch.Tensor], torch.Tensor]


def encoders() -> tuple[dict[str, dict[str, Decoded]], list[str]]:
    """{format: {library: bf16 weight -> float32 decoded}} of what is installed, and the libraries that are not."""
    theirs = compressed_tensors_encoders()

    def ct_nvfp4(weight):
        state = theirs["nvfp4"](weight)
        shared = 1.0 / state["weight_global_scale"].reshape(())
        return nvfp4.NVFP4Tensor(state["weight_packed"], state["weight_scale"], shared).dequantize(torch.float32)

    def ct_mxfp8(weight):
        state = theirs["mxfp8"](weight)
        return mxfp8.MXFP8Tensor(state["weight"], state["weight_scale"]).dequantize(torch.float32)

    table: dict[str, dict[str, Decoded]] = {
        "nvfp4": {"ours": lambda w: nvfp4.quantize(w).dequantize(torch.float32), "compressed-tensors": ct_nvfp4},
        "mxfp8": {"ours": lambda w: mxfp8.quantize(w).dequantize(torch.float32), "compressed-tensors": ct_mxfp8},
    }
    missing = []
    for name, add in (("modelopt", _add_modelopt), ("torchao", _add_torchao)):
        if importlib.util.find_spec(name) is None:
            missing.append(name)
        else:
            add(table)
    return table, missing


def _add_modelopt(table: dict[str, dict[str, Decoded]]) -> None:
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    def four(weight):
        tensor, scale, double = NVFP4QTensor.quantize(weight, 16)
        return tensor.dequantize(dtype=torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})

    def eight(weight):
        tensor, scale = MXFP8QTensor.quantize(weight)
        return tensor.dequantize(dtype=torch.float32, scale=scale)

    table["nvfp4"]["modelopt"], table["mxfp8"]["modelopt"] = four, eight


def _add_torchao(table: dict[str, dict[str, Decoded]]) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def four(weight):
        shared = per_tensor_amax_to_scale(weight.abs().max().float())
        return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=shared).dequantize(torch.float32)

    def eight(weight):
        return MXTensor.to_mx(weight, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL).dequantize(torch.float32)

    table["nvfp4"]["torchao"], table["mxfp8"]["torchao (RCEIL)"] = four, eight


def weight_sets(real: Path | None) -> dict[str, list[torch.Tensor]]:
    """bf16 matrices by kind; `real` is a safetensors file whose 2-D weights (no embeddings) of K % 32 = 0 are used."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(1024, 2048, generator=generator)
    chi = torch.randn(4, 1024, 2048, generator=generator).pow(2).mean(0)
    outliers = normal.clone()
    outliers[:, ::97] *= 20
    sets = {
        "gaussian": [normal * 0.02],
        "student t, 4 degrees": [normal / chi.sqrt() * 0.02],
        "gaussian, 1 % of columns x20": [outliers * 0.02],
    }
    if real is not None:
        from safetensors.torch import load_file

        state = load_file(real)
        sets[f"real: {real.stem}"] = [
            value.float()
            for name, value in state.items()
            if value.dim() == 2 and value.shape[1] % 32 == 0 and "embed" not in name and value.is_floating_point()
        ]
    return {name: [matrix.bfloat16() for matrix in matrices] for name, matrices in sets.items()}


def quality(real: Path | None) -> dict:
    """Relative rms error, sqrt(sum (w' - w)^2 / sum w^2) over all matrices of a kind, and ours over the best."""
    table, missing = encoders()
    results: dict = {"not_installed": missing, "versions": versions("nvidia-modelopt", "torchao")}
    for kind, matrices in weight_sets(real).items():
        total = sum(float(matrix.double().pow(2).sum()) for matrix in matrices)
        results[kind] = {"matrices": len(matrices)}
        for fmt, libraries in table.items():
            row = {}
            for library, decode in libraries.items():
                error = sum(float((decode(matrix).double() - matrix.double()).pow(2).sum()) for matrix in matrices)
                row[library] = (error / total) ** 0.5
            row["ours_over_best"] = row["ours"] / min(row.values())
            results[kind][fmt] = row
    return results


def versions(*names: str) -> dict[str, str]:
    """Versions of the distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict:
    """What the figures were taken with."""
    installed = versions("torch", "transformers", "compressed-tensors")
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = models[0].partition(":")[2].strip() if models else platform.processor()
    return {"processor": processor, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "versions": installed}


def main() -> int:
    """Run the parts asked for and print or write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be repeated (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there; parts not run are kept")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there; needs all four parts")
    parser.add_argument("--real", type=Path, metavar="FILE", help="safetensors file of real weights for `quality`")
    parser.add_argument("--tables", action="store_true", help="measure nothing: --markdown from the figures in --json")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.worker:
        memory_worker(args.worker[0], int(args.worker[1]))
        return 0
    if args.real is not None and not args.real.is_file():
        parser.error(f"--real {args.real}: no such file")
    figures = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    if not args.tables:
        figures["environment"] = environment()
    runs = {"memory": memory, "layer": layer, "encode": encode, "quality": lambda: quality(args.real)}
    for part in args.only or ([] if args.tables else PARTS):
        print(f"{part} ...", file=sys.stderr)
        figures[part] = runs[part]()
    text = json.dumps(figures, indent=2)
    if args.json and not args.tables:
        args.json.write_text(text + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(figures))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
