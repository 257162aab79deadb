"""FSDP2 over two processes: bytes shard, stay bit-identical through training, and compute as the unsharded model."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from quant.fsdp import patch

ROOT = Path(__file__).resolve().parent.parent
WORKER = """
import os, sys, torch, torch.distributed as dist, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from quant import mxfp8, nvfp4
from quant.experts import QuantExperts
from quant.layers import QuantLinear

hidden, inter, tokens = 64, 32, 12

def gate(x):
    a, b = x.chunk(2, -1)
    return F.silu(a) * b

class Block(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.first = QuantLinear(mxfp8.quantize(torch.randn(hidden, hidden) * 0.1))
        self.second = QuantLinear(nvfp4.quantize(torch.randn(hidden, hidden) * 0.1))
        gate_up, down = torch.randn(experts, 2 * inter, hidden) * 0.1, torch.randn(experts, hidden, inter) * 0.1
        self.experts = QuantExperts(nvfp4.quantize(gate_up), nvfp4.quantize(down), gate)
        self.low = torch.nn.Parameter(torch.randn(hidden, hidden) * 0.05)

    def forward(self, x, ids, weights):
        x = self.second(self.first(x)) + (x.float() @ self.low.float().T).to(x.dtype)
        return x + self.experts(x, ids, weights)

def build(experts):
    torch.manual_seed(0)
    return torch.nn.ModuleList(Block(experts) for _ in range(2))

def run(model, x, ids, weights):
    for block in model:
        x = block(x, ids, weights)
    return x

def check(experts, mesh):
    model, twin = build(experts), build(experts)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    for block in twin:
        block.low.data = block.low.data.bfloat16()
    # fully_shard casts a block's floating inputs to param_dtype, so the weights given here are bf16 values already
    x, weights = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, 1).bfloat16().float()
    ids = torch.randint(0, experts, (tokens, 1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        y = run(model, x, ids, weights)
        if step == 0:
            expected = run(twin, x, ids, weights)
            assert torch.equal(y, expected), "forward differs from the unsharded model"
            expected.float().pow(2).mean().backward()
        y.float().pow(2).mean().backward()
        if step == 0:
            grad, want = model[0].low.grad.full_tensor(), twin[0].low.grad.float()
            assert (grad - want).norm() <= 1e-2 * want.norm(), "gradient differs"
        optimizer.step()
        optimizer.zero_grad()
    frozen = 0
    for (name, shard), (_, whole) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        if whole.dtype == torch.uint8:
            assert shard.dtype == torch.uint8 and shard.to_local().dtype == torch.uint8, name
            assert torch.equal(shard.full_tensor(), whole), name + " changed"
            frozen += shard.to_local().numel()
    shares = [None, None]
    dist.all_gather_object(shares, frozen)
    assert sum(shares) == sum(p.numel() for p in twin.parameters() if p.dtype == torch.uint8), shares
    assert experts == 1 or max(shares) <= 0.8 * sum(shares), shares

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
mesh = init_device_mesh("cpu", (2,))
for experts in (4, 3, 1):  # divisible by the workers, uneven, and fewer than there are
    check(experts, mesh)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads sometimes abort the interpreter's own end
"""


def test_two_workers(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORKER, str(tmp_path / "store")]
    workers = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    errors = [worker.communicate(timeout=300)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)


def old_fsdp():
    """The two places in which torch 2.11 treats every parameter as a floating-point one."""
    module = types.ModuleType("old")
    module.nn = nn

    class FSDPParam:
        def _init_sharded_param(self, param):
            self.sharded_param = module.nn.Parameter(param.detach())
            self.sharded_param.requires_grad_(param.requires_grad)

        def init_dtype_attrs(self, mp_policy):
            self.orig_dtype = self.sharded_param.dtype
            self.param_dtype = None if mp_policy == self.orig_dtype else mp_policy

    module.FSDPParam = FSDPParam
    return module


def test_older_fsdp_keeps_bytes_as_they_are():
    bytes_ = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
    module = old_fsdp()
    with pytest.raises(RuntimeError, match="floating point"):
        module.FSDPParam()._init_sharded_param(bytes_)
    patch(module)
    patch(module)
    for param, dtype in ((bytes_, None), (nn.Parameter(torch.ones(2)), torch.bfloat16)):
        sharded = module.FSDPParam()
        sharded._init_sharded_param(param)
        sharded.init_dtype_attrs(torch.bfloat16)
        assert sharded.sharded_param.requires_grad == param.requires_grad
        assert sharded.param_dtype == dtype
    assert module.nn is nn


def test_fsdp_of_another_shape_is_refused():
    with pytest.raises(ImportError, match=r"FSDPParam is not as in torch 2\.11 .* install torch 2\.11 or 2\.13"):
        patch(types.ModuleType("other"))
