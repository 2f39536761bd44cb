"""`pipelinerl replay`: repeats a run, compares it with its records, and collects what differs.

exact             the weights of every published version have the recorded checksum
counterfactual    other settings of the loss, the correction, the advantages or the optimizer, on the same batches
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from pipelinerl.config.checks import mistakes
from pipelinerl.config.load import config_to_yaml, with_flags
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import CheckpointError, ModelLoadError, ReplayDifferenceError, RunDirectoryError, UserError
from pipelinerl.experiments.recompute import SavedWeights
from pipelinerl.experiments.replay.generation import TOLERANCE, GenerationResult, repeat_groups, versions_of
from pipelinerl.experiments.replay.records import RecordedRun
from pipelinerl.experiments.replay.training import COLUMNS, NAMED, StepComparison, TrainingReplay
from pipelinerl.launch.stages.training import this_computer
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.summary import summarize
from pipelinerl.report import count, number, write_file, write_json, writing_to
from pipelinerl.report.sections import in_terminal, table
from pipelinerl.report.series import read_summary
from pipelinerl.run_directory import RunDirectory
from pipelinerl.types import Group

DEVICE_KEYS = ("trainer.device", "trainer.threads", "engine.device", "engine.threads")
"""Settings with which a replay still repeats the run, though not always to the bit."""
COUNTERFACTUAL_KEYS = (
    *("trainer.loss", "trainer.clip_low", "trainer.clip_high", "trainer.dual_clip", "trainer.loss_normalization"),
    *("trainer.kl_coefficient", "trainer.learning_rate", "trainer.ess_lr", "trainer.lr_schedule", "trainer.warmup_steps"),
    *("trainer.betas", "trainer.weight_decay", "trainer.max_grad_norm", "trainer.micro_batch_tokens", "trainer.head_chunk"),
    *("correction.token", "correction.token_low", "correction.token_high", "correction.sequence", "correction.sequence_low"),
    *("correction.sequence_high", "correction.drift"),
    *("preprocess.advantage", "preprocess.normalize_std", "preprocess.zero_advantage"),
)
"""Settings that a counterfactual may change: those of the training side that leave the batches as they are."""
_OF_RECORDS = (  # numbers of the summary
    *("samples_trained", "tokens_trained", "reward_first", "reward_last", "metrics_first", "metrics_last", "ess_mean"),
    *("ess_min", "lag_mean", "lag_max", "trained_length_mean", "eval_reward_before", "eval_reward_after", "eval_online"),
)

ROWS = 10
"""Steps that the table of a counterfactual shows."""


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results, as written to `replay.json`.

    exact          the run was repeated as it was; otherwise `settings` are those that were changed
    compared       numbers of steps, and of published versions whose checksum the run recorded and the replay has, too
    kept           number of checkpoints and copies of weights that have the recorded checksum of their version
    unrecorded     published versions whose checksum the run did not record: it was ending when it published them
    differences    empty if everything was repeated; the first one is the first in the run
    warnings       what is other here than where the run trained
    metrics        counterfactuals: the metrics of every step
    """

    run: str
    exact: bool
    settings: dict[str, Any] = {}
    steps: int
    compared: int = 0
    kept: int = 0
    unrecorded: tuple[int, ...] = ()
    time_s: float = 0.0
    differences: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    metrics: tuple[StepComparison, ...] = ()
    generation: GenerationResult | None = None
    tolerance: float | None = None


