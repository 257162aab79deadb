"""What a run started, found again and ended: processes, shared memory, Ray's temporary folder.

Every process of a run inherits LOCKSTEP_RUN_ID=<id>, so its /proc/PID/environ tells whose it is, also after Ray or vLLM
has detached it from its parent. Only such processes, their children and the shared memory that they were seen to use
are ever touched; a segment whose process ends before anyone looked (a fifth of a second) is nobody's, and stays. Linux
only; no torch, verl, vLLM or Ray here.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

RUN_ID = "LOCKSTEP_RUN_ID"
RAY_TMP = "LOCKSTEP_RAY_TMP"
SHM = Path("/dev/shm")
PROC = Path("/proc")
# The inode and not the name: a named semaphore is made under another name than the one it is linked to.
_SHM_IN_MAPS = re.compile(rb"\s(\d+)\s+/dev/shm/", re.MULTILINE)
# What reading a process that just ended, or that belongs to someone else, raises.
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError, NotADirectoryError)


def end_process(status: int) -> None:
    """End this process at once, its output flushed: the shutdown of an interpreter with vLLM takes seconds and prints
    pages about leaks. For when everything is written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def environment(run_id: str, ray_tmp: Path) -> dict[str, str]:
    """Variables that mark every process of a run."""
    # SPT_NOENV: setproctitle (Ray and vLLM rename their processes) would otherwise overwrite /proc/PID/environ.
    return {RUN_ID: run_id, RAY_TMP: str(ray_tmp), "SPT_NOENV": "1"}


@dataclass(frozen=True)
class Process:
    """A process, told from a later one with the same number by its start time (clock ticks since boot)."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The process with this number, if there is one."""
        stat = _stat(pid)
        return cls(pid, stat[1]) if stat is not None else None

    def alive(self) -> bool:
        """True while this very process runs (a zombie has ended)."""
        stat = _stat(self.pid)
        return stat is not None and stat[1] == self.start and stat[2] != "Z"

    def signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def _stat(pid: int) -> tuple[int, int, str] | None:
    """(parent, start time, state) of a process."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except _GONE:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name may hold spaces and brackets
    return int(fields[1]), int(fields[19]), fields[0].decode()


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()]


def die_with_parent(number: int) -> None:
    """Ask Linux to send this process signal `number` when its parent ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, number)


def process_start_time() -> float:
    """When this process was started, in seconds since the epoch."""
    stat = _stat(os.getpid())
    uptime = float((PROC / "uptime").read_text().split()[0])
    return time.time() - (uptime - stat[1] / os.sysconf("SC_CLK_TCK")) if stat else time.time()


@dataclass
class RunProcesses:
    """The processes and shared memory of one run.

    Call `poll` every few seconds while the run lives (it collects), `stop` and `clean` when it ends.
    """

    run_id: str
    ray_tmp: Path
    known: set[Process] = field(default_factory=set)
    peak_memory_bytes: int = 0
    _segments: set[tuple[str, int]] = field(default_factory=set)
    _before: set[tuple[str, int]] = field(default_factory=set)
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._before = _segments()
        self._names = {name for name, _ in self._before}

    def watch_segments(self) -> None:
        """Cheap, for several times a second: when /dev/shm has a new name, look at once who uses it."""
        names = set(os.listdir(SHM)) if SHM.is_dir() else set()
        if names - self._names:
            self.poll(memory=False)
        self._names = names

    def poll(self, memory: bool = True) -> None:
        """Look for new processes, note the shared memory that they use and their memory together."""
        alive = self.alive()
        self._note_segments(alive)
        if memory:
            self.peak_memory_bytes = max(self.peak_memory_bytes, sum(_memory(process.pid) for process in alive))

    def alive(self) -> list[Process]:
        """Living processes of this run: those that carry its id, and the children of those seen before."""
        marker = f"{RUN_ID}={self.run_id}".encode()
        stats = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None and pid != os.getpid()}
        for pid, (_, start, _) in stats.items():
            if Process(pid, start) not in self.known and marker in _environ(pid):
                self.known.add(Process(pid, start))
        while True:  # children of known processes, and theirs
            numbers = {process.pid for process in self.known if process.pid in stats and self._same(process, stats)}
            new = {
                Process(pid, start)
                for pid, (parent, start, _) in stats.items()
                if parent in numbers and Process(pid, start) not in self.known
            }
            if not new:
                break
            self.known |= new
        return [process for process in self.known if process.alive()]

    @staticmethod
    def _same(process: Process, stats: dict[int, tuple[int, int, str]]) -> bool:
        return stats[process.pid][1] == process.start

    def _note_segments(self, processes: list[Process]) -> None:
        used = set().union(*(_shm_inodes(process.pid) for process in processes))
        self._segments |= {key for key in _segments() if key[1] in used} - self._before

    def stop(self, first: Process | None, grace: float = 5.0, interrupted=lambda: False) -> int:
        """End every process of the run: SIGINT to `first` alone, then SIGTERM and SIGKILL to all that are left.

        Args:
            first: the trainer process, which may save and shut Ray down by itself.
            grace: seconds for each of the three.
            interrupted: becomes true when the person does not want to wait any longer.

        Returns:
            How many processes had to be killed.
        """
        self.poll(memory=False)
        if first is not None and first.alive():
            first.signal(signal.SIGINT)
            self._wait(grace, interrupted)
        elif self.alive():
            self._wait(grace, interrupted)  # the trainer has ended: its helpers follow by themselves
        for process in self.alive():
            process.signal(signal.SIGTERM)
        self._wait(grace, interrupted)
        killed = 0
        for _ in range(5):  # again, in case one was being started meanwhile
            left = self.alive()
            if not left:
                break
            for process in left:
                process.signal(signal.SIGKILL)
                killed += 1
            self._wait(1.0, lambda: False)
        return killed

    def _wait(self, seconds: float, interrupted) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not interrupted():
            if not self.alive():
                return
            time.sleep(0.1)

    def clean(self) -> list[str]:
        """Remove the run's shared memory that nobody maps any more, and Ray's folder. Returns what was removed."""
        removed = []
        in_use = set().union(*(_shm_inodes(pid) for pid in _pids()))
        for name, inode in sorted(self._segments):
            path = SHM / name
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if inode not in in_use and path.stat().st_ino == inode:
                    path.unlink()
                    removed.append(str(path))
        if self.ray_tmp.exists():
            shutil.rmtree(self.ray_tmp, ignore_errors=True)
            removed.append(str(self.ray_tmp))
        return removed


def _environ(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except _GONE:
        return []


def _segments() -> set[tuple[str, int]]:
    """(name, inode) of everything in /dev/shm."""
    return {(entry.name, entry.inode()) for entry in os.scandir(SHM)} if SHM.is_dir() else set()


def _shm_inodes(pid: int) -> set[int]:
    """Inodes in /dev/shm that a process maps or has open."""
    inodes: set[int] = set()
    folder = PROC / str(pid)
    try:
        inodes.update(int(inode) for inode in _SHM_IN_MAPS.findall((folder / "maps").read_bytes()))
        for entry in os.listdir(folder / "fd"):
            with contextlib.suppress(*_GONE):
                if os.readlink(folder / "fd" / entry).startswith("/dev/shm/"):
                    inodes.add((folder / "fd" / entry).stat().st_ino)
    except _GONE:
        pass
    return inodes


def _memory(pid: int) -> int:
    """Proportional set size in bytes: pages that several processes share count once in a sum."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_bytes()
    except _GONE:
        return 0
    match = re.search(rb"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
