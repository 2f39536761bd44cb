"""The interfaces between stages. Stages never import each other; they share only this module and `types`.

Torch is imported for annotations only, never at run time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from pipelinerl.types import (
    Completion,
    EngineProgress,
    GenerationRequest,
    Group,
    Problem,
    Rollout,
    SamplingParams,
    StageStatus,
    TokenEvent,
    UpdateReceipt,
    WeightTransfer,
)

if TYPE_CHECKING:
    import torch

ItemOut_co = TypeVar("ItemOut_co", covariant=True)


PART = "\ufffd"  # the replacement character: what decoding gives for part of a character


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that environments use."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class GenerationClient(Protocol):
    """An environment's access to the model: takes token ids, returns a `Completion` with log-probs and weight versions.

    Each rollout gets its own client, with the run's sampling parameters, the model's stop tokens and the rollout's seed.
    Cancelling the awaiting task cancels the request.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def sampling(self) -> SamplingParams:
        """The default sampling parameters. `max_tokens` is the upper limit for a call's own `max_tokens`."""

    @property
    def completions(self) -> Sequence[Completion]:
        """The completions so far. A stream that was left early is a completion with finish reason "cancelled"."""

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> Completion:
        """Generate one completion. Raises PromptTooLongError immediately if the prompt does not fit."""

    def stream(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> AsyncIterator[TokenEvent]:
        """Generate one completion token by token. Leaving the loop early cancels the request."""


class Environment(Protocol):
    """A source of problems that also scores attempts at them.

    `problem` is a pure function of `index`, so a resumed run can continue where it stopped.
    """

    def problem(self, index: int) -> Problem:
        """Training problem number `index` (0, 1, 2, ... without end)."""

    def held_out(self, count: int) -> Sequence[Problem]:
        """The first `count` problems of a fixed evaluation set that training never uses, or all if there are fewer."""

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        """One attempt: calls the client as often as needed and returns the turns in order with a finite reward."""


@runtime_checkable
class ScoresGroups(Protocol):
    """An environment may also score the rollouts of a training group together, when all of its attempts have ended."""

    async def score_group(self, problem: Problem, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """The same rollouts in the same order, with final rewards and metrics. Evaluations don't call this."""


class StepOutput(NamedTuple):
    """What one engine step produced: new tokens of streaming requests, and the requests that finished."""

    tokens: Sequence[TokenEvent]
    finished: Sequence[Completion]


CANCELLED_KEPT = 4096
"""Number of completions of cancelled requests that an engine keeps for `AsyncEngine.take_cancelled`: the latest ones."""


class AsyncEngine(Protocol):
    """The engine as the actor sees it, embedded or behind HTTP: every request is a coroutine of the actor's event loop.

    Cancelling the coroutine, or closing the stream early, cancels the request. The owner of the engine calls `advance` until
    all requests are answered.
    """

    @property
    def version(self) -> int: ...

    @property
    def in_progress(self) -> int: ...

    @property
    def queued(self) -> int: ...

    @property
    def copies(self) -> int:
        """Number of model replicas; each has its own weights."""

    def progress(self) -> EngineProgress:
        """Counts since the engine was made."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion. Raises RequestError, at once or later, if the request can never be served."""

    def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent | Completion, None]:
        """Every token as it arrives, then the completion."""

    def take_cancelled(self) -> Sequence[Completion]:
        """The completions of cancelled requests that have ended since the last call. Engine servers send none."""

    async def advance(self) -> bool:
        """One decode step, or a short wait for servers. The coroutines that got a token or an answer then run.

        Returns False at once if no request is in progress or queued. Raises the errors that end the engine.
        """

    async def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        """Apply new weights in flight: all of them, or none (then the receipt has an error). Requests may go on."""


class StreamReader(Protocol[ItemOut_co]):
    """The reading end of a stream, as a stage sees it."""

    def read(self, limit: int) -> Sequence[tuple[int, ItemOut_co]]:
        """Take up to `limit` of the available items, oldest first, each with its offset. Never waits."""

    def commit(self, offset: int) -> None:
        """Everything before `offset` is processed: what comes after it is read again after a resume."""


class WeightUpdate(NamedTuple):
    """A complete set of weights, parameter name -> tensor, with the checksum that the sender computed over them.

    `tensors`: read-only views of the transport's memory, valid until the update is acknowledged; empty if engine servers
    receive the weights, or read them from the file at `path`. `device_checksum`: computed by the trainer's GPU
    (`models.device`); "" without one. `adapter`: the tensors are only an adapter's (`models.adapters`), which the engine
    merges; the checksums are of the merged weights, or "" if the sender does not know them.
    """

    version: int
    checksum: str
    tensors: Mapping[str, torch.Tensor]
    device_checksum: str = ""
    path: str = ""
    adapter: bool = False


class WeightSender(Protocol):
    """The trainer's end of the weight transfer: `weights.sending.Sender`, or a replay without engines."""

    transfer: WeightTransfer | None
    digests: Mapping[str, str]

    def send(self, version: int, tensors: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor]) -> str: ...

    def unanswered(self) -> Sequence[str]: ...

    def receipts(self) -> Sequence[UpdateReceipt]: ...

    def close(self) -> None: ...