def replay(
    run_dir: Path,
    settings: Sequence[str] = (),
    *,
    steps: int | None = None,
    verify: int = 0,
    seed: int = 0,
    tolerance: float | None = None,
    out: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _: None,
) -> ReplayResult:
    """Replay a run. Differences are in the result, not raised.

    settings          flags; without any of `COUNTERFACTUAL_KEYS` the replay is exact
    steps             only the first ones; None: all
    verify, seed      also repeat the generation of so many groups, which are chosen with `seed`
    tolerance         largest difference of log-probs to accept; None: by the model's type
    out               a new folder for the results, the metrics and the last weights
    say               is called with lines on the progress

    Raises UserError for a request or records that make no sense, RunInterruptedError once `stop` returns True, and, in a
    counterfactual, errors of training.
    """
    began_s = time.monotonic()
    run = RecordedRun(run_dir)
    if run.steps == 0:
        raise RunDirectoryError(f"{run_dir} took no step, so there is nothing to replay")
    if steps is not None and steps > run.steps:
        raise UserError(f"--steps {steps}: {run_dir} took {run.steps}")
    steps = run.steps if steps is None else steps
    given = {setting.partition("=")[0].removeprefix("--") for setting in settings if setting.startswith("--")}
    exact = given <= set(DEVICE_KEYS)
    if not exact and (verify or not steps):
        raise UserError("with other settings the replay trains: --steps 0 and --verify do not apply")
    config = [_changed(segment.config, settings) for segment in run.segments][-1]  # all mistakes before the work
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists; choose a new folder")
    with tempfile.TemporaryDirectory(prefix="pipelinerl-replay-") as temporary:
        folder = RunDirectory(Path(temporary) if out is None else out.absolute())
        with writing_to(folder.root):
            folder.make_folders()
        published = {version: record.checksum for version, record in run.published.items()}
        weights = SavedWeights(run_dir, config.model, published=published, folder=folder.root / "versions")
        training = TrainingReplay(
            run=run,
            steps=steps,
            folder=folder,
            weights=weights,
            stop=stop,
            say=say,
            change=lambda config: _changed(config, settings),
            exact=exact,
            keep_last=out is not None,
        )
        warnings = list(dict.fromkeys(_warnings(run))) if exact else []
        for warning in warnings:
            say(f"warning: {warning}")
        groups = _groups_to_verify(run, weights, config, steps) if verify else {}
        if verify and not groups:
            raise UserError(
                "--verify: no group has weights for all its tokens; replay more steps, or keep weights during the run with "
                "trainer.keep_versions"
            )
        chosen = sorted(random.Random(seed).sample(sorted(groups), min(verify, len(groups))))
        kv = config.engine.kv_on_update
        training.needed = {version for index in chosen for version in versions_of(groups[index], kv)} - set(weights.kept)
        kept = sorted(set(weights.kept) & run.published.keys() - {0}) if exact else []
        differences = list(_damaged(weights, kept))
        differences += training.differences() if steps else []
        differences += _odd_summary(run, config) if exact and not differences else ()
        generation = None
        tolerance = tolerance or TOLERANCE[config.model.dtype]
        if chosen and not differences:
            say(f"repeating {count(len(chosen), 'group')}")
            try:
                generation = repeat_groups([groups[index] for index in chosen], config, weights, stop=stop)
                beyond = [gap for gap in generation.gaps if not gap.difference <= tolerance]
                differences += [f"{gap} (tolerance {tolerance:g})" for gap in beyond]
            except ReplayDifferenceError as error:
                differences.append(str(error))
        result = ReplayResult(
            run=str(run_dir),
            exact=exact,
            settings=_changes(run.segments[-1].config, config),
            steps=steps,
            compared=len(training.compared),
            kept=len(kept),
            unrecorded=tuple(sorted(training.unrecorded - training.compared)),
            time_s=time.monotonic() - began_s,
            differences=tuple(differences),
            warnings=tuple(warnings),
            metrics=tuple(training.metrics),
            generation=generation,
            tolerance=tolerance if generation else None,
        )
        if out is not None:
            write_file(folder.config, config_to_yaml(config).encode())
            write_json(out / "replay.json", result)
    return result


