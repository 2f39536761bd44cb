"""Digests of tensors that are computed where the tensors are, for weights on a GPU: only 16 bytes for 256 KiB leave it.

The bytes of a tensor are little-endian int32 words w, in blocks of 2^16; the last word is filled with zeros. Each block has
two sums, each with its own table c of odd 64-bit constants:

    sum over j of  c[j] * w[j]   modulo 2^64

Sums of integers are the same in every order and on every device. Because the constants are odd, one changed word always
changes both sums. Several changes that are not made on purpose cancel in both with a probability of about 2^-64. The digest
of a tensor is xxh3 of the sums of its blocks. Zeros at the end may not change it: the caller adds the shape.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from pipelinerl.models.state import bytes_of, checksum, first_names

_BLOCK = 1 << 16  # words
_WORD_BYTES = 4
_GOLDEN, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64's constants as int64: products and sums of int64 wrap, so their bits are the same as with uint64."""


def device_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Like `state.checksum`, of names, types, shapes and bytes, but the bytes stay on the device of the tensors."""
    return checksum(tensors, device_digests_of(tensors))


def device_digests_of(tensors: Mapping[str, Tensor], chunk_blocks: int = 64) -> dict[str, str]:
    """A digest of the bytes of each tensor: 128 bits as 32 hex digits. All are on one device; a tied tensor is read once.

    `chunk_blocks`: blocks that are multiplied at once, which takes 512 KiB for each. Does not change the digests.
    """
    firsts = first_names(tensors)
    owners = list(dict.fromkeys(firsts.values()))
    device = next(iter(tensors.values())).device
    constants_2J = _constants(device)
    parts = [torch.empty(0, 2, dtype=torch.int64, device=device)]
    blocks = []
    for name in owners:
        bytes_U8 = bytes_of(tensors[name])
        for piece_U8 in torch.split(bytes_U8, chunk_blocks * _BLOCK * _WORD_BYTES) if len(bytes_U8) else ():
            words_KJ = _words(piece_U8)
            sums_2K = [(words_KJ * constants_J[: words_KJ.shape[1]]).sum(1) for constants_J in constants_2J]
            parts.append(torch.stack(sums_2K, 1))
        blocks.append(-(-len(bytes_U8) // (_BLOCK * _WORD_BYTES)))
    sums = torch.split(torch.cat(parts).cpu(), blocks)  # the only transfer
    digests = {name: xxhash.xxh3_128_hexdigest(sums_K2.numpy().data) for name, sums_K2 in zip(owners, sums, strict=True)}
    return {name: digests[first] for name, first in firsts.items()}


def _words(piece_U8: Tensor) -> Tensor:
    """The bytes as int32 words [blocks, _BLOCK], with zeros after the last one; a single block has as many as are needed."""
    wanted = _WORD_BYTES * (_BLOCK if len(piece_U8) > _BLOCK * _WORD_BYTES else 1)
    if missing := -len(piece_U8) % wanted:
        piece_U8 = torch.nn.functional.pad(piece_U8, (0, missing))
    elif piece_U8.storage_offset() % _WORD_BYTES or piece_U8.data_ptr() % _WORD_BYTES:
        piece_U8 = piece_U8.clone()  # a part of another tensor that does not begin at a word
    words = piece_U8.view(torch.int32)
    return words.view(-1, min(_BLOCK, len(words)))


def _constants(device: torch.device) -> Tensor:
    """The tables of both sums [2, _BLOCK]: SplitMix64's first numbers of seed 0, made odd."""
    mixed = torch.arange(1, 2 * _BLOCK + 1, device=device) * _GOLDEN
    for bits, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        mixed = (mixed ^ ((mixed >> bits) & (2 ** (64 - bits) - 1))) * factor  # a shift of an int64 copies its sign
    return (mixed | 1).view(2, _BLOCK)
