"""The report of a comparison: its findings in sentences, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipelinerl.experiments.compare.request import PIPELINE, ComparisonRequest
from pipelinerl.experiments.compare.results import QUANTITIES, Ratio, RunResult, ScheduleRow, Spread
from pipelinerl.experiments.compare.tuning import TuningResult
from pipelinerl.report import count, number
from pipelinerl.report.sections import PageSection, table
from pipelinerl.report.series import WINDOW


def findings(rows: Sequence[ScheduleRow], target: float | None, reward: str) -> list[str]:
    """Sentences that compare pipeline with the best conventional schedule and count failed runs, about `reward` rewards."""
    pipeline = next((row for row in rows if row.schedule == PIPELINE), None)
    sentences: list[str] = []
    if pipeline is not None:
        if target is None:
            sentences.append(f"No schedule's {reward} reward rose, so there is no target to compare times to.")
        elif pipeline.quantities["samples_to_reward"].median == 0:
            sentences.append(
                f"The initial weights already have a {reward} reward of {target:g}, so there is no time to compare."
            )
        else:
            did = f"reached a {reward} reward of {target:g}"
            sentences.append(_in_words(pipeline.ratio_time_to_reward, did, "sooner", "later"))
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
    comparison, times = (better, ratio.median) if ratio.median >= 1 else (worse, 1 / ratio.median)
    other = f"the best conventional schedule, {ratio.baseline}"
    sentence = f"pipeline {did} {times:.2f} times {comparison} than {other} (ratio {over})."
    if ratio.median < 1:
        return sentence + " Here it does not help."
    if ratio.min <= 1 and seeds > 1:
        return sentence + " Not in every seed: the difference is within the variation between seeds."
    return sentence


def sections(
    request: ComparisonRequest,
    target: float | None,
    rows: Sequence[ScheduleRow],
    runs: Sequence[RunResult],
    tuning: Mapping[str, TuningResult],
) -> list[PageSection]:
    """What the report says, above the runs themselves. `tuning`: the trials of each schedule, by its label."""
    config, machine = request.config, request.machine
    best = {ratio.baseline for row in rows for ratio in (row.ratio_time_to_reward, row.ratio_samples_per_s)}
    lead = (
        f"{config.environment.kind} with model {config.model.path}: {request.steps} optimizer steps of "
        f"{config.trainer.batch_size} rollouts per run, {count(request.seeds, 'seed')}. Runs were made one at a time, "
        "each from the same weights and with the whole machine."
    )
    how = "linear between evaluated versions" if request.held_out else f"mean over {WINDOW} steps"
    legend = (
        f"Target: a {request.reward} reward of {number(target, 'g')} ({how}). "
        "Values are medians over seeds, with the smallest and largest if they differ. Times sooner and times faster are "
        "ratios, seed by seed, to the schedule that is the best conventional one by its median; above 1 is better."
    )
    tried = [
        {
            "schedule": schedule,
            "settings": trial.settings.label,
            "run": "full length" if trial.full else "short",
            "tokens/s": number(trial.tokens_per_s, ".0f"),
            "": "used" if trial.settings == tuned.used else "",
        }
        for schedule, tuned in tuning.items()
        for trial in tuned.trials
    ]
    trials = (
        f"A short run has about {request.trial_steps} steps. tokens/s excludes the first third of a short run, and the "
        "first fifth of a full-length run. A setting is changed only for one that is more than 2% faster."
    )
    memory = "" if machine.memory_gib is None else f", {machine.memory_gib:g} GiB"
    method = [
        f"{machine.cpu}, {count(machine.cores, 'core')}{memory}, {machine.system}",
        ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        f"Seeds {', '.join(map(str, request.seed_numbers))}; the order of the schedules rotates from seed to seed.",
    ]
    if request.held_out:
        share = max(run.saving_s / run.measured.training_s for run in runs)
        changed = ", ".join(f"{key} {value}" for key, value in request.held_out_args.items())
        method.append(
            f"Every {count(request.evaluate_every, 'step')} each run copied its weights, which took at most {share:.2%} of "
            f"its measured time. After the run each copy answered {request.held_out} held-out problems once, with the same "
            f"random numbers{f' and the environment arguments {changed}' if changed else ''}."
        )
    return [
        PageSection(title="Findings", texts=[lead, *findings(rows, target, request.reward)]),
        table("Schedules", list(map(_cells, rows)), legend, strong=[PIPELINE, *(one for one in best if one)]),
        table("Every run", list(map(_run_cells, runs))),
        table("Trials of settings", tried, trials if request.tune else "The run file's settings were used, without trials."),
        PageSection(title="Machine and method", texts=method),
    ]


def _cells(row: ScheduleRow) -> dict[str, str]:
    quantities = {
        QUANTITIES[name].heading: _spread(found, QUANTITIES[name].pattern) for name, found in row.quantities.items()
    }
    return {
        "schedule": row.schedule,
        "times sooner": _spread(row.ratio_time_to_reward, ".2f"),
        "times faster": _spread(row.ratio_samples_per_s, ".2f"),
        "runs": f"{row.runs}, of which {row.reached} reached it" + (f", {row.diverged} diverged" if row.diverged else ""),
        **quantities,
        "settings": row.settings.label,
    }


def _run_cells(run: RunResult) -> dict[str, str]:
    quantities = {one.heading: number(one.of(run), one.pattern) for one in QUANTITIES.values()}
    named = {"schedule": run.schedule, "seed": str(run.seed), "status": run.status}
    return named | quantities | {"began": run.began, "load before": number(run.load_before, ".2f")}


def _spread(found: Spread, pattern: str) -> str:
    if found.median is None or found.min is None or found.max is None:
        return "-"
    middle, low, high = (format(value, pattern) for value in (found.median, found.min, found.max))
    return middle if low == high else f"{middle} ({low} to {high})"
