"""Check the Triton encoders and decoders bit for bit against the torch references on a device, and time them."""

import time
from collections.abc import Callable

import torch

from kernels import mxfp8, nvfp4, triton_formats


def _weights(device: str, half_types: tuple[torch.dtype, ...]) -> dict[str, torch.Tensor]:
    """Weights that reach every branch: all float16 values, every exponent, zero and flushed blocks, ties, stacks."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(3, 64, 64, generator=generator)
    every_half = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.float16)
    ties = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6])
    exponents = torch.exp2(torch.arange(-126, 114, dtype=torch.float32)).unsqueeze(1)
    weights = {
        "gaussian": normal * 0.02,
        "every float16": every_half[every_half.isfinite()].float().sort().values.view(-1, 32),
        "every exponent": exponents * normal.view(-1, 32)[:240],
        "ties": torch.cat((ties, -ties)) * torch.exp2(torch.arange(8.0) - 4).unsqueeze(1),
        "zero": torch.zeros(4, 64),
        "rows far apart": normal * torch.exp2(torch.arange(64.0) - 50).unsqueeze(1),
    }
    weights |= {f"gaussian {dtype}": (normal * 0.02).to(dtype) for dtype in half_types}
    return {name: weight.to(device) for name, weight in weights.items()}


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bytes; NaNs of any payload count as equal."""
    if left.dtype in (torch.float32, torch.float16, torch.bfloat16):
        left, right = left.nan_to_num(nan=12345.0), right.nan_to_num(nan=12345.0)
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def check(
    device: str = "cuda", half_types: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
) -> dict[str, bool]:
    """{case: whether Triton on `device` and the torch reference on CPU give the same bytes}."""
    results: dict[str, bool] = {}
    for name, weight in _weights(device, half_types).items():
        host = weight.cpu()
        for given in (None, 0.00123):
            amax = host.float().abs().flatten(-2).amax(-1)
            shared = (
                torch.exp2(torch.ceil(torch.log2(amax.clamp(min=1e-30) / 2688))) if given is None else amax * 0 + given
            )
            expected = nvfp4.encode_reference(host, shared)
            actual = triton_formats.nvfp4_encode(weight, shared.to(device))
            results[f"nvfp4 encode, {name}, global {given}"] = all(
                _same(ours.cpu(), theirs) for ours, theirs in zip(actual, expected, strict=True)
            )
        actual, expected = triton_formats.mxfp8_encode(weight), mxfp8.encode_reference(host)
        results[f"mxfp8 encode, {name}"] = all(
            _same(ours.cpu(), theirs) for ours, theirs in zip(actual, expected, strict=True)
        )
    return results | _check_decoders(device, (torch.float32, *half_types))


def _check_decoders(device: str, dtypes: tuple[torch.dtype, ...]) -> dict[str, bool]:
    """Every byte of codes, every code under every block scale, and every E4M3 byte under every E8M0 scale."""
    results = {}
    scales = torch.arange(256, dtype=torch.uint8).view(2, 128, 1)
    all_codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    every_byte = torch.arange(256, dtype=torch.uint8).repeat(2, 1, 1)
    packed = torch.cat((all_codes.expand(2, 128, 8).reshape(2, 4, 256), every_byte), 1)
    scale = torch.cat((scales.reshape(2, 4, 32), torch.full((2, 1, 32), 0x3A, dtype=torch.uint8)), 1)
    scale = scale.view(torch.float8_e4m3fn)
    data = torch.arange(256, dtype=torch.uint8).view(8, 32).repeat(256, 1)
    exponent = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(-1, 1)
    for dtype in dtypes:
        for shared in (None, torch.tensor([2.0**-9, 0.00123])):
            expected = nvfp4.decode_reference(packed, scale, shared, dtype)
            there = None if shared is None else shared.to(device)
            actual = triton_formats.nvfp4_decode(packed.to(device), scale.to(device), there, dtype)
            results[f"nvfp4 decode, every byte, {dtype}, global {shared is not None}"] = _same(actual.cpu(), expected)
        expected = mxfp8.decode_reference(data.view(torch.float8_e4m3fn), exponent, dtype)
        actual = triton_formats.mxfp8_decode(data.view(torch.float8_e4m3fn).to(device), exponent.to(device), dtype)
        results[f"mxfp8 decode, every byte, {dtype}"] = _same(actual.cpu(), expected)
    return results


def median_milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call; the device is synchronised around each."""
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times[3:])[repeats // 2]


def check_and_time(device: str = "cuda", experts: int = 8, rows: int = 6144, columns: int = 6144) -> dict:
    """{"device", "equal": {case: bool}, "shape", "times": {op: {"ms", "gb_per_s", "share_of_copy"}}}.

    Times are of a bf16 stack [experts, rows, columns]; gb_per_s counts the bytes read and written, and share_of_copy is
    that over the same device's copy of the stack.
    """
    weight = torch.randn(experts, rows, columns, device=device, dtype=torch.bfloat16) * 0.02
    shared = torch.full((experts,), 2.0**-15, device=device)
    packed, scale = triton_formats.nvfp4_encode(weight, shared)
    data, exponent = triton_formats.mxfp8_encode(weight)
    wide = weight.numel() * 2
    target = torch.empty_like(weight)
    runs = {
        "copy": (lambda: target.copy_(weight), 2 * wide),
        "nvfp4_encode": (lambda: triton_formats.nvfp4_encode(weight, shared), wide + packed.numel() + scale.numel()),
        "nvfp4_decode": (
            lambda: triton_formats.nvfp4_decode(packed, scale, shared, torch.bfloat16),
            wide + packed.numel() + scale.numel(),
        ),
        "mxfp8_encode": (lambda: triton_formats.mxfp8_encode(weight), wide + data.numel() + exponent.numel()),
        "mxfp8_decode": (
            lambda: triton_formats.mxfp8_decode(data, exponent, torch.bfloat16),
            wide + data.numel() + exponent.numel(),
        ),
    }
    times = {}
    for name, (run, moved) in runs.items():
        milliseconds = median_milliseconds(run)
        times[name] = {"ms": milliseconds, "gb_per_s": moved / milliseconds / 1e6}
    for entry in times.values():
        entry["share_of_copy"] = entry["gb_per_s"] / times["copy"]["gb_per_s"]
    return {
        "device": torch.cuda.get_device_name(device),
        "equal": check(device),
        "shape": [experts, rows, columns],
        "times": times,
    }
