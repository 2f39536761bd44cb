"""Text from tokens while they come: whole characters, nothing lost, nothing shown that a stop string would cut off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pipelinerl.environments.chat.conversation import parse_tool_calls
from pipelinerl.environments.prompts import MOST_HELD, TextStream, plain_decoder, text_decoder
from pipelinerl.interfaces import PART
from pipelinerl.serving.server.chat import StopStrings
from tests.unit.server_parts import byte_tokenizer

TOKENIZER = byte_tokenizer()


def cuts(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    inner = {generator.randint(0, length) for _ in range(generator.randint(0, length))}
    return sorted({0, length, *inner})


@given(st.text(max_size=30), st.integers(0, 1000))
def test_the_pieces_are_the_text_and_no_piece_breaks_a_character(text: str, seed: int) -> None:
    ids = TOKENIZER.encode(text)
    stream = TextStream(plain_decoder(TOKENIZER))
    pieces = [stream.feed(ids[start:end]) for start, end in pairwise(cuts(len(ids), seed))]
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.rest() == text


def byte_fallback_tokenizer() -> Any:
    """Token 3 + i is byte i, as in tokenizers of SentencePiece; a run of these tokens is text only if all of it is."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


FALLBACK = byte_fallback_tokenizer()
BYTES = bytes_to_unicode()


@given(st.lists(st.sampled_from([*b"a \xc3\xa9\xe2\x82\xac\xff"]), max_size=60), st.integers(0, 1000))
def test_streams_of_bytes_that_are_no_text_are_the_record(data: list[int], seed: int) -> None:
    for tokenizer, ids in (
        (FALLBACK, [3 + byte for byte in data]),
        (TOKENIZER, [TOKENIZER.convert_tokens_to_ids(BYTES[byte]) for byte in data]),
    ):
        stream = TextStream(plain_decoder(tokenizer))
        pieces = [stream.feed(ids[start:end]) for start, end in pairwise(cuts(len(ids), seed))]
        assert "".join(pieces) + stream.rest() == text_decoder(tokenizer)(ids)
    assert text_decoder(TOKENIZER)(ids) == bytes(data).decode(errors="replace")


@pytest.mark.parametrize("byte", [0x80, 0xE2, 0xFF])
def test_a_stream_of_undecodable_tokens_is_read_in_linear_time(byte: int) -> None:
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return bytes(ids).decode(errors="replace")

    stream = TextStream(decode)
    text = "".join(stream.feed([byte]) for _ in range(2000)) + stream.rest()
    assert text == PART * 2000
    assert max(decoded) <= 2 * MOST_HELD


@pytest.mark.parametrize("special", [False, True])
def test_special_tokens_with_a_meaning_are_text(special: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    ids = [*tokenizer.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>'), 2]
    stream = TextStream(plain_decoder(tokenizer, special=special))
    text = "".join(stream.feed([token]) for token in ids) + stream.rest()
    assert text.endswith("</tool_call><eos>" if special else "</tool_call>")
    assert parse_tool_calls(text).calls[0].name == "add"


@given(st.text("ab-", max_size=20), st.lists(st.text("ab-", min_size=1, max_size=4), max_size=3), st.integers(0, 1000))
def test_what_is_shown_is_the_text_before_the_first_stop(text: str, stops: list[str], seed: int) -> None:
    stop = StopStrings(stops)
    shown, fed = "", ""
    for start, end in pairwise([*range(len(text) + 1)]):
        fed += text[start:end]
        shown += stop.feed(text[start:end])
        assert text.startswith(shown)
        assert not any(word in shown for word in stops)
        if stop.found:
            break
    places = [place for word in stops if (place := fed.find(word)) >= 0]
    assert (stop.found is not None) == bool(places)
    expected = fed[: min(places)] if places else text
    assert shown + stop.rest() == expected


def test_nothing_is_held_back_longer_than_needed() -> None:
    stop = StopStrings(["\n\nUser:", "END"])
    pieces = [stop.feed(text) for text in ("a\n", "b", "E", "NX", "\n\nU", "ser", "!")]
    assert "|".join(pieces) == "a|\nb||ENX|||\n\nUser!"
    assert not stop.found
