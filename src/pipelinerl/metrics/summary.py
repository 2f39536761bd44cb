"""The contents of `summary.json`, computed from a run's records and the stages' last statuses. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from pipelinerl.config.schema import RunConfig
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.records import StepRecord, collapse_of
from pipelinerl.metrics.statistics import LOW_ESS, actor_total, engine_total, quantile, weighted_mean
from pipelinerl.types import TRAINER, ActorProgress, StageStatus, TrainerProgress, trainer_progress

MANY_CUT = 0.5
"""If at least this share of the completions was cut, that is the likely reason for equal rewards."""


def summarize(
    config: RunConfig,
    steps: Sequence[StepRecord],
    evaluations: Sequence[EvaluationRecord],
    statuses: Mapping[str, StageStatus],
    *,
    wall_s: float,
    status: str,
    stream_rollouts: int = 0,
    earlier_rollouts: int = 0,
    peak_memory_bytes: Mapping[str, int] | None = None,
    peak_gpu_memory_bytes: Mapping[str, int] | None = None,
    resumed_from: int | None = None,
) -> dict[str, Any]:
    """The contents of `summary.json`. A number that can't be computed is None. Raises no error.

    steps, evaluations   of the whole run, sessions before a resume included
    statuses             the last status of every stage of this session, by stage; several engines or actors are summed
    wall_s               length of this session; rates divide this session's counts (steps after `resumed_from`) by it
    status               "finished", "interrupted" or "failed: WHY"
    stream_rollouts      rollouts in the stream: written by the actor and not yet taken by the trainer
    earlier_rollouts     started rollouts of earlier sessions, settled or in the stream: trainers count them, actors do not
    resumed_from         version of the checkpoint that this session started from

    `reward_first` and `reward_last` are means of `reward_read_mean` over the first and last min(5, n/4) of n steps, at least
    one; `metrics_first` and `metrics_last` are those of the rollouts' metrics, by name, over the same steps.
    Means over the run weight every step equally, except that lengths are weighted by rollouts and lag by tokens.
    `ess_low_steps` counts the steps with an ESS below `LOW_ESS`; `ess_low_first` is the version that the first of them made.
    `cut_fraction` is the share of this session's rollouts that ended at their token limit. `nothing_learned` says why no
    step had a gradient; it is None if a step had one, or if there was no step. `collapse` says when the reward was at its
    floor (see `CollapseWatch`), and is None if it was not.
    `eval_online` are the evaluations during training. `version`: the weights when the evaluation began; its tokens
    were sampled by versions `version_min` to `version_max`. `eval_skipped` counts evaluations that were due but skipped.
    `started_length_mean` is the last step's (see `StepRecord`). `actor_dropped_length_mean` is the mean number of
    sampled tokens of the rollouts that actors dropped, by reason.
    `update_bytes_mean`, `update_s_p50` and `update_delta_fraction` are over the weight updates in the records of steps:
    bytes to each engine, time until every engine had it, and share that was sent as a delta.
    `generated_per_trained`: rollouts (and sampled tokens) that were trained on or dropped, per rollout (token) trained on.
    `dropped_fraction`: share of these rollouts, by reason. `no_gradient_fraction`: share of the rollouts trained on whose
    advantage was 0. `groups_skipped`: how often `actor.online_filter` skipped a problem in this session; `skipped_fraction`
    is their share of all groups whose turn had come.
    `rollouts_dropped` is the sum of the actor's and the trainer's counts. If the number of started rollouts is not the sum
    of those trained, dropped, queued and in progress, the key `conservation_error` is added, with the numbers.
    """
    engine, actor, trainer = engine_total(statuses), actor_total(statuses), trainer_progress(statuses.get(TRAINER))
    if actor:
        actor = msgspec.structs.replace(actor, rollouts_started=actor.rollouts_started + earlier_rollouts)
    session = [step for step in steps if resumed_from is None or step.version > resumed_from]
    pauses_s = engine.pauses_s if engine else ()
    updates = {step.update.version: step.update for step in steps if step.update is not None}.values()
    handed_over = actor.rollouts_handed_over + actor.rollouts_dropped.get("stream_full", 0) if actor else 0
    cut = _ratio(actor.rollouts_cut, handed_over) if actor else None
    summary: dict[str, Any] = {
        "status": status,
        "schedule": config.schedule.kind,
        "seed": config.seed,
        "model": config.model.path,
        "environment": config.environment.kind,
        "warm_start_steps": config.trainer.warm_start.steps if config.trainer.warm_start else 0,
        "resumed_from": resumed_from,
        # A trainer that died may have written its record but not its status, or neither.
        "version": max(steps[-1].version if steps else 0, trainer.version if trainer else 0, resumed_from or 0),
        "wall_s": wall_s,
        "optimizer_steps": len(steps),
        "samples_trained": sum(step.samples for step in steps),
        "samples_per_s": _ratio(sum(step.samples for step in session), wall_s),
        "tokens_generated": engine.tokens_generated if engine else None,
        "tokens_per_s": _ratio(engine.tokens_generated, wall_s) if engine else None,
        "prompt_tokens": engine.prompt_tokens if engine else None,
        "prefilled_tokens": engine.prefilled_tokens if engine else None,
        "tokens_trained": sum(step.tokens_trained for step in steps),
        "cut_fraction": cut,
        "collapse": collapse_of(steps),
        "nothing_learned": nothing_learned(steps, cut, config.actor.max_tokens),
        **_quality(steps),
        **_evaluated("before", next((e for e in evaluations if e.when == "before"), None)),
        **_evaluated("after", next((e for e in reversed(evaluations) if e.when == "after"), None)),
        "eval_online": [
            {name: getattr(e, name) for name in ("version", "version_min", "version_max", "metrics")}
            | {"reward": e.reward_mean, "standard_error": e.reward_standard_error}
            for e in evaluations
            if e.when == "online"
        ],
        "eval_skipped": sum(e.skipped for e in evaluations),
        "weight_updates": engine.weight_updates if engine else None,
        "update_pause_s_p50": quantile(pauses_s, 0.5),
        "update_pause_s_p99": quantile(pauses_s, 0.99),
        "update_bytes_mean": _mean(update.bytes for update in updates),
        "update_s_p50": quantile([update.time_s for update in updates], 0.5),
        "update_delta_fraction": _mean(update.encoding == "delta" for update in updates),
        "engine_busy_fraction": _ratio(engine.busy_s, engine.ready_s) if engine else None,
        "trainer_busy_fraction": _ratio(trainer.busy_s, trainer.ready_s) if trainer else None,
        "peak_memory_bytes": dict(peak_memory_bytes or {}),
        "peak_gpu_memory_bytes": dict(peak_gpu_memory_bytes or {}),
    }
    return summary | account_for_rollouts(actor, trainer, stream_rollouts, steps)


def account_for_rollouts(
    actor: ActorProgress | None, trainer: TrainerProgress | None, stream_rollouts: int, steps: Sequence[StepRecord] = ()
) -> dict[str, Any]:
    """What happened to every started rollout, and what was generated for what was trained on.

    Each part is counted by the stage that holds it, not derived from the total. Without an actor's status the numbers that
    it would give are None, and the sum is not checked.
    """
    counted, trainer = actor or ActorProgress(), trainer or TrainerProgress()
    trained, queued = trainer.trained, stream_rollouts + trainer.queued
    by_actor = Counter(counted.rollouts_dropped)
    dropped = Counter(trainer.dropped) + by_actor
    dropped_tokens = sum(trainer.dropped_tokens.values()) + sum(counted.dropped_tokens.values())
    tokens = round(sum(step.samples * (step.completion_length_mean or 0.0) for step in steps))
    ended = trained + dropped.total()
    lengths = {why: tokens / by_actor[why] for why, tokens in sorted(counted.dropped_tokens.items()) if by_actor[why]}
    account: dict[str, Any] = {
        "rollouts_started": actor and actor.rollouts_started,
        "rollouts_trained": trained,
        "rollouts_dropped": dict(dropped.most_common()),
        "actor_dropped_length_mean": lengths,
        "rollouts_queued": queued,
        "rollouts_in_progress": actor and actor.rollouts_in_progress,
        "generated_per_trained": {
            "rollouts": _ratio(ended, trained),
            "tokens": _ratio(tokens + dropped_tokens, tokens),
        },
        "dropped_fraction": {reason: rollouts / ended for reason, rollouts in dropped.most_common()},
        "no_gradient_fraction": _ratio(sum(step.samples_skipped for step in steps), sum(step.samples for step in steps)),
        "groups_skipped": counted.groups_skipped,
        "skipped_fraction": _ratio(counted.groups_skipped, counted.groups_skipped + counted.groups_started),
    }
    accounted = ended + queued + counted.rollouts_in_progress
    if actor and accounted != actor.rollouts_started:
        account["conservation_error"] = {
            "started": actor.rollouts_started,
            "accounted": accounted,
            "missing": actor.rollouts_started - accounted,
            "trained": trained,
            "dropped": dropped.total(),
            "queued_in_stream": stream_rollouts,
            "queued_at_trainer": trainer.queued,
            "in_progress": actor.rollouts_in_progress,
            "handed_over": actor.rollouts_handed_over,
        }
    return account


def nothing_learned(steps: Sequence[StepRecord], cut: float | None, max_tokens: int) -> str | None:
    """A sentence that says why no step had a gradient; None if one had, or there was no step. `cut` is `cut_fraction`."""
    if not steps or any(step.tokens_trained and step.grad_norm != 0 for step in steps):
        return None
    rewards = {step.reward_mean for step in steps if step.reward_std == 0}
    if len(rewards) == 1 and all(step.reward_std == 0 for step in steps):
        reason = f"every rollout had the reward {rewards.pop():g}"
    else:
        reason = "in every group all rewards were equal"
    message = f"no step had a gradient, as {reason}"
    if cut is not None and cut >= MANY_CUT:
        return f"{message}; {cut:.0%} of the answers were cut at their token limit: raise actor.max_tokens, {max_tokens} now"
    return f"{message}; check the answers with `pipelinerl browse` or `pipelinerl try`, and the reward"


def edge_of(steps: int) -> int:
    """How many of a run's steps count as its beginning, and how many as its end."""
    return max(1, min(5, steps // 4))


def _quality(steps: Sequence[StepRecord]) -> dict[str, Any]:
    edge = edge_of(len(steps))
    first, last = steps[:edge], steps[-edge:]
    ess = [step.ess for step in steps if step.ess is not None]
    started = [step.started_length_mean for step in steps if step.started_length_mean is not None]
    low = [step.version for step in steps if step.ess is not None and step.ess < LOW_ESS]
    return {
        "reward_first": _mean(step.reward for step in first),
        "reward_last": _mean(step.reward for step in last),
        "metrics_first": _metrics(first),
        "metrics_last": _metrics(last),
        "trained_length_mean": weighted_mean((step.completion_length_mean, step.samples) for step in steps),
        "sampled_length_mean": weighted_mean((step.sampled_length_mean, step.samples) for step in steps),
        "started_length_mean": started[-1] if started else None,
        "length_lag_correlation": _mean(step.length_lag_correlation for step in steps),
        "ess_mean": _mean(ess),
        "ess_min": min(ess, default=None),
        "ess_low_steps": len(low),
        "ess_low_first": low[0] if low else None,
        "lag_mean": weighted_mean((step.lag_mean, step.tokens_trained) for step in steps),
        "lag_max": max((step.lag_max for step in steps if step.lag_max is not None), default=None),
    }


def _evaluated(when: str, record: EvaluationRecord | None) -> dict[str, Any]:
    lengths = ("mean", "p50", "p99")
    return {
        f"eval_reward_{when}": record and record.reward_mean,
        f"eval_reward_{when}_standard_error": record and record.reward_standard_error,
        f"eval_{when}_lengths": record and {name: getattr(record, f"completion_length_{name}") for name in lengths},
        f"eval_{when}_metrics": record.metrics if record else {},
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _metrics(steps: Sequence[StepRecord]) -> dict[str, float | None]:
    names = sorted({name for step in steps for name in step.metrics})
    known = {name: [step for step in steps if name in step.metrics] for name in names}
    return {
        name: weighted_mean((s.metrics[name], s.metric_counts.get(name, s.samples)) for s in known[name]) for name in names
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
