"""Find the lines of a run's logs that say why it failed."""

import re
from pathlib import Path

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TRACEBACK = "Traceback (most recent call last)"
_TAIL_BYTES = 400_000
# Ray's autoscaler monitor wants a fixed port for its metrics and goes on without it: two runs on a host always meet.
_UNRELATED = ("monitor.log", "monitor.out", "monitor.err")
# Failures of one process that are only the echo of another's: shown only if there is nothing better.
_ECHO = re.compile(
    r"ActorDiedError|RayActorError|EngineDeadError|WorkerCrashedError|ActorUnavailableError|"
    r"KeyboardInterrupt|SystemExit|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|CancelledError"
)


def log_excerpt(logs: Path, lines: int = 15, only_errors: bool = False) -> tuple[Path | None, list[str]]:
    """The log that tells most about a failure, and its lines.

    Engine and worker logs come before the trainer's (which often repeats their errors shortened), newer before older,
    and errors that are only the echo of another process's end come last. Without any traceback: the end of trainer.log,
    or nothing if only_errors.
    """
    best: tuple[tuple[bool, bool, float], Path, list[str]] | None = None
    for path in log_files(logs):
        block = last_traceback(tail(path))
        if not block:
            continue
        rank = (not _ECHO.search(block[-1]), path.name != "trainer.log", path.stat().st_mtime)
        if best is None or rank > best[0]:
            best = (rank, path, block)
    if best is not None:
        return best[1], best[2][-lines:]
    trainer = logs / "trainer.log"
    if only_errors or not trainer.is_file():
        return None, []
    return trainer, [line for line in tail(trainer) if line.strip()][-lines:]


def log_files(logs: Path) -> list[Path]:
    """All logs of a run."""
    found = (path for path in logs.rglob("*") if path.suffix in (".log", ".out", ".err") and path.is_file())
    return sorted(path for path in found if path.name not in _UNRELATED)


def tail(path: Path) -> list[str]:
    """The last lines of a log, without colours."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [_ANSI.sub("", line).rstrip() for line in text.splitlines()]


def last_traceback(lines: list[str]) -> list[str]:
    """The last traceback with its error message; [] if there is none.

    A traceback ends with the first line after its frames that is not indented; the message may go on below it, up to an
    empty line or the next log record.
    """
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return []
    begin = starts[-1]
    margin = lines[begin].index(_TRACEBACK)  # what a logger puts before each line, such as "(worker pid=12) "
    block = [lines[begin][margin:]]
    for line in lines[begin + 1 :]:
        body = line[margin:] if len(line) > margin else ""
        if len(block) > 1 and not block[-1].startswith(" ") and (not body or not body.startswith(" ")):
            break
        if not body and len(block) > 1:
            break
        block.append(body)
    return block
