"""Incremental detokenization, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from pipelinerl.interfaces import Tokenizer

PART = "\ufffd"
"""The replacement character: what decoding gives for part of a character."""


class TextStream:
    """Decodes a growing sequence of tokens in pieces. The concatenated pieces are the text of the whole sequence.

    Some tokens are parts of a character, and some decode differently after another token. So the tokens of the last piece
    are decoded again with the new ones, and a piece is held back until its last character is complete. `special`: whether
    the text includes special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._ids: list[int] = []
        self._start = self._read = 0  # first token to decode again as context; number of tokens whose text was returned

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that became final."""
        self._ids += token_ids
        text = self._new_text()
        if text.endswith(PART):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text

    def rest(self) -> str:
        """The remaining text at the end, including incomplete characters."""
        text = self._new_text()
        self._start = self._read = len(self._ids)
        return text

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(known) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=not self._special) if token_ids else ""


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
