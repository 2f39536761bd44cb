"""Runs from Python: `train`, `start`, and what a run left (`Run`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import pipelinerl.errors
from pipelinerl.config.load import config_of_values, config_to_yaml, load_config, validate
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.user.source import name_by_file
from pipelinerl.errors import INVALID_DATA, PipelineRLError, RunDirectoryError, UserError
from pipelinerl.extras import require
from pipelinerl.files import write_atomically
from pipelinerl.launch.run_lock import errors_explained, fresh_directory
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import Records, read_records
from pipelinerl.metrics.records import Record, StepRecord
from pipelinerl.process.child import ChildProcess
from pipelinerl.run_directory import RunDirectory, existing_run

if TYPE_CHECKING:
    from pipelinerl.experiments.trial import Trial

LOOK_EVERY_S = 0.2
STOP_PATIENCE_S = 180.0

Config = RunConfig | Mapping[str, Any] | str | Path | None
Environment = type | partial[Any] | str
Reward = Callable[..., Any] | str
Rewards = Reward | Mapping[Any, float] | Sequence[Reward | tuple[Reward, float]]


class Run:
    """What the run in a directory has recorded; it may still be running. Data frames need pandas (extra `pandas`)."""

    def __init__(self, path: str | Path) -> None:
        """Raises RunDirectoryError if this is not a run directory."""
        self._files = existing_run(Path(path).absolute())
        self.path = self._files.root

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config(self) -> RunConfig:
        return load_config(self._files.config)

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of `summary.json`. Raises RunDirectoryError if the run has not ended."""
        try:
            return msgspec.json.decode(self._files.summary.read_bytes(), type=dict[str, Any])
        except (OSError, *INVALID_DATA) as error:
            raise RunDirectoryError(f"{self.path} has no summary: the run has not ended") from error

    @property
    def metrics(self) -> Any:
        """A data frame with a row for each optimizer step; columns are the fields of `StepRecord`, nested ones as `a/b`."""
        return _frame([record.numbers() for record in read_records(self._files.metrics, StepRecord)])

    @property
    def evaluations(self) -> Any:
        """A data frame with a row for each evaluation."""
        rows: list[dict[str, Any]] = []
        for one in read_records(self._files.evaluations, EvaluationRecord):
            numbers = {name.removeprefix("evaluation/"): value for name, value in one.numbers().items()}
            rows.append({"when": one.when, "version": one.version, **numbers})
        return _frame(rows)

    @property
    def rollouts(self) -> Any:
        """A data frame with a row for each rollout; columns are the fields of `RolloutRow` (`experiments/browse.py`)."""
        from pipelinerl.experiments.browse import RunRollouts, load_token_text, read_rows  # noqa: PLC0415 - few need it

        rows = read_rows(RunRollouts(self.path), load_token_text(self.path))
        return _frame([msgspec.structs.asdict(row) for row in rows])

    def load_model(self, version: int | Literal["best"] | None = None) -> tuple[Any, Any]:
        """The model and tokenizer of the last checkpoint, or of `version`, as transformers objects.

        `best`: the saved version with the highest held-out reward.
        """
        from pipelinerl.experiments.evaluate.models import find_targets  # noqa: PLC0415 - loads torch
        from pipelinerl.models.loading import load_tokenizer  # noqa: PLC0415 - as above

        (target,) = find_targets([str(self.path) if version is None else f"{self.path}@{version}"])
        return target.load(), load_tokenizer(target.model)


