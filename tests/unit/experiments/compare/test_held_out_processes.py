"""Held-out problems are answered by several processes, if there are enough attempts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelinerl.experiments.compare import held_out
from pipelinerl.experiments.runs import Command

VERSIONS = (0, 4, 6, 7)


@pytest.mark.parametrize(
    ("problems", "cores", "processes"), [(8, 4, 1), (50, 4, 3), (1000, 3, 3), (1000, 64, len(VERSIONS))]
)
def test_every_version_is_answered_once_by_as_many_processes_as_are_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: int, cores: int, processes: int
) -> None:
    started: list[list[int]] = []

    def answer(commands: Sequence[Command]) -> None:
        for command in commands:
            versions = [int(word.partition("@")[2]) for word in command.arguments if word.startswith(f"{tmp_path}@")]
            started.append(versions)
            reward = {"mean": 0.5, "low": 0.25, "high": 0.75}
            models = [{"version": version, "estimates": {"reward": reward}, "failed": {}} for version in versions]
            out = Path(command.arguments[-1])
            out.mkdir()
            (out / "summary.json").write_text(json.dumps({"models": models}))

    monkeypatch.setattr(held_out, "run_commands", answer)
    engine, machine = SimpleNamespace(device="cpu"), SimpleNamespace(cores=cores)
    config = SimpleNamespace(engine=engine)
    request: Any = SimpleNamespace(
        evaluated_versions=VERSIONS, held_out=problems, machine=machine, config=config, held_out_args={}
    )
    answered = held_out.answer_held_out(tmp_path, request)
    assert len(started) == processes
    assert sorted(version for versions in started for version in versions) == list(VERSIONS)
    assert answered == [held_out.Answered(version=version, reward=0.5, low=0.25, high=0.75) for version in VERSIONS]
