"""Seeded mutations of valid input: of JSON values, of bytes, and of the headers of safetensors files."""

from __future__ import annotations

import copy
import json
import struct
from random import Random
from typing import Any

NASTY: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**400,
    1e308,
    -0.0,
    float("nan"),
    float("inf"),
    "",
    "\x00",
    "\x1b[2J\x1b]0;title\x07",
    "<script>alert(1)</script>",
    "[red]markup[/red]",
    "\u202e\ufeff\ud7ff",
    "../../../../etc/passwd",
    "/dev/zero",
    "/proc/self/environ",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "%s%n" * 50,
    "x" * 100_000,
    [],
    {},
    [[]] * 1000,
    ["x"] * 5000,
    {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}},
)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def mutated(value: Any, rng: Random) -> Any:
    """A copy of a JSON value with one to three places replaced, removed or added."""
    changed = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(list(_containers(changed)))
        if isinstance(place, dict):
            key = rng.choice([*place, "n", "stream", "stop", "tools", "\x00", "__class__"])
            if key in place and rng.random() < 0.2:
                del place[key]
            else:
                place[key] = copy.deepcopy(rng.choice(NASTY))
        else:
            place.insert(rng.randint(0, len(place)), copy.deepcopy(rng.choice(NASTY)))
    return changed


def _containers(value: Any) -> Any:
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value[:20]:
            yield from _containers(inner)


def mutated_bytes(data: bytes, rng: Random) -> bytes:
    """A copy with a part flipped, removed, repeated or replaced by random bytes; sometimes only random bytes."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randint(0, 300))
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(result))
        end = min(len(result), start + rng.randint(0, 20))
        replacement = rng.choice(
            (b"", bytes(result[start:end]) * 2, rng.randbytes(rng.randint(1, 12)), b"\x00", b"\xff\xfe")
        )
        result[start:end] = replacement
    return bytes(result)


def body(value: Any, rng: Random) -> bytes:
    """A request's body: a mutated JSON value, mutated text of it, or deep nesting."""
    kind = rng.random()
    if kind < 0.7:
        return json.dumps(mutated(value, rng)).encode(errors="surrogatepass")
    if kind < 0.97:
        return mutated_bytes(json.dumps(value).encode(), rng)
    return nested(rng.choice((10, 1000, 100_000))).encode()


def safetensors(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def false_safetensors(whole: bytes, rng: Random) -> bytes:
    """A safetensors file with a false header: lengths, offsets, types or shapes that lie, or damaged bytes."""
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    kind = rng.randrange(4)
    if kind == 0:
        return mutated_bytes(whole, rng)
    if kind == 1:
        claimed = rng.choice((0, 1, 7, 2**20, 2**32, 2**63, 2**64 - 1))
        return struct.pack("<Q", claimed) + whole[8:]
    if kind == 2:
        return safetensors(mutated(header, rng), data)
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    entry[rng.choice(("dtype", "shape", "data_offsets"))] = rng.choice(
        ("F64", "I8", [2**62, 2**62], [-1], [0], [len(data), 0], [0, 2**60], [1, 2, 3], [])
    )
    return safetensors(header, data[: rng.choice((len(data), len(data) // 2))])
