"""Answers of OpenAI's API: text that grows, choices, and the body of a response, whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from starlette.responses import Response

from pipelinerl.serving.server.api.bodies import ChatBody, CompletionBody, read_body
from pipelinerl.serving.server.http import answer, server_sent_event

Json = dict[str, Any]


class Writer(Protocol):
    """Builds the answer to one request from choices of OpenAI's API (see `choice_of`), as the request's API has it."""

    def whole(self, choices: Sequence[Json], usage: Json) -> Json: ...

    def stream(self, choices: Sequence[Json], usage: Json) -> bytes:
        """The answer as a stream, in one piece."""


class ReadRequest(NamedTuple):
    """A request, perhaps translated. `writer` makes the writer of its answer, from the answer's id and the model's name."""

    body: ChatBody | CompletionBody
    writer: Callable[[str, str], Writer]

    def answered(self, writer: Writer, choices: Sequence[Json], usage: Json) -> Response:
        """The response with these choices, as the request's `writer` has it."""
        if self.body.stream:
            return Response(writer.stream(choices, usage), media_type="text/event-stream")
        return answer(writer.whole(choices, usage))


class AnswerWriter:
    """The writer of chats and text completions."""

    def __init__(self, body: ChatBody | CompletionBody, answer_id: str, model: str) -> None:
        self._include_usage = body.include_usage
        chat = isinstance(body, ChatBody)
        self._kind, self._chunk_kind = ("chat.completion", "chat.completion.chunk") if chat else ("text_completion",) * 2
        self._fields = {"id": answer_id, "model": model, "created": int(time.time())}

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        return self._fields | {"object": self._kind, "choices": choices, "usage": usage}

    def stream(self, choices: Sequence[Json], usage: Json) -> bytes:
        chunks = []
        for choice in choices:
            said: Json = {"text": choice.get("text")}
            last: Json = {"text": ""}
            if "message" in choice:
                said, last = {"delta": delta_of(choice["message"])}, {"delta": {}}
            chunks.append(self.chunk(choice_of(said, None, index=choice["index"])))
            chunks.append(self.chunk({key: value for key, value in choice.items() if key not in ("message", "text")} | last))
        return b"".join([*chunks, self.end(usage)])

    def chunk(self, choice: Json) -> bytes:
        """A part of a stream. If the stream ends with a usage chunk, all other chunks have usage null."""
        usage = {"usage": None} if self._include_usage else {}
        return server_sent_event(self._fields | {"object": self._chunk_kind, "choices": [choice]} | usage)

    def end(self, usage: Json) -> bytes:
        last = self._fields | {"object": self._chunk_kind, "choices": [], "usage": usage}
        return (server_sent_event(last) if self._include_usage else b"") + b"data: [DONE]\n\n"


def read_chat(data: bytes) -> ReadRequest:
    body = read_body(data, ChatBody)
    return ReadRequest(body, partial(AnswerWriter, body))


def read_completion(data: bytes) -> ReadRequest:
    body = read_body(data, CompletionBody)
    return ReadRequest(body, partial(AnswerWriter, body))


def choice_of(content: Json, finish_reason: str | None, logprobs: Json | None = None, *, index: int = 0) -> Json:
    """A choice, or the part of it in one chunk. `content`: its `message`, `delta` or `text`."""
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def delta_of(message: Json) -> Json:
    """A message as the delta of one chunk."""
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    return {key: value for key, value in message.items() if value is not None} | ({"tool_calls": calls} if calls else {})


def usage_of(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


# ---- text that grows; `TextStream` makes it from tokens


class StopStrings:
    """Cuts a text before the first occurrence of any of `stops`, or after it with `include`.

    A possible beginning of one is held back. `found`: the stop string that was found.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Add text; return the text that is final. Returns "" once a stop string was `found`."""
        if self.found is not None:
            return ""
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            shown, self._held = self._held[: place + (len(self.found) if self._include else 0)], ""
            return shown
        keep = 0
        for stop in self._stops:
            longest = min(len(stop) - 1, len(self._held))
            keep = max(keep, next((size for size in range(longest, 0, -1) if stop.startswith(self._held[-size:])), 0))
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """The text that was held back; call it at the end."""
        shown, self._held = self._held, ""
        return shown


class TextBeforeCalls:
    """Shows the text of an answer up to its first tool call. White space is shown when it is known not to end the text."""

    def __init__(self) -> None:
        self._before = StopStrings(["<tool_call>"])
        self._space = self._shown = ""

    def feed(self, text: str) -> str:
        """Add text; return what can be shown of it."""
        text = self._space + self._before.feed(text)
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._shown += shown
        return shown

    def rest(self, message: Json) -> Json:
        """What is left of the complete message, as a delta: its calls, and the rest of its text."""
        calls = "tool_calls" in message
        shown = self._shown.lstrip() if calls else self._shown  # a text with calls is stripped
        rest = (message["content"] or "")[len(shown) :]
        delta = delta_of({"tool_calls": message["tool_calls"]}) if calls else {}
        return delta | ({"content": rest} if rest else {})
