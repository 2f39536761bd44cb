"""Reads a run directory for the simulation: its workload, and what it measured."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from pipelinerl.config.schema import PreprocessConfig, RunConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.planner.lengths import ROLLOUTS
from pipelinerl.experiments.planner.simulation.result import first_fifth
from pipelinerl.experiments.planner.simulation.scenario import GroupWork
from pipelinerl.experiments.planner.simulation.workload import ReplayedWorkload
from pipelinerl.files import read_json_lines
from pipelinerl.metrics.records import EVALUATIONS_FILE, METRICS_FILE, EvaluationRecord, StepRecord, read_records
from pipelinerl.preprocess.advantages import advantages
from pipelinerl.schedule import make_schedule


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of a run, defined like the fields of the same name in `Prediction`.

    Time starts when the trainer was ready and any evaluation before training had ended. The engine's busy fraction is over
    its session, evaluations included. None: not recorded.
    """

    steps: int
    time_s: float
    samples_per_s: float
    samples_per_s_later: float
    trained_tokens_per_s_later: float
    lag_mean: float | None
    lag_max: int | None
    engine_busy_fraction: float | None
    trainer_busy_fraction: float


class _Span(msgspec.Struct, frozen=True):
    end: int


class _Completion(msgspec.Struct, frozen=True):
    weight_versions: tuple[_Span, ...]
    finish_reason: str

    @property
    def tokens(self) -> int:
        return self.weight_versions[-1].end if self.weight_versions else 0


class _Turn(msgspec.Struct, frozen=True):
    prompt_ids: tuple[int, ...]
    completion: _Completion


class _Rollout(msgspec.Struct, frozen=True):
    turns: tuple[_Turn, ...]
    reward: float

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.completion.tokens for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """Tokens of the last turn's prompt that were not sampled."""
        return len(self.turns[-1].prompt_ids) - sum(turn.completion.tokens for turn in self.turns[:-1])


class _Group(msgspec.Struct, frozen=True):
    """The fields of `types.Group` that the simulation needs."""

    index: int
    rollouts: tuple[_Rollout, ...]


def read_workload(run_dir: Path, config: RunConfig) -> ReplayedWorkload:
    """The groups that a run finished, except those with a failed attempt. Raises RunDirectoryError."""
    path = run_dir / ROLLOUTS
    try:
        groups = read_json_lines(path, _Group)
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {path})") from error
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RunDirectoryError(f"not the rollouts of a run: {error}") from error
    whole = [group for group in groups if len(group.rollouts) == config.actor.group_size]
    whole = [group for group in whole if all(rollout.sampled_tokens for rollout in group.rollouts)]
    if not whole:
        raise RunDirectoryError(f"{path} has no finished group of {config.actor.group_size} attempts")
    used = config.preprocess.zero_advantage == "keep" or config.trainer.kl_coefficient > 0
    return ReplayedWorkload(
        {group.index: _work(group, config.preprocess, all_used=used) for group in whole},
        fmean(rollout.context_tokens for group in whole for rollout in group.rollouts),
    )


def _work(group: _Group, config: PreprocessConfig, *, all_used: bool) -> GroupWork:
    values = advantages(
        [rollout.reward for rollout in group.rollouts], baseline=config.advantage, normalize_std=config.normalize_std
    )
    no_gradient = [value == 0.0 for value in values]
    cut = [rollout.turns[-1].completion.finish_reason == "length" for rollout in group.rollouts]
    return GroupWork(
        lengths=tuple(rollout.sampled_tokens for rollout in group.rollouts),
        used=tuple(all_used or not zero for zero in no_gradient),
        dropped=tuple(
            (zero and config.zero_advantage == "drop") or (long and config.overlong == "drop")
            for zero, long in zip(no_gradient, cut, strict=True)
        ),
    )


def read_measured(run_dir: Path, config: RunConfig) -> Measured:
    """Read what a run measured. Raises RunDirectoryError without optimizer steps, or if records can't be read."""
    steps = read_records(run_dir / METRICS_FILE, StepRecord)
    if not steps:
        raise RunDirectoryError(f"{run_dir} has no record of an optimizer step to compare with")
    evaluations = read_records(run_dir / EVALUATIONS_FILE, EvaluationRecord)
    ready_s = steps[0].time_s - steps[0].train_s - steps[0].wait_s
    begin_s = max([ready_s, *(record.time_s for record in evaluations if record.when == "before")])
    time_s = steps[-1].time_s - begin_s
    waited_s = sum(step.wait_s for step in steps) - (begin_s - ready_s)
    later = first_fifth(len(steps), make_schedule(config))
    later_s = steps[-1].time_s - (steps[later - 1].time_s if later else begin_s)
    tokens = sum(step.samples * (step.completion_length_mean or 0.0) for step in steps[later:])
    lags = [(step.lag_mean, step.tokens_trained) for step in steps if step.lag_mean is not None]
    trained = sum(tokens for _, tokens in lags)
    return Measured(
        steps=len(steps),
        time_s=time_s,
        samples_per_s=sum(step.samples for step in steps) / time_s,
        samples_per_s_later=sum(step.samples for step in steps[later:]) / later_s,
        trained_tokens_per_s_later=tokens / later_s,
        lag_mean=sum(lag * tokens for lag, tokens in lags) / trained if trained else None,
        lag_max=max((step.lag_max for step in steps if step.lag_max is not None), default=None),
        engine_busy_fraction=_summary(run_dir).get("engine_busy_fraction"),
        trainer_busy_fraction=1 - max(0.0, waited_s) / time_s,
    )


def _summary(run_dir: Path) -> dict[str, Any]:
    """`summary.json`, which is written at the end of a session; empty before that."""
    try:
        return msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirectoryError(f"can't read {run_dir / 'summary.json'}: {error}") from error