def _changed(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """The configuration with these flags. Raises ConfigError or UserError."""
    changed = with_flags(config, settings, (*COUNTERFACTUAL_KEYS, *DEVICE_KEYS))
    if changed == config:
        return config
    for mistake in mistakes(changed):
        raise UserError(f"--{mistake}")
    if (changed.preprocess.zero_advantage == "drop") != (config.preprocess.zero_advantage == "drop"):
        raise UserError("--preprocess.zero_advantage: with or without `drop`, batches have other rollouts")
    return changed


def _changes(config: RunConfig, changed: RunConfig) -> dict[str, Any]:
    """The settings that differ, by key."""
    before, after = config.model_dump(mode="json"), changed.model_dump(mode="json")
    keys = [key.split(".") for key in COUNTERFACTUAL_KEYS]
    return {f"{section}.{key}": after[section][key] for section, key in keys if after[section][key] != before[section][key]}


def _warnings(run: RecordedRun) -> Iterator[str]:
    """What is other here than where the run trained, so that bits may differ."""
    here = this_computer()
    for segment in run.segments:
        there, threads, device = segment.record.machine, segment.record.threads, segment.config.trainer.device
        if there.instructions != here.instructions:
            yield f"the run computed with {there.instructions} instructions, this machine does with {here.instructions}"
        for package in sorted(there.packages.keys() | here.packages.keys()):
            before, now = there.packages.get(package, "none"), here.packages.get(package, "none")
            if before != now:
                yield f"the run had {package} {before}, this machine has {now}"
        if device != "cpu":
            yield f"the run trained on {device}, where the order of sums may vary"
        elif threads > 1:
            yield f"the run trained with {threads} threads; only one thread promises the same bits"


def _damaged(weights: SavedWeights, versions: Sequence[int]) -> Iterator[str]:
    """What differs in the checkpoints and copies of weights of these versions."""
    for version in versions:
        try:
            weights(version)
        except (CheckpointError, ModelLoadError, ReplayDifferenceError) as error:
            yield str(error)


def _odd_summary(run: RecordedRun, config: RunConfig) -> Iterator[str]:
    """What differs between the numbers in `summary.json` and the records that they follow from."""
    steps, found = list(run.metrics.values()), read_summary(run.run.root) or {}
    evaluations = read_records(run.run.evaluations, EvaluationRecord)
    again = msgspec.to_builtins(summarize(config, steps, evaluations, {}, wall_s=0.0, status=""))
    whole = found.get("optimizer_steps") == len(steps)  # another session may have ended without one
    odd = [key for key in _OF_RECORDS if whole and key in found and found[key] != again[key]]
    yield from (f"summary.json has {key} {found[key]}, the records give {again[key]}" for key in odd[:1])


def _groups_to_verify(run: RecordedRun, weights: SavedWeights, config: RunConfig, steps: int) -> dict[int, Group]:
    """The groups, by index, that were trained on, and whose weights the run kept or this replay will compute.

    Only of sessions that generated like the last one.
    """
    since = 0
    for before, after in pairwise(run.segments):
        if _generation(before.config) != _generation(after.config):
            since = after.start + 1  # a group of version `start` may be from before
    available = {version for version in run.published if steps and version <= steps}.union(weights.kept)
    found = {}
    for index in run.trained_groups():
        for group in run.groups.read(index)[:1]:
            versions = versions_of(group, config.engine.kv_on_update)
            if versions <= available and min(versions, default=-1) >= since:
                found[index] = group
    return found


def _generation(config: RunConfig) -> tuple[object, ...]:
    """The settings that completions depend on, besides weights."""
    return config.seed, config.model, config.engine.kv_on_update, config.actor.temperature


# ---- what the command prints


def result_text(result: ReplayResult) -> str:
    """Everything but differences."""
    parts = []
    if not result.exact:
        parts.append(_metrics_table(result))
    elif result.steps and not result.differences:
        parts.append(
            f"{count(result.steps, 'step')} of {result.run} repeated in {result.time_s:.0f} s: {result.compared} published "
            f"versions, and {count(result.kept, 'folder')} of kept weights, have the checksums of the run\n"
        )
    if result.unrecorded:
        parts.append(f"not compared, because the run recorded no checksum: {', '.join(map(str, result.unrecorded))}\n")
    if (made := result.generation) is not None and result.tolerance is not None and not result.differences:
        drawn = f"; its random numbers draw {made.drawn} of these tokens again" if made.drawn is not None else ""
        largest = max((gap.difference for gap in made.gaps), default=0.0)
        parts.append(
            f"{count(made.groups, 'group')} repeated with {count(made.completions, 'completion')}, "
            f"{count(made.tokens, 'token')} and {count(made.switches, 'weight update')} within completions: log-probs "
            f"differ by at most {largest:.2g} (tolerance {result.tolerance:g}){drawn}\n"
        )
    return "".join(parts)


def difference_text(result: ReplayResult) -> str:
    """One line that names the first differences."""
    shown = "; ".join(result.differences[:NAMED])
    more = len(result.differences) - NAMED
    return f"{result.run} is not repeated: {shown}{f'; and {more} more' if more > 0 else ''}"


def _metrics_table(result: ReplayResult) -> str:
    """Some of the steps, and the means of all."""
    changes = ", ".join(f"{key} {value}" for key, value in result.settings.items()) or "the run's own settings"

    def cells(step: str, some: Sequence[StepComparison]) -> dict[str, str]:
        """The means over some steps."""
        row = {"step": step}
        for column, name in COLUMNS.items():
            known = [
                [value for one in some if (value := getattr(one, side)[name]) is not None] for side in ("run", "replay")
            ]
            row[column] = " → ".join(number(fmean(values) if values else None, ".3g") for values in known)
        return row

    every = max(1, math.ceil(len(result.metrics) / ROWS))
    rows = [cells(str(one.version), [one]) for one in result.metrics[every - 1 :: every]]
    rows.append(cells("mean", result.metrics))
    return in_terminal(table(f"{result.run} with {changes}: run → replay", rows))
