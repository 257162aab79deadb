"""How fast does the embedded engine decode? Tokens a second at several batch sizes, adapter on; see --help."""

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.check import build_pair, libraries_in_log, probe_prompts  # noqa: E402
from rl.config import ConfigError, load_recipe, with_absolute_paths  # noqa: E402
from rl.environment import devices  # noqa: E402
from rl.launch import Parser  # noqa: E402
from rl.preflight import preflight  # noqa: E402
from rl.processes import end_process  # noqa: E402

EXAMPLES = """examples:
  python scripts/bench_decode.py --config tiny_m3.yaml
  python scripts/bench_decode.py --config tiny_m3.yaml --batch 1 8 32 --json docs/benchmarks/tiny_m3_decode.json

Decodes as many tokens as a response may have, end of turn ignored, from held-out prompts. The time of the prompts is
measured alone and taken off.

exit status: 0 done, 2 bad usage or recipe"""


def main() -> int:
    """Run the command line."""
    parser = Parser("bench_decode.py", __doc__, EXAMPLES)
    parser.add_argument("--config", required=True, metavar="NAME", help="recipe in recipes/, or a path to one")
    parser.add_argument("--batch", type=int, nargs="+", default=[32], metavar="N", help="sequences (default: 32)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="times each batch is decoded (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to a file")
    args = parser.parse_args()
    try:
        if min(*args.batch, args.repeats, 1) < 1:
            raise ConfigError("--batch and --repeats must be 1 or more")
        most = max(args.batch)
        recipe = load_recipe(args.config, [f"consistency.probe_sequences={most}"])
        preflight(recipe)
    except ConfigError as error:
        print(f"bench_decode.py: {error}", file=sys.stderr)
        return 2
    with libraries_in_log() as log:
        found = run(with_absolute_paths(recipe), args.batch, args.repeats)
    log.unlink()
    for row in found["batches"]:
        rates = ", ".join(f"{rate:.0f}" for rate in row["tokens_per_s"])
        print(f"batch {row['batch']}: {rates} tokens/s, contexts of {row['context']:.0f} tokens on average")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def run(recipe, batches: list[int], repeats: int) -> dict:
    """Tokens a second of each batch, from the wall time of a generation less that of its prompts alone."""
    from rollout.sampling import lora_request, sampling_params

    pair, _ = build_pair(recipe)
    llm, tokens = pair.engine.llm, recipe.data.max_response_length
    prompts = probe_prompts(recipe, max(batches), llm.get_tokenizer())

    def seconds(batch: int, max_tokens: int) -> float:
        llm.reset_prefix_cache()
        started = time.monotonic()
        llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts[:batch]],
            sampling_params(max_tokens=max_tokens, ignore_eos=True, detokenize=False),
            lora_request=lora_request(1),
            use_tqdm=False,
        )
        return time.monotonic() - started

    seconds(max(batches), 2)
    rows = []
    for batch in batches:
        rates = [batch * (tokens - 1) / (seconds(batch, tokens) - seconds(batch, 1)) for _ in range(repeats)]
        context = sum(map(len, prompts[:batch])) / batch + tokens / 2
        rows.append({"batch": batch, "tokens_per_s": rates, "context": context})
    return {"recipe": recipe.name, "response_tokens": tokens, "devices": devices(), "batches": rows}


if __name__ == "__main__":
    end_process(main())
