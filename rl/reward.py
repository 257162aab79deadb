"""Rule-based reward for math answers: +1.0 when the last ``Answer: X`` line names the gold answer, else -1.0.

The rule is DAPO's (the prompt of ``rl.data.dapo_prompt`` asks for that line; the two are tested against each other). A
response without such a line is read by its last \\boxed{}. Integers are compared exactly, as integers of any size. Any
other answer goes to math-verify, gold first (its ``verify`` is not symmetric), in one worker process that is started
when first needed and killed when an answer takes too long: no signals, so any thread may call, and one pathological
answer cannot hang or slow a run. Whatever is done before that is linear in the response's length.

A failure to judge is not a wrong answer: it is named in ``Reward.error``, so that a run can count it.
"""

import atexit
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

TIMEOUT_S = 5.0
"""Wall-clock limit of one comparison by math-verify; the worker is killed when it is over."""
STARTUP_S = 120.0
"""Limit of the worker's start, which imports sympy; counted apart, so that a loaded machine makes no answer wrong."""
MAX_ANSWER_CHARS = 512
"""A longer answer is judged wrong unread: no gold answer is that long, and sympy's parser is superlinear."""
_TAIL_CHARS = 4096
"""Where the last answer line is looked for first, so that 20 000 tokens of reasoning before it cost nothing."""

_WORKER = Path(__file__).with_name("reward_worker.py")
# The rest of the line, or a formula in display delimiters, which may begin on a line of its own.
_ANSWER_LINE = re.compile(
    r"answer\**\s*[:：]\**\s*(\\\[(?:(?!\\\])[\s\S]){1,512}\\\]|\$\$[^$]{1,512}\$\$|\S[^\n]*)", re.IGNORECASE
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Of ChatML and its kin, of Llama and Gemma, of DeepSeek, of MiniMax.
_SPECIAL_TOKEN = re.compile(
    r"<[|｜][^|｜<>\n]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>|<pad>|\[e~\[|\]~b\](?:user|ai|system)?|\]~!b\["
)
_INTEGER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+)(?:\.0+)?", re.ASCII)
_QUANTITY = re.compile(r"(?:\\?\$)?\s*(.*\d)(?:\\?\$)?\s+([A-Za-z][A-Za-z/^23 ]*)")
# What may follow an integer in plain words: math-verify knows units in LaTeX and takes words for products of letters.
_UNIT = re.compile(
    r"(?:dollar|cent|euro|pound|degree|radian|second|minute|hour|day|week|month|year|met[er]{2}|kilomet[er]{2}|gram|lit[er]{2}"
    r"|centimet[er]{2}|mile|unit|point|way|person|student|boy|girl|egg|apple|orange|book|page|piece|item|ticket|car"
    r"|integer|digit|number|solution|pair|triple|time|square|cube)s?|percent|people|child|children|men|women|inch|inches|foot"
    r"|feet|ft|box|boxes|mph|per|cubic|k?g|ml|(?:[ckm]?m)(?:\^[23]|/h|/s)?"
)
_WRAPPERS = (
    re.compile(r"\$\$(.+)\$\$"),
    re.compile(r"\$(.+)\$"),
    re.compile(r"\\\((.+)\\\)"),
    re.compile(r"\\\[(.+)\\\]"),
    re.compile(r"\*\*(.+)\*\*"),
    re.compile(r"\\(?:boxed|fbox|text|mathrm|mathbf)\s*\{(.*)\}"),
    re.compile(r"\{(.*)\}"),
    re.compile(r"[\"'`](.+)[\"'`]"),
)


@dataclass(frozen=True)
class Reward:
    """The judgement of one response.

    Attributes:
        score: +1.0 or -1.0, the reward.
        correct: whether the answer equals the gold answer.
        answer: the answer as read from the response, unwrapped; None without ``Answer:`` and \\boxed{}.
        error: None, or why the answer could not be judged ("timeout", "worker died", ...); the score is then -1.0.
    """

    score: float
    correct: bool
    answer: str | None
    error: str | None = None


def extract_answer(response: str) -> str | None:
    """The text after the last ``Answer:`` of ``response``, else that in its last \\boxed{}; None without either.

    Special tokens, wrappers and a closing period are taken off, unless the text is too long to be an answer.
    """
    start = response.find("\n", len(response) - _TAIL_CHARS) + 1 if len(response) > _TAIL_CHARS else 0
    text = _SPECIAL_TOKEN.sub("", response[start:])
    found = _ANSWER_LINE.findall(text)
    if start and not found:
        text = _SPECIAL_TOKEN.sub("", response)
        found = _ANSWER_LINE.findall(text)
    answer = found[-1].strip() if found else _last_boxed(text)
    if answer is None or len(answer) > MAX_ANSWER_CHARS:  # unwrapping is quadratic in the depth of the wrappers
        return answer and answer[: MAX_ANSWER_CHARS + 1]
    return _unwrap(answer)


