"""What the integration tests share: small runs of the demo's model, and reading what they left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from pipelinerl import RunConfig, load_config, train
from pipelinerl.files import read_json_lines
from pipelinerl.metrics.records import StepRecord, read_records
from pipelinerl.status.board import MmapBoard
from pipelinerl.trainer.records import TrainedRecord
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


HANGS_S = 180.0
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
    board = MmapBoard(run_dir / "control")
    try:
        return board.read(stage)
    finally:
        board.close()


def worker_pids(run_dir: Path) -> dict[str, int]:
    """Process ids by role; of a run that has come so far that both have reported."""
    found = {role: status_of(run_dir, stage) for role, stage in (("generation", "actor"), ("training", "trainer"))}
    return {role: status.pid for role, status in found.items() if status is not None}


def alive(pid: int) -> bool:
    """Running or stopped; a zombie, whose parent is gone or has not looked yet, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def no_leftovers(run_dir: Path) -> Any:
    """All processes of the run have ended at the end, and nothing is left in shared memory under the name of one of them."""
    pids: dict[str, int] = {}
    yield pids
    assert pids, "the test did not say which processes there were"
    until(lambda: not any(alive(pid) for pid in pids.values()))
    shared_memory = Path("/dev/shm")  # noqa: S108 - looked at only
    assert not [path for pid in pids.values() for path in shared_memory.glob(f"pipelinerl-weights-{pid}-*")]


# ------------------------------------------------------------------------------------------------ the records


def groups(run_dir: Path) -> list[Group]:
    """Every group that was handed over, those of an abandoned past included."""
    return read_json_lines(run_dir / "rollouts" / "rollouts.jsonl", Group)


def trained(run_dir: Path) -> list[TrainedRecord]:
    """What each step trained on. A resumed run repeats the steps after its checkpoint: the last line of a version counts."""
    lines = read_json_lines(run_dir / "rollouts" / "trained.jsonl", TrainedRecord)
    kept: list[TrainedRecord] = []
    for line in lines:
        while kept and kept[-1].version >= line.version:
            kept.pop()
        kept.append(line)
    return kept


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
