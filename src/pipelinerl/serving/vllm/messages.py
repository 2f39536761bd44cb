"""What vLLM's interfaces take and give: the part of it that is used here."""

from __future__ import annotations

import contextlib

import msgspec

from pipelinerl.serving.wire import ProcessGroupRequest

BACKEND = "pipelinerl"
"""Our weight-transfer backend, as vLLM knows it."""
REFUSED = "weights refused:"
"""How its error begins when the model was not touched."""
UNLABELLED = "default"
"""vLLM's version of weights that nobody has named: those it was started with."""


class UnfaithfulError(ValueError):
    """An answer that does not say all that a completion must say, or contradicts itself or the request."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """No seed: vLLM draws by one of its own. The model's own end tokens count only if the request names them."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = True
    logprobs: int = 0
    detokenize: bool = False


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /inference/v1/generate."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling_params: Sampling
    stream: bool


class AbortBody(msgspec.Struct, frozen=True):
    """POST /inference/v1/abort_requests: by the names that vLLM makes of our ids."""

    request_ids: tuple[str, ...]

    @staticmethod
    def of(request_id: str) -> AbortBody:
        return AbortBody((f"generate-tokens-{request_id}",))


class TokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...] | None = None


class LabelSpan(msgspec.Struct, frozen=True):
    """vLLM's `WeightVersionSpan`: its versions are any text. Ours are numbers in decimal."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or what a line of a stream adds to it. Spans come with the end alone, over all of its tokens."""

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
        """The one choice there is. Raises UnfaithfulError."""
        if len(self.choices) != 1:
            raise UnfaithfulError(f"it has {len(self.choices)} choices")
        return self.choices[0]


class FilesInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="files"):
    """Files of weights may come from below `directory` alone."""

    directory: str


class BroadcastInfo(ProcessGroupRequest, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="broadcast"):
    """Weights are broadcast by the trainer."""


InitInfo = FilesInfo | BroadcastInfo


class InitBody(msgspec.Struct, frozen=True):
    """POST /init_weight_transfer_engine."""

    init_info: InitInfo


class UpdateInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights of `version` are in the safetensors file at `path`, or were broadcast; under the names of Hugging Face."""

    version: int
    checksum: str
    path: str | None = None


class UpdateBody(msgspec.Struct, frozen=True):
    """POST /update_weights."""

    update_info: UpdateInfo


class FinishBody(msgspec.Struct, frozen=True):
    """POST /finish_weight_update."""

    weight_version: str


class LabelBody(msgspec.Struct, frozen=True):
    """POST /update_weight_version."""

    new_version: str


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of an error, and a line of a stream that ends with one."""

    error: ErrorDetail


def worker_error(text: str) -> str:
    """What went wrong, out of vLLM's account of it: the JSON of an error, around the message of a worker process."""
    with contextlib.suppress(msgspec.DecodeError):
        text = msgspec.json.decode(text, type=ErrorAnswer).error.message
    _, found, rest = text.partition("Worker failed with error '")
    return rest.rpartition("', please check")[0] or rest if found else text
