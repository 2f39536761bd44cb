"""The records that the stages of the pipeline exchange: problems, rollouts, samples, statuses.

Every record is a frozen `msgspec.Struct`. It encodes to readable JSON and decodes with its types checked, so data from
another process or a file is never executed. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any, Literal, SupportsFloat

import msgspec

from pipelinerl.errors import RolloutError

FinishReason = Literal["stop", "length", "cancelled"]


class Problem(msgspec.Struct, frozen=True):
    """One task to attempt. `payload` is JSON-like data that only the environment interprets."""

    id: str
    payload: dict[str, Any]


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens `start <= i < end` were produced by the weights after `version` optimizer steps (0 = initial weights)."""

    version: int
    start: int
    end: int


def spans_from_versions(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Run-length encode one version per token into half-open spans that cover all of them."""
    spans, start = list[VersionSpan](), 0
    for version, tokens in groupby(versions):
        end = start + sum(1 for _ in tokens)
        spans.append(VersionSpan(version, start, end))
        start = end
    return tuple(spans)


def versions_from_spans(spans: Sequence[VersionSpan], length: int) -> list[int]:
    """The version of each of `length` tokens. Raises ValueError unless the spans cover the tokens exactly, in order."""
    edges = [0, *(span.end for span in spans)]
    starts = [span.start for span in spans]
    if starts != edges[:-1] or edges[-1] != length or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"weight version spans {list(spans)} do not cover {length} tokens exactly")
    return [span.version for span in spans for _ in range(span.start, span.end)]


def finite(value: object, what: str, wanted: str = "a number") -> float:
    """`value` as a float: bool, int, float, or a scalar of NumPy, torch, ... Raises RolloutError unless it is finite."""
    if type(value) is float and math.isfinite(value):  # the common case
        return value
    if not isinstance(value, SupportsFloat):
        raise RolloutError(f"{what} is {type_name(value)}, not {wanted}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RolloutError(f"{what} is {number}, not a finite number")
    return number


def type_name(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled.

    `temperature` 0 means greedy. `top_k` 0 and `top_p` 1.0 mean no truncation. If `seed` is None, the engine derives one
    from the request id. The same (seed, prompt, weights) gives the same tokens, independently of the rest of the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an engine. With `stream`, every step also reports the request's new token.

    `copy` is the index of the model replica that must serve the request; None: any.
    `reuses_from`: the oldest weights whose keys and values, computed for other requests, this one may read instead of
    computing its own. None: it reads none, and no other request reads its own. `turn`: how many requests its rollout made
    before. Later turns go first: the beginnings of their prompts are still there.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stream: bool = False
    copy: int | None = None
    reuses_from: int | None = None
    turn: int = 0


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One streamed token: its position in the completion, id, log-prob and weight version.

    The first token of each version has the `prompt_versions` with which it was sampled: see `Completion`.
    """

    request_id: str
    index: int
    token_id: int
    logprob: float
    version: int
    prompt_versions: tuple[VersionSpan, ...] = ()


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine returns for one request.

    `token_ids` ends with the stop token, if one ended the completion.
    `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution it was sampled from: after temperature
    and truncation, with the weights given by `weight_versions`.
    `prompt_versions` are the versions of the weights that computed the prompt's KV entries, as used for the last token.
    They have several spans only if an update arrived between two prefill chunks of a long prompt, or if the beginning of
    the prompt was computed for another request. After an update that recomputed the KV cache they are one span of the new
    version.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    prompt_versions: tuple[VersionSpan, ...] = ()

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The token ids without the stop token."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids


def cancelled_completion(request_id: str, events: Sequence[TokenEvent]) -> Completion:
    """The completion of a stream that ended after these tokens."""
    return Completion(
        request_id=request_id,
        token_ids=tuple(event.token_id for event in events),
        logprobs=tuple(event.logprob for event in events),
        weight_versions=spans_from_versions(event.version for event in events),
        finish_reason="cancelled",
        prompt_versions=next((event.prompt_versions for event in reversed(events) if event.prompt_versions), ()),
    )


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model call within a rollout: the exact prompt ids and the completion (`text` is for human readers).

    `reward`: the part of the rollout's reward that this turn earned. The rest belongs to the last turn. None: not known.
    `teacher_prompt_ids`: the prompt with which a teacher scores the completion, if not `prompt_ids`.
    """

    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str = ""
    reward: float | None = None
    teacher_prompt_ids: tuple[int, ...] = ()


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a problem, as an environment returns it. The actor fills in `id` and `attempt`."""

    turns: tuple[Turn, ...]
    reward: float
    metrics: dict[str, float] = {}
    id: str = ""
    attempt: int = 0


class Skip(msgspec.Struct, frozen=True, kw_only=True):
    """Why a problem was skipped: its latest groups up to `last_group` had equal rewards. Mean: over all its `rollouts`."""

    equal_groups: int
    last_group: int
    rollouts: int
    reward_mean: float
    probability: float


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The K finished and scored attempts at one problem: the unit that the actor writes to the stream.

    `index` numbers groups in the order in which they were started. An index is never reused within a run, even after a
    resume. `started` counts all attempts, `dropped` the failed ones by reason; `rollouts` holds the others. A problem that
    was `skipped` has none.
    """

    index: int
    problem: Problem
    rollouts: tuple[Rollout, ...]
    started: int
    dropped: dict[str, int] = {}
    started_version: int = 0
    skipped: Skip | None = None


class GroupLedger(msgspec.Struct):
    """A set of group indices that only grows: all under `below`, and `extras`, which are above it.

    Groups finish nearly in the order in which they were started, so `extras` are few.
    """

    below: int = 0
    extras: set[int] = set()

    def copy(self) -> GroupLedger:
        return GroupLedger(self.below, set(self.extras))

    def add(self, index: int) -> None:
        if index >= self.below:
            self.extras.add(index)
        while self.below in self.extras:
            self.extras.remove(self.below)
            self.below += 1

    def __contains__(self, index: int) -> bool:
        return 0 <= index < self.below or index in self.extras

    def first_missing(self, start: int) -> int:
        """The lowest index >= start (and >= 0) that is not in the ledger."""
        index = max(start, self.below)
        while index in self.extras:
            index += 1
        return index


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One token sequence. `sampled`: the half-open ranges of positions that the model produced, in order.

    `supervised`: ranges of other positions, whose given tokens are trained on by cross-entropy.
    """

    token_ids: tuple[int, ...]
    sampled: tuple[tuple[int, int], ...]
    supervised: tuple[tuple[int, int], ...] = ()

    @property
    def sampled_positions(self) -> list[int]:
        return [i for start, end in self.sampled for i in range(start, end)]

    @property
    def trained_positions(self) -> list[int]:
        """The sampled and the supervised ones, in order."""
        if not self.supervised:
            return self.sampled_positions
        return [i for start, end in sorted((*self.sampled, *self.supervised)) for i in range(start, end)]


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, prepared for training. Sampled and supervised tokens are trained on; the others are context.

    A rollout of several turns is usually one segment. A new segment begins only where a turn's prompt does not continue
    the preceding ids. `behaviour_logprobs`, `versions` and (when a KL coefficient is set) `reference_logprobs` have one
    entry per sampled token, over all segments in order; so has `advantage`, unless one number holds for all.
    `supervised_weight` multiplies the cross-entropy of supervised tokens. `finished` is False if the last completion was cut
    at its token limit. `metrics` are the rollout's.
    """

    id: str
    group_index: int
    segments: tuple[Segment, ...]
    behaviour_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantage: float | tuple[float, ...]
    reward: float
    finished: bool = True
    reference_logprobs: tuple[float, ...] | None = None
    metrics: dict[str, float] = {}
    supervised_weight: float = 1.0

    @property
    def sampled_count(self) -> int:
        return len(self.behaviour_logprobs)

    @property
    def supervised_count(self) -> int:
        return sum(end - start for segment in self.segments for start, end in segment.supervised)

    @property
    def has_gradient(self) -> bool:
        """Whether the loss without penalties has one."""
        credit = any(self.advantage) if isinstance(self.advantage, tuple) else self.advantage != 0.0
        return credit or (self.supervised_weight != 0.0 and any(segment.supervised for segment in self.segments))

    @property
    def length(self) -> int:
        """Tokens of all segments, context included."""
        return sum(len(segment.token_ids) for segment in self.segments)


class DroppedRollout(msgspec.Struct, frozen=True):
    """A rollout that is not trained on, and why. `tokens`: the sampled ones, so that a bias against a length is visible."""

    id: str
    reason: str
    tokens: int
    reward: float

    @classmethod
    def of(cls, sample: TrainingSample, reason: str) -> DroppedRollout:
        return cls(sample.id, reason, sample.sampled_count, sample.reward)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared group: its index, the ids of all its rollouts, and each of them in `samples` or in `dropped`."""

    index: int
    ids: tuple[str, ...]
    samples: tuple[TrainingSample, ...]
    dropped: tuple[DroppedRollout, ...] = ()


class UpdateReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's acknowledgement of a weight update. `checksum` is verified on the engine's own parameters."""

    engine: str
    version: int
    checksum: str
    pause_s: float
    sequences_in_flight: int
    error: str | None = None

    def problem(self, version: int, checksum: str) -> str | None:
        """An error message if this does not prove that the engine holds the update, or None."""
        if self.error is not None:
            return f"engine {self.engine!r} did not apply weights of version {version}: {self.error}"
        if self.checksum != checksum:
            return (
                f"engine {self.engine!r} says it took weights of version {version}, but holds others: checksum "
                f"{self.checksum}, sent {checksum} (are its parameters of the same type as those sent?)"
            )
        return None


StageState = Literal["starting", "working", "waiting", "done", "failed"]

MAX_RECEIVERS = 64
"""Receivers of weights in a run: generation processes, or engine servers in a broadcast."""

ENGINE, ACTOR, PREPROCESSOR, TRAINER = "engine", "actor", "preprocessor", "trainer"
"""Names of stages. With several generation processes, engines and actors are numbered: `actor-0`, `actor-1`, ..."""


class ProbeReading(msgspec.Struct, frozen=True, kw_only=True):
    """Weight canary: the log-prob of one token that an engine computed for the trainer's fixed prompt at `version`."""

    engine: str
    version: int
    token_id: int
    logprob: float


class EngineProgress(msgspec.Struct, frozen=True, kw_only=True, tag="engine"):
    """Counts since the engine was made.

    `prompt_tokens` are of requests that have begun. Of these, `prefilled_tokens` were computed for them; the others were
    computed once for several, where the engine knows it.
    `ready_s` is the time since the engine became ready, of which it spent `busy_s` in steps and weight updates.
    `pauses_s` are the pauses for the latest weight updates, `update_cpu_s` the CPU seconds of this process in all of them.
    `runner` is how the model is run, where the engine knows it.
    `begun`: version -> sequences in progress whose first token it sampled, where the engine knows it. `notes`: what does not
    agree between model and tokenizer (`models.contract`).
    """

    version: int = 0
    slots: int = 0
    in_progress: int = 0
    queued: int = 0
    tokens_generated: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    decode_steps: int = 0
    busy_s: float = 0.0
    ready_s: float = 0.0
    weight_updates: int = 0
    pauses_s: tuple[float, ...] = ()
    update_cpu_s: float = 0.0
    probes: tuple[ProbeReading, ...] = ()
    runner: str = ""
    begun: dict[int, int] = {}
    notes: tuple[str, ...] = ()


STREAM_DROP, LOST = "stream_full", "lost_in_crash"
"""Why rollouts were dropped: the stream had no room, or their process died while it had them in progress."""


class ActorProgress(msgspec.Struct, frozen=True, kw_only=True, tag="actor"):
    """Counts of rollouts: started = handed_over + sum(dropped) + in_progress. Groups that were skipped are not started.

    Rollouts are handed over when their group is written to the stream. Until then, finished attempts of an open group
    count as in progress. `rollouts_cut` counts the handed-over rollouts that ended at their token limit. `dropped_tokens`
    are the tokens sampled for dropped rollouts, by the same reasons. `started_length_mean` is the mean number of sampled
    tokens of the latest `started_lengths` attempts in order of start, in groups before the oldest open one. `evaluating` is
    the progress of the evaluation that runs, in words.
    """

    groups_started: int = 0
    groups_skipped: int = 0
    rollouts_started: int = 0
    rollouts_handed_over: int = 0
    rollouts_cut: int = 0
    rollouts_dropped: dict[str, int] = {}
    dropped_tokens: dict[str, int] = {}
    rollouts_in_progress: int = 0
    started_length_mean: float | None = None
    started_lengths: int = 0
    evaluations: dict[str, float] = {}
    evaluated: int = 0
    evaluating: str = ""


class TrainerProgress(msgspec.Struct, frozen=True, kw_only=True, tag="trainer"):
    """Counts of rollouts over the whole run, including the parts before a resume.

    `queued` rollouts are in the trainer's queue; `dropped` counts the rollouts that the trainer dropped, by reason, and
    `dropped_tokens` their sampled tokens. Rollouts in the stream and rollouts that the actor dropped are not counted.
    `probe_ids` is the prompt of the weight canary (see `ProbeReading`), `runner` how the model is trained. `notes`:
    warnings about the training.
    """

    version: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    dropped_tokens: dict[str, int] = {}
    queued: int = 0
    micro_batches: int = 0
    tokens_trained: int = 0
    busy_s: float = 0.0
    ready_s: float = 0.0
    published_version: int = -1
    goal_reached: bool = False
    probe_ids: tuple[int, ...] = ()
    latest: dict[str, float] = {}
    runner: str = ""
    notes: tuple[str, ...] = ()


Progress = EngineProgress | ActorProgress | TrainerProgress


Encoding = Literal["full", "delta", "adapter"]
"""What a weight update sends: all weights, the bits that differ from the previous one (`weights.delta`), or an adapter."""


class WeightTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """How a weight update was transferred.

    `bytes` were sent to each engine, or written once if engines share memory. They include a delta that an engine could not
    use, which all weights followed. `time_s`: from the start of the copy until every engine could apply the update; for the
    first broadcast this includes the time until all have joined.
    """

    version: int
    bytes: int
    time_s: float
    encoding: Encoding = "full"


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one stage: what it does or waits for, and since when (seconds of `time.monotonic`).

    `waits_for` names the stages that can end the wait; `actor` stands for all of `actor-0`, `actor-1`, ...
    `detail` describes the same for human readers. `machine` is set in runs on several machines.
    """

    stage: str
    pid: int
    state: StageState
    detail: str
    since_s: float
    written_s: float
    waits_for: tuple[str, ...] = ()
    progress: Progress | None = None
    machine: str = ""


def trainer_progress(status: StageStatus | None) -> TrainerProgress | None:
    """The progress in the trainer's status; None if it has published none."""
    progress = status.progress if status is not None else None
    return progress if isinstance(progress, TrainerProgress) else None


def goal_reached(trainer: StageStatus | None) -> bool:
    """Whether this is the status of a trainer that has taken all its steps."""
    progress = trainer_progress(trainer)
    return progress is not None and progress.goal_reached