class StartedRun(AbstractContextManager["StartedRun"]):
    """A run in a process of its own. Iterating over it yields the records of steps and evaluations, as they come.

    As a context manager it is stopped at the end. It ends with this process.
    """

    def __init__(self, config: RunConfig, inputs: Path) -> None:
        """`inputs` is the folder in the run directory for what the run is given."""
        inputs.mkdir(parents=True, exist_ok=True)
        self.path = inputs.parent
        self._log = inputs / "output.log"
        run_file = inputs / "run.yaml"
        write_atomically(run_file, config_to_yaml(config, only_given=True).encode(), mode=0o600)
        command = [sys.executable, "-m", "pipelinerl", "train", str(run_file), "--metrics.view", "plain"]
        self._stopped = False
        self._process = ChildProcess(command, log=self._log)

    def __iter__(self) -> Iterator[Record]:
        """Raises the error that the run ends with, except after `stop`."""
        records = Records(self.path)
        while True:
            running = self.running
            yield from records.read()
            if not running:
                break
            time.sleep(LOOK_EVERY_S)
        if not (status := self._process.status) or self._stopped:
            return
        text = "\n".join(self._process.log_lines())
        _, found, message = text.rpartition("error: ")
        errors = pipelinerl.errors
        known = (errors.StageDiedError, errors.StalledError, errors.TrainingDivergedError, UserError)
        kinds = {kind.exit_status: kind for kind in known}
        message = message if found else f"the run {self._process.how_it_ended()}{self._process.log_excerpt()}"
        raise kinds.get(status, PipelineRLError)(message)

    @property
    def running(self) -> bool:
        return self._process.running

    def stop(self) -> Run:
        """End the run with a checkpoint, like Ctrl-C, and wait for that."""
        self._stopped = True
        self._process.ask_to_stop()
        self._process.wait(STOP_PATIENCE_S)
        self._process.kill()
        return Run(self.path)

    def wait(self) -> Run:
        """Wait for the end of the run. Raises the error that it ends with, except after `stop`."""
        for _ in self:
            pass
        return Run(self.path)

    def __exit__(self, *exception: object) -> None:
        if self.running:
            self.stop()


