"""One warm Python for all processes of a run on this machine.

A verl run has a dozen Python processes, and each would import torch, vLLM and verl again: 15-25 s of CPU apiece. Here
the trainer process imports once and forks a server before it starts a thread; every `python ...` that Ray and vLLM then
start is a small stub that asks the server to fork a child with the stub's arguments, environment, folder and open
files, passes signals on, and ends with the child's status. Without a server, and for anything but workers, the stub
runs the real interpreter.

Only on machines without a GPU: a CUDA driver that was initialised by an import does not survive a fork.
Protocol (unix socket, one connection a process): the stub sends a JSON line with its open files as ancillary data, the
server answers {"pid": n} and later {"status": wait status}. A closed connection kills the child.
"""

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

from rl.processes import die_with_parent

STUB = """#!{python} -IS
import os, sys
line = " ".join(sys.argv[1:])
if not any(name in line for name in {warm!r}):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import json, select, signal, socket, struct
server = socket.socket(socket.AF_UNIX)
try:
    server.connect({socket!r})
except OSError:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
files = []
for entry in os.listdir("/proc/self/fd"):
    try:
        os.fstat(int(entry))
    except OSError:
        continue
    if int(entry) != server.fileno():
        files.append(int(entry))
request = {{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "files": files}}
data = json.dumps(request).encode()
socket.send_fds(server, [struct.pack("!I", len(data))], files)
server.sendall(data)
# Signals come through a pipe: a handler alone could run too late, when one arrives just before a blocking read.
wake, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: None)
lines, numbers, status = [b""], b"", None
while status is None:
    if len(lines) > 1:
        for number in numbers:
            try:
                os.kill(json.loads(lines[0])["pid"], number)
            except ProcessLookupError:
                pass
        numbers = b""
    ready = select.select([server, wake], [], [])[0]
    if wake in ready:
        numbers += os.read(wake, 64)
    if server in ready:
        part = server.recv(4096)
        lines = (b"\\n".join(lines) + part).split(b"\\n")
        if not part:
            status = signal.SIGKILL
        elif len(lines) > 2:
            status = json.loads(lines[1])["status"]
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""


# What is worth a warm interpreter: Ray's workers, and vLLM's engine process. Ray's agents must stay children of the
# raylet (they watch their parent) and import little, so they and everything else get the real interpreter.
WARM_COMMANDS = ("setup_worker.py", "default_worker.py", "multiprocessing.spawn import spawn_main")


class PreforkServer:
    """A fork of the caller that forks the run's workers, for as long as the caller lives.

    Create it early (the stub exists from then on and runs the real interpreter), import what workers need, `start` it.
    `folder`: an existing short path; the socket and the stub go there.
    """

    def __init__(self, folder: Path) -> None:
        self.stub = folder / "python"
        self.socket = folder / "prefork.sock"
        self.stub.write_text(STUB.format(python=sys.executable, socket=str(self.socket), warm=WARM_COMMANDS))
        self.stub.chmod(0o700)

    def start(self) -> None:
        """Fork the server; from now on children of this process and of Ray are forks of it.

        Raises:
            RuntimeError: an import started a thread, which a fork would lose.
        """
        if threading.active_count() != 1:
            names = ", ".join(thread.name for thread in threading.enumerate())
            raise RuntimeError(f"cannot fork a warm interpreter: an import started threads ({names})")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.socket))
        listener.listen(64)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        if os.fork() == 0:
            try:
                _die_with(parent)
                _Server(listener, str(self.stub)).serve()
            finally:
                os._exit(1)
        listener.close()


def _use_stub(stub: str) -> None:
    """Make this process start Python children through the stub."""
    import multiprocessing.spawn

    sys.executable = stub
    multiprocessing.spawn.set_executable(stub)


def _die_with(parent: int) -> None:
    """Have this process killed when `parent` ends, also if it has ended already."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


