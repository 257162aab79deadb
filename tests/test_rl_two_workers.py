"""One and two FSDP2 workers train alike: same batch, same loss curve, same adapter but for the order of sums."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

WORKER = """
import json, os, sys
import torch
import torch.distributed as dist
from tiny_model import build, spec, masters
from rl.in_process import shard
from rl.lora import engine_tensors
from rl.replay import layout

store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
trainer = build(spec())
shard(trainer.model, torch.bfloat16)
generator = torch.Generator().manual_seed(0)
rows, length = 8, 20
ids = torch.randint(3, 600, (rows, length), generator=generator)
advantages = torch.randn(rows, 1, generator=generator)
routes = torch.rand(rows, length, 4, 8, generator=generator).topk(2).indices
mine = slice(rank * rows // world, (rank + 1) * rows // world)
known = layout(list(routes[mine]), [length] * (rows // world), length, trainer.moe_layers, trainer.num_experts)
optimizer = torch.optim.AdamW(list(masters(trainer.model).values()), lr=3e-3)
losses = []
for _ in range(4):
    trainer.routing.begin(known)
    logits = trainer.model(input_ids=ids[mine], use_cache=False).logits
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, ids[mine, 1:, None]).squeeze(-1)
    loss = -(advantages[mine] * logp).sum() / (rows * (length - 1))
    (loss * world).backward()  # FSDP2 averages gradients over the workers
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(float(total))
tensors = engine_tensors(trainer.model)
if rank == 0:
    norms = {name: float(tensor.double().norm()) for name, tensor in tensors.items()}
    print(json.dumps({"losses": losses, "norms": norms}), flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads sometimes abort the interpreter's own end
"""


def train(folder: Path, world: int) -> dict:
    """What the first of `world` workers reports."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", WORKER, str(folder / f"store{world}")]
    workers = [
        subprocess.Popen([*command, str(rank), str(world)], env=environment, stdout=-1, stderr=-1, text=True)
        for rank in range(world)
    ]
    answers = [worker.communicate(timeout=300) for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), answers[0][1][-2000:] + answers[-1][1][-2000:]
    return json.loads(answers[0][0].strip().splitlines()[-1])


@pytest.mark.slow
def test_loss_curve_and_adapter_do_not_depend_on_the_number_of_workers(tmp_path):
    one, two = train(tmp_path, 1), train(tmp_path, 2)
    assert one["losses"][-1] < one["losses"][0] - 0.05  # it trains
    # Before the first step nothing differs. Then each worker has rounded the gradient of its half to bf16, where one
    # worker rounds the whole, and AdamW turns a last bit of a small gradient into a good part of a step.
    assert two["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert two["losses"] == pytest.approx(one["losses"], rel=5e-3)
    assert two["norms"] == pytest.approx(one["norms"], rel=2e-2, abs=1e-3)
