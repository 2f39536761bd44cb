"""A run's directory: the paths of its files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipelinerl.errors import RunDirectoryError

ORPHAN_PATIENCE_S = 30.0
"""How long the processes of a run may take to end by themselves once their launcher has ended."""


class ReadyFile(msgspec.Struct, frozen=True):
    """What an engine server writes once its address is known. With vLLM, `pid` is the process that runs it."""

    url: str
    pid: int


class RunDirectory:
    """The paths of a run's files.

    config, settings   the configuration, for people and as the processes of the session read it
    sessions           a record of each session, and
    published          the checksums of all published weights, for a replay
    trackers           a file for each tracker: the id of the tracked run, and what it has been sent
    plan               the `StartPlan` of the current or latest session; only this package writes it
    stop_request       why a callback ends the run after the step in progress
    statuses           the latest statuses of all stages, for other programs (see `status.board`)
    recorded           every finished group
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.evaluations = root / "evaluations.jsonl"
        self.sessions = root / "sessions.jsonl"
        self.published = root / "published.jsonl"
        self.summary = root / "summary.json"
        self.curves = root / "curves.png"
        self.trackers = root / "trackers"
        self.rollouts = root / "rollouts"
        self.recorded = self.rollouts / "rollouts.jsonl"
        self.trained = self.rollouts / "trained.jsonl"
        self.checkpoints = root / "checkpoints"
        self.streams = root / "streams"
        self.logs = root / "logs"
        self.control = root / "control"
        self.plan = self.control / "plan.json"
        self.settings = self.control / "config.json"
        self.stop_request = self.control / "stop"
        self.statuses = self.control / "statuses.json"

    def request_stop(self, why: object) -> str:
        """Let the run end after its current step. Returns a line for the user. Raises OSError."""
        self.stop_request.write_text(str(why), encoding="utf-8")
        return f"a callback ends the run after the current step: {why}"

    def make_folders(self) -> None:
        for folder in (self.root, self.rollouts, self.checkpoints, self.streams, self.control, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    def records(self) -> list[Path]:
        """What sessions have left here, except for config.yaml, checkpoints and logs."""
        files = (self.metrics, self.evaluations, self.sessions, self.published, self.summary, self.curves, self.trackers)
        folders = (self.rollouts, self.streams, self.control, self.root / "tensorboard")
        return [path for path in (*files, *folders, *self.root.glob("timeline-*.jsonl")) if path.exists()]

    def evaluation(self, name: str) -> Path:
        """The answers of the evaluation `before` or `after` training, or `v20`, which began at version 20."""
        return self.rollouts / f"evaluation-{name}.jsonl"

    def log(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def ready_file(self, role: str) -> Path:
        """Where an engine server, or the first rank of a sharded trainer, of the current session writes its address."""
        return self.control / f"{role}.ready.json"

    def report(self, role: str) -> Path:
        """Where a process of the current session writes at its end how it ended."""
        return self.control / f"{role}.report.json"


def existing_run(root: Path) -> RunDirectory:
    """The directory of a run that was started. Raises RunDirectoryError."""
    run = RunDirectory(root)
    if not run.config.is_file():
        missing = "it has no config.yaml" if root.is_dir() else "there is no such folder"
        raise RunDirectoryError(f"{root} is not a run directory: {missing}")
    return run
