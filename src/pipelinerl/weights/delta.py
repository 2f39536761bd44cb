"""Lossless deltas: the words of a buffer that differ from an older state of it, and where they are.

Both functions know bytes only, not types or tensors. A word has two bytes: one bfloat16, or half a float32. Words are
compared as bits, so -0.0 and the payload of a NaN are kept. A delta is a sequence of slices, each independent of the others.

    slice       header: start, size (bytes of the buffer), length (bytes of this slice), 64 bits each
                the number of changed words of each block, 32 bits each
                the changed words of each dense block as a bitmap
                the place in its block of each changed word of the sparse blocks, 16 bits each
                the changed words: those of the sparse blocks, then those of the dense ones
                zeros, up to a multiple of 8 bytes

A block has 65,536 words; it is dense if a bitmap is shorter than the places. Slices without a change are left out. A delta
has 4 bytes for a changed word if few have changed, and 6.3% more bytes than the buffer if all have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError

_WORD = torch.int16
_WORD_BYTES = 2
_BLOCK_BITS = 16
_BLOCK = 1 << _BLOCK_BITS  # words
_BITMAP_BYTES = _BLOCK // 8
_MOST_PLACES = _BITMAP_BYTES // 2
_SLICE = 64 * _BLOCK  # words: the most that is encoded or applied at once, which limits the memory for indices
_HEADER_BYTES = 24
_ALIGNMENT = 8


def encode(new_U8: Tensor, base_U8: Tensor, *, below: int | None = None) -> Tensor | None:
    """The delta (bytes) that turns `base_U8` into `new_U8`; None if it has not fewer than `below` bytes.

    Both are contiguous, and of the same even size. Needs memory for the delta and a few slices. Costs little if the answer
    is None, since words are counted first.
    """
    new, base = new_U8.view(_WORD), base_U8.view(_WORD)
    parts: list[tuple[int, _Form]] = []
    total = 0
    for begin in range(0, new.numel(), _SLICE):
        form = _Form.of(_counts(_changed(new, base, begin)))
        if form.changed:
            parts.append((begin, form))
            total += form.length
            if below is not None and total >= below:
                return None
    if below is not None and below <= 0:
        return None
    delta_U8 = torch.zeros(total, dtype=torch.uint8, device=new.device)
    end = 0
    for begin, form in parts:
        slice_U8, end = delta_U8[end : end + form.length], end + form.length
        header, rest = slice_U8[:_HEADER_BYTES].view(torch.int64), slice_U8[_HEADER_BYTES:]
        size = min(_SLICE, new.numel() - begin) * _WORD_BYTES
        header.copy_(torch.tensor([begin * _WORD_BYTES, size, form.length]))
        _write(rest, form, _padded(new[begin : begin + _SLICE]), _changed(new, base, begin))
    return delta_U8


def apply(delta_U8: Tensor, buffer_U8: Tensor) -> None:
    """Change the buffer, which holds the base of the delta, in place.

    Raises WeightUpdateError if the delta is malformed; the buffer may then be changed in part. Does not detect wrong values
    or another base: compare checksums.
    """
    buffer, end = buffer_U8.view(_WORD), 0
    while end < delta_U8.numel():
        end += _apply_slice(delta_U8[end:], buffer)


class _Form(NamedTuple):
    """The parts of an encoded slice, from its blocks' numbers of changed words. `sparse`, `dense`: indices of blocks."""

    counts: Tensor
    sparse: Tensor
    dense: Tensor
    places: int
    changed: int

    @classmethod
    def of(cls, counts: Tensor) -> _Form:
        sparse = ((counts > 0) & (counts <= _MOST_PLACES)).nonzero()[:, 0]
        dense = (counts > _MOST_PLACES).nonzero()[:, 0]
        return cls(counts, sparse, dense, int(counts[sparse].sum()), int(counts.sum()))

    @property
    def sizes(self) -> list[int]:
        """Bytes of the parts after the header: counts, bitmaps, places, words, and the zeros at the end."""
        sizes = [
            self.counts.nbytes,
            self.dense.numel() * _BITMAP_BYTES,
            self.places * _WORD_BYTES,
            self.changed * _WORD_BYTES,
        ]
        return [*sizes, -sum(sizes) % _ALIGNMENT]

    @property
    def length(self) -> int:
        """Bytes of the slice."""
        return _HEADER_BYTES + sum(self.sizes)


