"""One process's hold on a stream in Redis: its keys, and the answers of its scripts."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from pipelinerl.errors import StreamError
from pipelinerl.interfaces import StreamStats
from pipelinerl.stream.redis import scripts
from pipelinerl.stream.redis.connection import PATIENCE_S, RedisConnection

T = TypeVar("T")

TROUBLE = {
    "gone": "it is not in Redis any more: Redis was restarted without its data, or the stream was deleted or evicted. "
    "What was in it is lost; resume the run from its checkpoint",
    "replaced": "Redis has lost it, or it was rewound, and another process has begun it anew. What was in it is lost to "
    "this process; resume the run from its checkpoint",
    "damaged": "its items and its counts differ: something else has written to it, deleted from it, or evicted it. "
    "Resume the run from its checkpoint",
    "forgot": "Redis has forgotten what it had confirmed: it was restarted from an older state (appendfsync always "
    "prevents that). Resume the run from its checkpoint",
    "foreign": "there are keys of this name which are not a whole stream; delete them, or use another stream name",
    "displaced": "another process reads it now; end one of the two",
}
"""The answers of `scripts` that mean that the stream can't be used any more, in words."""


class RedisStream:
    """A stream that is there: it is begun if there is none.

    `word` names this end, and nobody else ever: host, process and a random part. The connection is called so, too.
    """

    def __init__(self, url: str, stream: str, role: str, patience_s: float = PATIENCE_S) -> None:
        """Raises StreamError, or ConfigError for a wrong URL or password."""
        if not re.fullmatch(r"[\w./:-]{1,200}", stream, re.ASCII):
            raise ValueError(f"a stream's name in Redis has 1 to 200 letters, digits or ./:_- in it: {stream!r}")
        host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)
        self.word = f"{role}-{host}-{os.getpid()}-{secrets.token_hex(8)}"
        self._keys = [f"{{{stream}}}:{part}" for part in ("items", "counts", "writers", f"dropped:{self.word}", "rewound")]
        self._connection = RedisConnection(url, name=self.word, patience_s=patience_s)
        self._closed = False
        self.place = f"{self._connection.url}, stream {stream}"
        self.life = secrets.token_hex(8)
        try:
            self.life = self.call(scripts.OPEN)[1].decode()
        except BaseException:
            self._connection.close()
            raise

    def call(self, script: str, *arguments: str | bytes | int) -> list[Any]:
        """The script's answer and results. It is given the stream's life before the arguments.

        Raises StreamError for an answer that is in `TROUBLE`, and for what `RedisConnection.run` does.
        """
        answer, *results = self._connection.run(script, self._keys, (self.life, *arguments))
        word = answer.decode()
        if word in TROUBLE:
            raise StreamError(f"{self.place}: {TROUBLE[word]}")
        return [word, *results]

    def refuse_second_reader(self) -> str:
        """The word of the reader before, "" if there was none. Raises StreamError if it is connected."""
        _, reader = self.call(scripts.READER)
        word: str = reader.decode()
        if word and self._connection.is_connected(word):
            raise StreamError(
                f"{self.place} is open already, by another reader ({word}: its host and process): end that process, or wait "
                "until Redis notices that its host is gone"
            )
        return word

    def stats(self) -> StreamStats:
        _, written, taken, dropped = self.call(scripts.STATS)
        return StreamStats(written, taken, dropped)

    def close(self, farewell: str = "") -> None:
        """Run one more script with this process's word, if Redis is there. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._connection.close(farewell, self._keys, (self.life, self.word))


def decoded(decoder: msgspec.json.Decoder[T], entries: Sequence[Any], place: str) -> list[tuple[int, T]]:
    """Offset and item of each entry of the items. Raises StreamError, naming it, for one that is of another type."""
    offsets = [int(entry_id.partition(b"-")[0]) for entry_id, _ in entries]
    return [
        (offset, decode_item(decoder, fields[1], f"{place}, item {offset}"))
        for offset, (_, fields) in zip(offsets, entries, strict=True)
    ]


def decode_item(decoder: msgspec.json.Decoder[T], payload: bytes, place: str) -> T:
    """Raises StreamError for JSON that is not one of the stream's items."""
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise StreamError(f"{place}: not an item of this stream ({error}); use another stream name") from error