class _Server:
    """The loop of the warm interpreter; single-threaded."""

    def __init__(self, listener: socket.socket, stub: str) -> None:
        self.listener, self.stub, self.pid = listener, stub, os.getpid()
        self.connections: dict[int, socket.socket] = {}  # child pid -> its stub
        self.selector = selectors.DefaultSelector()
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.selector.register(self.listener, selectors.EVENT_READ, "accept")
        self.selector.register(self.wake_read, selectors.EVENT_READ, "reap")
        while True:
            for key, _ in self.selector.select():
                if key.data == "accept":
                    connection, _ = self.listener.accept()
                    self._start(connection)
                elif key.data == "reap":
                    os.read(self.wake_read, 4096)
                    self._reap()
                else:
                    self._stub_gone(key.data)

    def _start(self, connection: socket.socket) -> None:
        try:
            header, files, _, _ = socket.recv_fds(connection, 4, 253)
            (size,) = struct.unpack("!I", header)
            data = b""
            while len(data) < size:
                part = connection.recv(size - len(data))
                if not part:
                    raise ConnectionError("the stub ended early")
                data += part
        except (ConnectionError, struct.error):
            connection.close()
            return
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            try:
                self._become(request, files, connection)
            finally:
                os._exit(1)  # a child must never fall back into this loop
        for file in files:
            os.close(file)
        self.connections[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ, pid)
        _answer(connection, {"pid": pid})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            connection = self.connections.pop(pid, None)
            if connection is not None:
                self.selector.unregister(connection)
                _answer(connection, {"status": status})
                connection.close()

    def _stub_gone(self, pid: int) -> None:
        connection = self.connections.pop(pid)
        self.selector.unregister(connection)
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _become(self, request: dict, files: list[int], connection: socket.socket) -> None:
        """In the forked child: take the stub's place and run what it was asked to run. Never returns."""
        _die_with(self.pid)  # the stub does too: it takes a lost server for a killed child
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.selector.close()
        for other in (self.listener, connection, *self.connections.values()):
            other.close()
        os.close(self.wake_read)
        os.close(self.wake_write)
        _place_files(request["files"], files)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        _reseed()
        _use_stub(self.stub)
        for path in reversed(request["env"].get("PYTHONPATH", "").split(os.pathsep)):
            if path and path not in sys.path:
                sys.path.insert(0, path)
        os._exit(_run(request["argv"]))


def _answer(connection: socket.socket, answer: dict) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a killed stub is handled by the loop
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _place_files(targets: list[int], received: list[int]) -> None:
    """Give the received files the numbers they had in the stub, inheritable as they were there."""
    import fcntl

    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 512) for file in received]
    for file in received:
        os.close(file)
    for target, file in zip(targets, high, strict=True):
        os.dup2(file, target, inheritable=True)
        os.close(file)


def _reseed() -> None:
    """A forked child must not draw the numbers that its siblings draw."""
    import random

    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run(argv: list[str]) -> int:
    """Run `python argv...` in this process; returns the exit status after Python's own shutdown steps."""
    import traceback

    status = 0
    try:
        _run_target(argv)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - what the interpreter's top level does with an uncaught exception
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    return status & 0xFF


def _run_target(argv: list[str]) -> None:
    """Skip interpreter options, then run -c CODE, -m MODULE or a script as __main__."""
    index = 0
    while index < len(argv) and argv[index].startswith("-") and argv[index][:2] not in ("-c", "-m"):
        index += 2 if argv[index] in ("-X", "-W") else 1
    if index == len(argv):
        raise SystemExit("prefork: no script, -c or -m among the arguments")
    option, rest = argv[index], argv[index + 1 :]
    if option == "-c":
        import types

        sys.argv = ["-c", *rest[1:]]
        module = types.ModuleType("__main__")
        module.__builtins__ = __builtins__
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif option == "-m":
        sys.argv = [rest[0], *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *rest]
        sys.path.insert(0, str(Path(option).resolve().parent))
        runpy.run_path(option, run_name="__main__")
