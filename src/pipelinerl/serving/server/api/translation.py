"""What the translations of other APIs share: parts of requests as those of Chat Completions, and streams of named events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.api.answers import Json
from pipelinerl.serving.server.api.bodies import refuse_keys
from pipelinerl.serving.server.http import server_sent_event

T = TypeVar("T")


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


class _ForeignTool(msgspec.Struct, frozen=True):
    """A tool of either API."""

    type: str | None = None
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None


def chat_tools(tools: Sequence[Json] | None, *types: str | None) -> list[Json] | None:
    """Tools of these types as those of Chat Completions. Raises RequestError for other ones."""
    translated: list[Json] = []
    for number, given in enumerate(tools or []):
        where = f"tools[{number}]"
        tool = converted(where, given, _ForeignTool)
        if tool.type not in types or not tool.name:
            kind = str(tool.type)[:40]
            raise RequestError(
                f"{where}: this server has no tools of type {kind!r}; give functions of your own, with a `name`"
            )
        refuse_keys(given, _ForeignTool, f"{where}.", strict=True)
        optional = {"description": tool.description, "parameters": tool.parameters or tool.input_schema}
        function = {"name": tool.name} | {key: value for key, value in optional.items() if value}
        translated.append({"type": "function", "function": function})
    return translated or None


def function_call(call_id: str, name: str, arguments: object) -> Json:
    """A call in a message of Chat Completions."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def named_events(events: Iterable[Json]) -> bytes:
    """Events, which have a `type`, as server-sent events of that name."""
    return b"".join(b"event: %s\n" % event["type"].encode() + server_sent_event(event) for event in events)