class Messages(Protocol):
    """One end of a connection with the hub, as the ends of the weight transfer use it. Any thread may send."""

    def handle(self, kind: type[Any], handler: Any) -> None:
        """Have `handler` called with every message of a kind."""

    def take(self) -> None:
        """Take the messages that have arrived."""

    def send(self, message: Any) -> None: ...


class Board(Protocol):
    """The status board: each stage publishes its status, any process may read it. It outlives the stages."""

    def publish(self, status: StageStatus) -> None: ...

    def read(self, stage: str) -> StageStatus | None: ...

    def stages(self) -> Iterable[str]: ...


class Verdict(NamedTuple):
    """A schedule's decision: whether a stage may proceed and, if not, what it waits for.

    `waiting_for` is for human readers; `waits_for` names the stages that can end the wait (as in `StageStatus`).
    """

    allowed: bool
    waiting_for: str = ""
    waits_for: tuple[str, ...] = ()


ALLOWED = Verdict(True)


class Admitted(NamedTuple):
    """`group` is the index of the group to start. If it is None, the verdict says why."""

    group: int | None
    verdict: Verdict


class Admission(Protocol):
    """A generation process's access to the hub, which decides over all of them. Nothing waits for an answer."""

    @property
    def in_rounds(self) -> bool:
        """Whether the schedule generates in rounds of fixed size."""

    @property
    def opened(self) -> bool:
        """Whether groups may be started, that is, whether the evaluation before training is over."""

    def open(self) -> None:
        """Allow groups to be started from now on."""

    def claim(self, engine_version: int, rollouts: int, *, room: int = 0) -> Admitted:
        """A group of `rollouts` attempts that the schedule has allowed. `engine_version`: of the engine's weights.

        `room`: for how many rollouts the engine has slots.
        """

    def hand_over(self, group: Group) -> None:
        """Record a finished group, and write it to the stream. Raises RunDirectoryError and StreamError, perhaps later."""

    def settle(self) -> None:
        """Wait until every finished group is in the stream, for a bounded time."""

    def take_dropped(self) -> int:
        """How many rollouts the stream has dropped for groups of this process since the last call."""

    def may_take(self, version: int) -> bool:
        """Whether the engine may apply the weights of `version` now. If so, it must: they are counted as applied."""


class PipelineState(NamedTuple):
    """The input to admission: counts and versions of outstanding rollouts, over all engines.

    `outstanding` counts the rollouts that were started and are neither trained on nor dropped yet: they are in progress or
    handed over. `handed_over` counts those in the stream or with the trainer. `oldest_in_progress` is the lowest version
    that a rollout in progress was started with (`engine_version` if there are none). `newest_version` is the newest version
    that any engine has applied. `own` counts the rollouts in progress on the requesting engine; there are `processes`
    engines. `latency`: optimizer steps from the start of a group to its hand-over, a running mean; None before a group that
    was started after the first weight update is handed over. `most_in_progress`: highest number of rollouts in progress so
    far.
    """

    engine_version: int
    trainer_version: int
    oldest_in_progress: int
    outstanding: int
    handed_over: int
    newest_version: int = 0
    own: int = 0
    processes: int = 1
    latency: float | None = None
    most_in_progress: int = 0
