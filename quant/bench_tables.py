"""The figures of scripts/bench_quant.py as the markdown of docs/benchmarks/quant.md."""


def markdown(figures: dict) -> str:
    """The section of docs/benchmarks/quant.md."""
    memory_, layer_, encode_, quality_ = (figures[part] for part in ("memory", "layer", "encode", "quality"))
    about = figures["environment"]
    installed = {**about["versions"], **quality_["versions"]}
    versions = ", ".join(f"{name} {version}" for name, version in installed.items())
    shape = layer_["shape"]
    lines = [
        "# Quantised base: memory, speed, quality",
        "",
        f"Taken by `scripts/bench_quant.py` on {about['processor']}, {about['cores']} cores shared with other work, "
        f"{about['threads']} thread; {versions}. Times are the fastest of several calls taken in turns: compare them "
        "within a table. The figures are in quant.json.",
        "",
        "## Memory of the frozen base, sharded by FSDP2 over two processes",
        "",
        "| | bytes a parameter | bound |",
        "|--|--|--|",
        f"| experts, NVFP4 | {memory_['experts_nvfp4']:.4f} | at most 0.58 |",
        f"| linear, MXFP8 | {memory_['linear_mxfp8']:.4f} | at most 1.05 |",
        f"| bf16 | {memory_['experts_bf16']:.4f} | |",
        "",
        "## Forward + backward of a layer of routed experts on CPU",
        "",
        f"{shape['experts']} experts, top-{shape['top_k']}, hidden {shape['hidden']}, intermediate "
        f"{shape['intermediate']}; gradient to the input. bf16 (eager and grouped_mm) and float32 "
        "(grouped_mm) are transformers' Qwen3-MoE experts; "
        "packed decodes every expert twice (forward and backward), a cost that tokens share.",
        "",
        "| tokens | packed | bf16, faster of two | float32 | packed / bf16 | packed / float32 |",
        "|--|--|--|--|--|--|",
    ]
    for name, row in layer_.items():
        if name == "shape":
            continue
        plain = min(row["bf16_eager_ms"], row["bf16_grouped_mm_ms"])
        milliseconds = (row["packed_ms"], plain, row["float32_grouped_mm_ms"])
        ratios = (row["packed_over_fastest_bf16"], row["packed_over_float32"])
        cells = [name.split("_")[0], *(f"{value:.0f} ms" for value in milliseconds), *(f"{r:.2f}" for r in ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    rows, columns = encode_["shape"]
    lines += [
        "",
        f"## Encoding a bf16 matrix [{rows}, {columns}] (GB/s of bf16 read)",
        "",
        "| | ours | compressed-tensors | ratio (bound: at least 1.0) |",
        "|--|--|--|--|",
    ]
    for fmt in ("nvfp4", "mxfp8"):
        row = encode_[fmt]
        theirs = row["compressed_tensors_gb_per_s"]
        lines.append(f"| {fmt.upper()} | {row['ours_gb_per_s']:.3f} | {theirs:.3f} | {row['ratio']:.1f} |")
    return "\n".join(lines + _quality_lines(quality_)) + "\n"


def _quality_lines(figures: dict) -> list[str]:
    kinds = [kind for kind in figures if kind not in ("not_installed", "versions")]
    lines = ["", "## Encoder quality: relative rms error of the decoded weight", ""]
    for fmt in ("nvfp4", "mxfp8"):
        libraries = [name for name in figures[kinds[0]][fmt] if name != "ours_over_best"]
        lines += [f"| {fmt.upper()} | {' | '.join(libraries)} | ours / best |", "|--" * (len(libraries) + 2) + "|"]
        for kind in kinds:
            row = figures[kind][fmt]
            cells = " | ".join(f"{row[name]:.5f}" for name in libraries)
            lines.append(f"| {kind} ({figures[kind]['matrices']}) | {cells} | {row['ours_over_best']:.4f} |")
        lines.append("")
    lines += [
        "In brackets: how many matrices. Bound: within 1 % of the best. The NVFP4 rule gives up about 0.1 % for its "
        "power-of-two global scale (others take amax / 2688, which makes the largest block's scale exact): decoding to "
        "bf16 is then exact under every backend, where an arbitrary global scale rounds 85 % of the weights, by up to "
        "0.32 %, in one backend and not in another. A further difference shows only where values span more than four "
        "decades: block scales below 2^-6 are written as zero, because Marlin drops them.",
    ]
    return lines
