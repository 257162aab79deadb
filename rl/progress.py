"""What a person sees while a run goes on: stages of the start-up, then a bar; plain lines when nobody watches."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

_SIGN_OF_LIFE_S = 30
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class _Steady:
    """A stream that stays quiet once its reader is gone: a closed terminal must not keep a run from being ended."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._gone = False
        self.encoding = getattr(stream, "encoding", "utf-8")
        self.fileno = stream.fileno  # tqdm asks the terminal for its width
        self.isatty = stream.isatty

    def write(self, text: str) -> None:
        self._try(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            action()
        except OSError:  # a broken pipe, or a terminal that was closed
            self._gone = True


class Progress:
    """Draws the events of one run.

    On a terminal: a line with the stage and its seconds, then a tqdm bar. Otherwise: a line when a stage begins, a sign
    of life every half minute, and one line a step.
    """

    def __init__(self, steps: int, stream: TextIO | None = None):
        self._steps = steps
        self._stream = _Steady(stream or sys.stdout)
        self._tty = self._stream.isatty()
        self._bar: tqdm | None = None
        self._stage = "starting the trainer process"
        self._began = self._stage_began = self._last_sign = time.monotonic()
        self._frame = 0
        self._first_step: tuple[float, int] | None = None

    @property
    def stage(self) -> str:
        """The stage that runs now, or the step."""
        return self._stage

    def handle(self, event: dict[str, Any]) -> None:
        """Show one event; an unknown kind is shown as it is."""
        kind = event["event"]
        if kind == "stage":
            self._begin_stage(event["name"])
        elif kind == "step":
            self._step(event)
        elif kind == "validation":
            self.line(f"  {validation_text(event)}")
        elif kind == "gate":
            self.line(f"  consistency check, step {event['step']}: {event.get('summary') or event['verdict']}")
            for reason in event.get("reasons", []):
                self.line(f"    {reason}")
        elif kind == "note":
            self.line(f"  {event['text']}")
        elif kind not in ("done", "failed"):
            self.line(f"  {event}")

    def tick(self) -> None:
        """Call a few times a second: moves the spinner, or gives a sign of life."""
        now = time.monotonic()
        if self._bar is not None:
            return
        if self._tty:
            self._frame += 1
            spinner = _SPINNER[self._frame % len(_SPINNER)]
            self._stream.write(f"\r\x1b[2K{spinner} {self._stage}  {now - self._stage_began:.0f} s")
            self._stream.flush()
        elif now - self._last_sign > _SIGN_OF_LIFE_S:
            self.line(f"  [{now - self._began:4.0f} s] still {self._stage}, for {now - self._stage_began:.0f} s")

    def line(self, text: str) -> None:
        """A line of its own, above the bar or the spinner."""
        self._last_sign = time.monotonic()
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            clear = "\r\x1b[2K" if self._tty else ""
            self._stream.write(f"{clear}{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the bar or the spinner."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._tty:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()

    def _begin_stage(self, name: str) -> None:
        now = time.monotonic()
        if self._bar is None:
            if self._tty:
                self.line(f"  {self._stage}: {now - self._stage_began:.1f} s")
            else:
                self.line(f"  [{now - self._began:4.0f} s] {name}")
        self._stage, self._stage_began = name, now

    def _step(self, event: dict[str, Any]) -> None:
        step, total = event["step"], event.get("of", self._steps)
        now = time.monotonic()
        if self._first_step is None:
            if self._tty:
                self.line(f"  {self._stage}: {now - self._stage_began:.1f} s")
                self.close()
                self._bar = tqdm(
                    total=total,
                    initial=step - 1,
                    file=self._stream,
                    dynamic_ncols=True,
                    bar_format="step {n_fmt}/{total_fmt} |{bar:20}| {desc} [{elapsed}, {remaining} left]",
                )
            self._first_step = (now, step)
        self._stage, self._stage_began = f"step {step + 1}", now
        if self._bar is not None:
            self._bar.set_description_str(step_text(event), refresh=False)
            self._bar.update(step - self._bar.n)
            self._bar.refresh()
            return
        left, (began, first) = "", self._first_step
        if step > first:
            left = f"  {duration((now - began) / (step - first) * (total - step))} left"
        took = f"  {event['time_step']:.1f} s" if event.get("time_step") is not None else ""
        self.line(f"step {step}/{total}  {step_text(event)}{took}{left}")


def step_text(row: dict[str, Any]) -> str:
    """reward, accuracy, kept groups, k3 KL and speed of a step, those that the row has; failed judgements if any."""
    parts = (
        ("reward", "reward {:+.2f}"),
        ("accuracy", "accuracy {:.1%}"),
        ("kept", "kept {}"),
        ("kl_k3", "k3 {:.1e}"),
        ("tokens_per_s", "{:.0f} tokens/s"),
    )
    if row.get("gen_batches") is not None:
        row = {**row, "kept": f"{row['kept_groups']:.0%} of {row['gen_batches']:.1f} batches"}
    texts = [form.format(row[key]) for key, form in parts if row.get(key) is not None]
    return "  ".join(texts + _not_judged(row))


def validation_text(event: dict[str, Any]) -> str:
    """The held-out accuracy, that of each set if there are several, and failed judgements if any."""
    by_set = ", ".join(f"{name} {percent(share)}" for name, share in event.get("by_set", {}).items())
    when = f"after {count(event['step'], 'step')}" if event["step"] else "before training"
    text = f"held-out accuracy {percent(event['accuracy'])}{by_set and f' ({by_set})'} {when}"
    return "  ".join([text, *_not_judged(event)])


def _not_judged(row: dict[str, Any]) -> list[str]:
    failed = {key: int(row.get(f"reward_{key}") or 0) for key in ("errors", "timeouts")}
    return [f"{number} reward {key}" for key, number in failed.items() if number]


def percent(value: float | None) -> str:
    """0.4321 as 43.2 %."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


def count(number: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
