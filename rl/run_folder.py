"""The run folder as the trainer processes see it: the recipe they run, and where they report."""

import json
import os
from pathlib import Path

from rl.config import Recipe
from rl.consistency_report import ConsistencyReport
from rl.events import METRIC_KEYS, EventLog


class RunFolder:
    """`path` with config.json; events, metrics rows and consistency reports are written through it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = json.loads((self.path / "config.json").read_text())
        self.recipe = Recipe.model_validate(self.config["recipe"])
        self._log = log = EventLog(self.path)
        self.stage, self.note, self.validation = log.stage, log.note, log.validation
        self.done, self.failed = log.done, log.failed

    def step(self, step: int, metrics: dict[str, float], of: int) -> None:
        self._log.step(step, of, {key: value for key, value in metrics.items() if key in METRIC_KEYS})

    def samples(self, step: int, rows: list[dict]) -> None:
        """Append samples of a step to samples.jsonl."""
        with (self.path / "samples.jsonl").open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"step": step, **row}, ensure_ascii=False) + "\n")

    def write_consistency(self, report: ConsistencyReport) -> None:
        """Write consistency.json (the newest report; earlier ones are kept as consistency-STEP.json) and an event."""
        report.environment, report.recipe = self.config["environment"], self.config["recipe"]
        text = json.dumps(report.as_dict(), indent=1) + "\n"
        for name in (f"consistency-{report.step}.json", "consistency.json"):
            part = self.path / f".{name}.{os.getpid()}"
            part.write_text(text)
            part.replace(self.path / name)
        self._log.gate(report.step, report.verdict, report.reasons, report.summary())
