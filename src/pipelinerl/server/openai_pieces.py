"""A generation as pieces of text: tokens, the text that is certain with them, and where it ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from pipelinerl.interfaces import Tokenizer
from pipelinerl.server.exchange import Exchange, Generation
from pipelinerl.server.refusal import unavailable
from pipelinerl.server.text import StopStrings, TextStream
from pipelinerl.types import TokenEvent, VersionSpan


class Piece(NamedTuple):
    """Tokens, and the text that became certain with them. `end` is why it is the last, or None."""

    tokens: list[TokenEvent]
    text: str
    end: str | None = None
    prompt_versions: tuple[VersionSpan, ...] = ()


async def pieces(
    exchange: Exchange, generation: Generation, tokenizer: Tokenizer, stops: Sequence[str], *, singly: bool
) -> AsyncGenerator[Piece]:
    """The text of a generation; the last piece has no tokens. `singly`: a piece for each token, else for each batch.

    Raises why there is no completion: it was refused, or ended by a server that stops.
    """
    text, stop = TextStream(tokenizer), StopStrings(stops)
    async for batch in generation.batches():
        size = 1 if singly or stops else len(batch)
        for start in range(0, len(batch), size):
            tokens = batch[start : start + size]
            yield Piece(tokens, stop.feed(text.feed([event.token_id for event in tokens])))
            if stop.found:
                break
        if stop.found:
            exchange.cancel(generation.request.id)
            break
    completion = await generation.completion()
    if completion.finish_reason == "cancelled" and not stop.found:
        raise unavailable("the request was cancelled")
    rest = stop.feed(text.rest()) + stop.rest()
    yield Piece([], rest, "stop" if stop.found else completion.finish_reason, completion.prompt_versions)
