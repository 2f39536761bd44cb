"""The messages of the Tinker API, as the SDK sends and reads them: JSON, and protobuf for what has many numbers.

Names and field numbers are those of `tinker` 0.38 (`tinker/types`, `tinker/proto`). A field that is not here is refused if
it could change a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from pipelinerl.errors import RequestError

PROTOBUF = "application/x-protobuf"
Array = npt.NDArray[Any]

# ---- JSON


class Named(msgspec.Struct, frozen=True):
    """A request about one thing; what else it says is not used."""

    session_id: str = ""
    model_id: str = ""
    request_id: str = ""
    tinker_path: str = ""


class Exact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of its fields are known here."""

    type: str = ""


class LoraSettings(Exact, frozen=True, kw_only=True):
    rank: Annotated[int, Meta(ge=1, le=1024)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Create(Exact, frozen=True, kw_only=True):
    """Of a model, with new or saved weights, or of a sampling session. With a `model_id`, the model is there already."""

    session_id: str = ""
    model_id: str = ""
    seq_id: int = 0
    model_seq_id: int = 0
    sampling_session_seq_id: int = 0
    base_model: str | None = None
    lora_config: LoraSettings | None = None
    path: str = ""
    optimizer: bool = False
    model_path: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[Literal["type"], Literal["adamw"]] = {}


class AdamSettings(Exact, frozen=True, kw_only=True):
    learning_rate: Annotated[float, Meta(ge=0)] = 1e-4
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(gt=0)] = 1e-12
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Exact, frozen=True, kw_only=True):
    model_id: str
    seq_id: int
    adam_params: AdamSettings


class SaveWeights(Exact, frozen=True, kw_only=True):
    """Also `save_weights_for_sampler`, there with a `sampling_session_seq_id` instead of a name in `path`."""

    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class Chunk(Exact, frozen=True, kw_only=True):
    tokens: tuple[int, ...]


class SamplingSettings(Exact, frozen=True, kw_only=True):
    """`stop`: None is the model's own end; an empty list: no end; strings, or ids."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | tuple[str | int, ...] | None = None
    temperature: float = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    top_p: float = 1.0


class Sample(Exact, frozen=True, kw_only=True):
    sampling_session_id: str
    seq_id: int
    prompt: dict[Literal["chunks"], tuple[Chunk, ...]]
    sampling_params: SamplingSettings
    num_samples: Annotated[int, Meta(ge=1)] = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: bool = False


# ---- protobuf: a line is a message and its fields, NAME:NUMBER:TYPE, with a star for several. A map is a list of entries
# with a key and a value, and an enumeration an integer: both are the same on the wire.

_SCHEMA = """
SampledSequence stop_reason:1:int32 tokens:2:bytes logprobs:3:bytes
SampleResponse sequences:1:SampledSequence* prompt_logprobs:2:bytes
Tensor dense:1:bytes sparse_csr:2:bytes dtype:3:int32 shape:4:int64*
BatchedTensor data:1:bytes offsets:2:bytes dtype:3:int32
NamedTensor key:1:string value:2:Tensor
NamedBatch key:1:string value:2:BatchedTensor
Metric key:1:string value:2:double
ArrayRecord type_tag:1:string fields:2:NamedBatch* num_datums:3:int64
ForwardBackwardOutput loss_fn_output_type:1:string loss_fn_outputs:2:ArrayRecord* metrics:3:Metric*
TextChunk tokens:1:bytes
InputChunk encoded_text:1:TextChunk image:2:bytes dmel:3:bytes
Datum model_input:1:InputChunk* loss_fn_inputs:2:NamedTensor*
Setting number:1:double text:2:string
NamedSetting key:1:string value:2:Setting
Request model_id:1:string seq_id:2:int32 data:3:Datum* loss:4:string older:5:Metric* forward:6:bool config:7:NamedSetting*
"""
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_TYPES = {_FLOAT32: np.float32, _INT64: np.int64, _INT32: np.int32}


@cache
def _messages() -> Mapping[str, Any]:
    """The messages' classes by name."""
    from google.protobuf import descriptor_pb2, message_factory  # noqa: PLC0415 - needs an extra

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="pipelinerl_tinker.proto", package="tinker", syntax="proto3")
    for line in _SCHEMA.strip().splitlines():
        message, *fields = line.split()
        made = file.message_type.add(name=message)
        for text in fields:
            field, number, kind = text.rstrip("*").split(":")
            scalar = getattr(kinds, f"TYPE_{kind.upper()}", None)
            one = made.field.add(name=field, number=int(number), label=3 if text.endswith("*") else 1)
            one.type = scalar or kinds.TYPE_MESSAGE
            if scalar is None:
                one.type_name = f".tinker.{kind}"
    return {full.removeprefix("tinker."): made for full, made in message_factory.GetMessages([file]).items()}


