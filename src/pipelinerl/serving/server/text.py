"""From tokens to text while they come: pieces that are final, and strings that end the text."""

from __future__ import annotations

from collections.abc import Sequence

from pipelinerl.interfaces import Tokenizer

PART = "\ufffd"
"""What decoding shows for a part of a character."""


class TextStream:
    """The text of a growing row of tokens. The pieces, put together, are the text of the whole row.

    Some tokens are parts of a character, and some read differently behind another token. So the tokens of the last piece
    are decoded again with the new ones, and a piece waits until its last character is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._read = 0  # tokens decoded again for what they do to the next; tokens whose text was given

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        self._ids += token_ids
        text = self._new_text()
        if text.endswith(PART):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text

    def rest(self) -> str:
        """What is left at the end, whole characters or not."""
        text = self._new_text()
        self._start = self._read = len(self._ids)
        return text

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(known) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if token_ids else ""


class StopStrings:
    """Cuts a text before the first of `stops` that appears in it; what may become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that may be shown now. Nothing more comes once one is `found`."""
        if self.found:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            shown, self._held = self._held[: min(places)], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """What was held back, when no more text comes."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of the text are the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if stop.startswith(self._held[-size:])), 0)
