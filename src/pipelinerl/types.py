"""The vocabulary: what flows through the pipeline, as plain frozen records.

Every record is a `msgspec.Struct`: it encodes to readable JSON and decodes with its types checked, so that nothing that
crosses a process boundary or is read from a file is ever executed. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled"]


class Problem(msgspec.Struct, frozen=True):
    """One task to attempt. `payload` is the environment's own JSON-like data; nobody else reads it."""

    id: str
    payload: dict[str, Any]


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens `start <= i < end` were produced by the weights after `version` optimizer steps (0 = initial weights)."""

    version: int
    start: int
    end: int


def spans_from_versions(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Run-length encode one version per token into half-open spans that cover all of them."""
    spans: list[VersionSpan] = []
    start = 0
    current: int | None = None
    position = 0
    for version in versions:
        if current is not None and version != current:
            spans.append(VersionSpan(current, start, position))
            start = position
        current = version
        position += 1
    if current is not None:
        spans.append(VersionSpan(current, start, position))
    return tuple(spans)


def versions_from_spans(spans: Sequence[VersionSpan], length: int) -> list[int]:
    """The version of each of `length` tokens. Raises ValueError unless the spans cover them exactly, in order."""
    edges = [0, *(span.end for span in spans)]
    starts = [span.start for span in spans]
    if starts != edges[:-1] or edges[-1] != length or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"weight version spans {list(spans)} do not cover {length} tokens exactly")
    return [span.version for span in spans for _ in range(span.start, span.end)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled.

    `temperature` 0 means greedy. `top_k` 0 and `top_p` 1.0 mean no truncation. `seed` None lets the engine derive one
    from the request id; the same (seed, prompt, weights) gives the same tokens whatever else shares the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is asked for. With `stream`, every step also reports the request's new token.

    `copy` says which of the engine's copies of the model is to answer; None: any.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stream: bool = False
    copy: int | None = None


class TokenEvent(msgspec.Struct, frozen=True):
    """One sampled token, as streamed: its position in the completion, id, log-prob and weight version."""

    request_id: str
    index: int
    token_id: int
    logprob: float
    version: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine returns for one request.

    `logprobs[i]` is the log-probability of `token_ids[i]` under the very distribution it was sampled from (after
    temperature and truncation), by the weights that `weight_versions` names. `prompt_versions` says which weights computed
    the prompt's KV entries that the completion's last token was sampled with: several spans only if an update arrived
    between two chunks of a long prompt, and after an update that recomputed the entries the version of that. A stop token
    that ended the completion is its last token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    prompt_versions: tuple[VersionSpan, ...] = ()


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the model within a rollout: the exact ids that went in, and what came out (`text` is for readers)."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str = ""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a problem, as an environment returns it. The actor fills in the identities."""

    turns: tuple[Turn, ...]
    reward: float
    metrics: dict[str, float] = {}
    id: str = ""
    attempt: int = 0


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The K attempts at one problem, finished and scored: the unit that streams from the actor to the preprocessor.

    `index` numbers groups in the order they were started and is never used twice in a run, resumes included.
    `started` counts all attempts, `dropped` those that failed, by reason; `rollouts` holds the others.
    """

    index: int
    problem: Problem
    rollouts: tuple[Rollout, ...]
    started: int
    dropped: dict[str, int] = {}
    started_version: int = 0


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence; `sampled` are the half-open ranges of positions that the model produced, in order."""

    token_ids: tuple[int, ...]
    sampled: tuple[tuple[int, int], ...]

    @property
    def sampled_positions(self) -> list[int]:
        return [i for start, end in self.sampled for i in range(start, end)]


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, prepared for training. Sampled tokens are trained on, the others are context.

    Usually a single segment, however many turns; a new one begins only where a turn's prompt does not continue the ids
    before it. `behaviour_logprobs`, `versions` and (when a KL coefficient is set) `reference_logprobs` have one entry per
    sampled token, over all segments in order. `finished` is False when the last completion was cut at its token limit.
    `metrics` are the rollout's.
    """

    id: str
    group_index: int
    segments: tuple[Segment, ...]
    behaviour_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantage: float
    reward: float
    finished: bool = True
    reference_logprobs: tuple[float, ...] | None = None
    metrics: dict[str, float] = {}

    @property
    def sampled_count(self) -> int:
        return len(self.behaviour_logprobs)

    @property
    def length(self) -> int:
        """Tokens of all segments together, context included."""
        return sum(len(segment.token_ids) for segment in self.segments)


class UpdateReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to a weight update: what it holds now (checksum recomputed from its own parameters)."""

    engine: str
    version: int
    checksum: str
    pause_s: float
    sequences_in_flight: int
    error: str | None = None


StageState = Literal["starting", "working", "waiting", "done", "failed"]

ENGINE, ACTOR, PREPROCESSOR, TRAINER = "engine", "actor", "preprocessor", "trainer"
"""Names of stages. With several generation processes, engines and actors are numbered: `actor-0`, `actor-1`, ..."""


class ProbeReading(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine computed for the trainer's fixed prompt with the weights of `version`: one token's log-prob."""

    engine: str
    version: int
    token_id: int
    logprob: float


class EngineProgress(msgspec.Struct, frozen=True, kw_only=True, tag="engine"):
    """`busy_s` of the `ready_s` seconds since the engine was ready were spent in steps; `pauses_s` of the latest updates."""

    version: int = 0
    slots: int = 0
    in_progress: int = 0
    queued: int = 0
    tokens_generated: int = 0
    decode_steps: int = 0
    busy_s: float = 0.0
    ready_s: float = 0.0
    weight_updates: int = 0
    pauses_s: tuple[float, ...] = ()
    probes: tuple[ProbeReading, ...] = ()


class ActorProgress(msgspec.Struct, frozen=True, kw_only=True, tag="actor"):
    """Counts of rollouts. started = handed_over + sum(dropped) + in_progress (finished attempts of an open group are in
    progress until their group is handed to the stream).

    `rollouts_cut`, of those handed over, ended at their token limit. `dropped_tokens` were sampled for those that were
    dropped, by the same reasons. `started_length_mean` is the mean of sampled tokens over the latest `started_lengths`
    attempts in order of start, of groups before the oldest open one."""

    groups_started: int = 0
    rollouts_started: int = 0
    rollouts_handed_over: int = 0
    rollouts_cut: int = 0
    rollouts_dropped: dict[str, int] = {}
    dropped_tokens: dict[str, int] = {}
    rollouts_in_progress: int = 0
    started_length_mean: float | None = None
    started_lengths: int = 0
    recent_reward: float | None = None
    evaluations: dict[str, float] = {}
    evaluated: int = 0


class TrainerProgress(msgspec.Struct, frozen=True, kw_only=True, tag="trainer"):
    """Counts of rollouts over the whole run, resumed parts included. Those in the stream are nobody's yet.

    `probe_ids` is the prompt of the weight probe: see `ProbeReading`.

    `queued` are with the trainer, `dropped` (by reason) were dropped there: the actor's own drops are not among them.
    """

    version: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    queued: int = 0
    steps_target: int = 0
    micro_batches: int = 0
    tokens_trained: int = 0
    busy_s: float = 0.0
    ready_s: float = 0.0
    published_version: int = -1
    goal_reached: bool = False
    probe_ids: tuple[int, ...] = ()
    latest: dict[str, float] = {}


Progress = EngineProgress | ActorProgress | TrainerProgress


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one stage: what it does or waits for, and since when (seconds of `time.monotonic`).

    `waits_for` names the stages that can end its wait; `actor` stands for all of `actor-0`, `actor-1`, ...
    `detail` says the same for people.
    """

    stage: str
    pid: int
    state: StageState
    detail: str
    since_s: float
    written_s: float
    waits_for: tuple[str, ...] = ()
    progress: Progress | None = None
