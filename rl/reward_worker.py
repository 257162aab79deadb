"""The worker process of ``rl.reward``: compares a gold answer with an answer by math-verify, one pair at a time.

Started as ``python -P reward_worker.py FD``; FD is one end of a pipe. Sends "ready", then receives (gold, answer,
timeout in seconds) and sends (equal, error). Its parent kills it when an answer takes too long.
"""

import logging
import math
import resource
import signal
import sys
from multiprocessing.connection import Connection

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# A parent that was killed can no longer kill: then this alarm, whose default action ends the process, does.
_GRACE_S = 10
# 2^(10^11) alone takes 12 GB; over this limit it is a MemoryError within sympy, and the worker lives on.
_MEMORY_BYTES = 2 << 30


def _read(text: str, strict: bool) -> list:
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    # math-verify's own limits use SIGALRM and an exception, which does not get through C code: no limit here.
    return parse(f"${text}$", kinds, parsing_timeout=None, raise_on_error=strict)


def judge(gold: str, answer: str) -> tuple[bool, str | None]:
    """(equal, error). An answer that cannot be read is wrong; a gold answer that cannot be read is an error."""
    expected = _read(gold, strict=True)
    if not expected:
        return False, "unreadable gold answer"
    given = _read(answer, strict=False)
    return bool(given) and bool(verify(expected, given, timeout_seconds=None, raise_on_error=True)), None


def main() -> None:
    """Serves until the pipe closes."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.ERROR)  # math-verify warns, for every answer, that its own time limits are off
    connection = Connection(int(sys.argv[1]))
    connection.send("ready")
    while True:
        try:
            gold, answer, timeout_s = connection.recv()
        except EOFError:
            return
        signal.alarm(math.ceil(timeout_s) + _GRACE_S)
        try:
            reply = judge(gold, answer)
        except Exception as failure:  # noqa: BLE001 - sympy raises anything; every kind is reported by name
            reply = (False, type(failure).__name__)
        signal.alarm(0)
        connection.send(reply)


if __name__ == "__main__":
    main()
