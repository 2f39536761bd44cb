"""The seams between stages. Stages never import each other: they meet here and in `types`.

Nothing here imports torch at run time; tensors appear in annotations only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from pipelinerl.errors import PipelineRLError
from pipelinerl.types import (
    Completion,
    EngineProgress,
    GenerationRequest,
    Problem,
    Rollout,
    SamplingParams,
    StageStatus,
    TokenEvent,
    UpdateReceipt,
)

if TYPE_CHECKING:
    import torch

ItemIn_contra = TypeVar("ItemIn_contra", contravariant=True)
ItemOut_co = TypeVar("ItemOut_co", covariant=True)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that environments use."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class GenerationClient(Protocol):
    """What an environment sees of the model: token ids in, a `Completion` with provenance out.

    Each rollout gets a client of its own, which knows the run's sampling parameters, the model's stop tokens and the
    rollout's seed. Cancelling the awaiting task cancels the request.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are sampled, but for what a call may ask for; `max_tokens` is the most that one gets."""
        ...

    @property
    def completions(self) -> Sequence[Completion]:
        """All that this client produced so far; a stream that was left early is a completion of reason "cancelled"."""
        ...

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> Completion:
        """One completion. Raises PromptTooLongError at once when the prompt can't fit."""
        ...

    def stream(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> AsyncIterator[TokenEvent]:
        """The same, token by token; leaving the loop early cancels the request."""
        ...


class Environment(Protocol):
    """A source of problems and the judge of attempts at them.

    `problem` is a pure function of `index`: that is what lets a resumed run continue where it stopped.
    """

    def problem(self, index: int) -> Problem:
        """The training problem number `index` (0, 1, 2, ... without end)."""
        ...

    def held_out(self, count: int) -> Sequence[Problem]:
        """The first `count` problems of a fixed evaluation set that training never sees (fewer if there are fewer)."""
        ...

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        """One attempt: call the client as often as needed, return its turns in order and a finite reward."""
        ...


class StepOutput(NamedTuple):
    """What one engine step produced: new tokens of the requests that stream, and the requests that ended with it.

    `failed`: those that can't be served, though `submit` took them, each with the reason.
    """

    tokens: Sequence[TokenEvent]
    finished: Sequence[Completion]
    failed: Sequence[tuple[str, PipelineRLError]] = ()


class Engine(Protocol):
    """Keeps up to H sequences in progress and advances all of them by one token a step."""

    @property
    def version(self) -> int: ...

    @property
    def in_progress(self) -> int: ...

    @property
    def queued(self) -> int: ...

    @property
    def copies(self) -> int:
        """Copies of the model, each with weights of its own to be updated."""
        ...

    def progress(self) -> EngineProgress:
        """Counts since the engine was made."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises RequestError, for this request alone, if it can never be served."""
        ...

    def cancel(self, request_id: str) -> None:
        """Free the request's slot at the next token boundary; its completion ends with reason "cancelled"."""
        ...

    def step(self) -> StepOutput:
        """One token boundary and one decode step. Does nothing when there is nothing in progress or queued."""
        ...

    def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        """Take new weights now, between two decode steps: all of them, or none (then the receipt has an error)."""
        ...


class StreamStats(NamedTuple):
    """Counts over the life of the stream. pending = written - dropped - taken."""

    written: int
    taken: int
    dropped: int

    @property
    def pending(self) -> int:
        return self.written - self.taken - self.dropped


class StreamWriter(Protocol[ItemIn_contra]):
    def try_write(self, item: ItemIn_contra, encoded: bytes | None = None) -> bool:
        """Append one item. False when the stream is full and set to block (nothing was written then).

        `encoded`: the item as JSON, if the caller has it already.
        """
        ...

    def stats(self) -> StreamStats: ...

    def close(self) -> None: ...


class StreamReader(Protocol[ItemOut_co]):
    def read(self, limit: int) -> Sequence[tuple[int, ItemOut_co]]:
        """Take up to `limit` items that are there now, oldest first, each with its offset. Never waits."""
        ...

    def commit(self, offset: int) -> None:
        """Everything before `offset` is dealt with for good: a reader opened later starts there, disk is reclaimed."""
        ...

    def stats(self) -> StreamStats: ...

    def close(self) -> None: ...


class WeightUpdate(NamedTuple):
    """A whole set of weights: parameter name -> tensor, with the checksum its sender computed over them.

    The tensors are read-only views of the transport's memory, good until the receipt is given. There are none if the
    engine's servers receive them from the trainer by themselves.
    """

    version: int
    checksum: str
    tensors: Mapping[str, torch.Tensor]


class WeightSender(Protocol):
    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> str:
        """Hand the weights over and return their checksum. Returns as soon as they are copied.

        Raises WeightUpdateError if an engine did not acknowledge the update before this one within the bound.
        """
        ...

    def receipts(self) -> Sequence[UpdateReceipt]:
        """Receipts that came since the last call. Raises WeightUpdateError on a checksum that differs or an error."""
        ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    def offered(self) -> int | None:
        """The version of the update that `poll` would give, or None. Cheap: called at every token boundary."""
        ...

    def poll(self) -> WeightUpdate | None:
        """The newest update that is whole and not yet taken, or None. Whoever takes it acknowledges it."""
        ...

    def acknowledge(self, receipt: UpdateReceipt) -> None: ...

    def close(self) -> None: ...


class Board(Protocol):
    """Where every stage says what it does and waits for; anyone may look. Survives the death of the stage."""

    def publish(self, status: StageStatus) -> None: ...

    def read(self, stage: str) -> StageStatus | None: ...

    def stages(self) -> Iterable[str]: ...


class Verdict(NamedTuple):
    """A schedule's answer: whether a stage may go on and, if not, what it waits for.

    `waiting_for` is for people, `waits_for` names the stages that can end the wait (as in `StageStatus`).
    """

    allowed: bool
    waiting_for: str = ""
    waits_for: tuple[str, ...] = ()


class PipelineState(NamedTuple):
    """What admission looks at: rollouts that were started, by any engine, and are neither trained nor dropped yet.

    `outstanding` counts all of them, `handed_over` those that are in the stream or with the trainer. The others are in
    progress: `oldest_in_progress` is the lowest version that any of them was started with (`engine_version` if there are
    none). `newest_version` is the newest that any engine has taken. `own` counts the rollouts that the asking engine has in
    progress; there are `processes` engines.
    """

    engine_version: int
    trainer_version: int
    oldest_in_progress: int
    outstanding: int
    handed_over: int = 0
    newest_version: int = 0
    own: int = 0
    processes: int = 1


class Schedule(Protocol):
    """Who may go on when: the only place where pipeline, conventional and asynchronous RL differ."""

    @property
    def name(self) -> str: ...

    @property
    def too_old_reason(self) -> str:
        """The reason under which rollouts older than `oldest_trained` are dropped."""
        ...

    def oldest_trained(self, version: int) -> int:
        """The lowest version whose tokens may be trained on by the trainer at `version`."""
        ...

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        """May the actor start `rollouts` more now?"""
        ...

    def may_take_weights(self, in_progress: int) -> Verdict:
        """May an engine take new weights at this token boundary?

        `in_progress` counts the rollouts that were started with older weights, by any engine, and are not in the stream.
        """
        ...

    def may_train(self, version: int, queued: int) -> Verdict:
        """May the trainer, at `version`, with `queued` samples at hand, take its next optimizer step?"""
        ...

    def publishes(self, version: int) -> bool:
        """Are the weights of `version` handed to the engines?"""
        ...

    def trains_in_rounds(self) -> bool:
        """True when the samples of several steps are there before the first: batches are then in order of problems.

        In order of completion the first batch of each round would hold its short rollouts, and the last its long ones.
        """
        ...

    def takes_turns(self) -> bool:
        """True when generation and training never overlap, so that each phase may have the whole machine."""
        ...
