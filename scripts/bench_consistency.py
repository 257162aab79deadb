"""Does the consistency check find every fault, and none where there is none? See --help."""

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.check import build_pair, libraries_in_log, probe_prompts  # noqa: E402
from rl.config import ConfigError, load_recipe, with_absolute_paths  # noqa: E402
from rl.environment import gpu_count  # noqa: E402
from rl.launch import Parser  # noqa: E402
from rl.preflight import preflight  # noqa: E402
from rl.processes import end_process  # noqa: E402

EXAMPLES = """examples:
  python scripts/bench_consistency.py --config tiny_math.yaml
  python scripts/bench_consistency.py --config tiny_math.yaml --clean 20 --json docs/benchmarks/consistency.json

exit status: 0 every fault found by the right check and no false alarm, 1 otherwise, 2 bad usage or recipe"""

ADAPTER_STD = 0.02


def main() -> int:
    """Run the command line."""
    parser = Parser("bench_consistency.py", __doc__, EXAMPLES)
    parser.add_argument("--config", required=True, metavar="NAME", help="recipe in recipes/, or a path to one")
    parser.add_argument("--clean", type=int, default=20, metavar="N", help="checks without a fault (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to a file")
    args = parser.parse_args()
    try:
        recipe = load_recipe(args.config, ["data.max_prompt_length=400"])
        formats = preflight(recipe).formats
        if args.clean < 1 or gpu_count() or not formats:
            raise ConfigError("the faults are of a quantised base on CPU: hide GPUs, and give --clean 1 or more")
    except ConfigError as error:
        print(f"bench_consistency.py: {error}", file=sys.stderr)
        return 2
    with libraries_in_log() as log:
        outcome = run(with_absolute_paths(recipe), args.clean)
    log.unlink()
    print(table(outcome))
    if args.json:
        args.json.write_text(json.dumps(outcome, indent=1) + "\n")
    found = all(row["detected"] and row["explained"] for row in outcome["faults"])
    return 0 if found and not outcome["false_alarms"] else 1


def run(recipe, clean: int) -> dict:
    """Clean checks with another adapter and other prompts each, then every fault."""
    import torch

    from rl.consistency import check
    from rl.faults import FAULTS
    from rl.lora import adapters

    pair, limits = build_pair(recipe)
    prompts = probe_prompts(recipe, 8 * clean, pair.engine.llm.get_tokenizer())

    def randomise(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for adapter in adapters(pair.trainer_model.model).values():
                for name, parameter in adapter.named_parameters(recurse=False):
                    if name.endswith("B"):
                        local = parameter.to_local()
                        local.copy_(torch.randn(local.shape, generator=generator) * ADAPTER_STD)
        pair.engine_side.sync()

    def checked(number: int, probe: bool, long: bool = False):
        started = time.monotonic()
        some = [ids * 6 if long else ids for ids in prompts[8 * number : 8 * number + 8]]
        report = check(pair.probe, pair.engine_side, some, 32, limits, probe=probe)
        return report, round(time.monotonic() - started, 2)

    alarms, seconds, first, largest = [], [], None, {"kl_k3": 0.0, "mean_abs": 0.0, "max_abs": 0.0}
    for number in range(clean):
        randomise(number)
        report, spent = checked(number, probe=False)
        seconds.append(spent)
        first = first or report.logprobs["replayed"]
        largest = {key: max(value, report.logprobs["replayed"][key]) for key, value in largest.items()}
        alarms += [{"seed": number, "reasons": report.reasons}] if report.verdict != "pass" else []
    rows = []
    for fault in FAULTS:
        randomise(0)
        with fault.inject(pair):
            report, spent = checked(0, fault.probe, fault.long)
        rows.append(
            {
                "fault": fault.name,
                "detected": any(reason.startswith(fault.check) for reason in report.reasons),
                "explained": any(fault.words in cause for cause in report.diagnosis),
                "reason": report.reasons[0] if report.reasons else None,
                "diagnosis": report.diagnosis,
                "seconds": spent,
            }
        )
        pair.engine_side.sync()
    randomise(0)
    report, _ = checked(0, probe=False)
    if report.logprobs["replayed"] != first:  # the CPU repeats bit for bit
        raise RuntimeError(f"a fault was not taken back: {report.reasons}, {report.logprobs['replayed']}, not {first}")
    return {"clean": clean, "false_alarms": alarms, "largest_clean": largest, "seconds_clean": seconds, "faults": rows}


def table(outcome: dict) -> str:
    """Markdown table, one row a fault."""
    lines = ["| fault | found | explained | first reason | likely cause |", "|--|--|--|--|--|"]
    for row in outcome["faults"]:
        marks = ["yes" if row[key] else "NO" for key in ("detected", "explained")]
        cause = row["diagnosis"][0] if row["diagnosis"] else "none"
        lines.append(f"| {row['fault']} | {marks[0]} | {marks[1]} | {row['reason']} | {cause} |")
    found = sum(row["detected"] and row["explained"] for row in outcome["faults"])
    lines.append("")
    lines.append(
        f"{found} of {len(outcome['faults'])} faults found and explained, {len(outcome['false_alarms'])} false alarms "
        f"in {outcome['clean']} clean checks (largest k3 {outcome['largest_clean']['kl_k3']:.1e})"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    end_process(main())