def _last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{} or \\fbox{}; None if there is none or it is not closed."""
    starts = [match.end() for match in _BOXED.finditer(text)]
    if not starts:
        return None
    depth = 1
    for place in range(starts[-1], min(len(text), starts[-1] + MAX_ANSWER_CHARS + 2)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[starts[-1] : place]
    return None


def _unwrap(text: str) -> str:
    """Strips, as often as any applies: blanks, a closing period, math delimiters, bold, \\boxed{}, quotes."""
    while True:
        before = text
        text = text.strip().removesuffix(".").strip()
        if text.count("**") == 1:  # "**Answer: 42**": the opening pair stands before "Answer"
            text = text.removesuffix("**").removeprefix("**")
        for wrapper in _WRAPPERS:
            match = wrapper.fullmatch(text)
            if match and _balanced(match.group(1)):
                text = match.group(1)
        if text == before:
            return text


def _balanced(text: str) -> bool:
    """Whether braces pair up inside ``text``, so that "{1}{2}" is not read as one group."""
    depth = 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return False
    return depth == 0


def as_integer(text: str) -> str | None:
    """The canonical digits of an integer ("-0" is "0", "025" is "25", "1,200.0" is "1200"), or None for anything else.

    Digits, not an int: Python refuses to convert strings of more than 4300 digits.
    """
    compact = text.replace("{,}", ",").replace("\\!", "").replace("\\,", "").strip()
    compact = compact.replace("\u2212", "-").replace("\u2013", "-").replace("\u00a0", " ").replace("\u202f", " ")
    if not _INTEGER.fullmatch(compact):
        return None
    digits = compact.partition(".")[0].replace(",", "").replace(" ", "").lstrip("+-").lstrip("0") or "0"
    return f"-{digits}" if compact.startswith("-") and digits != "0" else digits


def _as_quantity(text: str) -> tuple[str | None, str | None]:
    """(``as_integer``, unit): also of a number that units in plain words follow; the unit is without its plural."""
    match = _QUANTITY.fullmatch(text)
    if match and all(_UNIT.fullmatch(word) for word in match[2].lower().split()):
        return as_integer(match[1]), match[2].lower().strip().removesuffix("s") or None
    return as_integer(text), None


def score(response: str, gold: str, timeout_s: float = TIMEOUT_S) -> Reward:
    """Judges one response against the gold answer; callable from any thread.

    Args:
        response: the whole text that the model wrote, with or without special tokens.
        gold: the gold answer, an integer or LaTeX.
        timeout_s: limit for one comparison that needs math-verify, seconds.

    Raises:
        ValueError: ``gold`` is empty; a data set is checked for that before training (``rl.data.validate_rows``).
    """
    expected = _unwrap(str(gold))
    if not expected:
        raise ValueError("the gold answer is empty: check the data set with rl.data.validate_rows")
    answer = extract_answer(response)
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return Reward(-1.0, False, answer)
    if answer == expected:
        return Reward(1.0, True, answer)
    (gold_integer, gold_unit), (integer, unit) = _as_quantity(expected), _as_quantity(answer)
    if gold_integer is not None and integer is not None:
        same_unit = gold_unit is None or unit is None or gold_unit == unit
        correct = gold_integer == integer and same_unit
        return Reward(1.0 if correct else -1.0, correct, answer)
    correct, error = _verifier.verify(expected, answer, timeout_s)
    return Reward(1.0 if correct else -1.0, correct, answer, error)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_) -> dict:
    """verl's ``custom_reward_function``: {"score": +-1.0, "acc": 0.0 or 1.0, "pred": str, "error": str}.

    Every value is a plain str or float, since verl gathers them in arrays; "" stands for no answer and for no error.
    """
    reward = score(solution_str, ground_truth)
    return {
        "score": reward.score,
        "acc": float(reward.correct),
        "pred": reward.answer or "",
        "error": reward.error or "",
    }


class _Verifier:
    """math-verify in one worker process, started when first needed, killed and replaced when it hangs or dies.

    The worker is a plain child, not a ``multiprocessing`` process: those are refused inside daemonic processes, and
    their start imports the caller's main module again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        return self._process.pid if self._process else None

    def verify(self, gold: str, answer: str, timeout_s: float) -> tuple[bool, str | None]:
        """(equal, error); on an error ``equal`` is False and the next call gets a fresh worker."""
        with self._lock:
            try:
                self._await_ready()
                self._connection.send((gold, answer, timeout_s))
                if self._connection.poll(timeout_s):
                    return self._connection.recv()
                error = "timeout"
            except (EOFError, OSError) as failure:
                error = f"worker died: {type(failure).__name__}"
            self.stop()
            self._start()  # it gets ready while the caller goes on
            return False, error

    def stop(self) -> None:
        """Kills the worker, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None

    def _await_ready(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        if not self._ready:
            if not self._connection.poll(STARTUP_S):
                raise TimeoutError(f"math-verify did not start in {STARTUP_S:.0f} s")
            self._connection.recv()
            self._ready = True

    def _start(self) -> None:
        ours, theirs = Pipe()
        # -P: else the worker's folder comes first on its path, and our platform.py hides the standard library's.
        command = [sys.executable, "-P", str(_WORKER), str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        self._connection, self._ready = ours, False


_verifier = _Verifier()
atexit.register(_verifier.stop)
os.register_at_fork(after_in_child=_verifier.__init__)  # a forked child must not share its parent's worker or lock
