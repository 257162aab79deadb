"""Conversion: contents, shared global scales, resuming after a stop at any point, memory, bad input, full disk."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quant_checkpoints import EXPERTS, HIDDEN, INTER, tensors, write
from safetensors.torch import load_file

from quant import cli, convert, mxfp8, nvfp4, shards
from quant.checkpoint import CheckpointError, decoded_state, packed_state, quantize_checkpoint
from quant.config import quantization_config
from quant.policy import POLICIES, Policy

ROOT = Path(__file__).resolve().parent.parent
_RULES = POLICIES["nvfp4_mxfp8"].rules


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "src", tensors(), shards=3)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def test_written_tensors_are_the_encoders_bytes(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "dst", progress=False)
    written, plain = load_all(tmp_path / "dst"), tensors()
    weight = plain["model.layers.0.self_attn.q_proj.weight"]
    encoded = mxfp8.quantize(weight)
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(written[f"{name}.weight"].view(torch.uint8), encoded.data.view(torch.uint8))
    assert torch.equal(written[f"{name}.weight_scale"], encoded.scale)
    for expert in range(EXPERTS):
        base = f"model.layers.1.mlp.experts.{expert}"
        both = torch.cat((plain[f"{base}.gate_proj.weight"], plain[f"{base}.up_proj.weight"]))
        encoded = nvfp4.quantize(both)
        for half, leaf in enumerate(("gate_proj", "up_proj")):
            rows = slice(half * INTER, (half + 1) * INTER)
            assert torch.equal(written[f"{base}.{leaf}.weight_packed"], encoded.packed[rows])
            assert written[f"{base}.{leaf}.weight_global_scale"].tolist() == [1 / float(encoded.global_scale)]
    for kept in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"):
        assert torch.equal(written[kept], plain[kept])
    index = json.loads((tmp_path / "dst" / shards.INDEX_NAME).read_text())
    assert set(index["weight_map"]) == set(written)
    total = sum(tensor.numel() * tensor.element_size() for tensor in written.values())
    assert index["metadata"]["total_size"] == total
    assert (tmp_path / "dst" / "tokenizer.json").exists()
    assert not list((tmp_path / "dst").glob("*.partial")) and not (tmp_path / "dst" / convert.MARKER).exists()


def test_fused_and_separate_sources_give_the_same_tensors(source, tmp_path):
    fused = write(tmp_path / "fused", tensors(fused=True), shards=2)
    quantize_checkpoint(source, tmp_path / "a", progress=False)
    quantize_checkpoint(fused, tmp_path / "b", progress=False)
    first, second = load_all(tmp_path / "a"), load_all(tmp_path / "b")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def test_packed_and_decoded_state_use_module_names_and_stack_experts(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "dst", progress=False)
    packed, decoded = packed_state(tmp_path / "dst"), decoded_state(tmp_path / "dst")
    plain = tensors(fused=True)
    assert packed.keys() == decoded.keys() == plain.keys()
    gate_up = packed["model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.packed.shape == (EXPERTS, 2 * INTER, HIDDEN // 2)
    assert gate_up.scale.shape == (EXPERTS, 2 * INTER, HIDDEN // 16) and gate_up.global_scale.shape == (EXPERTS,)
    whole = nvfp4.quantize(plain["model.layers.0.mlp.experts.gate_up_proj"])
    assert torch.equal(gate_up.packed, whole.packed) and torch.equal(gate_up.global_scale, whole.global_scale)
    for name, tensor in decoded.items():
        assert tensor.shape == plain[name].shape
        error = (tensor.float() - plain[name].float()).norm() / plain[name].float().norm()
        assert error < 0.11, name


LAYERWISE = Policy("layerwise", (("layers.0.self_attn", None), ("layers.1.mlp.experts", "mxfp8"), *_RULES))


@pytest.mark.parametrize("policy", [*POLICIES.values(), LAYERWISE], ids=lambda policy: policy.name)
def test_config_parses_as_compressed_tensors_and_its_targets_cover_exactly_the_quantised(source, policy):
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils import match_name

    plan = convert.make_plan(source, policy)
    config = QuantizationConfig.model_validate(quantization_config(plan))
    for job in plan.all_jobs():
        if len(job.shape) != 2:
            continue
        groups = [
            group for group in config.config_groups.values() if any(match_name(job.module, t) for t in group.targets)
        ]
        ignored = any(match_name(job.module, t) for t in config.ignore)
        assert (len(groups), ignored) == ((1, False) if job.fmt else (0, True)), job.module
        if job.fmt:
            assert groups[0].weights.num_bits == (4 if job.fmt == "nvfp4" else 8)
            assert groups[0].input_activations is None


def test_attention_in_nvfp4_shares_a_global_scale_over_q_k_and_v(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "dst", policy="nvfp4_all", progress=False)
    written, plain = load_all(tmp_path / "dst"), tensors()
    base = "model.layers.1.self_attn"
    parts = [f"{base}.{leaf}_proj" for leaf in "qkv"]
    encoded = nvfp4.quantize(torch.cat([plain[f"{part}.weight"] for part in parts]))
    assert torch.equal(torch.cat([written[f"{part}.weight_packed"] for part in parts]), encoded.packed)
    assert {float(written[f"{part}.weight_global_scale"]) for part in parts} == {1 / float(encoded.global_scale)}
    assert packed_state(tmp_path / "dst")[f"{base}.q_proj.weight"].global_scale.shape == ()


def test_a_stop_at_any_write_is_resumed_to_the_same_bytes(source, tmp_path, monkeypatch):
    quantize_checkpoint(source, tmp_path / "whole", progress=False)
    expected = contents(tmp_path / "whole")
    real_put, real_json, real_copy = shards.ShardWriter.put, convert.write_json, shutil.copyfile
    count = 0

    def stopping(real, at):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == at:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return call

    stops = 0
    for at in range(1, 200, 3):
        count = 0
        with monkeypatch.context() as patch:
            patch.setattr(shards.ShardWriter, "put", stopping(real_put, at))
            patch.setattr(convert, "write_json", stopping(real_json, at))
            patch.setattr(shutil, "copyfile", stopping(real_copy, at))
            try:
                quantize_checkpoint(source, tmp_path / "dst", progress=False)
            except KeyboardInterrupt:
                stops += 1
                assert not (tmp_path / "dst" / "config.json").exists()
                with pytest.raises(CheckpointError):
                    packed_state(tmp_path / "dst")
            else:
                break
        if at % 2:  # half of the stops are followed by a second one
            quantize_checkpoint(source, tmp_path / "dst", progress=False)
            assert contents(tmp_path / "dst") == expected
            shutil.rmtree(tmp_path / "dst")
    assert stops > 20
    assert contents(tmp_path / "dst") == expected


def test_finished_shards_are_kept_on_resume(source, tmp_path, monkeypatch):
    plan = convert.make_plan(source, "nvfp4_mxfp8")
    real = shards.ShardWriter.finish
    finished = []

    def finish(writer):
        real(writer)
        finished.append(writer.path.name)
        if len(finished) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(shards.ShardWriter, "finish", finish)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "dst", progress=False)
    quantize_checkpoint(source, tmp_path / "dst", progress=False)
    assert finished == list(plan.jobs), "two shards before the stop, one after"


def test_a_killed_process_leaves_no_complete_looking_folder(source, tmp_path):
    code = (
        "import os, signal, sys; from quant import shards; from quant.checkpoint import quantize_checkpoint\n"
        "real = shards.ShardWriter.put; n = [0]\n"
        "def put(*a):\n    n[0] += 1\n    n[0] == 30 and os.kill(os.getpid(), signal.SIGKILL)\n    real(*a)\n"
        "shards.ShardWriter.put = put; quantize_checkpoint(sys.argv[1], sys.argv[2], progress=False)\n"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "dst")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    assert not (tmp_path / "dst" / "config.json").exists()
    quantize_checkpoint(source, tmp_path / "dst", progress=False)
    quantize_checkpoint(source, tmp_path / "whole", progress=False)
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")


def test_nothing_is_overwritten_and_another_source_is_not_resumed(source, tmp_path, monkeypatch):
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        quantize_checkpoint(source, occupied, progress=False)
    assert contents(occupied) == {"notes.txt": b"mine"}
    with pytest.raises(CheckpointError, match="lies in SRC"):
        quantize_checkpoint(source, source / "out", progress=False)
    other = write(tmp_path / "other", tensors(seed=1), shards=3)
    monkeypatch.setattr(convert, "_write_shard", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "dst", progress=False)
    with pytest.raises(CheckpointError, match="another source or policy"):
        quantize_checkpoint(other, tmp_path / "dst", progress=False)


MEMORY_SCRIPT = """
import re, sys
from quant.checkpoint import quantize_checkpoint
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
def resident(): return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
quantize_checkpoint(sys.argv[1], sys.argv[2], progress=False)  # warm up: libraries and tables
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from what is resident now
before = resident()
quantize_checkpoint(sys.argv[3], sys.argv[4], progress=False)
print(peak() - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak-memory counter")
def test_memory_stays_below_a_shard_and_two_tensors(source, tmp_path):
    rows, columns, layers, files = 1024, 1024, 12, 4
    generator = torch.Generator().manual_seed(0)
    big = torch.randn(rows, columns, generator=generator).bfloat16()
    state = {
        f"model.layers.{n}.mlp.experts.{n}.{leaf}.weight": big.clone()
        for n in range(layers)
        for leaf in ("w1", "w3", "w2")
    }
    large = write(tmp_path / "large", state, shards=files)
    tensor = big.numel() * 2
    bound = layers * 3 // files * tensor + 2 * tensor
    assert layers * 3 * tensor > bound, "the checkpoint is larger than the bound"
    paths = [str(path) for path in (source, tmp_path / "a", large, tmp_path / "b")]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, *paths], cwd=ROOT, check=True, capture_output=True, text=True
    )
    grown = int(done.stdout)
    assert grown <= bound, f"{grown / tensor:.1f} tensors"
    assert grown <= 8 * tensor, "in fact a few matrices, whatever the shard's size"


