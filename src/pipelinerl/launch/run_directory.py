"""A run's directory: the paths of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ORPHAN_PATIENCE_S = 30.0
"""How long the processes of a run may take to end by themselves once their launcher has ended."""


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run's files."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def curves(self) -> Path:
        return self.root / "curves.png"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    def evaluation(self, name: str) -> Path:
        """The answers of the evaluation `before` or `after` training, or `v20`: the one that began at version 20."""
        return self.rollouts / f"evaluation-{name}.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def streams(self) -> Path:
        return self.root / "streams"

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def plan(self) -> Path:
        """The `StartPlan` of the current or latest session. Only this package writes it."""
        return self.control / "plan.json"

    @property
    def settings(self) -> Path:
        """The configuration of the current or latest session, as JSON. `config` has the same for people."""
        return self.control / "config.json"

    @property
    def admission(self) -> Path:
        """The record that the generation processes of the current session share (see `actor/admission.py`)."""
        return self.control / "admission"

    def ready_file(self, role: str) -> Path:
        """Where an engine server of the current session writes its address."""
        return self.control / f"{role}.ready.json"

    def error_report(self, role: str) -> Path:
        """Where a process of the current session writes the error that it ended with."""
        return self.control / f"{role}.error.json"

    def result(self, role: str) -> Path:
        """Where a process of the current session writes its result, if it ended without an error."""
        return self.control / f"{role}.result.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def make_folders(self) -> None:
        for folder in (self.root, self.rollouts, self.checkpoints, self.streams, self.control, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
