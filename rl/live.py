"""The live trainer and engines of a verl run as the two sides of a consistency check."""

import numpy as np
import ray

from rl.consistency_report import TrainerScore
from rl.server import ADAPTER_ID
from rollout.sampling import Sequence


class LiveTrainer:
    """The FSDP2 worker group; every call runs on all workers, the first one's answer counts."""

    def __init__(self, worker_group) -> None:
        self.worker_group = worker_group

    def _call(self, method: str, *args):
        return self.worker_group.lockstep_probe(method, *args)[0]

    def base_digests(self, detail: bool = False, shards: dict[str, dict] | None = None) -> dict[str, dict]:
        return self._call("base_digests", detail, shards)

    def adapter_digests(self, detail: bool = False, shards: dict[str, dict] | None = None) -> dict[str, dict]:
        return self._call("adapter_digests", detail, shards)

    def adapter_kinds(self) -> list[str]:
        return self._call("adapter_kinds")

    def set_test_adapter(self, kind: str | None, seed: int) -> None:
        self._call("set_test_adapter", kind, seed)

    def restore_adapter(self) -> None:
        self._call("restore_adapter")

    def adapter_is_zero(self) -> bool:
        return self._call("adapter_is_zero")

    def selects_blocks(self) -> bool:
        return self._call("selects_blocks")

    def score(
        self, sequences: list[Sequence], blocks: list[np.ndarray] | None = None, replay_blocks: bool = False
    ) -> TrainerScore:
        return self._call("score", sequences, blocks, replay_blocks)


class LiveEngine:
    """The replicas' servers: digests come from every worker of every replica, probes from the first replica."""

    def __init__(self, replicas, sync) -> None:
        self.servers = [server for replica in replicas for server in replica.servers]
        self.sync = sync

    def _rpc(self, method: str, *args) -> list[dict[str, dict]]:
        answers = ray.get([server.collective_rpc.remote(method, args=args) for server in self.servers])
        return [worker for server in answers for worker in server]

    def base_digests(self, detail: bool = False) -> list[dict[str, dict]]:
        return self._rpc("lockstep_base_digests", detail)

    def adapter_digests(self, detail: bool = False) -> list[dict[str, dict]]:
        return self._rpc("lockstep_adapter_digests", ADAPTER_ID, detail)

    def wake_report(self) -> dict | None:
        """The slowest worker's last wake (`SleepWorker.lockstep_after_wake`).

        None if an engine has proved nothing since its last sleep.
        """
        answers = ray.get([server.wake_reports.remote() for server in self.servers])
        servers = [reports for reports in answers if reports is not None]
        if not all(servers):
            return None
        reports = [report for server in servers for report in server]
        return max(reports, key=lambda report: report["restore_ms"] + report["proof_ms"])

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Sequence]:
        return ray.get(self.servers[0].probe_generate.remote(prompts, max_tokens))

    def score(self, sequences: list[list[int]], adapter: bool) -> list[list[float]]:
        return ray.get(self.servers[0].probe_score.remote(sequences, adapter))

    def selected_blocks(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return ray.get(self.servers[0].probe_blocks.remote(sequences))
