"""Joins the turns of a rollout into token sequences by token ids; text is never tokenised again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    current = _OpenSegment()
    for number, turn in enumerate(turns):
        turn_versions = _check(turn, number)
        if not current.is_continued_by(turn.prompt_ids):
            segments += current.finish()
            current = _OpenSegment()
        current.add(turn)
        logprobs += turn.completion.logprobs
        versions += turn_versions
    segments += current.finish()
    return JoinedTurns(tuple(segments), tuple(logprobs), tuple(versions))


@dataclass
class _OpenSegment:
    """A segment under construction."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[tuple[int, int]] = field(default_factory=list)

    def is_continued_by(self, prompt_ids: Sequence[int]) -> bool:
        return list(prompt_ids[: len(self.token_ids)]) == self.token_ids

    def add(self, turn: Turn) -> None:
        self.token_ids += turn.prompt_ids[len(self.token_ids) :]
        start = len(self.token_ids)
        self.token_ids += turn.completion.token_ids
        if len(self.token_ids) > start:
            self.sampled.append((start, len(self.token_ids)))

    def finish(self) -> list[Segment]:
        if not self.sampled:
            return []
        _, end = self.sampled[-1]
        return [Segment(token_ids=tuple(self.token_ids[:end]), sampled=tuple(self.sampled))]


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