def _write(rest_U8: Tensor, form: _Form, words: Tensor, changed: Tensor) -> None:
    """Write what follows the header. `words`, `changed`: [blocks, _BLOCK]."""
    counts, bitmaps, places, values, _ = torch.split(rest_U8, form.sizes)
    counts.view(torch.int32).copy_(form.counts)
    bitmaps.copy_(_packed(changed[form.dense]))
    sparse = changed[form.sparse].view(-1).nonzero()[:, 0]
    dense = changed[form.dense].view(-1).nonzero()[:, 0]
    places.view(_WORD).copy_(sparse.to(_WORD))  # The conversion keeps the lower 16 bits.
    values.view(_WORD).copy_(
        torch.cat([words[form.sparse].view(-1).index_select(0, sparse), words[form.dense].view(-1).index_select(0, dense)])
    )


def _apply_slice(delta_U8: Tensor, buffer: Tensor) -> int:
    """Apply the first slice of `delta_U8`; returns its length in bytes."""
    _require(delta_U8.numel() >= _HEADER_BYTES, "a header")
    start, size, length = delta_U8[:_HEADER_BYTES].view(torch.int64).tolist()
    _require(start >= 0 and start + size <= buffer.numel() * _WORD_BYTES and start % _WORD_BYTES == 0, "a start")
    _require(0 < size <= _SLICE * _WORD_BYTES and size % _WORD_BYTES == 0, "a size")
    words = size // _WORD_BYTES
    counts_end = _HEADER_BYTES + 4 * -(-words // _BLOCK)
    _require(counts_end <= length <= delta_U8.numel(), "a length")
    counts = delta_U8[_HEADER_BYTES:counts_end].view(torch.int32)
    _require(bool(((counts >= 0) & (counts <= _BLOCK)).all()), "a count")
    form = _Form.of(counts)
    _require(form.length == length, "a length")
    _, bitmaps, places, values, _ = torch.split(delta_U8[_HEADER_BYTES:length], form.sizes)

    sparse = form.sparse.repeat_interleave(counts[form.sparse]) * _BLOCK + (places.view(_WORD).long() & (_BLOCK - 1))
    found = _unpacked(bitmaps).nonzero()[:, 0]
    _require(form.places + found.numel() == form.changed, "a bitmap")
    at = torch.cat([sparse, form.dense[found >> _BLOCK_BITS] * _BLOCK + (found & (_BLOCK - 1))])
    _require(bool((at < words).all()), "a place")
    buffer[start // _WORD_BYTES :][:words].index_copy_(0, at, values.view(_WORD))
    return int(length)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise WeightUpdateError(f"the delta of a weight update is malformed: {what} is impossible")


def _changed(new: Tensor, base: Tensor, begin: int) -> Tensor:
    """Which words of the slice at word `begin` differ (booleans, [blocks, _BLOCK])."""
    return _padded(new[begin : begin + _SLICE] != base[begin : begin + _SLICE])


def _padded(words: Tensor) -> Tensor:
    """As whole blocks ([blocks, _BLOCK]), the last one filled with zeros."""
    missing = -words.numel() % _BLOCK
    return (torch.nn.functional.pad(words, (0, missing)) if missing else words).view(-1, _BLOCK)


def _counts(changed: Tensor) -> Tensor:
    """The number of changed words of each block."""
    # Adds 8 booleans at once, as the bytes of a 64-bit integer. Each byte stays below 256: it adds 32 of them.
    sums = changed.view(torch.int64).view(changed.shape[0], 32, -1).sum(1)
    return sums.view(torch.uint8).sum(1, dtype=torch.int32)


def _packed(changed: Tensor) -> Tensor:
    """Eight booleans per byte, the first one in the lowest bit."""
    # The product moves the lowest bit of byte i of a 64-bit integer to bit 56 + i. No other products meet there.
    return ((changed.reshape(-1).view(torch.int64) * 0x0102040810204080 >> 56) & 0xFF).to(torch.uint8)


def _unpacked(bitmaps_U8: Tensor) -> Tensor:
    """The inverse of `_packed`, flat."""
    bits = (torch.arange(256, device=bitmaps_U8.device)[:, None] >> torch.arange(8, device=bitmaps_U8.device)) & 1
    return bits.to(torch.bool).view(torch.int64)[:, 0].index_select(0, bitmaps_U8.int()).view(torch.bool)
