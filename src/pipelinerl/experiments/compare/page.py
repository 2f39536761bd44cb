"""The report of a comparison: one HTML page with tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipelinerl.experiments.compare.results import Ratio, RunResult, ScheduleRow, Spread, samples_per_s, time_to_reward
from pipelinerl.experiments.compare.settings import PIPELINE, ComparisonRequest, Trials
from pipelinerl.experiments.watch.page import page
from pipelinerl.report import count, number
from pipelinerl.report.sections import PageSection, table
from pipelinerl.report.series import WINDOW

# ---- conclusions from the numbers, in sentences


def findings(rows: Sequence[ScheduleRow], target: float | None, reward: str) -> list[str]:
    """Sentences that compare pipeline with the best conventional schedule and count failed runs, about `reward` rewards."""
    by_name = {row.schedule: row for row in rows}
    pipeline = by_name.get(PIPELINE)
    sentences: list[str] = []
    if pipeline is not None:
        time = pipeline.ratio_time_to_reward
        if target is None:
            sentences.append(f"No schedule's {reward} reward rose, so there is no target to compare times to.")
        elif pipeline.samples_to_reward.median == 0:
            sentences.append(
                f"The initial weights already have a {reward} reward of {target:g}, so there is no time to compare."
            )
        else:
            sentences.append(_in_words(time, f"reached a {reward} reward of {target:g}", "sooner", "later"))
        sentences.append(_in_words(pipeline.ratio_samples_per_s, "made samples", "faster", "slower"))
    for row in rows:
        if row.diverged:
            sentences.append(f"{row.schedule}: {row.diverged} of {row.runs} runs diverged.")
        missed = row.runs - row.reached - row.diverged
        if target is not None and missed:
            sentences.append(f"{row.schedule}: {missed} of {row.runs} runs did not reach {target:g}.")
    return sentences


def _in_words(ratio: Ratio, did: str, better: str, worse: str) -> str:
    if ratio.baseline is None:
        return f"There is no conventional run that {did}, so there is no ratio."
    if ratio.median is None or ratio.min is None or ratio.max is None:
        return f"There is no ratio to {ratio.baseline}: at least one run of the two schedules never {did}."
    seeds = len(ratio.per_seed)
    over = f"between {ratio.min:.2f} and {ratio.max:.2f} over {seeds} seeds" if seeds > 1 else "one seed, so no spread"
    comparison = better if ratio.median >= 1 else worse
    times = ratio.median if ratio.median >= 1 else 1 / ratio.median
    other = f"the best conventional schedule, {ratio.baseline}"
    sentence = f"pipeline {did} {times:.2f} times {comparison} than {other} (ratio {over})."
    if ratio.median < 1:
        return sentence + " Here it does not help."
    if ratio.min <= 1 and seeds > 1:
        return sentence + " Not in every seed: the difference is within the variation between seeds."
    return sentence


class Results(NamedTuple):
    """The numbers of a comparison: one row per schedule, and every run."""

    target: float | None
    rows: Sequence[ScheduleRow]
    runs: Sequence[RunResult]
    trials: Trials


def comparison_page(request: ComparisonRequest, results: Results, shown: Mapping[str, Mapping[str, Any]]) -> str:
    """The HTML. `shown` has what a page shows of each run, by label, in the order of `results.runs`."""
    target, rows, runs, trials = results
    config = request.config
    best = {ratio.baseline for row in rows for ratio in (row.ratio_time_to_reward, row.ratio_samples_per_s)}
    strong = [row.schedule for row in rows if row.schedule == PIPELINE or row.schedule in best]
    lead = (
        f"{config.environment.kind} with model {config.model.path}: {request.steps} optimizer steps of "
        f"{config.trainer.batch_size} rollouts per run, {count(request.seeds, 'seed')}. Runs were made one at a time, "
        "each from the same weights and with the whole machine."
    )
    sections = [
        PageSection(title="Findings", texts=[lead, *findings(rows, target, request.reward)]),
        table("Schedules", [_cells(row) for row in rows], _legend(target, request), strong=strong),
        table("Every run", [_run_cells(run) for run in runs]),
        _tried(request, trials),
        PageSection(title="Machine and method", texts=_circumstances(request, runs)),
    ]
    colours = {label: run.schedule for label, run in zip(shown, runs, strict=True)}
    return page(f"Schedules compared: {config.environment.kind}", sections, shown, colours)


def _cells(row: ScheduleRow) -> dict[str, str]:
    reached, rate = row.time_to_reward_s, row.samples_per_s
    missed, diverged = f"{row.reached} of {row.runs} runs reached it", f"{row.diverged} of {row.runs} diverged"
    return {
        "schedule": row.schedule,
        "time to target, s": missed if reached.median is None else _spread(reached, ".1f"),
        "times sooner": _spread(row.ratio_time_to_reward, ".2f"),
        "samples to target": _spread(row.samples_to_reward, ".0f"),
        "samples/s": diverged if rate.median is None else _spread(rate, ".1f"),
        "times faster": _spread(row.ratio_samples_per_s, ".2f"),
        "tokens/s": number(row.tokens_per_s, ".0f"),
        "mean length": number(row.length_mean, ".1f"),
        "ESS mean (min)": f"{number(row.ess_mean, '.4f')} ({number(row.ess_min, '.3f')})",
        "lag mean (max)": f"{number(row.lag_mean, '.2f')} ({number(row.lag_max, '.0f')})",
        "engine busy": number(row.engine_busy_fraction, ".0%"),
        "trainer busy": number(row.trainer_busy_fraction, ".0%"),
        "slots in use": number(row.slots_used_fraction, ".0%"),
        "settings": row.settings.label,
    }


def _legend(target: float | None, request: ComparisonRequest) -> str:
    how = "linear between evaluated versions" if request.held_out else f"mean over {WINDOW} steps"
    reward = (
        f"No target: no schedule's {request.reward} reward rose."
        if target is None
        else f"Target: a {request.reward} reward of {target:g} ({how})."
    )
    return (
        f"{reward} Values are medians over seeds, with the smallest and largest if they differ. "
        "Times sooner and times faster are ratios to the best conventional schedule (for that quantity, by its median), "
        "taken seed by seed; above 1, the schedule is better. Slots in use is averaged over the time in which any slot is "
        "in use: a draining batch counts, a training phase does not."
    )


def _run_cells(run: RunResult) -> dict[str, str]:
    return {
        "schedule": run.schedule,
        "seed": str(run.seed),
        "status": run.status,
        "time to target, s": number(time_to_reward(run), ".1f") if run.reached else "not reached",
        "samples/s": number(samples_per_s(run), ".1f"),
        "samples/s, last 4/5 of steps": number(run.measured.samples_per_s_later, ".1f"),
        "tokens/s": number(run.measured.tokens_per_s, ".0f"),
        "last reward": number(run.rewards[-1] if run.rewards else None, ".3f"),
        "same training reward at, s": number(run.reached_training.time_s if run.reached_training else None, ".1f"),
        "ESS mean": number(run.ess_mean, ".4f"),
        "lag mean": number(run.lag_mean, ".2f"),
        "began": run.began,
        "load before": number(run.load_before, ".2f"),
    }


def _tried(request: ComparisonRequest, trials: Trials) -> PageSection:
    rows = [
        {
            "schedule": schedule,
            "settings": trial.settings.label,
            "run": "full length" if trial.full else "short",
            "tokens/s": number(trial.tokens_per_s, ".0f"),
            "": "used" if tried.decided_by(trial) else "",
        }
        for schedule, tried in trials.items()
        for trial in tried.trials
    ]
    note = (
        f"A short run has about {request.trial_steps} steps. tokens/s excludes the first third of a short run, and the "
        "first fifth of a full-length run. A setting is changed only for one that is more than 2% faster."
    )
    untuned = "No settings were tried; the run file's settings were used."
    return table("Trials of settings", rows, note if request.tune else untuned)


def _circumstances(request: ComparisonRequest, runs: Sequence[RunResult]) -> list[str]:
    machine = request.machine
    memory = "" if machine.memory_gib is None else f", {machine.memory_gib:g} GiB"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return [
        f"{machine.cpu}, {count(machine.cores, 'core')}{memory}, {machine.system}",
        versions,
        f"Seeds {', '.join(map(str, request.seed_numbers))}; the order of the schedules rotates from seed to seed.",
        "The measured time includes no evaluation of held-out problems and no checkpoint.",
        *([_held_out(request, runs)] if request.held_out else []),
    ]


def _held_out(request: ComparisonRequest, runs: Sequence[RunResult]) -> str:
    share = max(run.saving_s / run.measured.training_s for run in runs)
    changed = ", ".join(f"{key} {value}" for key, value in request.held_out_args.items())
    return (
        f"Every {count(request.evaluate_every, 'step')} each run copied its weights, which took at most {share:.2%} of its "
        f"measured time. After the run each copy answered {request.held_out} held-out problems once, with the same random "
        f"numbers{f' and the environment arguments {changed}' if changed else ''}."
    )


def _spread(found: Spread, pattern: str) -> str:
    if found.median is None or found.min is None or found.max is None:
        return "-"
    middle, low, high = (format(value, pattern) for value in (found.median, found.min, found.max))
    return middle if low == high else f"{middle} ({low} to {high})"
