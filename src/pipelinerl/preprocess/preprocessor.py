"""Turns a finished group into training samples, and counts dropped rollouts by reason and length.

rollout stream ──▶ reader of the trainer                                                     (one process)
rollout stream ──▶ reader ──▶ `run_stage` ──▶ hub ──▶ trainer                                (two)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from pipelinerl.config.schema import PreprocessConfig
from pipelinerl.errors import RolloutError, UserError
from pipelinerl.hub.client import HubReader
from pipelinerl.interfaces import Board
from pipelinerl.preprocess.advantages import Credit, make_advantages
from pipelinerl.status.board import StatusReporter
from pipelinerl.types import (
    ACTOR,
    PREPROCESSOR,
    TRAINER,
    DroppedRollout,
    Group,
    Prepared,
    Rollout,
    Segment,
    TrainingSample,
    Turn,
    versions_from_spans,
)

LOGPROB_TOLERANCE = 1e-2
"""How far rounding (a bfloat16 head) may push a log-probability above 0; higher values are rejected."""

POLL_S = 0.002


Scorer = Callable[[Sequence[Segment]], Sequence[Sequence[float]]]
"""For each segment, the log-probabilities of its sampled tokens, in order of position, under the reference model of the KL
term. They are at the temperature of training rollouts, like `behaviour_logprobs`. A call has all segments of a group."""


def prepare(group: Group, config: PreprocessConfig, score: Scorer | None = None, *, scores_prompts: bool = True) -> Prepared:
    """Turn a group into samples. Advantages are computed over the whole group, before rollouts are dropped.

    A rollout is dropped for the first of these reasons that applies:
    `empty`: it has no sampled tokens; `overlong`: its last completion was cut at its token limit (`overlong: drop`);
    `zero_advantage`: its advantage is 0, so it has no policy gradient (`zero_advantage: drop`).

    Without `scores_prompts`, a turn with a prompt of its own for the teacher is refused: what scores it does not have this.

    Raises RolloutError, naming the group and rollout, for an inconsistent rollout, and UserError for such a prompt.
    """
    try:
        found = make_advantages(config)(group)
    except (ValueError, RolloutError) as error:
        raise RolloutError(f"group {group.index}: {error}") from error
    samples: list[TrainingSample] = []
    scored: list[list[Segment]] = []
    dropped: list[DroppedRollout] = []
    for rollout, credit in zip(group.rollouts, found, strict=True):
        sample = _sample(group, rollout, credit, config.observation_weight)
        if sample.sampled_count == 0:
            dropped.append(DroppedRollout.of(sample, "empty"))
        elif not sample.finished and config.overlong == "drop":
            dropped.append(DroppedRollout.of(sample, "overlong"))
        elif not sample.has_gradient and config.zero_advantage == "drop":
            dropped.append(DroppedRollout.of(sample, "zero_advantage"))
        else:
            samples.append(sample)
            if not scores_prompts and any(turn.teacher_prompt_ids for turn in rollout.turns):
                raise UserError(
                    "launch.preprocessor: the trainer's ranks can't score a teacher's own prompts (`teacher_prompt`); "
                    "set it to process"
                )
            if score is not None:
                scored.append(_scored(sample, rollout))
    if score is not None and samples:
        samples = _with_reference(samples, scored, score)
    return Prepared(
        index=group.index,
        ids=tuple(rollout.id for rollout in group.rollouts),
        samples=tuple(samples),
        dropped=tuple(dropped),
    )


def _sample(group: Group, rollout: Rollout, credit: Credit, observation_weight: float) -> TrainingSample:
    try:
        joined = join_turns(rollout.turns, observations=observation_weight > 0)
    except RolloutError as error:
        raise RolloutError(f"group {group.index}, rollout {rollout.id!r}: {error}") from error
    return TrainingSample(
        id=rollout.id,
        group_index=group.index,
        segments=joined.segments,
        behaviour_logprobs=joined.behaviour_logprobs,
        versions=joined.versions,
        advantage=credit,
        reward=rollout.reward,
        finished=not rollout.turns or rollout.turns[-1].completion.finish_reason != "length",
        metrics=rollout.metrics,
        supervised_weight=observation_weight,
    )


def _scored(sample: TrainingSample, rollout: Rollout) -> list[Segment]:
    """The sampled tokens in the context in which the reference scores them: its own prompts, if the turns have any."""
    if not any(turn.teacher_prompt_ids for turn in rollout.turns):
        return [msgspec.structs.replace(segment, supervised=()) for segment in sample.segments]
    turns = [(turn.teacher_prompt_ids or turn.prompt_ids, turn.completion.token_ids) for turn in rollout.turns]
    return [
        Segment(token_ids=(*prompt, *ids), sampled=((len(prompt), len(prompt) + len(ids)),)) for prompt, ids in turns if ids
    ]


def _with_reference(
    samples: Sequence[TrainingSample], scored: Sequence[Sequence[Segment]], score: Scorer
) -> list[TrainingSample]:
    """The samples with their reference log-probs, from one call. `scored`: the segments of each that are scored."""
    segments = [segment for of_sample in scored for segment in of_sample]
    scores = score(segments)
    if [len(of_segment) for of_segment in scores] != [len(segment.sampled_positions) for segment in segments]:
        raise ValueError("the reference scorer did not return one log-probability per sampled token of each segment")
    remaining = iter(scores)
    return [
        msgspec.structs.replace(sample, reference_logprobs=tuple(logprob for _ in of_sample for logprob in next(remaining)))
        for sample, of_sample in zip(samples, scored, strict=True)
    ]


# ---- turns: joined by token ids; text is never tokenised again


class JoinedTurns(NamedTuple):
    """All turns of a rollout. `behaviour_logprobs` and `versions` have one entry per sampled token, in order."""

    segments: tuple[Segment, ...]
    behaviour_logprobs: tuple[float, ...]
    versions: tuple[int, ...]


def join_turns(turns: Sequence[Turn], *, observations: bool = False) -> JoinedTurns:
    """Join consecutive turns into segments.

    A turn whose prompt starts with everything before it (all earlier ids of its segment, prompt and completion)
    continues the segment: the new part of the prompt is context, the completion is sampled. Any other turn starts a new
    segment.
    A segment ends with its last sampled token; a segment without sampled tokens is omitted. With `observations`, context
    between sampled tokens is supervised.

    Raises RolloutError for an inconsistent turn: lengths that differ, version spans that do not cover the completion, an
    empty prompt, a negative id or version, or an invalid log-probability.
    """
    segments: list[Segment] = []
    logprobs: list[float] = []
    versions: list[int] = []
    token_ids: list[int] = []  # of the segment under construction, as `sampled`
    sampled: list[tuple[int, int]] = []

    def finish() -> None:
        if sampled:
            between = [(end, start) for (_, end), (start, _) in pairwise(sampled) if end < start] if observations else []
            ids = tuple(token_ids[: sampled[-1][1]])
            segments.append(Segment(token_ids=ids, sampled=tuple(sampled), supervised=tuple(between)))

    for number, turn in enumerate(turns):
        versions += _check(turn, number)
        logprobs += turn.completion.logprobs
        if list(turn.prompt_ids[: len(token_ids)]) != token_ids:
            finish()
            token_ids, sampled = [], []
        token_ids += turn.prompt_ids[len(token_ids) :]
        start = len(token_ids)
        token_ids += turn.completion.token_ids
        if len(token_ids) > start:
            sampled.append((start, len(token_ids)))
    finish()
    return JoinedTurns(tuple(segments), tuple(logprobs), tuple(versions))


def _check(turn: Turn, number: int) -> list[int]:
    """The version of each token of the turn's completion. Raises RolloutError if the turn is inconsistent."""
    completion, versions, wrong = turn.completion, list[int](), ""
    if not turn.prompt_ids:
        wrong = " has an empty prompt"
    elif len(completion.logprobs) != len(completion.token_ids):
        wrong = f" has {len(completion.token_ids)} tokens but {len(completion.logprobs)} log-probabilities"
    elif min(turn.prompt_ids) < 0 or min(completion.token_ids, default=0) < 0:
        wrong = " has a negative token id"
    else:
        for logprob in completion.logprobs:
            if not math.isfinite(logprob) or logprob > LOGPROB_TOLERANCE:
                wrong = f": {logprob} is not a log-probability"
    if not wrong and (completion.token_ids or completion.weight_versions):
        try:
            versions = versions_from_spans(completion.weight_versions, len(completion.token_ids))
        except ValueError as error:
            wrong = f": {error}"
        if min(versions, default=0) < 0:
            wrong = " has a negative weight version"
    if wrong:
        raise RolloutError(f"turn {number} (request {completion.request_id}){wrong}")
    return versions


def run_stage(reader: HubReader[Prepared], board: Board, stop: Callable[[], bool]) -> None:
    """The preprocessor as a process of its own, until `stop()` is true. Otherwise the trainer's reader prepares each group.

    consumes      groups from the rollout stream, a few more than the trainer has taken
    produces      prepared groups, in the same order
    waits for     the actor, when there is no group, or the trainer, when enough groups are prepared

    If the stage is killed, the group that it had is prepared again. The last status tells how it ended.
    """
    status = StatusReporter(board, PREPROCESSOR, time.monotonic)
    try:
        while not stop():
            read = reader.read(1)
            for offset, prepared in read:
                reader.pass_on(offset, prepared)
                status.report("working", f"group {prepared.index} is prepared")
            if not read:
                wait = "groups from the actor, or the trainer to read prepared groups"
                status.report("waiting", wait, waits_for=(ACTOR, TRAINER))
                time.sleep(POLL_S)
    except BaseException as error:
        status.report("failed", type(error).__name__, now=True)
        raise
    status.report("done", "", now=True)
