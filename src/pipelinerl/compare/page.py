"""The report of a comparison: tables and figures on one page of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipelinerl.compare.findings import LIMITS, findings
from pipelinerl.compare.request import Request
from pipelinerl.compare.results import Ratio, Row, RunResult, Spread, samples_per_s, time_to_reward
from pipelinerl.compare.settings import Settings, Trial
from pipelinerl.report import html
from pipelinerl.report.run_report import BATCH_SIZES, LEARNING, NO_TIMELINE, ON_POLICYNESS
from pipelinerl.report.series import WINDOW


class Tried(NamedTuple):
    """The settings that a schedule uses, and everything that was tried for it, in order."""

    used: Settings
    trials: Sequence[Trial]

    def decided_by(self, trial: Trial) -> bool:
        """Whether this is the trial for which the settings are used: the longest that they had."""
        return trial.settings == self.used and trial.full == any(one.full for one in self.trials)


Trials = Mapping[str, Tried]
"""By schedule."""


class Results(NamedTuple):
    """A whole comparison in numbers: a row for each schedule, and every run."""

    target: float | None
    rows: Sequence[Row]
    runs: Sequence[RunResult]
    trials: Trials


def comparison_page(request: Request, results: Results, figures: Mapping[str, bytes]) -> str:
    """The HTML. `figures` are PNGs by name: learning, on_policyness, and held_out and batch_sizes if there are any."""
    target, rows, runs, trials = results
    config = request.config
    best = {ratio.baseline for row in rows for ratio in (row.ratio_time_to_reward, row.ratio_samples_per_s)}
    strong = [row.schedule for row in rows if row.schedule == "pipeline" or row.schedule in best]
    body = [
        html.paragraph(
            f"{config.environment.kind} with model {config.model.path}: {request.steps} optimizer steps of "
            f"{config.trainer.batch_size} rollouts for each, {_count(request.seeds, 'seed')}, one run after another, "
            "each from the same weights and with the whole machine.",
            "lead",
        ),
        html.heading("What was found"),
        html.bullets(findings(rows, target, request.reward)),
        html.heading("Schedules"),
        html.table(_HEADER, [_cells(row) for row in rows], strong=strong),
        html.paragraph(_legend(target, request), "note"),
        *([html.heading("Held-out reward"), html.figure(figures["held_out"], HELD_OUT)] if "held_out" in figures else []),
        html.heading("Learning"),
        html.figure(figures["learning"], LEARNING + _dashed(None if request.held_out else target)),
        html.heading("On-policyness"),
        html.figure(figures["on_policyness"], ON_POLICYNESS),
        html.heading("Generation batch size"),
        html.figure(figures["batch_sizes"], BATCH_SIZES)
        if "batch_sizes" in figures
        else html.paragraph(NO_TIMELINE, "note"),
        html.heading("Where PipelineRL does not help"),
        html.bullets(LIMITS),
        html.heading("Every run"),
        html.table(_RUN_HEADER, [_run_cells(run) for run in runs]),
        html.heading("Settings that were tried"),
        *_tried(request, trials),
        html.heading("Machine and method"),
        html.bullets(_circumstances(request, runs)),
    ]
    return html.page(f"Schedules compared: {config.environment.kind}", body)


_HEADER = (
    *("schedule", "time to target, s", "times sooner", "samples to target", "samples/s", "times faster", "tokens/s"),
    *("mean length", "ESS mean (min)", "lag mean (max)", "engine busy", "trainer busy", "slots in use", "settings"),
)


def _cells(row: Row) -> list[str]:
    reached = row.time_to_reward_s
    return [
        row.schedule,
        _spread(reached, ".1f") if reached.median is not None else f"{row.reached} of {row.runs} runs reached it",
        _ratio(row.ratio_time_to_reward),
        _spread(row.samples_to_reward, ".0f"),
        _spread(row.samples_per_s, ".1f")
        if row.samples_per_s.median is not None
        else f"{row.diverged} of {row.runs} diverged",
        _ratio(row.ratio_samples_per_s),
        _number(row.tokens_per_s, ".0f"),
        _number(row.length_mean, ".1f"),
        f"{_number(row.ess_mean, '.4f')} ({_number(row.ess_min, '.3f')})",
        f"{_number(row.lag_mean, '.2f')} ({_number(row.lag_max, '.0f')})",
        _number(row.engine_busy_fraction, ".0%"),
        _number(row.trainer_busy_fraction, ".0%"),
        _number(row.slots_used_fraction, ".0%"),
        row.settings.label,
    ]


HELD_OUT = (
    "The same held-out problems, answered after the run by the weights of the same versions of every run, with their 95% "
    "intervals as standard errors; the time of a version is when the trainer had made it. Dashed: the target."
)


def _legend(target: float | None, request: Request) -> str:
    how = "between evaluated versions the reward is taken as linear" if request.held_out else f"mean of {WINDOW} steps"
    reward = (
        f"No target: no schedule's {request.reward} reward rose."
        if target is None
        else f"Target: a {request.reward} reward of {target:g} ({how})."
    )
    return (
        f"{reward} Medians over seeds, with the smallest and largest where they differ. "
        "Times sooner and faster are ratios to the best conventional schedule (for that quantity, by its median), seed by "
        "seed: above 1 is better than it. Slots in use: while any is, so that a draining batch counts, and a phase of "
        "training does not."
    )


def _dashed(target: float | None) -> str:
    return "" if target is None else " Dashed: the target."


_RUN_HEADER = (
    *("schedule", "seed", "status", "time to target, s", "samples/s", "samples/s, last 4/5 of steps", "tokens/s"),
    *("last reward", "same training reward at, s", "ESS mean", "lag mean", "began", "load before"),
)


def _run_cells(run: RunResult) -> list[str]:
    return [
        run.schedule,
        str(run.seed),
        run.status,
        _number(time_to_reward(run), ".1f") if run.reached else "not reached",
        _number(samples_per_s(run), ".1f"),
        _number(run.measured.samples_per_s_later, ".1f"),
        _number(run.measured.tokens_per_s, ".0f"),
        _number(run.rewards[-1] if run.rewards else None, ".3f"),
        _number(run.reached_training.time_s if run.reached_training else None, ".1f"),
        _number(run.ess_mean, ".4f"),
        _number(run.lag_mean, ".2f"),
        run.began,
        _number(run.load_before, ".2f"),
    ]


def _tried(request: Request, trials: Trials) -> list[str]:
    if not request.tune:
        return [html.paragraph("Nothing was tried: the run file's settings were used.", "note")]
    rows = [
        [
            schedule,
            trial.settings.label,
            "full length" if trial.full else "short",
            _number(trial.tokens_per_s, ".0f"),
            "used" if tried.decided_by(trial) else "",
        ]
        for schedule, tried in trials.items()
        for trial in tried.trials
    ]
    return [
        html.table(("schedule", "settings", "run", "tokens/s", ""), rows),
        html.paragraph(
            f"A short run has about {request.trial_steps} steps; tokens/s after its first third, of a full one after the "
            "first fifth. A setting is changed only for one that is more than 2% faster.",
            "note",
        ),
    ]


def _circumstances(request: Request, runs: Sequence[RunResult]) -> list[str]:
    machine = request.machine
    memory = "" if machine.memory_gib is None else f", {machine.memory_gib:g} GiB"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return [
        f"{machine.cpu}, {_count(machine.cores, 'core')}{memory}, {machine.system}",
        versions,
        f"Seeds {', '.join(map(str, request.seed_numbers))}; the order of the schedules rotates from seed to seed.",
        "No evaluation of held-out problems and no checkpoint falls into the measured time.",
        *([_held_out(request, runs)] if request.held_out else []),
    ]


def _held_out(request: Request, runs: Sequence[RunResult]) -> str:
    share = max(run.saving_s / run.measured.training_s for run in runs)
    changed = ", ".join(f"{key} {value}" for key, value in request.held_out_args.items())
    return (
        f"Every {_count(request.evaluate_every, 'step')} each run copied its weights, which took at most {share:.2%} of its "
        f"measured time. After the run each copy answered {request.held_out} held-out problems once, with the same random "
        f"numbers{f', the environment with {changed}' if changed else ''}."
    )


def _spread(found: Spread, pattern: str) -> str:
    if found.median is None or found.min is None or found.max is None:
        return "-"
    middle, low, high = (format(value, pattern) for value in (found.median, found.min, found.max))
    return middle if low == high else f"{middle} ({low} to {high})"


def _ratio(ratio: Ratio) -> str:
    return _spread(Spread(median=ratio.median, min=ratio.min, max=ratio.max, per_seed=ratio.per_seed), ".2f")


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
