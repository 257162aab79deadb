"""The consistency report as an artifact of the run in wandb; verl logs the metrics themselves."""

import json
from pathlib import Path


def log_consistency(loggers: list[str], run_dir: Path) -> None:
    """Attach the newest consistency.json of a run folder to the wandb run of this process.

    One artifact `consistency-RUN` with a version a check; nothing without wandb among `loggers` or before any check.
    """
    path = run_dir / "consistency.json"
    if "wandb" not in loggers or not path.is_file():
        return
    import wandb

    if wandb.run is None:
        raise RuntimeError("trainer.logger has wandb, but no wandb run is open in the trainer's process")
    report = json.loads(path.read_text(encoding="utf-8"))
    facts = {key: report[key] for key in ("verdict", "step", "reasons") if key in report}
    artifact = wandb.Artifact(f"consistency-{run_dir.name}", type="consistency", metadata=facts)
    artifact.add_file(str(path), policy="mutable")
    wandb.run.log_artifact(artifact)