@dataclass(frozen=True)
class TrainingDatum:
    """One sequence of N `tokens`, and the arrays (N,) that its loss reads: entry i is about what follows token i."""

    tokens: Sequence[int]
    inputs: Mapping[str, Array]


@dataclass(frozen=True)
class ForwardBackward:
    model_id: str
    seq_id: int
    data: Sequence[TrainingDatum]
    loss: str
    settings: Mapping[str, float]
    backward: bool


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Raises RequestError for what isn't such a request, or has data that this server does not take."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - as above

    try:
        found = _messages()["Request"].FromString(body)
        data = [_datum(one, f"datum {index}") for index, one in enumerate(found.data)]
    except (DecodeError, ValueError) as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {error}") from error
    if texts := [one.key for one in found.config if one.value.text]:
        raise RequestError(f"loss_fn_config: {texts[0]} is a text; the losses here take numbers")
    settings = {one.key: one.value for one in found.older} | {one.key: one.value.number for one in found.config}
    return ForwardBackward(found.model_id, found.seq_id, data, found.loss, settings, not found.forward)


def _datum(found: Any, where: str) -> TrainingDatum:
    if any(chunk.image or chunk.dmel for chunk in found.model_input):
        raise RequestError(f"{where}: only tokens are trained on here, no images or audio")
    tokens = [token for chunk in found.model_input for token in np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()]
    inputs = {}
    for entry in found.loss_fn_inputs:
        tensor = entry.value
        values = np.frombuffer(tensor.dense, _TYPES.get(tensor.dtype, np.uint8))
        shape = tuple(tensor.shape) or values.shape  # clients may leave out the shape
        if tensor.dtype not in _TYPES or not values.shape == shape == (len(tokens),):
            given = "sparse" if tensor.sparse_csr else f"of shape {shape}"
            raise RequestError(f"{where}: {entry.key} is {given}; give {len(tokens)} float32 or int64, one for each token")
        inputs[entry.key] = values
    return TrainingDatum(tokens, inputs)


def forward_backward_output(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """`logprobs`: of each datum's targets."""
    offsets = np.cumsum([0, *(4 * len(one) for one in logprobs)], dtype=np.int64)
    batch = {"data": np.concatenate(logprobs, dtype=np.float32).tobytes(), "offsets": offsets.tobytes(), "dtype": _FLOAT32}
    record = {"type_tag": "ArrayRecord", "fields": [{"key": "logprobs", "value": batch}], "num_datums": len(logprobs)}
    values = [{"key": key, "value": value} for key, value in metrics.items()]
    output = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": [record], "metrics": values}
    return bytes(_messages()["ForwardBackwardOutput"](**output).SerializeToString())


class SampledTokens(NamedTuple):
    """A sampled sequence, with the stop token that ended it (`stopped`), and the weights that sampled it.

    `logprobs`: of the distribution that was sampled from.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    weights: Sequence[Any] = ()


def sample_response(sequences: Sequence[SampledTokens], prompt_logprobs: Sequence[float]) -> bytes:
    """`prompt_logprobs`: one for each token of the prompt, NaN for those without one; or none at all."""
    arrays = [(one, np.array(one.tokens, np.int32), np.array(one.logprobs, np.float32)) for one in sequences]
    found = [
        {"stop_reason": int(not one.stopped), "tokens": tokens.tobytes(), "logprobs": logprobs.tobytes()}
        for one, tokens, logprobs in arrays
    ]
    prompt = np.array(prompt_logprobs, np.float32).tobytes()
    return bytes(_messages()["SampleResponse"](sequences=found, prompt_logprobs=prompt).SerializeToString())
