"""`pipelinerl replay`: repeats a run, compares it with its records, and reports what differs.

exact             the weights of every published version have the recorded checksum
counterfactual    other settings of the loss, the correction, the advantages or the optimizer, on the same batches
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from torch import Tensor

from pipelinerl.config.checks import mistakes
from pipelinerl.config.keys import config_to_yaml
from pipelinerl.config.load import with_flags
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ReplayDifferenceError, RunDirectoryError, UserError
from pipelinerl.experiments.evaluate.evaluate import LEVEL, RESAMPLES, EvaluationPlan, evaluate
from pipelinerl.experiments.evaluate.models import find_targets
from pipelinerl.experiments.evaluate.results import EvaluationSettings, EvaluationSummary
from pipelinerl.experiments.replay.generation import (
    TOLERANCE,
    GenerationResult,
    Weights,
    choose_groups,
    repeat_groups,
    versions_of,
)
from pipelinerl.experiments.replay.records import Batch, RecordedRun
from pipelinerl.experiments.replay.training import TrainingReplay
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.stages.recording import this_machine
from pipelinerl.metrics.records import StepRecord
from pipelinerl.report import count, new_table, number, rendered, write_json, writing_to
from pipelinerl.types import Group

DEVICE_KEYS = ("trainer.device", "trainer.threads", "engine.device", "engine.threads")
"""Settings with which a replay is still a repetition of the run, though not always to the bit."""
COUNTERFACTUAL_KEYS = (
    *("trainer.loss", "trainer.clip_low", "trainer.clip_high", "trainer.dual_clip", "trainer.loss_normalization"),
    *("trainer.kl_coefficient", "trainer.learning_rate", "trainer.ess_lr", "trainer.lr_schedule", "trainer.warmup_steps"),
    *("trainer.betas", "trainer.weight_decay", "trainer.max_grad_norm", "trainer.micro_batch_tokens"),
    *("correction.token", "correction.token_low", "correction.token_high", "correction.sequence", "correction.sequence_low"),
    *("correction.sequence_high", "correction.drift"),
    *("preprocess.advantage", "preprocess.normalize_std", "preprocess.zero_advantage"),
)
"""Settings that a counterfactual may change: those of the training side that leave the batches as they are."""
_COMPARED = ("loss", "grad_norm", "ess")
"""The metrics of a step that must be the run's to the bit."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to replay. `settings` are flags; `steps` None means all; `out` None: nothing is kept."""

    run_dir: Path
    settings: Sequence[str] = ()
    steps: int | None = None
    verify: int = 0
    seed: int = 0
    tolerance: float | None = None
    held_out: int = 0
    out: Path | None = None

    @property
    def counterfactual(self) -> bool:
        given = {setting.partition("=")[0].removeprefix("--") for setting in self.settings if setting.startswith("--")}
        return not given <= {*DEVICE_KEYS}

    def change(self, config: RunConfig) -> RunConfig:
        """The configuration with the request's settings. Raises ConfigError."""
        changed = with_flags(config, self.settings, (*COUNTERFACTUAL_KEYS, *DEVICE_KEYS))
        if changed != config:
            for mistake in mistakes(changed):
                raise UserError(f"--{mistake}")
        return changed


class StepComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of the step to `version` in the run and in the replay."""

    version: int
    run: dict[str, float | None]
    replay: dict[str, float | None]


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The mean held-out reward of some weights, with its 95% interval; `minus_first` is paired with the first of the list."""

    name: str
    reward: float
    low: float
    high: float
    minus_first: float | None = None


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results, as written to `replay.json`. `published` counts the versions whose checksums were compared.

    `differences` are in the order in which they were found; `warnings` name what may cause one.
    """

    run: str
    counterfactual: dict[str, Any]
    steps: int
    published: int
    time_s: float
    differences: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    compared: tuple[StepComparison, ...] = ()
    generation: GenerationResult | None = None
    tolerance: float | None = None
    held_out: tuple[HeldOut, ...] = ()


def replay(request: Request, stop: Callable[[], bool], say: Callable[[str], None]) -> ReplayResult:
    """Replay a run. `say` is called with lines on the progress.

    Raises UserError for a request or records that make no sense, RunInterruptedError once `stop` returns True, and errors of
    training. Differences are in the result, not raised.
    """
    run = RecordedRun(request.run_dir)
    steps = run.steps if request.steps is None else request.steps
    if not 0 <= steps <= run.steps:
        raise UserError(f"--steps {steps}: {request.run_dir} took {run.steps}")
    if run.steps == 0:
        raise RunDirectoryError(f"{request.run_dir} took no step, so there is nothing to replay")
    if request.counterfactual and request.verify:
        raise UserError("--verify repeats the run's own generation; leave out the settings that change its training")
    configs = [request.change(segment.config) for segment in run.segments]  # all mistakes before the work
    with ExitStack() as stack:
        folder = _folder(request.out, stack)
        return _Replay(request, run, steps, folder, configs[-1], stop, say).run_all()


def _folder(out: Path | None, stack: ExitStack) -> RunDirectory:
    if out is None:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipelinerl-replay-")))
    elif out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty; choose another folder")
    folder = RunDirectory(out.absolute())
    with writing_to(out):
        folder.make_folders()
    return folder


@dataclass
class _Replay:
    """One replay: observes training (see `training.Observer`), and collects the results."""

    request: Request
    run: RecordedRun
    steps: int
    folder: RunDirectory
    config: RunConfig
    stop: Callable[[], bool]
    say: Callable[[str], None]
    differences: list[str] = field(default_factory=list)
    compared: list[StepComparison] = field(default_factory=list)
    needed: set[int] = field(default_factory=set)
    checked: set[int] = field(default_factory=set)
    first_step: str | None = None
    said_s: float = 0.0

    def run_all(self) -> ReplayResult:
        began_s, exact = time.monotonic(), not self.request.counterfactual
        warnings = self._warnings()
        for warning in warnings:
            self.say(f"warning: {warning}")
        checksums = {version: record.checksum for version, record in self.run.published.items()}
        self.weights = Weights(self.request.run_dir, self.config.model, self.folder.root / "versions", checksums)
        groups = self._choose() if self.request.verify else []
        if self.steps:
            training = TrainingReplay(
                run=self.run,
                steps=self.steps,
                folder=self.folder,
                observer=self,
                stop=self.stop,
                change=self.request.change,
                exact=exact,
                keep_last=bool(self.request.held_out or self.request.out),
            )
            try:
                training()
            except ReplayDifferenceError as error:
                self.differences.append(str(error))
            else:
                if self.first_step is not None:
                    self.differences.append(self.first_step)
        generation, tolerance = None, None
        try:
            generation, tolerance = self._verify(groups)
        except ReplayDifferenceError as error:
            self.differences.append(str(error))
        result = ReplayResult(
            run=str(self.request.run_dir),
            counterfactual=self._settings() if not exact else {},
            steps=self.steps,
            published=len(self.checked),
            time_s=time.monotonic() - began_s,
            differences=tuple(self.differences),
            warnings=tuple(warnings),
            compared=tuple(self.compared),
            generation=generation,
            tolerance=tolerance,
            held_out=tuple(self._held_out()) if self.request.held_out and not self.differences else (),
        )
        if self.request.out is not None:
            with writing_to(self.request.out):
                self.folder.config.write_text(config_to_yaml(self.config), encoding="utf-8")
            write_json(self.request.out / "replay.json", result)
        return result

    def _warnings(self) -> list[str]:
        """What is other here than where the run trained, so that bits may differ."""
        here, found = this_machine(), []
        for segment in self.run.segments:
            there = segment.record.machine
            if there.instructions != here.instructions:
                found.append(f"the run computed with {there.instructions} instructions, this machine does with {here.instructions}")
            for package in sorted(there.packages.keys() | here.packages.keys()):
                before, now = there.packages.get(package), here.packages.get(package)
                if before != now:
                    found.append(f"the run had {package} {before or '-'}, here is {now or '-'}")
            if segment.record.threads > 1:
                found.append(f"the run trained with {segment.record.threads} threads; one thread always repeats the same bits")
            if segment.config.trainer.device != "cpu":
                found.append(f"the run trained on {segment.config.trainer.device}, where operations may add in any order")
        return list(dict.fromkeys(found))

    def _settings(self) -> dict[str, Any]:
        before, after = self.run.segments[-1].config.model_dump(mode="json"), self.config.model_dump(mode="json")
        keys = (key.split(".") for key in COUNTERFACTUAL_KEYS)
        return {f"{a}.{b}": after[a][b] for a, b in keys if after[a][b] != before[a][b]}

    # ---- training

    def published(self, version: int, tensors: Mapping[str, Tensor], checksum: str, digests: Mapping[str, str]) -> None:
        if version in self.needed:
            self.weights.save(version, tensors)
        if self.request.counterfactual:
            return
        recorded = self.run.published.get(version)
        if recorded is None:
            raise RunDirectoryError(f"{self.run.run.published} lacks version {version}, which the run published")
        if recorded.checksum != checksum:
            where = f"{self.first_step}; the weights" if self.first_step else "the weights"
            found = {name: digest[:16] for name, digest in digests.items()}
            odd = [name for name in {**recorded.digests, **found} if recorded.digests.get(name) != found.get(name)]
            what = f"first in parameter {odd[0]} ({len(odd)} of {len(found)} differ)" if odd else "in a type or a shape"
            raise ReplayDifferenceError(f"{where} of version {version} differ from those of the run, {what}")
        self.checked.add(version)

    def stepped(self, record: StepRecord) -> None:
        recorded = self.run.metrics.get(record.version)
        if recorded is None:
            raise RunDirectoryError(f"{self.run.run.metrics} lacks step {record.version}")
        if self.request.counterfactual:
            self.compared.append(StepComparison(version=record.version, run=_shown(recorded), replay=_shown(record)))
        elif self.first_step is None:
            odd = [name for name in _COMPARED if getattr(recorded, name) != getattr(record, name)]
            if odd:
                first = odd[0]
                self.first_step = (
                    f"step {record.version} differs: {first} is {getattr(record, first)}, and was {getattr(recorded, first)}"
                )
        if time.monotonic() - self.said_s > SAY_EVERY_S:
            self.said_s = time.monotonic()
            self.say(f"step {record.version} of {self.steps}")

    def refused(self, batch: Batch, refused: bool) -> None:
        if refused != batch.refused and not self.request.counterfactual:
            did = {True: "rejected", False: "accepted"}
            raise ReplayDifferenceError(
                f"step {batch.version} differs: the ESS guard {did[refused]} a batch that it {did[batch.refused]} in the run"
            )

    def changed(self, what: str) -> None:
        self.differences.append(what)

    # ---- generation

    def _choose(self) -> list[Group]:
        """Groups to repeat whose weights the run kept, or the replay of training will compute."""
        kv = self.config.engine.kv_on_update
        published = {version for version in self.run.published if version <= self.steps and self.steps}
        available = self.weights.kept | published
        found: dict[int, Group] = {}
        for index in self.run.trained_groups(self.run.steps):
            group = self.run.groups.read(index)[0]
            if versions_of(group, kv) <= available:
                found[index] = group
        if not found:
            raise UserError(
                "--verify: no group has weights of all its versions; replay the training too (without --steps 0), or keep "
                "versions in the next run with trainer.keep_versions"
            )
        groups = [found[index] for index in choose_groups(sorted(found), self.request.verify, self.request.seed)]
        self.needed = {version for group in groups for version in versions_of(group, kv)} - self.weights.kept
        return groups

    def _verify(self, groups: Sequence[Group]) -> tuple[GenerationResult | None, float | None]:
        if not groups or self.differences:
            return None, None
        tolerance = self.request.tolerance or TOLERANCE[self.config.model.dtype]
        self.say(f"repeating {count(len(groups), 'group')}")
        result = repeat_groups(groups, self.config, self.weights, stop=self.stop)
        beyond = [gap for gap in result.gaps if not gap.difference <= tolerance]
        for gap in beyond:
            self.differences.append(f"{gap} (tolerance {tolerance:g})")
        return result, tolerance

    # ---- held-out reward

    def _held_out(self) -> list[HeldOut]:
        """The reward of the replay's last weights, and of the run's own weights of that version, if it kept them."""
        config, version = self.config, self.steps
        own = [f"{self.request.run_dir}@{version}"] if version in self.weights.kept else []
        (self.folder.config).write_text(config_to_yaml(config), encoding="utf-8")
        targets = find_targets([f"{self.request.run_dir}@0", *own, f"{self.folder.root}@{version}"])
        names = ["the initial model", *["the run"] * len(own), "the replay"]
        model = config.model.model_copy(update={"path": config.model.path})
        targets = [target._replace(model=model) if target.version == 0 else target for target in targets]
        summary = evaluate(
            EvaluationPlan(
                targets=targets,
                settings=EvaluationSettings(
                    environment=config.environment.kind,
                    environment_args=config.environment.args,
                    environment_seed=config.seed,
                    problems=self.request.held_out,
                    training_problems=False,
                    attempts=1,
                    temperature=config.evaluation.temperature,
                    top_p=config.actor.top_p,
                    top_k=config.actor.top_k,
                    max_tokens=config.actor.max_tokens,
                    pass_at=1.0,
                    seed=self.request.seed,
                    resamples=RESAMPLES,
                    level=LEVEL,
                ),
                engine=config.engine.model_copy(update={"kind": "local", "urls": (), "servers": 1, "processes": 1}),
                api_key=None,
                rollout_timeout_s=config.actor.rollout_timeout_s,
                code_timeout_s=config.actor.code_timeout_s,
                out=self.folder.root / "held_out",
                overwrite=True,
            ),
            self.stop,
            self.say,
        )
        return _rewards(names, summary)


SAY_EVERY_S = 10.0


def _shown(record: StepRecord) -> dict[str, float | None]:
    names = ("grad_norm", "ess", "kl_behaviour_policy", "masked_fraction", "truncated_fraction", "loss", "learning_rate")
    return {name: getattr(record, name) for name in names}


def _rewards(names: Sequence[str], summary: EvaluationSummary) -> list[HeldOut]:
    found = []
    for name, model in zip(names, summary.models, strict=False):
        if model.estimates is not None:
            reward = model.estimates.reward
            minus = model.minus_first.reward.mean if model.minus_first else None
            found.append(HeldOut(name=name, reward=reward.mean, low=reward.low, high=reward.high, minus_first=minus))
    return found


# ---- what the command prints


ROWS = 10


def result_text(result: ReplayResult) -> str:
    parts = [_compared_table(result)] if result.compared else []
    if not result.counterfactual and result.steps and not result.differences:
        parts.append(
            f"{count(result.steps, 'step')} of {result.run} repeated in {result.time_s:.0f} s: all "
            f"{result.published} published versions have the checksums of the run\n"
        )
    if (made := result.generation) is not None and result.tolerance is not None:
        largest = max((gap.difference for gap in made.gaps), default=0.0)
        parts.append(
            f"{count(made.groups, 'group')} repeated with {count(made.completions, 'completion')}, "
            f"{count(made.tokens, 'token')} and {count(made.switches, 'weight update')} within completions: log-probs differ "
            f"by at most {largest:.2g} (tolerance {result.tolerance:g}); {made.drawn} of {made.tokens} tokens were drawn again\n"
        )
    if result.held_out:
        table = new_table("held-out reward", "weights", "mean", "95% interval", "minus the first")
        for one in result.held_out:
            table.add_row(one.name, f"{one.reward:.3f}", f"{one.low:.3f} to {one.high:.3f}", number(one.minus_first, "+.3f"))
        parts.append(rendered(table))
    return "".join(parts)


def difference_text(result: ReplayResult) -> str:
    """One line that names the first differences."""
    shown = "; ".join(result.differences[:3])
    more = f"; and {len(result.differences) - 3} more" if len(result.differences) > 3 else ""
    return f"{result.run} is not repeated: {shown}{more}"


def _compared_table(result: ReplayResult) -> str:
    changes = ", ".join(f"{key} {value}" for key, value in result.counterfactual.items()) or "no setting changed"
    names = {"grad_norm": "gradient norm", "ess": "ESS", "masked_fraction": "masked", "truncated_fraction": "truncated"}
    columns = [f"{title}: {side}" for title in names.values() for side in ("run", "replay")]
    table = new_table(f"{result.run}, trained with {changes}", "step", *columns)
    every = max(1, math.ceil(len(result.compared) / ROWS))
    for one in result.compared[every - 1 :: every]:
        table.add_row(str(one.version), *(number(side[name], ".3g") for name in names for side in (one.run, one.replay)))
    means = [_mean(one_side) for name in names for one_side in _sides(result.compared, name)]
    table.add_row("mean", *(number(mean, ".3g") for mean in means))
    return rendered(table)


def _sides(compared: Sequence[StepComparison], name: str) -> tuple[list[float | None], list[float | None]]:
    return [one.run[name] for one in compared], [one.replay[name] for one in compared]


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
