"""What the integration tests share: small runs of the demo's model, and reading what they left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash

from pipelinerl import RunConfig, load_config
from pipelinerl.launch import checks, tryout
from pipelinerl.launch.run import train
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import StepRecord, TrainedRecord
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.board import read_statuses
from pipelinerl.types import Group, Rollout, StageStatus, versions_from_spans

SMALL = {
    "actor.group_size": 4,
    "engine.slots": 16,
    "engine.threads": 1,
    "trainer.threads": 1,
    "trainer.batch_size": 16,
    "trainer.steps": 5,
    "trainer.learning_rate": 1e-3,
    "evaluation.problems": 0,
    "metrics.plot": "false",
    "metrics.view": "none",
    "launch.kind": "embedded",
    "launch.watchdog_s": 60,
}


def flags(run_dir: Path, **settings: Any) -> list[str]:
    """Command-line flags of a small run; `a__b=1` sets `a.b`."""
    values = SMALL | {name.replace("__", "."): value for name, value in settings.items()} | {"run_dir": run_dir}
    return [
        f"--{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        for key, value in values.items()
    ]


def small_run(run_dir: Path, **settings: Any) -> RunConfig:
    return load_config(None, flags(run_dir, **settings))


def run(run_dir: Path, **settings: Any) -> dict[str, Any]:
    """A small run in this process, to its end."""
    return train(small_run(run_dir, **settings))


def resume(run_dir: Path, **settings: Any) -> dict[str, Any]:
    changed = [f"--{name.replace('__', '.')}={value}" for name, value in settings.items()]
    return train(load_config(run_dir / "config.yaml", changed), resume=run_dir)


@contextmanager
def tried_here(command: list[str], **_: object) -> Iterator[SimpleNamespace]:
    """In place of the trial's process, which imports libraries for longer than all else takes."""
    assert command[1:3] == ["-m", "pipelinerl.launch.tryout"]
    tryout.main(command[3:])
    yield SimpleNamespace(running=False, wait_until=lambda condition, _: condition())


def try_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no process for the trial of user code before a run."""
    monkeypatch.setattr(checks, "ChildProcess", tried_here)


# ------------------------------------------------------------------------------------------------ the command


def start(*arguments: str, cwd: Path | None = None, prepare: str = "") -> subprocess.Popen[str]:
    """`pipelinerl ARGUMENTS` as a process of its own; `prepare` is code that runs in it before."""
    code = f"import sys\n{textwrap.dedent(prepare)}\nfrom pipelinerl.cli import main\nsys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def start_processes(run_dir: Path, **settings: Any) -> subprocess.Popen[str]:
    """A small run as real processes."""
    return start("train", *flags(run_dir, launch__kind="processes", **settings))


class Ended(msgspec.Struct, frozen=True):
    status: int
    out: str
    error: str


HANGS_S = 240.0
"""Longer than anything here takes, even on a machine that has ten times as much to do as it should."""


def wait(process: subprocess.Popen[str], timeout_s: float = HANGS_S) -> Ended:
    try:
        out, error = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Ended(process.returncode, out, error)


def command(*arguments: str, **options: Any) -> Ended:
    return wait(start(*arguments, **options))


def until(condition: Callable[[], Any], process: subprocess.Popen[str] | None = None, timeout_s: float = HANGS_S) -> None:
    """Wait for it, as long as `process` lives."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if process is not None:
            assert process.poll() is None, wait(process)
        assert time.monotonic() < deadline_s, "it did not come to that in time"
        time.sleep(0.02)


def status_of(run_dir: Path, stage: str) -> StageStatus | None:
    return read_statuses(RunDirectory(run_dir).statuses).get(stage)


def version_of(run_dir: Path) -> int:
    """The trainer's version, as the status board says; 0 before its first status."""
    status = status_of(run_dir, "trainer")
    return getattr(status.progress, "version", 0) if status is not None else 0


ROLES = {"actor": "generation", "preprocessor": "preprocessing", "trainer": "training"}


def process_ids(run_dir: Path) -> dict[str, int]:
    """By role: the workers that have reported and still live, and the servers that are ready."""
    control, found = run_dir / "control", {}
    for stage, status in read_statuses(RunDirectory(run_dir).statuses).items():
        kind, dash, index = stage.partition("-")
        if kind in ROLES and alive(status.pid):
            found[ROLES[kind] + dash + index] = status.pid
    for path in control.glob("server-*.ready.json"):
        found[path.name.split(".")[0]] = msgspec.json.decode(path.read_bytes())["pid"]
    return found


def alive(pid: int) -> bool:
    """Running or stopped; a zombie, whose parent is gone or has not looked yet, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def in_training(
    process: subprocess.Popen[str], run_dir: Path, version: int = 2, workers: int = 2
) -> Iterator[dict[str, int]]:
    """Process ids by role of a run that has come to `version`, once so many workers have reported.

    At the end of the block all these processes must end, and leave nothing in shared memory under the name of one of them.
    """
    try:
        until(lambda: version_of(run_dir) >= version and len(process_ids(run_dir)) >= workers, process)
        pids = process_ids(run_dir)
        yield pids
        until(lambda: not any(alive(pid) for pid in pids.values()))
        shared_memory = Path("/dev/shm")  # noqa: S108 - looked at only
        assert not [path for pid in pids.values() for path in shared_memory.glob(f"pipelinerl-weights-{pid}-*")]
    finally:
        process.kill()
        process.wait()


@contextmanager
def endless(run_dir: Path, **settings: Any) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A run without an end as real processes, once it is training: see `in_training`."""
    process = start_processes(run_dir, **{"trainer__steps": 100_000, **settings})
    with in_training(process, run_dir, workers=1 + settings.get("engine__processes", 1)) as pids:
        yield process, pids


