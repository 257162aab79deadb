"""The warm interpreter: a stub that behaves as `python` does, and nothing that outlives the run."""

import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the prefork server is Linux only")
ROOT = Path(__file__).resolve().parent.parent
WARM = "  # from multiprocessing.spawn import spawn_main"  # what tells the stub that a -c command is a worker's
DRIVER = """
import sys, types
import numpy.random
from pathlib import Path
from rl.prefork import PreforkServer
sys.modules["warm_marker"] = types.ModuleType("warm_marker")
server = PreforkServer(Path(sys.argv[1]))
print(server.stub, flush=True)
sys.stdin.readline()
server.start()
print("started", flush=True)
sys.stdin.read()
"""


class Driver:
    """The trainer process of the tests: it makes the stub, and starts the server when it is told to."""

    def __init__(self, folder: Path, start: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.stub = self.process.stdout.readline().strip()
        if start:
            self.start()

    def start(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "started\n"

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    driver = Driver(tmp_path_factory.mktemp("warm"))
    yield driver.stub
    driver.end()


def run(python: str, *arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run([python, *map(str, arguments)], capture_output=True, text=True, timeout=30, **options)


def worker(folder: Path, code: str) -> Path:
    """A script of the name that Ray's workers have."""
    path = folder / "default_worker.py"
    path.write_text(code)
    return path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


# ---- as python does ------------------------------------------------------------------------------------------------


def test_worker_is_a_fork_of_the_warm_process(stub):
    code = "import sys; print('warm_marker' in sys.modules)"
    assert run(stub, "-c", code + WARM).stdout == "True\n"
    assert run(sys.executable, "-c", code + WARM).stdout == "False\n"


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "sys.exit(3)",
        "sys.exit(-1)",
        "sys.exit(True)",
        "sys.exit('some words')",
        "sys.exit(('a', 1))",
        "raise ValueError('wrong')",
        "os._exit(7)",
        "import atexit; atexit.register(print, 'bye'); sys.exit(4)",
        "import threading as t, time; t.Thread(target=lambda: (time.sleep(0.2), print('late'))).start(); print('now')",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()",
    ],
)
def test_status_and_output_are_those_of_python(stub, code):
    code = f"import os, signal, sys; {code}{WARM}"
    ours, theirs = run(stub, "-c", code), run(sys.executable, "-c", code)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]


SHOW = "import sys; print(__name__, sys.argv, sys.modules['__main__'].__dict__ is globals(), sys.stdin.isatty())"


def test_command_module_and_script_see_their_arguments(stub, tmp_path):
    script = worker(tmp_path, SHOW + "\nimport beside; print(__file__, beside.VALUE)\n")
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    (tmp_path / "some_module.py").write_text(SHOW)
    options = {"cwd": tmp_path, "stdin": subprocess.DEVNULL, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
    for arguments in (
        ("-c", SHOW + WARM, "a", "-b"),
        ("-u", "-X", "utf8", "-W", "ignore", script, "--flag", "default_worker.py"),
        ("-m", "some_module", "x", "default_worker.py"),
    ):
        ours, theirs = run(stub, *arguments, **options), run(sys.executable, *arguments, **options)
        assert ours.stdout.count("__main__") == 1 and ours.returncode == 0, ours.stderr
        assert ours.stdout == theirs.stdout


def test_environment_and_folder_are_the_callers(stub, tmp_path):
    code = "import os; print(os.environ, os.getcwd())" + WARM
    ours, theirs = (run(p, "-c", code, env={"A": "1", "PATH": "/bin"}, cwd=tmp_path) for p in (stub, sys.executable))
    assert ours.stdout == theirs.stdout and str(tmp_path) in ours.stdout and "'A': '1'" in ours.stdout


def test_standard_streams_are_the_callers(stub):
    code = "import sys; d = sys.stdin.buffer.read(); sys.stdout.buffer.write(d[::-1]); print(len(d), file=sys.stderr)"
    data = os.urandom(300_000)
    result = subprocess.run([stub, "-c", code + WARM], input=data, capture_output=True, timeout=30)
    assert result.stdout == data[::-1] and result.stderr == b"300000\n"


def test_inherited_files_keep_their_numbers_and_are_closed_with_the_child(stub):
    read, write = os.pipe()
    high = 47
    os.dup2(write, high)
    os.close(write)
    code = f"import os; os.write({high}, b'from the child'); os.fstat({read})" + WARM
    assert run(stub, "-c", code, pass_fds=(read, high)).returncode == 0
    os.close(high)
    assert os.read(read, 100) == b"from the child"
    assert select.select([read], [], [], 5)[0] and os.read(read, 1) == b"", "somebody still holds the writing end"
    os.close(read)


def test_spawned_processes_of_a_worker_are_warm_too(stub, tmp_path):
    script = worker(
        tmp_path,
        "import multiprocessing, sys\n"
        "def work(queue, x):\n"
        "    queue.put((x * 2, 'warm_marker' in sys.modules))\n"
        "    sys.exit(5)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue, 21))\n"
        "    child.start()\n"
        "    print(queue.get(timeout=20))\n"
        "    child.join()\n"
        "    print(child.exitcode)\n",
    )
    result = run(stub, script)
    assert result.stdout == "(42, True)\n5\n", result.stderr


def test_workers_that_start_together_draw_different_numbers(stub):
    code = "import numpy, random; print(random.random(), numpy.random.random())" + WARM
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: run(stub, "-c", code).stdout, range(8)))
    assert all(len(set(numbers)) == 8 for numbers in zip(*map(str.split, results), strict=True)) and all(results)