def cut(source: Path) -> str:
    file = source / "model-00002-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    return "truncated: tensor"


def cut_header(source: Path) -> str:
    os.truncate(source / "model-00002-of-00003.safetensors", 100)
    return "truncated or not a safetensors file"


def drop_index_entry(source: Path) -> str:
    index = json.loads((source / shards.INDEX_NAME).read_text())
    index["weight_map"].pop("model.layers.0.mlp.gate.weight")
    (source / shards.INDEX_NAME).write_text(json.dumps(index))
    return "no entry for tensor model.layers.0.mlp.gate.weight"


def promise_a_tensor(source: Path) -> str:
    index = json.loads((source / shards.INDEX_NAME).read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00003.safetensors"
    (source / shards.INDEX_NAME).write_text(json.dumps(index))
    return "tensor model.ghost.weight is missing"


def remove_shard(source: Path) -> str:
    (source / "model-00003-of-00003.safetensors").unlink()
    return "model-00003-of-00003.safetensors: cannot read it"


def unknown_dtype(source: Path) -> str:
    file = source / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"BQ16"', 1))
    return "unknown dtype 'BQ16'"


def bad_config(source: Path) -> str:
    (source / "config.json").write_text("{")
    return "config.json: not valid JSON"


def no_config(source: Path) -> str:
    (source / "config.json").unlink()
    return "config.json: cannot read it"


def already(source: Path) -> str:
    (source / "config.json").write_text(json.dumps({"quantization_config": {}}))
    return "already quantised"


def not_a_number(source: Path) -> str:
    state = tensors()
    state["model.layers.1.self_attn.o_proj.weight"][3, 3] = float("nan")
    shutil.rmtree(source)
    write(source, state, shards=3)
    return "model.layers.1.self_attn.o_proj.*NaN or Inf"


def odd_width(source: Path) -> str:
    state = tensors()
    state["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(8, 40, dtype=torch.bfloat16)
    shutil.rmtree(source)
    write(source, state, shards=3)
    return "q_proj.weight has K=40, not a multiple of 32"


DAMAGE = [
    cut,
    cut_header,
    drop_index_entry,
    promise_a_tensor,
    remove_shard,
    unknown_dtype,
    bad_config,
    no_config,
    already,
    not_a_number,
    odd_width,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_source_is_one_line_and_exit_2(damage, source, tmp_path, capsys):
    message = damage(source)
    before = contents(source)
    assert cli.main([str(source), str(tmp_path / "dst"), "--quiet"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("quantize_checkpoint.py: ")
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, tmp_path / "dst", progress=False)
    assert contents(source) == before and not (tmp_path / "dst" / "config.json").exists()


def test_a_full_disk_is_one_line_and_the_run_is_resumable(source, tmp_path, capsys):
    target = tmp_path / "disk"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(target)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        assert cli.main([str(source), str(target), "--quiet"]) == 2
        line = capsys.readouterr().err
        assert "No space left on device" in line and "run the same command again" in line and line.count("\n") == 1
        assert not (target / "config.json").exists()
        subprocess.run(["mount", "-o", "remount,size=8m", str(target)], check=True)
        assert cli.main([str(source), str(target), "--quiet"]) == 0
        quantize_checkpoint(source, tmp_path / "whole", progress=False)
        assert contents(target) == contents(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_dry_run_prints_the_table_and_writes_nothing(source, tmp_path, capsys):
    assert cli.main([str(source), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["module", "shape", "format", "count", "bytes", "before", "bytes", "after"]
    gate = next(line.split() for line in lines if "experts.*.gate_proj" in line)
    assert gate == ["model.layers.*.mlp.experts.*.gate_proj", "32x64", "nvfp4", "8", "32,768", "9,248"]
    assert cli.main([str(source), "--dry-run", "--every"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(tensors()) + 2
    assert [file.name for file in tmp_path.iterdir()] == ["src"]


def test_usage_errors_exit_2(source, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(source)])
    assert stop.value.code == 2 and "DST is missing" in capsys.readouterr().err
    assert cli.main([str(source), "--dry-run", "--policy", "nvfp9"]) == 2
    assert "policy 'nvfp9' is unknown: use one of nvfp4_mxfp8" in capsys.readouterr().err
    assert cli.main(["/nowhere", "--dry-run"]) == 2
    assert "no such checkpoint folder" in capsys.readouterr().err
