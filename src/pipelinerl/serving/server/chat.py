"""Chat Completions and Completions of OpenAI: the supported fields of a request, the keys that all APIs refuse, and answers.

The keys in `_REFUSED` would change an answer, so a request is refused that sets one of them to a value with an effect. Other
unknown keys are ignored, because clients send many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.http import answer_of, check_stops, decoded, server_sent_event
from pipelinerl.types import SamplingParams

Json = dict[str, Any]

# ---- requests

_NEVER = """
    allowed_token_ids audio background bad_words chat_template chat_template_kwargs container context_management
    continue_final_message conversation documents early_stopping echo functions guided_choice guided_grammar guided_json
    guided_regex include_stop_str_in_output logit_bias logprob_token_ids max_tool_calls mcp_servers output_config prediction
    previous_response_id prompt_embeds prompt_logprobs reasoning reasoning_effort return_tokens_as_token_ids stop store
    structured_outputs suffix tools truncate_prompt_tokens use_beam_search web_search_options
"""
_REFUSED: dict[str, tuple[object, ...]] = dict.fromkeys(_NEVER.split(), ()) | {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "include": (["reasoning.encrypted_content"],),  # there are no items of reasoning
    "length_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "text": ({"format": {"type": "text"}}, {"verbosity": "medium"}, {"format": {"type": "text"}, "verbosity": "medium"}),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Keys that a request can't set, unless its API has such a field, and the values that have no effect."""
_NO_EFFECT: tuple[object, ...] = (None, "", [], {})
"""Values that no key has an effect with. False is one, too, unless true is the default."""
WHOLE_INPUT = "nothing is stored here: send the whole input each time"
_HINTS = {
    "previous_response_id": WHOLE_INPUT,
    "conversation": WHOLE_INPUT,
    "store": "nothing is stored here: leave it out, or set it to false",
    "n": "send several requests at once",
    "parallel_tool_calls": "the model may call several tools in one answer: leave it out",
    "top_logprobs": "log-probs are of the sampled tokens alone: leave it out",
}

OTHER_SAMPLING = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""Sampling parameters that this server lacks, and their neutral values. The gateway of agents may ignore them."""

_NOT_VARIABLES = """
    add_generation_prompt chat_template continue_final_message conversation documents max_length messages padding
    return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs tools truncation
"""
"""Arguments of `apply_chat_template` that are not variables of the template."""

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def read_body(data: bytes, body_type: type[BodyT]) -> BodyT:
    """Decode a body. Raises RequestError if it is malformed, or sets a key that is refused."""
    body = decoded(data, body_type)
    for name, value in decoded(data, Json).items():
        if name in _REFUSED and name not in body_type.__struct_fields__:
            refuse_effect(name, value)
    return body


def refuse_effect(name: str, value: object) -> None:
    """Raises RequestError if a key that is not supported has a value with an effect."""
    neutral = _REFUSED.get(name, ())
    if value not in _NO_EFFECT and value not in neutral and (value is not False or True in neutral):
        raise RequestError(f"{name}: this server does not support it; {_HINTS.get(name, 'leave it out')}")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both endpoints: OpenAI's, those of vLLM's server that are supported, and `return_weight_versions`."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_weight_versions: bool = False

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling(self, *, default: int, end_ids: tuple[int, ...]) -> SamplingParams:
        """The sampling parameters. `default`: the token limit if the body has none. `end_ids`: the model's end tokens.

        Raises RequestError for parameters that this server lacks.
        """
        for name, neutral in OTHER_SAMPLING.items():
            if getattr(self, name) not in (None, neutral):
                raise RequestError(f"{name}: this server does not support it; leave it out")
        check_stops(self.stops)
        most = self.most_tokens
        return SamplingParams(
            max_tokens=max(1, default) if most is None else most,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k in (None, -1) else self.top_k,  # many clients send -1 for "off"
            stop_token_ids=(*(() if self.ignore_eos else end_ids), *(self.stop_token_ids or ())),
            seed=self.seed,
        )


class CompletionBody(Body, frozen=True, kw_only=True):
    """`prompt`: a text or token ids. `logprobs`: 0, for those of the sampled tokens alone."""

    prompt: str | list[int]
    logprobs: Literal[0] | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    name: str


class ChatTool(msgspec.Struct, frozen=True):
    """What a tool must have; the chat template gets all that the client sent."""

    type: Literal["function"]
    function: ToolFunction


class ChatBody(Body, frozen=True, kw_only=True):
    """`chat_template_kwargs`: variables of the model's chat template, such as Qwen3's `enable_thinking`."""

    messages: list[Json]
    logprobs: bool | None = None
    tools: list[Json] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: Json | None = None

    @property
    def offered_tools(self) -> list[Json]:
        """The tools that the model may call. Raises RequestError for tools that are not functions."""
        try:
            msgspec.convert(self.tools or [], list[ChatTool])
        except msgspec.ValidationError as error:
            raise RequestError(f"tools: {error}") from error
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def template_options(self) -> Json:
        """Arguments for the chat template. Raises RequestError for what is no variable of the template."""
        options = self.chat_template_kwargs or {}
        if taken := sorted(options.keys() & _NOT_VARIABLES.split()):
            raise RequestError(f"chat_template_kwargs: {taken[0]} is not a variable of the chat template; leave it out")
        return {**options, "add_generation_prompt": True}


AnyBody = ChatBody | CompletionBody


# ---- answers


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer to a request of any API. `message`: as in Chat Completions; a text is its `content`.

    `finish_reason`: as in Chat Completions. `stop`: the stop string of the request that ended the text. `beyond`: more
    fields of the choice, in the APIs of OpenAI that have one.
    """

    message: Json
    finish_reason: str
    stop: str | None = None
    prompt_tokens: int
    completion_tokens: int
    beyond: Json = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.message["content"] or ""

    @property
    def calls(self) -> Sequence[Json]:
        calls: Sequence[Json] = self.message.get("tool_calls", ())
        return calls


