"""The limit of a pipeline: how fast a perfect one would be on the same cores, and where a real one's seconds went.

Overlap alone gains nothing: N cores need (g + t) / N for generating and training, in any order. A pipeline gains what a
conventional run loses: draining engines, waits, and cores that one of the phases can't use. A perfect one loses nothing:

    limit = (g at full H + t) / N        S_max = T_conventional / limit

All parts are CPU seconds: the seconds in which one core computed for a process, user and system, all its threads. They add
up over processes that share cores, which seconds of a clock on the wall do not. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipelinerl.metrics.records import StepRecord, TimelineRecord
from pipelinerl.report.series import RunRecords, full_intervals, sampled_tokens

LIMIT = ("generation", "training")
"""The parts of `core_seconds` that a perfect pipeline has too."""


class WorkCosts(NamedTuple):
    """What work costs in a pipeline, in CPU seconds.

    token_s    of a generation process per token sampled by full engines: decode steps of constant H, prompts, the actor and
               the environment; without weight updates
    trained_s  of an optimizer step per token that goes through the model
    """

    token_s: float
    trained_s: float


def costs_of(records: RunRecords) -> WorkCosts | None:
    """The costs in a run. None without CPU seconds in its records, or if engines or trainer compute elsewhere."""
    engine, trainer, full = records.config.engine, records.config.trainer, full_intervals(records.timeline)
    elsewhere = engine.kind != "local" or engine.device != "cpu" or trainer.device != "cpu"
    if elsewhere or not full or not all(step.cpu_s for step in records.steps):
        return None
    tokens = sum(after.tokens_generated - before.tokens_generated for before, after in full)
    decoding_s = math.fsum(_generating_s(after) - _generating_s(before) for before, after in full)
    return WorkCosts(decoding_s / tokens, _cpu_s(records, "step") / max(1, _through_model(records.steps)))


def limit_s(steps: Sequence[StepRecord], costs: WorkCosts, cores: int) -> float:
    """The seconds that a perfect pipeline takes for the work of a run: the tokens of the rollouts in `steps`."""
    return (sampled_tokens(steps) * costs.token_s + _through_model(steps) * costs.trained_s) / cores


def core_seconds(records: RunRecords, costs: WorkCosts, cores: int) -> dict[str, float]:
    """Where the seconds of the cores went from the run's begin to the end of its last step; the sum is `cores` times that.

    generation        tokens that were trained on, at the cost of full engines; with `training` the limit
    training          forward, backward and optimizer
    engines not full  what tokens cost more because an engine had fewer sequences, and waiting. It can be slightly negative:
                      while a pipeline fills, contexts are short
    never trained on  tokens at the cost of full engines: dropped, or unfinished or queued at the end
    weights           copying them for the engines, and the engines' updates
    preparation       all else of the training process: reading and preparing rollouts, records, waiting
    evaluation        copies of the weights that are evaluated after the run
    launcher          the hub: groups and records on their way, statuses, the view
    idle              the rest, which the records do not explain: no process computed, or other programs did

    `costs` are the run's own. With several ranks, rank 0 stands for all of them.
    """
    begin, end, trained = records.begin_s, records.steps[-1].time_s, sampled_tokens(records.steps)

    def of_engines(counter: Callable[[TimelineRecord], float]) -> float:
        return math.fsum(
            _at(own, end, counter) - _at(own, begin, counter)
            for worker in sorted({one.worker for one in records.timeline})
            for own in [[one for one in records.timeline if one.worker == worker]]
        )

    generated = of_engines(lambda one: one.tokens_generated)
    found = {
        "generation": trained * costs.token_s,
        "training": _cpu_s(records, "step"),
        "engines not full": of_engines(_generating_s) - generated * costs.token_s,
        "never trained on": (generated - trained) * costs.token_s,
        "weights": _cpu_s(records, "publish") + of_engines(lambda one: one.update_cpu_s),
        "preparation": _cpu_s(records, "other"),
        "evaluation": _cpu_s(records, "saving"),
        "launcher": (records.summary or {}).get("launcher_cpu_s") or 0.0,
    }
    return found | {"idle": cores * (end - begin) - math.fsum(found.values())}


def _cpu_s(records: RunRecords, part: str) -> float:
    """CPU seconds of the training processes for `part` of `StepRecord.cpu_s`."""
    return records.config.trainer.ranks * math.fsum(step.cpu_s[part] for step in records.steps)


def _through_model(steps: Sequence[StepRecord]) -> int:
    return sum(step.tokens_forwarded for step in steps)


def _generating_s(record: TimelineRecord) -> float:
    return record.cpu_s - record.update_cpu_s


def _at(timeline: Sequence[TimelineRecord], time_s: float, counter: Callable[[TimelineRecord], float]) -> float:
    """A counter of one engine at `time_s`, interpolated linearly between its records."""
    before = timeline[0]
    for after in timeline:
        if after.time_s >= time_s:
            share = (time_s - before.time_s) / (after.time_s - before.time_s) if after is not before else 0.0
            return counter(before) + share * (counter(after) - counter(before))
        before = after
    return counter(before)
