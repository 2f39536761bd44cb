"""Decodes sampled tokens while they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipelinerl.interfaces import PART

MOST_HELD = 16
"""Tokens that a stream holds back for the rest of a character. A character has at most four bytes."""


class TextStream:
    """Decodes a growing sequence of tokens in pieces, which do not depend on how many tokens are fed at once.

    Some tokens are parts of a character, and some decode differently after another token. So the tokens of the last piece
    are decoded again with the new ones, and a piece is held back until its last character is complete, or for `MOST_HELD`
    tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode`: see `prompts.plain_decoder`."""
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._read = 0  # first token to decode again as context; number of tokens whose text was returned

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that became final."""
        before = len(self._ids)
        self._ids += token_ids
        text = self._new_text(len(self._ids))
        if PART not in text:
            self._start, self._read = self._read, len(self._ids)
            return text
        return "".join(self._piece(end + 1) for end in range(before, len(self._ids)))

    def rest(self) -> str:
        """The remaining text at the end, including incomplete characters."""
        text = self._new_text(len(self._ids))
        self._start = self._read = len(self._ids)
        return text

    def _piece(self, end: int) -> str:
        """The text that becomes final with token `end` - 1."""
        text = self._new_text(end)
        if not text.endswith(PART):
            self._start, self._read = self._read, end
            return text
        if end - self._read < MOST_HELD:
            return ""
        # All but the last tokens is final, cut where this changes nothing: not within a character.
        cuts = range(end - 3, self._read, -1)
        cut = next((at for at in cuts if self._new_text(at) + self._decode(self._ids[at:end]) == text), cuts[0])
        text = self._new_text(cut)
        self._start = self._read = cut
        return text

    def _new_text(self, end: int) -> str:
        known, text = (self._decode(self._ids[self._start : stop]) for stop in (self._read, end))
        return text[len(known) :] if text.startswith(known) else self._decode(self._ids[self._read : end])