# ------------------------------------------------------------------------------------------------ the records


def groups(run_dir: Path) -> list[Group]:
    """Every group that was handed over, those of an abandoned past included."""
    return read_lines(run_dir / "rollouts" / "rollouts.jsonl", Group)


def trained(run_dir: Path) -> list[TrainedRecord]:
    """What each step trained on. A resumed run repeats the steps after its checkpoint: the last line of a version counts."""
    path = run_dir / "rollouts" / "trained.jsonl"
    return read_lines(path, TrainedRecord, lambda old, new: old.version >= new.version)


def steps(run_dir: Path) -> list[StepRecord]:
    return read_records(run_dir / "metrics.jsonl", StepRecord)


def summary(run_dir: Path) -> dict[str, Any]:
    return msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=dict[str, Any])


def rollouts_by_id(run_dir: Path) -> dict[str, Rollout]:
    """The last rollout of each name: a resumed run generates what it lost again."""
    return {rollout.id: rollout for group in groups(run_dir) for rollout in group.rollouts}


def versions(rollout: Rollout) -> list[int]:
    """The version of each sampled token. Raises ValueError unless the spans cover them exactly."""
    return [
        version
        for turn in rollout.turns
        for version in versions_from_spans(turn.completion.weight_versions, len(turn.completion.token_ids))
    ]


def weights_checksum(checkpoint: Path) -> str:
    return xxhash.xxh3_128((checkpoint / "model.safetensors").read_bytes()).hexdigest()


# ------------------------------------------------------------------------------------------------ what must hold


def assert_conserved(counts: dict[str, Any]) -> None:
    """Every started rollout is in exactly one place, says the summary."""
    assert "conservation_error" not in counts, counts["conservation_error"]
    parts = counts["rollouts_trained"] + counts["rollouts_queued"] + counts["rollouts_in_progress"]
    assert counts["rollouts_started"] == parts + sum(counts["rollouts_dropped"].values())


def assert_trained_once(run_dir: Path) -> None:
    """No rollout was trained on twice, and what was trained on is what was handed over."""
    ids = [sample.id for record in trained(run_dir) for sample in record.samples]
    assert len(ids) == len(set(ids))
    assert set(ids) <= rollouts_by_id(run_dir).keys()


def assert_provenance(run_dir: Path, checked: Iterable[TrainedRecord] | None = None) -> int:
    """Spans cover each completion, versions never fall, and the recorded lags follow. Returns how many span an update."""
    by_id = rollouts_by_id(run_dir)
    spanning = 0
    for record in trained(run_dir) if checked is None else checked:
        for sample in record.samples:
            found = versions(by_id[sample.id])
            assert found == sorted(found)
            assert len(found) == sample.tokens
            assert record.version - 1 - max(found) == sample.lag_min >= 0
            assert record.version - 1 - min(found) == sample.lag_max
            spanning += len(set(found)) > 1
    return spanning


def assert_whole(run_dir: Path) -> dict[str, Any]:
    """All that any run promises, wherever it stopped. Returns its summary."""
    counts = summary(run_dir)
    assert_conserved(counts)
    assert_trained_once(run_dir)
    assert_provenance(run_dir)
    return counts


def assert_gone_on(run_dir: Path, goal: int) -> dict[str, Any]:
    """All sessions together are one run that reached its goal. Returns its summary."""
    counts = assert_whole(run_dir)
    assert counts["status"] == "finished"
    assert counts["version"] == goal
    assert [step.version for step in steps(run_dir)] == list(range(1, goal + 1))
    assert [record.version for record in trained(run_dir)] == list(range(1, goal + 1))
    times_s = [step.time_s for step in steps(run_dir)]
    assert times_s == sorted(times_s)
    assert counts["rollouts_trained"] == goal * 16
    return counts


def assert_finished(run_dir: Path, ended: Ended) -> dict[str, Any]:
    """All that a run promises that reached its goal. Returns its summary."""
    assert (ended.status, ended.error) == (0, "")
    counts = assert_whole(run_dir)
    assert counts["status"] == "finished"
    return counts


def run_processes(run_dir: Path, **settings: Any) -> dict[str, Any]:
    """A small run as real processes, to its end."""
    return assert_finished(run_dir, wait(start_processes(run_dir, **settings)))


def write_environment(folder: Path, body: str, imports: Sequence[str] = ()) -> str:
    """A file with a class `Task(Gcd)` of this body; returns its `environment.kind`."""
    path = folder / "task.py"
    lines = [
        "import asyncio",
        "import math",
        "import time",
        "from pipelinerl.environments.tasks.gcd import Gcd",
        "from pipelinerl.types import Problem, Rollout",
        *imports,
        "",
        "class Task(Gcd):",
        textwrap.indent(textwrap.dedent(body).strip("\n"), "    "),
        "",
    ]
    path.write_text("\n".join(lines))
    return f"{path}:Task"
