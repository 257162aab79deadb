"""Stands in for rl.train in tests of the front end: `python tests/fake_trainer.py BEHAVIOUR RUN_DIR`."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.events import EventLog, enable_stack_dumps

GRANDCHILD = "import os,signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); time.sleep(120)"


def row(step: int) -> dict[str, float]:
    """Metrics of a step."""
    return {
        "reward": -0.2 + 0.1 * step,
        "accuracy": 0.4 + 0.05 * step,
        "kl_k3": 1e-5 * step,
        "is_ratio_min": 0.9,
        "is_ratio_max": 1.0 + 0.01 * step,
        "response_length": 20.0,
        "tokens_per_s": 100.0 * step,
        "time_step": 0.05,
        "time_generate": 0.03,
    }


def train(log: EventLog, steps: int) -> None:
    """The events of a short run."""
    log.stage("loading model")
    log.gate(0, "pass", [], "pass: k3 1.0e-05, replayed routing 100 %")
    log.validation(0, 0.4)
    for step in range(1, steps + 1):
        time.sleep(0.05)
        log.step(step, steps, row(step))
    log.validation(steps, 0.62)


def leave_things_behind(run_dir: Path) -> None:
    """Detached grandchildren that ignore SIGTERM, shared memory, a named semaphore, a file in Ray's folder."""
    children = [subprocess.Popen([sys.executable, "-c", GRANDCHILD]) for _ in range(2)]
    segment = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")  # nobody else will remove it
    semaphore = multiprocessing.get_context("spawn").Semaphore()._semlock.name.lstrip("/")
    resource_tracker.unregister(f"/{semaphore}", "semaphore")
    logs = Path(os.environ["LOCKSTEP_RAY_TMP"]) / "session_2030-01-01" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("ray's own log\n")
    (run_dir / "left.txt").write_text(
        " ".join([segment.name, f"sem.{semaphore}", *(str(child.pid) for child in children)])
    )
    globals()["keep"] = (segment, children)


def main() -> int:
    """Behave as asked."""
    behaviour, run_dir = sys.argv[1], Path(sys.argv[2])
    log = EventLog(run_dir)
    log.stage("starting ray")
    print("fake trainer begins")
    if behaviour == "normal":
        train(log, 3)
        log.done()
    elif behaviour == "silent":
        train(log, 2)  # ends without saying that it is done
    elif behaviour == "raises":
        (run_dir / "logs" / "engine.log").write_text(
            "x\n(EngineCore pid=7) Traceback (most recent call last):\n"
            '(EngineCore pid=7)   File "engine.py", line 3, in load\n'
            "(EngineCore pid=7) ValueError: shard 3 does not fit\n"
        )
        raise RuntimeError("the engine died")
    elif behaviour == "gate":
        log.gate(0, "fail", ["weights: model.layers.1.mlp.experts.0 differs"], "fail: 1 tensor differs")
        log.failed("consistency check failed at step 0", 1)
        raise RuntimeError("check failed at step 0")
    elif behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "hangs":
        enable_stack_dumps(run_dir)
        log.stage("starting engine")
        time.sleep(120)
    elif behaviour == "leaves":
        leave_things_behind(run_dir)
        time.sleep(1)  # what exists for less than a moment is not seen
        train(log, 1)
        log.done()
        os._exit(0)
    elif behaviour == "long":
        leave_things_behind(run_dir)
        train(log, 2)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
