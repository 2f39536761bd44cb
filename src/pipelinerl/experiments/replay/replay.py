"""`pipelinerl replay`: repeats a run, compares it with its records, and collects what differs.

exact             the weights of every published version have the recorded checksum
counterfactual    other settings of the loss, the correction, the advantages or the optimizer, on the same batches
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from pipelinerl.config.checks import mistakes
from pipelinerl.config.load import config_to_yaml, with_flags
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import (
    CheckpointError,
    ModelLoadError,
    PolicyMismatchError,
    ReplayDifferenceError,
    RunDirectoryError,
    TrainingDivergedError,
    UserError,
)
from pipelinerl.experiments.recompute import SavedWeights
from pipelinerl.experiments.replay.generation import (
    TOLERANCE,
    GenerationResult,
    choose_groups,
    repeat_groups,
    versions_of,
)
from pipelinerl.experiments.replay.records import Batch, RecordedRun
from pipelinerl.experiments.replay.results import ReplayResult, StepComparison, changed_text
from pipelinerl.experiments.replay.training import TrainingReplay
from pipelinerl.launch.stages.training import this_computer
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.summary import summarize
from pipelinerl.report import count, write_file, write_json, writing_to
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
_OF_THE_COURSE = {
    *("time_s", "train_s", "wait_s", "publish_s", "saving_s", "update", "engine", "queued", "dropped", "actor_dropped"),
    *("actor_dropped_tokens", "sampled_length_mean", "started_length_mean", "reward_read_mean"),
}
"""The metrics of a step that do not follow from its batch. All others must be the run's to the bit."""
_OF_RECORDS = (  # numbers of the summary
    *("samples_trained", "tokens_trained", "reward_first", "reward_last", "metrics_first", "metrics_last", "ess_mean"),
    *("ess_min", "lag_mean", "lag_max", "trained_length_mean", "eval_reward_before", "eval_reward_after", "eval_online"),
)
SAY_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """What to replay. `settings` are flags; `steps` None means all; `out` None: nothing is kept."""

    run_dir: Path
    settings: Sequence[str] = ()
    steps: int | None = None
    verify: int = 0
    seed: int = 0
    tolerance: float | None = None
    out: Path | None = None

    @property
    def exact(self) -> bool:
        given = {setting.partition("=")[0].removeprefix("--") for setting in self.settings if setting.startswith("--")}
        return given <= set(DEVICE_KEYS)

    def change(self, config: RunConfig) -> RunConfig:
        """The configuration with the request's settings. Raises ConfigError or UserError."""
        changed = with_flags(config, self.settings, (*COUNTERFACTUAL_KEYS, *DEVICE_KEYS))
        if changed == config:
            return config
        for mistake in mistakes(changed):
            raise UserError(f"--{mistake}")
        if (changed.preprocess.zero_advantage == "drop") != (config.preprocess.zero_advantage == "drop"):
            raise UserError("--preprocess.zero_advantage: with or without `drop`, batches have other rollouts")
        return changed


def replay(request: ReplayRequest, stop: Callable[[], bool], say: Callable[[str], None]) -> ReplayResult:
    """Replay a run. `say` is called with lines on the progress.

    Raises UserError for a request or records that make no sense, RunInterruptedError once `stop` returns True, and, in a
    counterfactual, errors of training. Differences are in the result, not raised.
    """
    run = RecordedRun(request.run_dir)
    if run.steps == 0:
        raise RunDirectoryError(f"{request.run_dir} took no step, so there is nothing to replay")
    steps = run.steps if request.steps is None else request.steps
    if steps > run.steps:
        raise UserError(f"--steps {steps}: {request.run_dir} took {run.steps}")
    if not request.exact and (request.verify or not steps):
        raise UserError("with other settings the replay trains: --steps 0 and --verify do not apply")
    configs = [request.change(segment.config) for segment in run.segments]  # all mistakes before the work
    with ExitStack() as stack:
        folder = _folder(request.out, stack)
        return _Replay(request, run, steps, folder, configs[-1], stop, say).result()


def _folder(out: Path | None, stack: ExitStack) -> RunDirectory:
    if out is None:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipelinerl-replay-")))
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists; choose a new folder")
    folder = RunDirectory(out.absolute())
    with writing_to(out):
        folder.make_folders()
    return folder


