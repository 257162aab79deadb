"""The trainer process of a run: `python -m rl.train RUN_DIR`, started by `rl.launch`.

Reads RUN_DIR/config.json, prepares data, and runs verl's `main_ppo` with lockstep's trainer, workers and servers.
Exit status: 0 done, 1 training stopped itself.
"""

import gc
import importlib
import json
import os
import secrets
import sys
from pathlib import Path

from rl import ray_node
from rl.environment import gpu_count
from rl.events import enable_stack_dumps
from rl.prefork import PreforkServer
from rl.processes import end_process
from rl.run_folder import RunFolder


def resolve_backend(wanted: str, cuda: bool) -> str:
    """The rounding backend of the recipe, with "auto" resolved for this machine."""
    if wanted != "auto":
        return wanted
    if not cuda:
        return "emulation"
    import torch

    return "flashinfer_w4a4" if torch.cuda.get_device_capability()[0] >= 10 else "marlin"


SMALL_HIDDEN_SIZE = 512


def engine_threads(model: Path, cores: int) -> int:
    """Threads of the CPU engine: one for a hidden size up to SMALL_HIDDEN_SIZE, whose products are short."""
    hidden = json.loads((model / "config.json").read_text()).get("hidden_size", 0)
    return 1 if hidden <= SMALL_HIDDEN_SIZE else cores


def set_environment(run_dir: Path, model: Path, cuda: bool, nodes: int) -> None:
    """What verl, vLLM and Ray must find in the environment of every process of the run."""
    values = {
        "LOCKSTEP_RUN_DIR": str(run_dir),
        "VERL_USE_EXTERNAL_MODULES": "rl.platform",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HYDRA_FULL_ERROR": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",  # adapters come from the trainer, never over HTTP
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves workers beside any other process
        # A token of this run's own, before Ray is imported: its C++ parts read the environment once.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_prestart_worker_first_driver": "0",
    }
    if nodes == 1:
        values["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's switch for listening on loopback only
    if cuda:
        values |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "NCCL_SOCKET_IFNAME": "lo"}
    else:
        cores = len(os.sched_getaffinity(0))
        values |= {
            "VERL_PLATFORM": "cpu",
            "OMP_NUM_THREADS": str(cores),
            "LOCKSTEP_ENGINE_THREADS": str(engine_threads(model, cores)),
            # Waiting threads must not spin: trainer, engine and Ray share the cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            "TQ_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # vLLM compiles helpers of its sampler with inductor even in eager mode: 20-40 s of C++ compiler.
            "TORCHDYNAMO_DISABLE": "1",
        }
    for name, value in values.items():
        os.environ.setdefault(name, value)


WARM_BEFORE_RAY = ["torch", "transformers", "transformers.models.qwen3_moe.modeling_qwen3_moe", "pyarrow", "pandas"]
WARM_MODULES = [
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.experimental.agent_loop.single_turn_agent_loop",
    "verl.experimental.reward_loop.reward_loop",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.rollout.vllm_rollout.vllm_rollout",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "ray._private.workers.default_worker",
    "rl.extension",
    "rl.group_rollout",
    "rl.trainer",
    "rl.workers",
    "rl.engine",
    "rl.verl_config",
    "rollout.cpu",
    "rollout.experts",
]


