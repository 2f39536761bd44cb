"""Messages of vLLM's HTTP API that are decoded here: by the client, and by our backend inside vLLM."""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

import msgspec

from pipelinerl.errors import INVALID_DATA
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest

BACKEND = "pipelinerl"
"""The name of our weight-transfer backend in vLLM."""
REFUSED = "weights refused:"
"""The beginning of the backend's errors that leave the model unchanged."""
UNLABELLED = "default"
"""vLLM's version label of the weights that it was started with, until they get another label."""


class InvalidAnswerError(ValueError):
    """An answer that is incomplete, or contradicts itself or the request."""


class Label(NamedTuple):
    """What vLLM calls its weights: the version, and the session of a run that sent them ("", 0: none did).

    A version is one set of weights only within a session, so each token is labelled with both: `7`, or `7@RUN.EPOCH`.
    """

    version: int
    run: str = ""
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.version}@{self.run}.{self.epoch}" if self.run else str(self.version)

    @property
    def session(self) -> tuple[str, int]:
        return self.run, self.epoch

    @classmethod
    def of(cls, text: str) -> Label:
        """Raises InvalidAnswerError for a text that is no label."""
        found = re.fullmatch(r"([0-9]{1,18})(?:@([0-9a-zA-Z]{1,64})\.([0-9]{1,18}))?", text)
        if found is None:
            raise InvalidAnswerError(f"weights are labelled {text[:40]!r}, which is not a version number")
        version, run, epoch = found.groups()
        return cls(int(version), run or "", int(epoch or 0))


class TokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...] | None = None


class LabelSpan(msgspec.Struct, frozen=True):
    """vLLM's `WeightVersionSpan`. Its versions are arbitrary text; ours are a `Label`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or the part of it in one line of a stream. Only the last line has spans; they cover all tokens."""

    token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: tuple[LabelSpan, ...] | None = None

    @property
    def unlabelled(self) -> bool:
        return any(span.version == UNLABELLED for span in self.weight_versions or ())


class Answer(msgspec.Struct, frozen=True):
    """An answer, or a line of a stream."""

    choices: tuple[Choice, ...]

    @property
    def only(self) -> Choice:
        """The only choice. Raises InvalidAnswerError if there is not exactly one."""
        if len(self.choices) != 1:
            raise InvalidAnswerError(f"it has {len(self.choices)} choices")
        return self.choices[0]


class FilesInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="files"):
    """Weight files must be below `directory`."""

    directory: str


class BroadcastInfo(ProcessGroupRequest, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="broadcast"):
    """Weights are broadcast by the trainer."""


InitInfo = FilesInfo | BroadcastInfo


class UpdateInfo(WeightUpdateRequest, frozen=True, forbid_unknown_fields=True):
    """The weights to load, under Hugging Face names."""


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of an error answer, or an error line that ends a stream."""

    error: ErrorDetail


def worker_error(text: str) -> str:
    """Extract the worker's message from vLLM's error text, which is JSON around the message of a worker process."""
    with contextlib.suppress(*INVALID_DATA):
        text = msgspec.json.decode(text, type=ErrorAnswer).error.message
    _, found, rest = text.partition("Worker failed with error '")
    return rest.rpartition("', please check")[0] or rest if found else text
