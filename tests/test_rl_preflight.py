"""Preflight: broken checkpoints, tokenizers, adapters and data are refused in one line, before anything starts."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl import preflight as module
from rl.config import REPO_ROOT, ConfigError, load_recipe
from rl.preflight import check_data, count_parameters, preflight, read_safetensors_header, read_tensors

ROW = {
    "data_source": "tiny_math",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}, "group_1": {"format": "mxfp8-quantized"}},
}


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A folder with a complete small checkpoint in two shards, data, and the overrides that point there."""
    model = tmp_path / "model"
    model.mkdir()
    expert, attention = "model.layers.0.mlp.experts.0.up_proj", "model.layers.0.self_attn.q_proj"
    shards = {
        "model-1.safetensors": {
            f"{expert}.weight_packed": np.zeros((4, 16), np.uint8),
            f"{expert}.weight_scale": np.zeros((4, 2), np.uint8),
            f"{expert}.weight_global_scale": np.ones((1,), np.float32),
        },
        "model-2.safetensors": {
            f"{attention}.weight": np.zeros((4, 32), np.uint8),
            f"{attention}.weight_scale": np.zeros((4, 1), np.uint8),
            "model.norm.weight": np.ones((8,), np.float32),
        },
    }
    index = {name: shard for shard, tensors in shards.items() for name in tensors}
    for shard, tensors in shards.items():
        save_file(tensors, model / shard)
    write(model / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 4}
    write(model / "config.json", {**config, "max_position_embeddings": 512, "quantization_config": QUANTISATION})
    added = [{"content": "<eos>", "id": 3}, {"content": "b", "id": 1}]
    write(model / "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": added})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(ROW) + "\n" for _ in range(3)))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(module, "gpu_count", lambda: 0)
    return tmp_path


def write(path, content):
    """Write JSON."""
    path.write_text(json.dumps(content))