class Writer:
    """Writes the answer to one request, as the request's API has it. `asked`: the request's body."""

    def __init__(self, asked: Any, answer_id: str, model: str) -> None:
        self.asked, self.id, self.model, self.created = asked, answer_id, model, int(time.time())

    def whole(self, answer: Answer) -> Json:
        raise NotImplementedError

    def events(self, answer: Answer) -> Iterable[bytes]:
        """The answer as a stream."""
        raise NotImplementedError

    def response(self, answer: Answer) -> Response:
        """Of one piece, also for a stream."""
        if self.asked.stream:
            return Response(b"".join(self.events(answer)), media_type="text/event-stream")
        return answer_of(self.whole(answer))


class ReadRequest(NamedTuple):
    """A request, perhaps translated. `writer` makes the writer of its answer, from the answer's id and the model's name."""

    body: AnyBody
    writer: Callable[[str, str], Writer]


class ChoiceWriter(Writer):
    """The writer of chats and text completions."""

    def whole(self, answer: Answer) -> Json:
        choice = self._choice({"message": answer.message | {"refusal": None}}, answer.text, answer)
        return self._body("", [choice]) | {"usage": _usage(answer)}

    def events(self, answer: Answer) -> Iterable[bytes]:
        delta = {key: value for key, value in answer.message.items() if value is not None}
        if answer.calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(answer.calls)]
        yield self.part(answer.text, delta)
        yield self.end(answer)

    def part(self, text: str, delta: Json | None = None) -> bytes:
        """A part of a stream. `delta`: of the message, if that is more than text."""
        return self._event([self._choice({"delta": delta or {"content": text}}, text)])

    def end(self, answer: Answer) -> bytes:
        """The end of a stream whose parts had all text. With `include_usage`, all other chunks have usage null."""
        last = self._event([self._choice({"delta": {}}, "", answer)])
        usage = self._event([], _usage(answer)) if self._include_usage else b""
        return last + usage + b"data: [DONE]\n\n"

    def _choice(self, content: Json, text: str, ended: Answer | None = None) -> Json:
        """The choice, or a part of it: `content` of a chat, or `text`. `ended`: the answer, in the last part."""
        shown = content if isinstance(self.asked, ChatBody) else {"text": text}
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": ended.finish_reason if ended else None}
        if ended and ended.stop is not None:
            choice["stop_reason"] = ended.stop
        return choice | (ended.beyond if ended else {})

    def _event(self, choices: Sequence[Json], usage: Json | None = None) -> bytes:
        chunk = self._body(".chunk", choices)
        return server_sent_event(chunk | {"usage": usage} if self._include_usage else chunk)

    def _body(self, chunk: str, choices: Sequence[Json]) -> Json:
        chat = isinstance(self.asked, ChatBody)
        kind = f"chat.completion{chunk}" if chat else "text_completion"
        about = {"id": f"{'chat' if chat else ''}cmpl-{self.id}", "model": self.model, "created": self.created}
        return {**about, "object": kind, "choices": choices}

    @property
    def _include_usage(self) -> bool:
        options: StreamOptions | None = self.asked.stream_options
        return options is not None and options.include_usage


def _usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def read(body_type: type[ChatBody | CompletionBody], data: bytes) -> ReadRequest:
    body = read_body(data, body_type)
    return ReadRequest(body, partial(ChoiceWriter, body))


class StopStrings:
    """Cuts a text before the first occurrence of any of `stops`. A possible beginning of one is held back.

    `found`: the stop string that was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Add text; return the text that is final. Returns "" once a stop string was `found`."""
        if self.found is not None:
            return ""
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            cut, self.found = min(places)
            return self._held[:cut]
        held = len(self._held)
        sizes = ((stop, size) for stop in self._stops for size in range(1, min(len(stop), held + 1)))
        cut = held - max((size for stop, size in sizes if self._held.endswith(stop[:size])), default=0)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """The text that was held back; call it at the end."""
        return self._held if self.found is None else ""
