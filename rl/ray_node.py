"""A Ray head node of a run's own, started beside the imports of the trainer process instead of after them.

It listens on loopback and is reached with the token in RAY_AUTH_TOKEN. Its processes inherit the run's marker from the
environment, so whoever ends the run finds them.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_START = "import sys; sys.executable = sys.argv.pop(1); from ray.scripts.scripts import main; main()"
START_TIMEOUT_S = 120


@dataclass
class RayNode:
    """A head node that is starting: `process` is `ray start`, `address` where it will answer."""

    process: subprocess.Popen
    address: str
    folder: Path

    def wait(self) -> int:
        """Wait until it answers; returns the raylet's pid.

        Raises:
            RuntimeError: `ray start` failed or took too long; the message has its last line and the log's place.
        """
        try:
            output, _ = self.process.communicate(timeout=START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(
                f"ray start took more than {START_TIMEOUT_S} s; see {self.folder}/session_latest/logs"
            ) from None
        if self.process.returncode:
            lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
            raise RuntimeError(f"ray start failed: {lines[-1].strip()}; see {self.folder}/session_latest/logs")
        return next(pid for pid, command in _processes(self.folder) if command[0].endswith("raylet"))


def start(folder: Path, *, num_cpus: int, num_gpus: int | None, object_store_bytes: int, python: str) -> RayNode:
    """Start a head node in the background. `folder`: short path for its sockets; `python`: what starts its workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", _START, python, "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1"]
    command += [f"--num-cpus={num_cpus}", f"--temp-dir={folder}", f"--object-store-memory={object_store_bytes}"]
    command += ["--include-dashboard=false", "--disable-usage-stats"]
    if num_gpus is not None:
        command.append(f"--num-gpus={num_gpus}")
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return RayNode(process, f"127.0.0.1:{port}", folder)


def stop(folder: Path) -> None:
    """Kill Ray's servers in `folder`; its agents and workers follow their raylet."""
    for pid, _ in _processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(folder: Path) -> list[tuple[int, list[str]]]:
    """(pid, command) of living processes whose command line names `folder`, except the caller."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(f"{folder}/session_" in part for part in command):
            found.append((int(entry.name), command))
    return found