def edit(path, **changes):
    """Change keys of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    write(path, {key: value for key, value in content.items() if value is not None})


def recipe_for(workspace, *overrides):
    """The main recipe, on the workspace."""
    data = workspace / "data.jsonl"
    paths = [f"model.path={workspace / 'model'}", f"data.train={data}", f"data.val={data}"]
    return load_recipe("tiny_math", [*paths, *overrides])


def error_of(workspace, *overrides):
    """The line that preflight refuses with."""
    with pytest.raises(ConfigError) as caught:
        preflight(recipe_for(workspace, *overrides))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_complete_workspace_passes(workspace):
    checked = preflight(recipe_for(workspace))
    assert checked.parameters == 4 * 32 + 4 * 32 + 8
    assert checked.formats == ("nvfp4-pack-quantized", "mxfp8-quantized")
    assert (checked.train_rows, checked.val_rows) == (3, 3)
    assert checked.model_text.startswith("qwen3_moe with 264 parameters (nvfp4 + mxfp8, ")


def test_prompts_are_shared_by_minimax_m3_only(workspace):
    assert error_of(workspace, "trainer.share_prompts=true").startswith("trainer.share_prompts = true: qwen3_moe")
    edit(workspace / "model" / "config.json", model_type="minimax_m3_text")
    preflight(recipe_for(workspace, "trainer.share_prompts=true"))


def test_missing_folder(workspace):
    line = error_of(workspace, "model.path=/no/such/folder")
    assert "model.path = '/no/such/folder'" in line and "no such folder" in line


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_or_broken_json(workspace, name):
    path = workspace / "model" / name
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert str(path) in error_of(workspace) and "not valid JSON" in error_of(workspace)
    path.unlink()
    assert str(path) in error_of(workspace) and "no such file" in error_of(workspace)


def test_missing_shard(workspace):
    (workspace / "model" / "model-2.safetensors").unlink()
    line = error_of(workspace)
    assert "model-2.safetensors" in line and "missing" in line


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_shard(workspace, kept):
    path = workspace / "model" / "model-1.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    line = error_of(workspace)
    assert "model-1.safetensors" in line and "truncated" in line


def test_shard_of_something_else(workspace):
    path = workspace / "model" / "model-1.safetensors"
    path.write_bytes((16).to_bytes(8, "little") + b"\xff" * 64)
    assert "not a safetensors file" in error_of(workspace)


def test_tensor_that_the_index_names_is_missing(workspace):
    index = workspace / "model" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**weight_map, "model.extra.weight": "model-1.safetensors"})
    line = error_of(workspace)
    assert "model.extra.weight" in line and "model-1.safetensors" in line


def test_no_weights_at_all(workspace):
    for path in (workspace / "model").glob("model*"):
        path.unlink()
    assert "no *.safetensors" in error_of(workspace)


def test_single_file_without_index(workspace):
    folder = workspace / "model"
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-2.safetensors").unlink()
    (folder / "model-1.safetensors").rename(folder / "model.safetensors")
    tensors, size = read_tensors(folder)
    assert len(tensors) == 3 and size == (folder / "model.safetensors").stat().st_size
    assert count_parameters(tensors) == 128


def test_header_matches_the_library(workspace):
    from safetensors import safe_open

    path = workspace / "model" / "model-2.safetensors"
    header = read_safetensors_header(path)
    with safe_open(path, framework="numpy") as file:
        assert set(header) == set(file.keys())
        assert all(tuple(entry["shape"]) == file.get_tensor(name).shape for name, entry in header.items())


def test_vocabulary_unlike_the_tokenizer(workspace):
    edit(workspace / "model" / "config.json", vocab_size=64)
    line = error_of(workspace)
    assert "vocab_size = 64" in line and "4 tokens" in line and "model.padded_vocab=true" in line
    assert preflight(recipe_for(workspace, "model.padded_vocab=true")).model_type == "qwen3_moe"
    edit(workspace / "model" / "config.json", vocab_size=3)
    assert "copy the tokenizer" in error_of(workspace, "model.padded_vocab=true")


@pytest.mark.parametrize(
    ("quantisation", "part"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method = 'gptq'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
        ({**QUANTISATION, "config_groups": {"group_0": {"format": "pack-quantized"}}}, "pack-quantized"),
        (None, "quantization_config is missing"),
    ],
)
def test_unknown_quantisation(workspace, quantisation, part):
    edit(workspace / "model" / "config.json", quantization_config=quantisation)
    assert part in error_of(workspace)


def test_packed_weight_without_its_global_scale(workspace):
    folder = workspace / "model"
    tensors = {"experts.0.up_proj.weight_packed": np.zeros((4, 16), np.uint8)}
    tensors["experts.0.up_proj.weight_scale"] = np.zeros((4, 2), np.uint8)
    save_file(tensors, folder / "model-1.safetensors")
    write(folder / "model.safetensors.index.json", {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")})
    assert "weight_global_scale" in error_of(workspace)


def test_too_long_for_the_model(workspace):
    line = error_of(workspace, "data.max_response_length=4096")
    assert "data.max_response_length = 4096" in line and "512 positions" in line


def test_adapter(workspace):
    folder = workspace / "adapter"
    folder.mkdir()
    override = f"model.adapter={folder}"
    assert "adapter_config.json" in error_of(workspace, override)
    write(folder / "adapter_config.json", {"r": 8})
    assert "set model.lora_rank=8" in error_of(workspace, override)
    write(folder / "adapter_config.json", {"r": 32})
    assert "adapter_model.safetensors" in error_of(workspace, override)


def test_missing_data_file(workspace):
    line = error_of(workspace, "data.val=/no/such.parquet")
    assert "data.val = '/no/such.parquet'" in line


def test_row_without_ground_truth(workspace):
    rows = [ROW, {**ROW, "reward_model": {"style": "rule", "ground_truth": ""}}]
    (workspace / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = error_of(workspace)
    assert "data.train" in line and "ground" in line


def test_questions_and_answers_are_a_data_set_too(workspace):
    rows = [{"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}, {"question": "What is 2 + 2?"}]
    (workspace / "data.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert check_data("data.train", str(workspace / "data.jsonl")) == 1
    (workspace / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "row 1: has neither prompt nor question and answer" in error_of(workspace)


def test_empty_data_file(workspace):
    (workspace / "data.jsonl").write_text("")
    assert "data.jsonl" in error_of(workspace)


def test_devices(workspace, monkeypatch):
    assert "model.backend = marlin" in error_of(workspace, "model.backend=marlin")
    assert "trainer.nodes = 2" in error_of(workspace, "trainer.nodes=2")
    for level in (1, 2):
        line = error_of(workspace, f"rollout.sleep_level={level}")
        assert f"rollout.sleep_level = {level}: no GPU is visible" in line and "set rollout.sleep_level=0" in line
    monkeypatch.setattr(module, "gpu_count", lambda: 1)
    assert "trainer.gpus_per_node = 4" in error_of(workspace, "trainer.gpus_per_node=4")


def test_torchrun_is_refused(workspace, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "plain python" in error_of(workspace)


def test_wrong_version_names_the_conflict(workspace, monkeypatch, capsys):
    real = module.metadata.version
    monkeypatch.setattr(module.metadata, "version", lambda name: "0.8.0" if name == "verl" else real(name))
    line = error_of(workspace)
    assert "verl is 0.8.0, not 0.9.1" in line and "make venv" in line
    monkeypatch.setenv("LOCKSTEP_ALLOW_VERSIONS", "1")
    preflight(recipe_for(workspace))
    assert "verl is 0.8.0" in capsys.readouterr().err


def test_the_command_line_exits_with_2_and_one_line(workspace):
    (workspace / "model" / "model-1.safetensors").write_bytes(b"")
    script = REPO_ROOT / "scripts" / "train_grpo.py"
    for arguments, part in (
        (["--config", "tiny_math", f"model.path={workspace / 'model'}"], "truncated"),
        (["--config", "tiny_math", "rollout.temperature=0.5"], "temperature"),
        (["--config", "tiny_mth"], "tiny_math"),
        (["--config", "tiny_math", "--wrong"], "--wrong"),
        ([], "--config"),
    ):
        command = [sys.executable, str(script), *arguments, f"run.root={workspace / 'runs'}"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=workspace, check=False)
        assert result.returncode == 2
        assert result.stdout == "" and result.stderr.count("\n") == 1 and part in result.stderr
    assert not (workspace / "runs").exists()


@pytest.mark.parametrize("header", ["[]", '{"a": 1}', '{"a": {"dtype": "F32", "shape": [1]}}'])
def test_a_header_without_tensors(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ConfigError, match="its header names no tensors"):
        read_safetensors_header(path)


@pytest.mark.parametrize("damage", [3, {"config_groups": []}, {"config_groups": {"a": 3}}])
def test_a_damaged_quantisation(workspace, damage):
    edit(workspace / "model" / "config.json", quantization_config=damage)
    assert "quantization_config is damaged" in error_of(workspace)


def test_a_tokenizer_without_a_vocabulary(workspace):
    write(workspace / "model" / "tokenizer.json", {})
    assert "has no vocabulary" in error_of(workspace)
