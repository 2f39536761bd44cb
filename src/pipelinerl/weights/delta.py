"""Lossless deltas: the words of a buffer that differ from an older state of it, and where they are.

Both functions know bytes only, not types or tensors. A word has two bytes: one bfloat16, or half a float32. Words are
compared as bits, so -0.0 and the payload of a NaN are exact. The buffer is divided into slices of `_SLICE` words:

    slice       a tree of bitmaps, from the top down, and a zero byte if their number is odd
                the changed words

The lowest bitmap has a bit for each word, the next one a bit for each byte of the one below it, and so on, up to `_TOP`
bytes. Of all bitmaps but the top one, the bytes without a bit are left out: the bitmap above says which these are. So every
size follows from the buffer's size and the bits, and nothing that is received can point beyond the buffer. A delta has some
3 to 6 bytes for a changed word, and 7.2% more bytes than the buffer if all words have changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError

_WORD = torch.int16
_WORD_BYTES = 2
_SLICE = 1 << 22
"""Words that are encoded or applied at once, which limits the memory for masks and indices."""
_TOP = 16


def encode(new_U8: Tensor, base_U8: Tensor, *, below: int | None = None) -> Tensor | None:
    """The delta (bytes) that turns `base_U8` into `new_U8`; None if it has not fewer than `below` bytes.

    Both are contiguous, and of the same even size. Needs memory for the delta and a few slices: words are counted first.
    """
    slices = torch.split(new_U8.view(_WORD), _SLICE)
    trees, total = list[Tensor](), 0
    for new, base in zip(slices, torch.split(base_U8.view(_WORD), _SLICE), strict=True):
        changed = new != base
        trees.append(_tree(changed))
        total += trees[-1].numel() + _WORD_BYTES * int(torch.count_nonzero(changed))
        if below is not None and total >= below:
            return None
    delta_U8, end = torch.empty(total, dtype=torch.uint8, device=new_U8.device), 0
    for new, tree_U8 in zip(slices, trees, strict=True):
        places, _ = _places(tree_U8, new.numel())
        for part_U8 in (tree_U8, new.index_select(0, places).view(torch.uint8)):
            delta_U8[end : end + part_U8.numel()] = part_U8
            end += part_U8.numel()
    return delta_U8


def apply(delta_U8: Tensor, buffer_U8: Tensor) -> None:
    """Change the buffer, which holds the base of the delta, in place.

    Raises WeightUpdateError if the delta is malformed; the buffer may then be changed in part. Does not detect wrong values
    or another base: compare checksums.
    """
    end = 0
    for words in torch.split(buffer_U8.view(_WORD), _SLICE):
        places, length = _places(delta_U8[end:], words.numel())
        begin, end = end + length, end + length + _WORD_BYTES * places.numel()
        _require(end <= delta_U8.numel())
        words.index_copy_(0, places, delta_U8[begin:end].view(_WORD))
    _require(end == delta_U8.numel())


def _tree(bits: Tensor) -> Tensor:
    """The bitmaps (bytes) of booleans."""
    parts = list[Tensor]()
    while (eights := torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)).numel() > _TOP:
        bits = eights != 0
        parts.insert(0, _packed(eights[bits]))
    tree_U8 = torch.cat([_packed(eights), *parts])
    return torch.nn.functional.pad(tree_U8, (0, tree_U8.numel() % _WORD_BYTES))


def _places(delta_U8: Tensor, count: int) -> tuple[Tensor, int]:
    """Which of `count` booleans are true, by the bitmaps at the beginning of `delta_U8`, and the length of these."""
    sizes = [count]
    while sizes[0] > _TOP or len(sizes) == 1:
        sizes.insert(0, -(-sizes[0] // 8))
    device = delta_U8.device
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    eights = bits.to(torch.bool).view(torch.int64)[:, 0]  # the eight booleans of each byte
    places, begin, end = torch.arange(sizes[0], device=device), 0, sizes[0]
    for size in sizes[1:]:
        _require(end <= delta_U8.numel())
        found = eights.index_select(0, delta_U8[begin:end].int()).view(torch.bool).nonzero()[:, 0]
        places = places.index_select(0, found >> 3) * 8 + (found & 7)
        _require(not places.numel() or int(places[-1]) < size)
        begin, end = end, end + places.numel()
    return places, begin + begin % _WORD_BYTES


def _require(possible: bool) -> None:
    if not possible:
        raise WeightUpdateError("the delta of a weight update is malformed: its bitmaps do not fit its length")


def _packed(eights: Tensor) -> Tensor:
    """Eight booleans, which are the bytes of a 64-bit integer, per byte; the first one in the lowest bit."""
    # The product moves the lowest bit of byte i of a 64-bit integer to bit 56 + i. No other products meet there.
    return ((eights * 0x0102040810204080 >> 56) & 0xFF).to(torch.uint8)