def train(
    config: Config = None,
    *,
    model: str | Path | None = None,
    environment: Environment | None = None,
    reward: Rewards | None = None,
    data: str | Path | Sequence[Mapping[str, Any]] | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Train, and return the run. See `start` for the arguments.

    resume   the directory of a run to continue. What `config` sets is changed; all else stays as it was. Each change is
             printed. A run file is refused, as on the command line

    Raises the error that ended the run (see `errors`) if it did not reach its goal.
    """
    from pipelinerl.launch import run  # noqa: PLC0415 - most users of this package start no run
    from pipelinerl.launch.resume import resumed_config  # noqa: PLC0415 - as above

    _refuse_imported_scripts()
    if resume is not None:
        if any(value is not None for value in (model, environment, reward, data)):
            raise UserError("a resumed run keeps its model, environment, reward and data; leave them out")
        path = Path(resume)
        if isinstance(config, str | Path):
            raise UserError(f"`resume` takes the configuration from {path / 'config.yaml'}; leave out {config}")
        changes = config.model_dump(exclude_unset=True) if isinstance(config, RunConfig) else config or {}
        run.train(resumed_config(path, changes), resume=path)
        return Run(path)
    prepared, inputs = _prepare(config, model, environment, reward, data)
    try:
        run.train(prepared)
    except PipelineRLError:
        with suppress(OSError):
            inputs.parent.rmdir()  # only if nothing was written
        raise
    return Run(inputs.parent)


def start(
    config: Config = None,
    *,
    model: str | Path | None = None,
    environment: Environment | None = None,
    reward: Rewards | None = None,
    data: str | Path | Sequence[Mapping[str, Any]] | None = None,
) -> StartedRun:
    """Start a run in a process of its own, and return it at once.

    config        a `RunConfig`, a run file, or values by key (`{"trainer.steps": 20}`, or nested), on top of the defaults.
                  Without any argument: the demo
    model         a folder or hub id of a causal language model, instead of `model.path`
    environment   a class, `functools.partial(Class, name=value)` with arguments for it, or what `environment.kind` names
    reward        a function (completion, example) -> number, for the environment `function`. Several: a list, with or
                  without weights ([f, (g, 0.2)]), or a dict ({f: 1.0, g: 0.2})
    data          the examples for `reward`: a file of JSON lines, a data set, dicts, or a data frame

    Functions and classes are imported by other processes from their files. The source of those defined in a notebook is
    written to the run directory. Raises UserError.
    """
    _refuse_imported_scripts()
    return StartedRun(*_prepare(config, model, environment, reward, data))


def try_run(config: Config = None, *, problem: int = 0, **inputs: Any) -> Trial:
    """Let the model answer problem number `problem` of the training data, `actor.group_size` times, and train nothing.

    `inputs`: model, environment, reward and data, as for `start`. `print` of the result shows prompt, answers and rewards.
    """
    from pipelinerl.experiments.trial import try_group  # noqa: PLC0415 - loads torch

    _refuse_imported_scripts()
    with TemporaryDirectory(prefix="pipelinerl-try-") as folder:
        return try_group(_prepare(config, **inputs, root=Path(folder))[0], problem)


def _prepare(
    config: Config,
    model: str | Path | None = None,
    environment: Environment | None = None,
    reward: Rewards | None = None,
    data: str | Path | Sequence[Mapping[str, Any]] | None = None,
    *,
    root: Path | None = None,
) -> tuple[RunConfig, Path]:
    """The configuration of a new run, with its directory `root`, and the folder there for what it is given."""
    given = any(value is not None for value in (model, environment, reward, data))
    base = _resolved({} if config is None and given else config)
    chosen = environment.func if isinstance(environment, partial) else environment
    name = chosen or ("function" if reward is not None else base.environment.kind)
    with errors_explained():
        name = name if isinstance(name, str) else getattr(name, "__name__", "environment")
        chosen_root = root or (Path(base.run_dir).absolute() if base.run_dir else None)
        root = chosen_root or fresh_directory(name, base.schedule.kind)
        if chosen_root and (trained := RunDirectory(root).metrics).is_file() and trained.stat().st_size:
            raise RunDirectoryError(f"{root} already has a run; continue it with `resume`, or choose another run_dir")
    inputs = root / "inputs"
    try:
        kind, args = base.environment.kind, dict(base.environment.args)
        if isinstance(environment, partial):
            if environment.args:
                raise UserError("environment: give the arguments of a `functools.partial` by name")
            args |= environment.keywords
        if not isinstance(chosen, str | type | None):
            raise UserError(
                f"environment: {chosen!r} is no class; each process makes an object of its own, so give the class, or "
                "`functools.partial(Class, name=value)`"
            )
        if chosen is not None:
            kind = chosen if isinstance(chosen, str) else name_by_file(chosen, inputs)
        if reward is not None:
            kind = "function" if environment is None else kind
            args["reward"] = _named_rewards(reward, inputs)
        if data is not None:
            args["data"] = str(data) if isinstance(data, str | Path) else _written(data, inputs)
        values: dict[str, Any] = {"run_dir": str(root), "environment.kind": kind, "environment.args": args}
        if not isinstance(model, str | Path | None):
            raise UserError(
                f"model: a {type(model).__name__} is neither a folder nor a hub id; save it with `save_pretrained`"
            )
        if model is not None:
            values["model.path"] = str(model)
        return config_of_values(values, base), inputs
    except PipelineRLError:
        with suppress(OSError):
            root.rmdir()
        raise


def _resolved(config: Config) -> RunConfig:
    if isinstance(config, RunConfig):
        return validate(config)
    return config_of_values(config) if isinstance(config, Mapping) else load_config(config)


def _named_rewards(reward: Any, inputs: Path) -> Any:
    """The same with functions named by their files, and several as a mapping to their weights."""
    if callable(reward):
        return name_by_file(reward, inputs)
    if isinstance(reward, str):
        return reward
    pairs = reward.items() if isinstance(reward, Mapping) else [it if isinstance(it, tuple) else (it, 1.0) for it in reward]
    weights = {_named_rewards(function, inputs): weight for function, weight in pairs}
    if len(weights) < len(pairs):
        raise UserError("reward: a function is given twice")
    return weights


def _written(examples: Any, inputs: Path) -> str:
    """The file with the examples. Raises UserError for what are no dicts of JSON values."""
    if isinstance(examples, Mapping):
        raise UserError("data: a dict is one example; give a list of them")
    rows = examples.to_dict("records") if hasattr(examples, "iterrows") else examples
    inputs.mkdir(parents=True, exist_ok=True)
    path = inputs / "data.jsonl"
    with open(path, "wb") as file:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UserError(f"data[{number}] is a {type(row).__name__}, not a dict")
            try:
                file.write(msgspec.json.encode(dict(row)) + b"\n")
            except TypeError as error:
                raise UserError(f"data[{number}] has a value that JSON can't represent: {error}") from error
    return str(path)


def _refuse_imported_scripts() -> None:
    """Raise UserError if the user's file that calls is imported by a process of a run, which would then start a run, too."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    if name.startswith("pipelinerl_file_"):
        raise UserError("this file starts a run when it is imported: put that below `if __name__ == '__main__':`")


def _frame(rows: list[dict[str, Any]]) -> Any:
    require("pandas", "data frames")
    import pandas  # noqa: PLC0415 - optional

    return pandas.DataFrame(rows)
