"""The runs of an experiment: which are done, and execution of the others, one `pipelinerl train` after another.

OUT/request.json              what determines the runs; the same command continues an experiment, others are refused
OUT/SETTING/seed-0/           a run directory for each setting and seed
OUT/SETTING/seed-0.yaml, .log its run file, and the output of its command
OUT/executions.jsonl          a line for each executed run: how it ended, and the load average before it
OUT/report.html               the results, and the curves of all runs
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipelinerl.config.keys import differences
from pipelinerl.config.load import config_to_yaml, validate
from pipelinerl.config.schema import EvaluationConfig, RunConfig
from pipelinerl.errors import INVALID_DATA, PipelineRLError, RunDirectoryError, RunInterruptedError, TrainingDivergedError
from pipelinerl.experiments.watch.page import page, shown_run
from pipelinerl.files import JsonLines
from pipelinerl.launch.hosts.host import FINISHED
from pipelinerl.launch.run_lock import RunLock
from pipelinerl.metrics.reading import read_lines
from pipelinerl.process import counted_interrupts
from pipelinerl.process.child import ChildProcess
from pipelinerl.report import PageSection, only_shown, write_file, write_json, writing_to
from pipelinerl.resources.machine import load_average
from pipelinerl.run_directory import RunDirectory

REQUEST_FILE = "request.json"
POLL_S = 0.1
STOP_S = 180.0
"""Time for a run to write a checkpoint and end."""


class Setting(NamedTuple):
    """What runs have in common that differ only in their seed. `config` has the first seed.

    `folder` is a path in the experiment's folder. `values`: what was typed, by key, if anything was.
    """

    label: str
    folder: str
    config: RunConfig
    values: Mapping[str, str] = {}


class PlannedRun(NamedTuple):
    """One run. `name` is its folder within the experiment's folder."""

    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting.folder}/seed-{self.seed}"

    @property
    def label(self) -> str:
        return f"{self.setting.label}, seed {self.seed}"

    def config(self, out: Path) -> RunConfig:
        return self.setting.config.model_copy(update={"seed": self.seed, "run_dir": str((out / self.name).absolute())})


def bare(config: RunConfig, *, trainer: Mapping[str, Any], **changes: Any) -> RunConfig:
    """`config` with other settings of its trainer, and without evaluations, checkpoints, and what shows or follows a run."""
    hidden = {"view": "none", "plot": False, "trackers": (), "callback": None}
    sections = {
        "trainer": config.trainer.model_copy(update={"checkpoint_every": 0, "weights_every": 0, **trainer}),
        "evaluation": EvaluationConfig(problems=0, temperature=config.evaluation.temperature),
        "metrics": config.metrics.model_copy(update=hidden),
    }
    return validate(config.model_copy(update=sections | changes))