def start_warm(folder: Path, workers: int) -> tuple[str, str]:
    """Start this run's Ray while importing everything once, then the server that forks the workers.

    Returns (Ray's address, the Python that workers are started with). Ray's C++ configuration reads RAY_JOB_ID and
    RAY_RAYLET_PID when it is loaded, and workers refuse to start without them: so the raylet comes first, and ray is
    imported after it. The first job of a new cluster has the id 01000000 (Ray 2.60).
    """
    server = PreforkServer(folder)
    node = ray_node.start(folder, num_cpus=16, num_gpus=workers, object_store_bytes=256 << 20, python=str(server.stub))
    gc.disable()  # collections while millions of objects are made by imports find nothing and take a tenth of the time
    for name in WARM_BEFORE_RAY:
        importlib.import_module(name)
    if "ray" in sys.modules:
        raise RuntimeError("a module of WARM_BEFORE_RAY imports ray; move it to WARM_MODULES")
    os.environ |= {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": str(node.wait())}
    for name in WARM_MODULES:
        importlib.import_module(name)
    del os.environ["RAY_JOB_ID"], os.environ["RAY_RAYLET_PID"]
    gc.freeze()  # and the forked children share these pages for longer
    gc.enable()
    server.start()
    return node.address, str(server.stub)


def prepare_data(folder: RunFolder) -> tuple[str, str]:
    """Write verl-ready parquet files of the recipe's data into the run folder; returns their paths."""
    from transformers import AutoTokenizer

    from rl.prepare import drop_long, prepare

    recipe = folder.recipe
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    target = folder.path / "data"
    target.mkdir(exist_ok=True)
    paths = []
    for split in ("train", "val"):
        path = target / f"{split}.parquet"
        report = prepare(getattr(recipe.data, split), path)
        if report.written < report.read:
            folder.note(f"data.{split}: {report}")
        limit = recipe.data.max_prompt_length
        if dropped := drop_long(path, limit, tokenizer):
            folder.note(
                f"data.{split}: {dropped} prompts of more than {limit} tokens (data.max_prompt_length) are dropped"
            )
        paths.append(str(path))
    return paths[0], paths[1]


def task_runner_class():
    """verl's TaskRunnerV1 with lockstep's trainer for the mode "sync"."""
    import ray

    from rollout.patching import patch_target

    original = patch_target("verl.trainer.main_ppo:TaskRunnerV1")
    base = original.__ray_metadata__.modified_class

    class LockstepTaskRunner(base):
        def run(self, config):
            from rl.dynamic_sampling import NoSignalError
            from rl.events import enable_stack_dumps
            from rl.run_folder import RunFolder
            from rl.trainer import GateError, LockstepTrainer

            folder = RunFolder(os.environ["LOCKSTEP_RUN_DIR"])
            self._stacks = enable_stack_dumps(folder.path)
            LockstepTrainer.folder = folder
            registry = patch_target("verl.trainer.ppo.v1.trainer_base:TRAINER_REGISTRY")
            registry["sync"] = LockstepTrainer
            try:
                super().run(config)
            except GateError as error:
                folder.failed(f"consistency gate: {error}")
                raise
            except NoSignalError as error:
                folder.failed(f"dynamic sampling: {error}")
                raise

    return ray.remote(num_cpus=1)(LockstepTaskRunner)


def main(run_dir: str) -> int:
    """Run the recipe of a run folder to its end."""
    folder = RunFolder(run_dir)
    stacks = enable_stack_dumps(folder.path)
    cuda = gpu_count() > 0
    set_environment(folder.path, Path(folder.recipe.model.path), cuda, folder.recipe.trainer.nodes)
    ray_tmp = os.environ.setdefault("LOCKSTEP_RAY_TMP", f"/tmp/lockstep-{os.getpid()}")
    Path(ray_tmp).mkdir(parents=True, exist_ok=True)
    folder.stage("importing verl and vLLM")
    address = stub = None
    if not cuda and folder.recipe.trainer.nodes == 1 and os.environ.get("LOCKSTEP_PREFORK", "1") != "0":
        address, stub = start_warm(Path(ray_tmp), folder.recipe.trainer.fsdp_workers)
    train_file, val_file = prepare_data(folder)
    import ray
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from rl.verl_config import to_verl

    config = to_verl(
        folder.recipe,
        backend=resolve_backend(folder.recipe.model.backend, cuda),
        cuda=cuda,
        run_dir=str(folder.path),
        ray_tmp=ray_tmp,
        ray_address=address,
        py_executable=stub,
        train_file=train_file,
        val_file=val_file,
    )
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    folder.stage("starting the controller")
    try:
        run_ppo(config, task_runner_class=task_runner_class())
        folder.done()
    finally:
        if "LOCKSTEP_RUN_ID" not in os.environ:  # no front end that ends the run's processes
            ray.shutdown()
            ray_node.stop(Path(ray_tmp))
    stacks.close()
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1]))
