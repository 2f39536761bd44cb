"""Answers: their common form, that of Chat Completions and Completions, whole or as a stream, and text that grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from starlette.responses import Response

from pipelinerl.serving.server.api.bodies import AnyBody, ChatBody, CompletionBody, Json, read_body
from pipelinerl.serving.server.http import answer, server_sent_event


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
        """Of tools, as in Chat Completions."""
        calls: Sequence[Json] = self.message.get("tool_calls", ())
        return calls


class Writer(Protocol):
    """Writes the answer to one request, as the request's API has it."""

    def whole(self, answer: Answer) -> Json: ...

    def stream(self, answer: Answer) -> bytes:
        """The answer as a stream, in one piece."""


class ReadRequest(NamedTuple):
    """A request, perhaps translated. `writer` makes the writer of its answer, from the answer's id and the model's name."""

    body: AnyBody
    writer: Callable[[str, str], Writer]

    def answered(self, writer: Writer, found: Answer) -> Response:
        if self.body.stream:
            return Response(writer.stream(found), media_type="text/event-stream")
        return answer(writer.whole(found))


class ChoiceWriter:
    """The writer of chats and text completions."""

    def __init__(self, body: AnyBody, answer_id: str, model: str) -> None:
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._chat = isinstance(body, ChatBody)
        self._kind = "chat.completion" if self._chat else "text_completion"
        self._fields = {"id": answer_id, "model": model, "created": int(time.time())}

    def whole(self, answer: Answer) -> Json:
        content = {"message": answer.message | {"refusal": None}} if self._chat else {"text": answer.text}
        choices = [self._choice(content, answer.beyond, answer)]
        return self._fields | {"object": self._kind, "choices": choices, "usage": _usage(answer)}

    def stream(self, answer: Answer) -> bytes:
        delta = {key: value for key, value in answer.message.items() if value is not None}
        if answer.calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(answer.calls)]
        return self.chunk(delta if self._chat else answer.text, {}) + self.end(answer)

    def chunk(self, content: Json | str, beyond: Json) -> bytes:
        """A part of a stream. `content`: a delta of the message, or text."""
        shown = {"delta": {"content": content} if isinstance(content, str) else content} if self._chat else {"text": content}
        return self._event([self._choice(shown, beyond)])

    def end(self, answer: Answer) -> bytes:
        """The end of a stream whose parts had all text. With `include_usage`, all other chunks have usage null."""
        content: Json = {"delta": {}} if self._chat else {"text": ""}
        last = self._event([self._choice(content, answer.beyond, answer)])
        usage = self._event([], _usage(answer)) if self._include_usage else b""
        return last + usage + b"data: [DONE]\n\n"

    def _choice(self, content: Json, beyond: Json, ended: Answer | None = None) -> Json:
        """The choice, or a part of it. `ended`: the answer, in the last part."""
        reason = {"finish_reason": ended.finish_reason if ended else None}
        if ended and ended.stop is not None:
            reason["stop_reason"] = ended.stop
        return {"index": 0, **content, "logprobs": None, **reason, **beyond}

    def _event(self, choices: Sequence[Json], usage: Json | None = None) -> bytes:
        kind = "chat.completion.chunk" if self._chat else self._kind
        chunk = self._fields | {"object": kind, "choices": choices}
        return server_sent_event(chunk | {"usage": usage} if self._include_usage else chunk)


def _usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def read_chat(data: bytes) -> ReadRequest:
    body = read_body(data, ChatBody)
    return ReadRequest(body, partial(ChoiceWriter, body))


def read_completion(data: bytes) -> ReadRequest:
    body = read_body(data, CompletionBody)
    return ReadRequest(body, partial(ChoiceWriter, body))


# ---- the translated APIs


class Part(Protocol):
    @property
    def text(self) -> str: ...


def text_of(content: str | Sequence[Part]) -> str:
    """A text, or parts of one."""
    return content if isinstance(content, str) else "".join([part.text for part in content])


def function_call(call_id: str, name: str, arguments: object) -> Json:
    """A call in a message of Chat Completions."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: str | None, parameters: Json | None) -> Json:
    """A tool of Chat Completions."""
    optional = {"description": description, "parameters": parameters}
    return {"type": "function", "function": {"name": name} | {key: value for key, value in optional.items() if value}}


def named_events(events: Iterable[Json]) -> bytes:
    """Events, which have a `type`, as server-sent events of that name."""
    return b"".join(b"event: %s\n" % event["type"].encode() + server_sent_event(event) for event in events)


# ---- stop strings


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
        keep = 0
        for stop in self._stops:
            longest = min(len(stop) - 1, len(self._held))
            keep = max(keep, next((size for size in range(longest, 0, -1) if stop.startswith(self._held[-size:])), 0))
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """The text that was held back; call it at the end."""
        return self._held if self.found is None else ""
