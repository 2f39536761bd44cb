"""`pipelinerl replay`: repeats a run, compares it with its records, and collects what differs.

exact             the weights of every published version have the recorded checksum
counterfactual    other settings of the loss, the correction, the advantages or the optimizer, on the same batches
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from pipelinerl.config.checks import mistakes
from pipelinerl.config.keys import differences
from pipelinerl.config.load import config_to_yaml, with_flags
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import CheckpointError, ModelLoadError, ReplayDifferenceError, RunDirectoryError, UserError
from pipelinerl.experiments.recompute import SavedWeights
from pipelinerl.experiments.replay.generation import TOLERANCE, repeat_groups, versions_of
from pipelinerl.experiments.replay.training import COLUMNS, NAMED, RecordedRun, ReplayResult, TrainingReplay
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.summary import summarize
from pipelinerl.report import count, in_terminal, number, table, write_file, write_json, writing_to
from pipelinerl.report.series import read_summary
from pipelinerl.resources.machine import this_computer
from pipelinerl.run_directory import RunDirectory
from pipelinerl.types import Group

DEVICE_KEYS = ("trainer.device", "trainer.threads", "engine.device", "engine.threads")
"""Settings with which a replay still repeats the run, though not always to the bit."""
COUNTERFACTUAL_KEYS = (
    *("trainer.loss", "trainer.clip_low", "trainer.clip_high", "trainer.dual_clip", "trainer.loss_normalization"),
    *("trainer.kl_coefficient", "trainer.kl_estimator", "trainer.teacher", "trainer.learning_rate", "trainer.ess_lr"),
    *("trainer.lr_schedule", "trainer.warmup_steps", "trainer.gradient_cosine"),
    *("trainer.betas", "trainer.weight_decay", "trainer.max_grad_norm", "trainer.micro_batch_tokens", "trainer.head_chunk"),
    *("correction.token", "correction.token_low", "correction.token_high", "correction.sequence", "correction.sequence_low"),
    *("correction.sequence_high", "correction.drift"),
    *("preprocess.advantage", "preprocess.normalize_std", "preprocess.zero_advantage", "preprocess.observation_weight"),
)
"""Settings that a counterfactual may change: those of the training side that leave the batches as they are."""
_OF_RECORDS = (  # numbers of the summary
    *("samples_trained", "tokens_trained", "reward_first", "reward_last", "metrics_first", "metrics_last", "ess_mean"),
    *("ess_min", "lag_mean", "lag_max", "trained_length_mean", "eval_reward_before", "eval_reward_after", "eval_online"),
)

ROWS = 10
"""Steps that the table of a counterfactual shows."""


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
    given = {setting.partition("=")[0].removeprefix("--") for setting in settings if setting.startswith("--")}
    result = ReplayResult(run=str(run_dir), exact=given <= set(DEVICE_KEYS), steps=run.steps if steps is None else steps)
    if not result.exact and (verify or not result.steps):
        raise UserError("with other settings the replay trains: --steps 0 and --verify do not apply")
    config = [_changed(segment.config, settings) for segment in run.segments][-1]  # all mistakes before the work
    before = run.segments[-1].config.model_dump(mode="json")
    changes = {key: now for key, _, now in differences(before, config.model_dump(mode="json"))}
    result.settings = {key: changes[key] for key in COUNTERFACTUAL_KEYS if key in changes}
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists; choose a new folder")
    with tempfile.TemporaryDirectory(prefix="pipelinerl-replay-") as temporary:
        folder = RunDirectory(Path(temporary) if out is None else out.absolute())
        with writing_to(folder.root):
            folder.make_folders()
        published = {version: record.checksum for version, record in run.published.items()}
        weights = SavedWeights(run_dir, config.model, published=published, folder=folder.root / "versions")
        if result.exact:
            result.warnings = list(dict.fromkeys(_warnings(run)))
        for warning in result.warnings:
            say(f"warning: {warning}")
        chosen = _groups_to_verify(run, weights, config, result.steps, number=verify, seed=seed) if verify else []
        needed = {version for group in chosen for version in versions_of(group, config.engine.kv_on_update)}
        checked = sorted(set(weights.saved) & run.published.keys() - {0}) if result.exact else []
        result.saved = len(checked)
        for version in checked:
            try:
                weights(version)
            except (CheckpointError, ModelLoadError, ReplayDifferenceError) as error:
                result.differences.append(str(error))
        if result.steps:
            TrainingReplay(
                run=run,
                result=result,
                folder=folder,
                weights=weights,
                stop=stop,
                say=say,
                change=lambda config: _changed(config, settings),
                keep_last=out is not None,
                needed=needed - set(weights.saved),
            ).repeat()
        result.unrecorded -= result.compared
        if result.exact and not result.differences:
            result.differences += _odd_summary(run, config)
        if chosen and not result.differences:
            say(f"repeating {count(len(chosen), 'group')}")
            result.tolerance = tolerance or TOLERANCE[config.model.dtype]
            _verify(result, chosen, config, weights, stop)
        result.time_s = time.monotonic() - began_s
        if out is not None:
            write_file(folder.config, config_to_yaml(config).encode())
            write_json(out / "replay.json", result)
    return result


def _verify(
    result: ReplayResult, groups: Sequence[Group], config: RunConfig, weights: SavedWeights, stop: Callable[[], bool]
) -> None:
    """Repeat the generation of groups, and add what differs to the result. Raises RunInterruptedError."""
    bound = result.tolerance
    try:
        result.generation = repeat_groups(groups, config, weights, stop=stop)
    except ReplayDifferenceError as error:
        result.differences.append(str(error))
        return
    beyond = [where for gap, where in result.generation.gaps if not gap <= bound]
    result.differences += [f"{where} (tolerance {bound:g})" for where in beyond]


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


def _warnings(run: RecordedRun) -> Iterator[str]:
    """What is other here than where the run trained, so that bits may differ."""
    here = msgspec.to_builtins(this_computer())
    for segment in run.segments:
        threads, device = segment.record.threads, segment.config.trainer.device
        for key, before, now in differences(msgspec.to_builtins(segment.record.machine), here):
            if key != "processor":  # what counts are its instructions
                yield f"the run had {key.removeprefix('packages.')} {before or 'none'}, this machine has {now or 'none'}"
        if device != "cpu":
            yield f"the run trained on {device}, where the order of sums may vary"
        elif threads > 1:
            yield f"the run trained with {threads} threads; only one thread promises the same bits"


def _odd_summary(run: RecordedRun, config: RunConfig) -> Iterator[str]:
    """What differs between the numbers in `summary.json` and the records that they follow from."""
    steps, found = list(run.metrics.values()), read_summary(run.run.root) or {}
    # A run without evaluations may have records of evaluations that were made after it, as by `lab compare`.
    evaluations = read_records(run.run.evaluations, EvaluationRecord) if config.evaluation.problems else []
    again = msgspec.to_builtins(summarize(config, steps, evaluations, {}, wall_s=0.0, status=""))
    whole = found.get("optimizer_steps") == len(steps)  # another session may have ended without one
    odd = [key for key in _OF_RECORDS if whole and key in found and found[key] != again[key]]
    yield from (f"summary.json has {key} {found[key]}, the records give {again[key]}" for key in odd[:1])


def _groups_to_verify(
    run: RecordedRun, weights: SavedWeights, config: RunConfig, steps: int, *, number: int, seed: int
) -> list[Group]:
    """A random choice of groups that were trained on, and whose weights the run saved or this replay will compute.

    Only of sessions that generated like the last one. Raises UserError if there are none.
    """

    def generation(config: RunConfig) -> tuple[object, ...]:
        """The settings that completions depend on, besides weights."""
        return config.seed, config.model, config.engine.kv_on_update, config.actor.temperature

    since = 0
    for before, after in pairwise(run.segments):
        if generation(before.config) != generation(after.config):
            since = after.record.version + 1  # a group of this version may be from before
    available = {version for version in run.published if steps and version <= steps}.union(weights.saved)
    batches = [batch for segment in run.segments for batch in segment.batches]
    found = []
    for index in sorted({sample.group_index for batch in batches for sample in batch.samples}):
        for group in run.groups.read(index)[:1]:
            versions = versions_of(group, config.engine.kv_on_update)
            if versions <= available and min(versions, default=-1) >= since:
                found.append(group)
    if not found:
        raise UserError(
            "--verify: no group has weights for all its tokens; replay more steps, or keep weights during the run with "
            "trainer.weights_every: 1"
        )
    return sorted(random.Random(seed).sample(found, min(number, len(found))), key=lambda group: group.index)


# ---- what the command prints


def result_text(result: ReplayResult) -> str:
    """Everything but differences."""
    parts = []
    if not result.exact:
        parts.append(_metrics_table(result))
    elif result.steps and not result.differences:
        parts.append(
            f"{count(result.steps, 'step')} of {result.run} repeated in {result.time_s:.0f} s: {len(result.compared)} "
            f"published versions, and {count(result.saved, 'folder')} of saved weights, have the checksums of the run\n"
        )
    if result.unrecorded:
        versions = ", ".join(map(str, sorted(result.unrecorded)))
        parts.append(f"not compared, because the run recorded no checksum: {versions}\n")
    if (made := result.generation) is not None and not result.differences:
        drawn = f"; its random numbers draw {made.drawn} of these tokens again" if made.drawn is not None else ""
        parts.append(
            f"{count(made.groups, 'group')} repeated with {count(made.completions, 'completion')}, "
            f"{count(made.tokens, 'token')} and {count(made.switches, 'weight update')} within completions: log-probs "
            f"differ by at most {made.gaps[0][0]:.2g} (tolerance {result.tolerance:g}){drawn}\n"
        )
    return "".join(parts)


def difference_text(result: ReplayResult) -> str:
    """One line that names the first differences."""
    shown = "; ".join(result.differences[:NAMED])
    more = len(result.differences) - NAMED
    return f"{result.run} is not repeated: {shown}{f'; and {more} more' if more > 0 else ''}"


def _metrics_table(result: ReplayResult) -> str:
    """Some of the steps, and the means of all."""

    def cells(step: str, some: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        row = {"step": step}
        for column, name in COLUMNS.items():
            sides = zip(*(one[name] for one in some), strict=True)
            known = [[value for value in side if value is not None] for side in sides]
            row[column] = " → ".join(number(fmean(values) if values else None, ".3g") for values in known)
        return row

    changes = ", ".join(f"{key} {value}" for key, value in result.settings.items()) or "the run's own settings"
    every = max(1, math.ceil(len(result.metrics) / ROWS))
    rows = [cells(str(one["version"]), [one]) for one in result.metrics[every - 1 :: every]]
    rows.append(cells("mean", result.metrics))
    return in_terminal(table(f"{result.run} with {changes}: run → replay", rows))
