"""A run's directory: the paths of its files."""

from __future__ import annotations

import json
from pathlib import Path

ORPHAN_PATIENCE_S = 30.0
"""How long the processes of a run may take to end by themselves once their launcher has ended."""


class RunDirectory:
    """The paths of a run's files.

    config, settings   the configuration, for people and as the processes of the session read it
    sessions           a record of each session, and
    published          the checksums of all published weights, for a replay
    trackers           the ids of the tracked runs, and what they have been sent
    plan               the `StartPlan` of the current or latest session; only this package writes it
    scratch            the folder for what processes of one machine share by maps and locks; in `control`, unless the run
                       directory is shared by several machines
    stop_request       why a callback ends the run after the step in progress
    current            the id of the session that may write here, if several machines share the directory (see `fence`)
    admission          the record that the generation processes of the session share (see `actor/admission.py`)
    """

    def __init__(self, root: Path, scratch: Path | None = None) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.evaluations = root / "evaluations.jsonl"
        self.sessions = root / "sessions.jsonl"
        self.published = root / "published.jsonl"
        self.summary = root / "summary.json"
        self.curves = root / "curves.png"
        self.trackers = root / "trackers.json"
        self.rollouts = root / "rollouts"
        self.trained = self.rollouts / "trained.jsonl"
        self.checkpoints = root / "checkpoints"
        self.streams = root / "streams"
        self.logs = root / "logs"
        self.control = root / "control"
        self.plan = self.control / "plan.json"
        self.settings = self.control / "config.json"
        self.stop_request = self.control / "stop"
        self.current = root / ".session"
        self.scratch = scratch or self.control
        self.admission = self.scratch / "admission"

    def request_stop(self, why: object) -> str:
        """Let the run end after its current step. Returns a line for the user. Raises OSError."""
        if json.loads(self.settings.read_bytes())["launch"]["kind"] == "ray":
            return "a callback can't stop a run on a Ray cluster: stop it with Ctrl-C"
        self.stop_request.write_text(str(why), encoding="utf-8")
        return f"a callback ends the run after the current step: {why}"

    def rollouts_of(self, generation: int, *, shared: bool) -> Path:
        """Where generation process number `generation` writes its groups.

        Several processes of one machine append to the same file. If the directory is `shared` by several machines, each has
        a file of its own until `resume.join_rollouts`, as a network file system may lose lines of others.
        """
        return self.rollouts / (f"rollouts-{generation}.jsonl" if shared and generation else "rollouts.jsonl")

    def make_folders(self) -> None:
        for folder in (self.root, self.rollouts, self.checkpoints, self.streams, self.control, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    def evaluation(self, name: str) -> Path:
        """The answers of the evaluation `before` or `after` training, or `v20`: the one that began at version 20."""
        return self.rollouts / f"evaluation-{name}.jsonl"

    def log(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def ready_file(self, role: str) -> Path:
        """Where an engine server of the current session writes its address."""
        return self.control / f"{role}.ready.json"

    def report(self, role: str) -> Path:
        """Where a process of the current session writes at its end how it ended."""
        return self.scratch / f"{role}.report.json"