def planned_runs(settings: Sequence[Setting], seeds: Sequence[int]) -> list[PlannedRun]:
    """All runs in order: every setting with the first seed, then with the next one.

    The order of the settings rotates from seed to seed, so that none is always first.
    """
    runs: list[PlannedRun] = []
    for place, seed in enumerate(seeds):
        first = place % len(settings)
        runs += [PlannedRun(setting, seed) for setting in (*settings[first:], *settings[:first])]
    return runs


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was not interrupted. `status` is "finished", "diverged: REASON" or "failed: REASON"."""

    run: str
    status: str
    began: str
    load_before: float | None

    @property
    def finished(self) -> bool:
        return self.status == FINISHED


class Folder:
    """The runs of one experiment. The name of a run contains everything in which runs of a request differ.

    `executions`, by name: how runs ended that were not interrupted and whose folders exist. Those that failed are not in the
    file, so that the next command tries them again.
    """

    def __init__(self, root: Path, train: Callable[[RunConfig], object]) -> None:
        """`train` executes a run in `config.run_dir`. Raises RunDirectoryError if `executions.jsonl` is damaged."""
        self.root = root
        self._train = train
        self._log = root / "executions.jsonl"
        recorded = read_lines(self._log, Execution)
        self.executions = {execution.run: execution for execution in recorded if (root / execution.run).is_dir()}

    @contextlib.contextmanager
    def claimed(self, request: Mapping[str, Any], what: str) -> Iterator[None]:
        """Create the folder for this request, or check that it holds it. Raises RunDirectoryError with the differences.

        An interruption within the block says how to continue.
        """
        out, path = self.root, self.root / REQUEST_FILE
        try:
            if not path.exists():
                out.mkdir(parents=True, exist_ok=True)
                if any(out.iterdir()):
                    raise RunDirectoryError(f"{out} is not empty and holds no {what}; choose a new --out")
                write_json(path, request, indent=2)
            before = msgspec.json.decode(path.read_bytes())
        except OSError as error:
            raise RunDirectoryError(f"can't use {out}: {error.strerror}; choose another --out") from error
        except INVALID_DATA as error:
            raise RunDirectoryError(f"{path} is damaged: {error}; choose another --out") from error
        encode = msgspec.json.encode
        changed = [
            f"{key} was {encode(was).decode()}, now {encode(value).decode()}"
            for key, was, value in differences(before, msgspec.json.decode(encode(request)))
        ]
        if changed:
            raise RunDirectoryError(
                f"{out} holds another {what} ({'; '.join(changed)}); give the same arguments to continue it, or choose "
                "another --out"
            )
        try:
            yield
        except RunInterruptedError as stopped:
            raise RunInterruptedError(f"stopped; to continue, run the same command with --out {out}") from stopped

    def execute(self, run: PlannedRun, *, resume: bool = False) -> Execution:
        """Execute a run unless it is done: from its checkpoint with `resume`, else from the start.

        A run that diverges is a result. Any other error that ends the run is raised.
        """
        if (done := self.executions.get(run.name)) is not None:
            return done
        config, path = run.config(self.root), self.root / run.name
        if path.is_dir() and (not resume or config.stream.kind == "memory"):  # such a stream can't go on
            with contextlib.closing(RunLock(RunDirectory(path))), writing_to(path):  # its last processes have ended
                shutil.rmtree(path)
        began, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), load_average()
        status = FINISHED
        try:
            self._train(config)
        except TrainingDivergedError as error:
            status = f"diverged: {error}"
        execution = Execution(run=run.name, status=status, began=began, load_before=load)
        with contextlib.closing(JsonLines(self._log)) as lines:
            lines.write(execution)
        self.executions[run.name] = execution
        return execution

    def execute_all(
        self,
        runs: Sequence[PlannedRun],
        say: Callable[[str], object],
        ended: Callable[[PlannedRun, Execution], str],
        *,
        resume: bool = False,
    ) -> PipelineRLError | None:
        """Execute the runs that are not done, one after another. Returns an error for the failed ones, if there are any.

        A run that fails is a result, and the others follow; the next call tries it again. `ended` is called for every run,
        in order, and returns what there is to say of it.
        """
        begun_s, failed = time.monotonic(), list[Execution]()
        waiting = [run.name for run in runs if run.name not in self.executions]
        for place, run in enumerate(runs, start=1):
            begins, rest = f"[{place}/{len(runs)}] {run.label}", ""
            if run.name in waiting:
                say(f"{begins}: {self.root / run.name}")
            try:
                execution = self.execute(run, resume=resume)
            except RunInterruptedError:
                raise
            except PipelineRLError as error:
                execution = Execution(run=run.name, status=f"failed: {error}", began="", load_before=None)
                self.executions[run.name] = execution
                failed.append(execution)
            if run.name in waiting and (left := len(waiting) - 1 - waiting.index(run.name)):
                minutes = (time.monotonic() - begun_s) / (len(waiting) - left) * left / 60
                rest = f"; about {minutes:.0f} min for the other {left}"
            say(f"{begins}: {execution.status}{ended(run, execution)}{rest}")
        if not failed:
            return None
        return PipelineRLError(
            f"{len(failed)} of {len(runs)} runs failed; the same command with --out {self.root} tries them again. "
            f"{failed[0].run} {failed[0].status}"
        )

    def write_page(self, title: str, sections: Sequence[PageSection], runs: Sequence[PlannedRun]) -> None:
        """Write `report.html`."""
        with only_shown("report.html"):
            shown = {run.label: shown_run(self.root / run.name) for run in runs}
            colours = {run.label: run.setting.label for run in runs}
            write_file(self.root / "report.html", page(title, sections, shown, colours).encode())


# ---- commands in processes of their own


class Command(NamedTuple):
    """Arguments of `pipelinerl`, the file that gets its output, and variables in addition to this process's."""

    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str] = {}


def run_commands(commands: Sequence[Command]) -> None:
    """Execute commands at the same time. If one fails, the others are stopped.

    Raises TrainingDivergedError, RunInterruptedError and, with the last error of its log, PipelineRLError.
    """
    with counted_interrupts() as interrupts, contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                ChildProcess(
                    [sys.executable, "-m", "pipelinerl", *command.arguments],
                    log=command.log,
                    environment=command.environment,
                    patience_s=STOP_S,
                )
            )
            for command in commands
        ]
        asked = 0
        while any(process.running for process in processes) and not any(process.status for process in processes):
            time.sleep(POLL_S)
            if interrupts.count > asked:  # the first asks for a checkpoint, the second for the end
                asked = interrupts.count
                for process in processes:
                    process.ask_to_stop()
        failed = next((process for process in processes if process.status), None)
        if interrupts.count or (failed and failed.status in (RunInterruptedError.exit_status, 128 + signal.SIGTERM)):
            raise RunInterruptedError("stopped")
        if failed is not None:
            errors = [line for line in failed.log_lines() if line.startswith("error: ")]
            kind = TrainingDivergedError if failed.status == TrainingDivergedError.exit_status else PipelineRLError
            why = errors[-1].removeprefix("error: ") if errors else f"its process {failed.how_it_ended()}"
            raise kind(f"{why} ({failed.log})")


def train_in_child(config: RunConfig) -> None:
    """Run `pipelinerl train` for `config.run_dir`, or let that run go on. Raises as `run_commands`."""
    path = Path(str(config.run_dir))
    arguments = ["--resume", str(path)]
    if not (path / "config.yaml").is_file():
        run_file = path.with_name(f"{path.name}.yaml")
        with writing_to(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            run_file.write_text(config_to_yaml(config, only_given=True), encoding="utf-8")
        arguments = [str(run_file)]
    run_commands([Command(["train", *arguments], path.with_name(f"{path.name}.log"))])
