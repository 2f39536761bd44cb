"""Text that grows: up to a stop string, and up to the first tool call. `TextStream` makes it from tokens."""

from __future__ import annotations

from collections.abc import Sequence

from pipelinerl.serving.server.api.answers import Json, delta_of


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