# ---- signals -------------------------------------------------------------------------------------------------------


def started(stub: str, code: str) -> tuple[subprocess.Popen, int]:
    """(stub, pid of its child) once the child runs `code` to the end and sleeps."""
    code = f"import os, signal, sys, time\n{code}\nprint(os.getpid(), flush=True)\n"
    code += f"for _ in range(600): time.sleep(0.1){WARM}"  # a signal just before a long sleep would wait for its end
    process = subprocess.Popen([stub, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    assert pid != process.pid
    return process, pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signal_to_the_stub_reaches_the_childs_handler(stub, number):
    process, pid = started(stub, f"signal.signal({int(number)}, lambda *_: sys.exit(9))")
    with process:
        process.send_signal(number)
        assert process.wait(10) == 9 and gone(pid)


def test_signal_without_handler_ends_both_as_it_would_python(stub):
    process, pid = started(stub, "pass")
    with process:
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM and gone(pid)


def test_killed_stub_takes_its_child_along(stub):
    process, pid = started(stub, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    with process:
        process.kill()
        assert process.wait(10) == -signal.SIGKILL and gone(pid)


def test_killed_child_shows_in_the_stubs_status(stub):
    process, pid = started(stub, "pass")
    with process:
        os.kill(pid, signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL


# ---- ends and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "ends"])
def test_server_and_workers_end_with_the_trainer(tmp_path, kill):
    driver = Driver(tmp_path)
    process, pid = started(driver.stub, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert server != driver.process.pid and alive(server)
    if kill:
        driver.process.kill()
    driver.end()
    with process:
        assert gone(server) and gone(pid) and process.wait(10) == -signal.SIGKILL
    assert run(driver.stub, "-c", f"print(1){WARM}").stdout == "1\n", "without its server the stub is python"


def test_stub_is_python_until_the_server_starts(tmp_path):
    driver = Driver(tmp_path, start=False)
    code = "import sys; print('warm_marker' in sys.modules)" + WARM
    assert run(driver.stub, "-c", code).stdout == "False\n"
    driver.start()
    assert run(driver.stub, "-c", code).stdout == "True\n"
    driver.end()


def test_command_that_is_no_workers_runs_the_real_interpreter(stub, tmp_path):
    code = "import sys; print('warm_marker' in sys.modules, sys.argv[1:])"
    (tmp_path / "agent.py").write_text(code)
    assert run(stub, tmp_path / "agent.py", "x").stdout == "False ['x']\n"
    assert run(stub, "-c", code).stdout == "False []\n"


def test_import_that_started_a_thread_is_refused(tmp_path):
    code = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from rl.prefork import PreforkServer\n"
        "threading.Thread(target=threading.Event().wait, name='greedy import', daemon=True).start()\n"
        "PreforkServer(Path(sys.argv[1])).start()\n"
    )
    result = run(sys.executable, "-c", code, tmp_path, cwd=ROOT)
    assert result.returncode == 1
    assert (
        "RuntimeError: cannot fork a warm interpreter: an import started threads (MainThread, greedy import)"
        in result.stderr
    )
    assert not (tmp_path / "prefork.sock").exists()
