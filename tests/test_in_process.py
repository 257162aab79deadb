"""FSDP2 trainer and vLLM engine in one process, no Ray: weights, sync, replay and log-probs on the committed model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("in_process_pair.py")


@pytest.fixture(scope="module")
def outcome() -> dict:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_both_sides_hold_the_same_bytes(outcome):
    weights = outcome["first"]["weights"]
    assert weights["base"]["tensors"] > 50 and weights["base"]["mismatched"] == []
    assert weights["adapter"]["tensors"] > 50 and weights["adapter"]["mismatched"] == []


def test_replayed_routing_and_logprobs_agree(outcome):
    for name in ("first", "second"):
        report = outcome[name]
        assert report["verdict"] == "pass", report["reasons"]
        assert report["routing"]["replayed_agreement"] == 1.0
        assert report["logprobs"]["replayed"]["kl_k3"] < 1e-4
        assert report["logprobs"]["replayed"]["max_abs"] < 0.1


def test_the_probe_sees_every_kind_of_module(outcome):
    probe = outcome["first"]["probe"]
    assert set(probe["by_kind"]) == {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}
    assert probe["adapter_effect"] > 1e-3
    assert probe["zero_adapter_effect"] == 0.0


def test_a_step_without_sync_is_caught(outcome):
    report = outcome["unsynced"]
    assert report["verdict"] == "fail"
    assert report["weights"]["adapter"]["mismatched"] and report["weights"]["base"]["mismatched"] == []


def test_an_adapter_that_vllm_reads_from_disk_is_the_one_that_was_sent(outcome):
    assert outcome["disk_equals_sent"]
    assert outcome["third"]["verdict"] == "pass" and outcome["third"]["probe"]["adapter_effect"] > 0


def test_training_changes_the_adapter_and_never_the_base(outcome):
    assert outcome["adapter_changed"] and outcome["base_unchanged"]
    assert outcome["second"]["probe"]["adapter_effect"] > 0
    assert outcome["master_dtypes"] == ["torch.float32"]