@dataclass
class _Replay:
    """One replay. It observes training (see `training.Observer`)."""

    request: ReplayRequest
    run: RecordedRun
    steps: int
    folder: RunDirectory
    config: RunConfig
    stop: Callable[[], bool]
    say: Callable[[str], None]
    first_step: str = ""
    changes: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    checked: set[int] = field(default_factory=set)
    unrecorded: set[int] = field(default_factory=set)
    metrics: list[StepComparison] = field(default_factory=list)
    needed: set[int] = field(default_factory=set)
    kept: int = 0
    said_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        checksums = {version: record.checksum for version, record in self.run.published.items()}
        self.weights = SavedWeights(
            self.request.run_dir, self.config.model, published=checksums, folder=self.folder.root / "versions"
        )

    def result(self) -> ReplayResult:
        began_s = time.monotonic()
        warnings = list(dict.fromkeys(self._warnings())) if self.request.exact else []
        for warning in warnings:
            self.say(f"warning: {warning}")
        groups = self._choose() if self.request.verify else []
        differences = list(self._kept_weights()) if self.request.exact else []
        differences += self._train() if self.steps else []
        differences += [changed_text(rollouts, version, what) for (version, what), rollouts in self.changes.items()]
        differences += self._summary() if self.request.exact and not differences else ()
        generation = None
        tolerance = self.request.tolerance or TOLERANCE[self.config.model.dtype]
        if groups and not differences:
            try:
                generation = self._generate(groups)
            except ReplayDifferenceError as error:
                differences.append(str(error))
            else:
                beyond = [gap for gap in generation.gaps if not gap.difference <= tolerance]
                differences += [f"{gap} (tolerance {tolerance:g})" for gap in beyond]
        result = ReplayResult(
            run=str(self.request.run_dir),
            exact=self.request.exact,
            settings=self._settings(),
            steps=self.steps,
            compared=len(self.checked),
            kept=self.kept,
            unrecorded=tuple(sorted(self.unrecorded - self.checked)),
            time_s=time.monotonic() - began_s,
            differences=tuple(differences),
            warnings=tuple(warnings),
            metrics=tuple(self.metrics),
            generation=generation,
            tolerance=tolerance if generation else None,
        )
        if self.request.out is not None:
            write_file(self.folder.config, config_to_yaml(self.config).encode())
            write_json(self.request.out / "replay.json", result)
        return result

    def _warnings(self) -> Iterator[str]:
        """What is other here than where the run trained, so that bits may differ."""
        here = this_computer()
        for segment in self.run.segments:
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

    def _settings(self) -> dict[str, Any]:
        """The changed settings."""
        before, after = self.run.segments[-1].config.model_dump(mode="json"), self.config.model_dump(mode="json")
        keys = [key.split(".") for key in COUNTERFACTUAL_KEYS]
        return {
            f"{section}.{key}": after[section][key] for section, key in keys if after[section][key] != before[section][key]
        }

    # ---- checkpoints and copies of weights

    def _kept_weights(self) -> Iterator[str]:
        """What differs in those that the run has kept, of the versions that it published."""
        for version in sorted(set(self.weights.kept) & self.run.published.keys() - {0}):
            try:
                self.weights(version)
            except (CheckpointError, ModelLoadError, ReplayDifferenceError) as error:
                yield str(error)
            self.kept += 1

    def _summary(self) -> Iterator[str]:
        """What differs between the numbers in `summary.json` and the records that they follow from."""
        steps, found = list(self.run.metrics.values()), read_summary(self.run.run.root) or {}
        evaluations = read_records(self.run.run.evaluations, EvaluationRecord)
        again = msgspec.to_builtins(summarize(self.config, steps, evaluations, {}, wall_s=0.0, status=""))
        whole = found.get("optimizer_steps") == len(steps)  # another session may have ended without one
        odd = [key for key in _OF_RECORDS if whole and key in found and found[key] != again[key]]
        yield from (f"summary.json has {key} {found[key]}, the records give {again[key]}" for key in odd[:1])

    # ---- training

    def _train(self) -> list[str]:
        """Repeat training. Returns the first difference."""
        training = TrainingReplay(
            run=self.run,
            steps=self.steps,
            folder=self.folder,
            observer=self,
            stop=self.stop,
            change=self.request.change,
            exact=self.request.exact,
            keep_last=self.request.out is not None,
        )
        try:
            training()
        except ReplayDifferenceError as error:
            return [str(error)]
        except (PolicyMismatchError, TrainingDivergedError) as error:
            if not self.request.exact:
                raise
            return [f"training ended, which the run's did not: {error}"]
        return [self.first_step] if self.first_step else []

    def published(self, version: int, tensors: Mapping[str, Tensor], checksum: str, digests: Mapping[str, str]) -> None:
        if version in self.needed:
            self.weights.save(version, tensors)
        recorded = self.run.published.get(version)
        if not self.request.exact or recorded is None:
            self.unrecorded |= {version} if self.request.exact else set()
            return
        if recorded.checksum != checksum:
            found = {name: digest[:16] for name, digest in digests.items()}
            odd = [name for name in {**recorded.digests, **found} if recorded.digests.get(name) != found.get(name)]
            first = f"{self.first_step}; " if self.first_step else ""
            what = f"first in parameter {odd[0]} ({len(odd)} of {len(found)} differ)" if odd else "but in no parameter"
            raise ReplayDifferenceError(f"{first}the weights of version {version} differ from the run's, {what}")
        self.checked.add(version)

    def stepped(self, record: StepRecord) -> None:
        recorded = self.run.metrics.get(record.version)
        if recorded is None:
            raise RunDirectoryError(f"{self.run.run.metrics} lacks step {record.version}")
        if not self.request.exact:
            self.metrics.append(StepComparison.of(recorded, record))
        elif not self.first_step:
            written = msgspec.json.decode(msgspec.json.encode(record), type=StepRecord)  # what is not finite is null there
            names = [name for name in recorded.__struct_fields__ if name not in _OF_THE_COURSE]
            odd = next((name for name in names if getattr(recorded, name) != getattr(written, name)), None)
            if odd is not None:
                now, before = getattr(written, odd), getattr(recorded, odd)
                self.first_step = f"step {record.version} has {odd} {now}, the run's had {before}"
        if time.monotonic() - self.said_s > SAY_EVERY_S:
            self.said_s = time.monotonic()
            self.say(f"step {record.version} of {self.steps}")

    def refused(self, batch: Batch, refused: bool) -> None:
        if refused != batch.refused and self.request.exact:
            did = {True: "rejected", False: "accepted"}
            raise ReplayDifferenceError(
                f"the ESS guard {did[refused]} a batch of step {batch.version}, which the run's {did[batch.refused]}"
            )

    def changed(self, rollout: str, version: int, what: str) -> None:
        self.changes.setdefault((version, what), []).append(rollout)

    # ---- generation

    def _choose(self) -> list[Group]:
        """Groups to repeat: trained on, and with weights that the run kept or that this replay will compute."""
        kv, since = self.config.engine.kv_on_update, self._generated_since()
        computed = {version for version in self.run.published if self.steps and version <= self.steps}
        available = computed.union(self.weights.kept)
        found: dict[int, Group] = {}
        for index in self.run.trained_groups():
            for group in self.run.groups.read(index)[:1]:
                versions = versions_of(group, kv)
                if versions <= available and min(versions, default=-1) >= since:
                    found[index] = group
        if not found:
            raise UserError(
                "--verify: no group has weights for all its tokens; replay more steps, or keep weights during the run with "
                "trainer.keep_versions"
            )
        groups = [found[index] for index in choose_groups(sorted(found), self.request.verify, self.request.seed)]
        self.needed = {version for group in groups for version in versions_of(group, kv)} - set(self.weights.kept)
        return groups

    def _generated_since(self) -> int:
        """The version from which on all sessions generated like the last one."""
        since = 0
        for before, after in zip(self.run.segments, self.run.segments[1:], strict=False):
            if _generation(before.config) != _generation(after.config):
                since = after.start + 1  # a group of version `start` may be from before
        return since

    def _generate(self, groups: Sequence[Group]) -> GenerationResult:
        self.say(f"repeating {count(len(groups), 'group')}")
        return repeat_groups(groups, self.config, self.weights, stop=self.stop)


def _generation(config: RunConfig) -> tuple[object, ...]:
    """The settings that completions depend on, besides weights."""
    return config.seed, config.model, config.engine.kv_on_update, config.actor.temperature
