"""Joins the turns of a rollout into token sequences by token ids; text is never tokenised again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pipelinerl.errors import RolloutError
from pipelinerl.types import Segment, Turn, versions_from_spans

LOGPROB_TOLERANCE = 1e-2
"""How far rounding (a bfloat16 head) may push a log-probability above 0; higher values are rejected."""


class JoinedTurns(NamedTuple):
    """All turns of a rollout. `behaviour_logprobs` and `versions` have one entry per sampled token, in order."""

    segments: tuple[Segment, ...]
    behaviour_logprobs: tuple[float, ...]
    versions: tuple[int, ...]


def join_turns(turns: Sequence[Turn]) -> JoinedTurns:
    """Join consecutive turns into segments.

    A turn whose prompt starts with everything before it (all earlier ids of its segment, prompt and completion)
    continues the segment: the new part of the prompt is context, the completion is sampled. Any other turn starts a new
    segment.
    A segment ends with its last sampled token; a segment without sampled tokens is omitted.

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
            segments.append(Segment(token_ids=tuple(token_ids[: sampled[-1][1]]), sampled=tuple(sampled)))

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
