"""Text that grows: stop strings, and tool calls. `TextStream` makes it from tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pipelinerl.environments.chat.messages import answer_message, parse_tool_calls


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
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """The text that was held back; call it at the end."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Number of characters at the end of the text that are a beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if stop.startswith(self._held[-size:])), 0)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_BETWEEN_STRINGS, _IN_STRING = re.compile(r'[^{}"]*'), re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


class ToolCallStream:
    """Splits a growing answer into deltas of OpenAI's API: content, names of called tools, and pieces of their arguments.

    The parts are those of `parse_tool_calls`. A call that does not begin with its name is sent in one piece at its end. A
    call whose arguments turn out to be malformed has been sent already. White space at the end of the content is dropped
    if there are calls. `called`: a call is complete.
    """

    def __init__(self, id_prefix: str) -> None:
        self._id_prefix = id_prefix
        self._held = self._space = ""
        self._state: Callable[[bool], bool] = self._content
        self._depth = self._calls = 0
        self._in_string = self._said = False
        self._texts: list[str] = []
        self._deltas: list[dict[str, Any]] = []
        self.called = False

    def feed(self, text: str, *, end: bool) -> dict[str, Any]:
        """Add text; return the delta that became final. `end`: no text follows."""
        self._held += text
        self._texts, self._deltas = [], []
        while self._state(end):
            pass
        content = "".join(self._texts)
        if end and not self._calls:
            content += self._space
        delta: dict[str, Any] = {"content": content} if content else {}
        return delta | ({"tool_calls": self._deltas} if self._deltas else {})

    # Each state reads what it can of the held text, and returns whether another state may read more.

    def _content(self, end: bool) -> bool:
        before, opened, after = self._held.partition(_OPEN)
        kept = 0
        if not opened and not end:
            kept = next((size for size in range(len(_OPEN) - 1, 0, -1) if before.endswith(_OPEN[:size])), 0)
        self._say(before[: len(before) - kept])
        self._held = after if opened else before[len(before) - kept :]
        if opened:
            self._state = self._call
        return bool(opened)

    def _call(self, end: bool) -> bool:
        if head := _HEAD.match(self._held):
            self._add({"id": f"{self._id_prefix}{self._calls:02}", "type": "function"}, name=head[1], arguments="")
            self._calls += 1
            self._depth, self._held, self._state = 0, self._held[head.end() :], self._arguments
            return True
        block, closed, after = self._held.partition(_CLOSE)
        if not closed and not end:
            return False
        written = _OPEN + block + closed
        parsed = parse_tool_calls(written)
        if parsed.calls:
            (call,) = answer_message(parsed, self._id_prefix)["tool_calls"]
            self._add({"id": f"{self._id_prefix}{self._calls:02}", "type": "function"}, **call["function"])
            self._calls += 1
            self.called = True
        else:
            self._say(written)
        self._held, self._state = after, self._content
        return bool(closed)

    def _arguments(self, _end: bool) -> bool:
        """Send the held text, up to the end of the object."""
        read = 0
        while read < len(self._held):
            inside = _IN_STRING if self._in_string else _BETWEEN_STRINGS
            read = inside.match(self._held, read).end()  # type: ignore[union-attr]
            if self._held[read:] in ("", "\\"):  # an escape may be incomplete
                break
            symbol = self._held[read]
            read += 1
            if symbol == '"':
                self._in_string = not self._in_string
                continue
            self._depth += 1 if symbol == "{" else -1
            if self._depth == 0:
                self.called, self._state = True, self._rest
                break
        if read:
            self._add({}, index=self._calls - 1, arguments=self._held[:read])
        self._held = self._held[read:]
        return self._state == self._rest

    def _rest(self, _end: bool) -> bool:
        _, closed, after = self._held.partition(_CLOSE)
        if closed:
            self._held, self._state = after, self._content
        return bool(closed)

    def _say(self, text: str) -> None:
        text = self._space + text
        if self._calls and not self._said:
            text = text.lstrip()
        said = text.rstrip()
        self._texts.append(said)
        self._said = self._said or bool(said)
        self._space = text[len(said) :]

    def _add(self, about: dict[str, Any], *, index: int | None = None, **function: str) -> None:
        self._deltas.append({"index": self._calls if index is None else index, **about, "function": function})
