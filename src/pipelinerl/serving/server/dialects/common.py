"""What the translations share: parts of requests as those of Chat Completions, and streams of named events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.http import server_sent_event
from pipelinerl.serving.server.openai.answers import Json, MakeWriter
from pipelinerl.serving.server.openai.bodies import ChatBody, StreamOptions, refuse_keys
from pipelinerl.serving.wire import ErrorBody

T = TypeVar("T")

# ---- requests


class Translated(NamedTuple):
    """A request as one of Chat Completions, and what makes the writer of its answer."""

    body: ChatBody
    writer: MakeWriter


USAGE_AT_THE_END = StreamOptions(include_usage=True)
"""What the writers below need of a stream."""


def converted(where: str, value: object, kind: type[T]) -> T:
    """A part of a body as `kind`. Raises RequestError that names the wrong field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {error}") from error


def only_text(where: str, content: object, types: Sequence[str]) -> str:
    """A text, or a list of parts of these types with a `text`, as one text. Raises RequestError for other parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in converted(where, content, list[dict[str, Any]]):
        if part.get("type") not in types:
            raise RequestError(f"{where}: a part of type {str(part.get('type'))[:40]!r}; this server takes only text")
        texts.append(converted(where, part.get("text"), str))
    return "".join(texts)


class _Tool(msgspec.Struct, frozen=True):
    """A tool of either API."""

    type: str | None = None
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None


def chat_tools(tools: Sequence[Json] | None, *types: str | None) -> list[Json] | None:
    """Tools of these types as those of Chat Completions. Raises RequestError for other ones."""
    return [_chat_tool(f"tools[{number}]", given, types) for number, given in enumerate(tools or [])] or None


def _chat_tool(where: str, given: Json, types: Sequence[str | None]) -> Json:
    tool = converted(where, given, _Tool)
    if tool.type not in types or not tool.name:
        kind = str(tool.type)[:40]
        raise RequestError(f"{where}: this server has no tools of type {kind!r}; give functions of your own, with a `name`")
    refuse_keys(given, _Tool, f"{where}.", strict=True)
    optional = {"description": tool.description, "parameters": tool.parameters or tool.input_schema}
    return {"type": "function", "function": {"name": tool.name} | {key: value for key, value in optional.items() if value}}


def function_call(call_id: str, name: str, arguments: object) -> Json:
    """A call in a message of Chat Completions."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# ---- answers


@dataclass
class Part:
    """A part of an answer: a text, or a call (with `name` and `call_id`), whose `text` is its arguments as JSON."""

    text: str = ""
    name: str = ""
    call_id: str = ""


class EventWriter(ABC):
    """Writes an answer of parts, whole, or as a stream in which one part after the other is begun, extended and ended."""

    def __init__(self, answer_id: str, model: str, prompt_tokens: int) -> None:
        self._id = answer_id.removeprefix("chatcmpl-")
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._parts: list[Part] = []
        self._open = self._begun = False  # whether the last part is open, and whether the stream has begun
        self._reason: str | None = None
        self._stop: str | None = None  # the stop string that ended the answer

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        list(self._events(choices, usage))
        return self._answer(usage)

    def chunk(self, choices: Sequence[Json], **usage: Json | None) -> bytes:
        counts = usage.get("usage")
        events = [] if self._begun else list(self._begin())
        self._begun = True
        events += self._events(choices, counts)
        if counts is not None:
            events += self._end(counts)
        return b"".join(map(self._framed, events))

    def end(self) -> bytes:
        return b""  # its last event ends a stream

    def _events(self, choices: Sequence[Json], usage: Json | None) -> Iterable[Json]:
        for choice in choices:
            said = choice["delta"] if "delta" in choice else choice["message"]
            self._reason = choice["finish_reason"] or self._reason
            self._stop = choice.get("stop_reason") or self._stop
            yield from self._extend(Part(said.get("content") or ""))
            for call in said.get("tool_calls", ()):
                function = call["function"]
                yield from self._extend(Part(function["arguments"], function.get("name", ""), call.get("id", "")), call=True)
        if usage is not None:
            if not self._parts:
                yield from self._add(Part())
            yield from self._close()

    def _extend(self, more: Part, *, call: bool = False) -> Iterable[Json]:
        """Add a text, a new call, or more of the last call's arguments."""
        last = self._parts[-1] if self._open else None
        if more.call_id or (more.text and not call and (last is None or last.call_id)):
            yield from self._close()
            yield from self._add(Part("", more.name, more.call_id))
        if more.text:
            part = self._parts[-1]
            part.text += more.text
            yield self._extended(part, more.text)

    def _add(self, part: Part) -> Iterable[Json]:
        self._parts.append(part)
        self._open = True
        yield from self._begin_part(part)

    def _close(self) -> Iterable[Json]:
        if self._open:
            self._open = False
            yield from self._end_part(self._parts[-1])

    @property
    def _index(self) -> int:
        """That of the last part."""
        return len(self._parts) - 1

    def _framed(self, event: Json) -> bytes:
        """An event, which has a `type`, as a server-sent event of that name."""
        return b"event: %s\n" % event["type"].encode() + server_sent_event(event)

    @abstractmethod
    def error(self, body: ErrorBody) -> bytes: ...

    @abstractmethod
    def _answer(self, usage: Json) -> Json:
        """The complete answer."""

    @abstractmethod
    def _begin(self) -> Iterable[Json]:
        """The first events of a stream."""

    @abstractmethod
    def _begin_part(self, part: Part) -> Iterable[Json]: ...

    @abstractmethod
    def _extended(self, part: Part, text: str) -> Json: ...

    @abstractmethod
    def _end_part(self, part: Part) -> Iterable[Json]: ...

    @abstractmethod
    def _end(self, usage: Json) -> Iterable[Json]:
        """The last events of a stream."""
