"""Sums of the progress of several generation processes: one total for the engines and one for the actors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import TypeVar

from pipelinerl.types import ActorProgress, EngineProgress, StageStatus, TrainerProgress

ENDED_ENGINES, ENDED_ACTORS = "ended-engines", "ended-actors"
"""Stages under which the launcher publishes the totals of processes that died and were replaced."""

ProgressT = TypeVar("ProgressT", EngineProgress, ActorProgress, TrainerProgress)


def engine_total(statuses: Mapping[str, StageStatus]) -> EngineProgress | None:
    """The total over all engines; None if there is none.

    Counts and times are summed, so that `busy_s / ready_s` is the mean over the engines. `version` is the oldest version
    that any engine holds, and `weight_updates` the largest count of one engine. The last of `pauses_s` is the longest of
    the engines' latest pauses.
    """
    engines = _all(statuses.values(), EngineProgress)
    if len(engines) < 2:
        return engines[0] if engines else None
    by_latest_pause = sorted(engines, key=lambda engine: engine.pauses_s[-1:])
    return EngineProgress(
        version=min((engine.version for engine in engines if engine.slots), default=0),  # one that has ended has no slots
        slots=sum(engine.slots for engine in engines),
        in_progress=sum(engine.in_progress for engine in engines),
        queued=sum(engine.queued for engine in engines),
        tokens_generated=sum(engine.tokens_generated for engine in engines),
        decode_steps=sum(engine.decode_steps for engine in engines),
        busy_s=sum(engine.busy_s for engine in engines),
        ready_s=sum(engine.ready_s for engine in engines),
        weight_updates=max(engine.weight_updates for engine in engines),
        pauses_s=tuple(pause_s for engine in by_latest_pause for pause_s in engine.pauses_s),
        runner=engines[0].runner,
        notes=engines[0].notes,
        begun=sum((Counter(engine.begun) for engine in engines), Counter()),
    )


def actor_total(statuses: Mapping[str, StageStatus]) -> ActorProgress | None:
    """The total over all actors; None if there is none. Counts are summed; `recent_reward` and `started_length_mean` are
    means over the actors that have one, the latter weighted by `started_lengths`.
    """
    actors = _all(statuses.values(), ActorProgress)
    if len(actors) < 2:
        return actors[0] if actors else None
    dropped: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for actor in actors:
        dropped.update(actor.rollouts_dropped)
        tokens.update(actor.dropped_tokens)
    lengths = [
        (actor.started_length_mean, actor.started_lengths) for actor in actors if actor.started_length_mean is not None
    ]
    rewards = [actor.recent_reward for actor in actors if actor.recent_reward is not None]
    return ActorProgress(
        groups_started=sum(actor.groups_started for actor in actors),
        groups_skipped=sum(actor.groups_skipped for actor in actors),
        rollouts_started=sum(actor.rollouts_started for actor in actors),
        rollouts_handed_over=sum(actor.rollouts_handed_over for actor in actors),
        rollouts_cut=sum(actor.rollouts_cut for actor in actors),
        rollouts_dropped=dict(dropped),
        dropped_tokens=dict(tokens),
        rollouts_in_progress=sum(actor.rollouts_in_progress for actor in actors),
        recent_reward=fmean(rewards) if rewards else None,
        started_length_mean=fmean([mean for mean, _ in lengths], [count for _, count in lengths]) if lengths else None,
        started_lengths=sum(count for _, count in lengths),
        evaluations={when: reward for actor in actors for when, reward in actor.evaluations.items()},
        evaluated=sum(actor.evaluated for actor in actors),
    )


def trainer_progress(statuses: Mapping[str, StageStatus]) -> TrainerProgress | None:
    return next(iter(_all(statuses.values(), TrainerProgress)), None)


def _all(statuses: Iterable[StageStatus], kind: type[ProgressT]) -> list[ProgressT]:
    return [status.progress for status in statuses if isinstance(status.progress, kind)]
