"""Assigns KV cache rows to sequences and sorts them into length buckets.

In a decode step, the rows of a bucket attend to as many positions as the longest of them has. Without buckets, one long
sequence would make all others as expensive; each additional bucket costs one attention call per layer. Sequences are moved
so that decoding rows are always `0..R-1`, longest bucket first, followed by the rows of prompts still being processed.

The state of all rows is in arrays, so that the work per token is done by NumPy, not by Python. Between two compactions
the same rows decode one token per step: sampled tokens are buffered, and flushed to the arrays when these are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelinerl.engine.attention import Chunk, LengthBucket, Move, PackedTokens
from pipelinerl.engine.contents import Contents, Prefix
from pipelinerl.engine.sampler import Ints
from pipelinerl.types import GenerationRequest, VersionSpan

if TYPE_CHECKING:
    from pipelinerl.engine.runner import Runner

# ---- state of one request; its tokens are in the row table


class VersionMarks:
    """The weight version of each token of a growing sequence, stored as the positions where the version changes."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: list[tuple[int, int]] = []

    def mark(self, version: int, start: int) -> None:
        """Tokens from `start` on are produced by the weights of `version`."""
        if not self._marks or self._marks[-1][0] != version:
            self._marks.append((version, start))

    @property
    def first(self) -> int | None:
        """The version of the first token; None before it."""
        return self._marks[0][0] if self._marks else None

    def spans(self, length: int) -> tuple[VersionSpan, ...]:
        """Spans over the first `length` tokens. A version that produced no token has no span."""
        starts = [start for _, start in self._marks]
        ends = [*starts[1:], length]
        return tuple(
            VersionSpan(version, start, min(end, length))
            for (version, start), end in zip(self._marks, ends, strict=False)
            if start < min(end, length)
        )


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and its row in the KV cache. `row` is -1 until it has one; `key` is the key of its random numbers."""

    request: GenerationRequest
    key: int
    row: int = -1
    versions: VersionMarks = field(default_factory=VersionMarks)
    prompt_versions: tuple[VersionSpan, ...] = ()


@dataclass(eq=False, slots=True)
class Prefill:
    """A prompt being processed for one or more requests that share it. It is computed once, in the first member's row."""

    prompt_ids: tuple[int, ...]
    members: list[Sequence]
    done: int = 0
    versions: VersionMarks = field(default_factory=VersionMarks)

    def begin_with(self, prefix: Prefix) -> None:
        """The row begins with a copy of `prefix`."""
        self.done = prefix.length
        for span in prefix.versions:
            self.versions.mark(span.version, span.start)

    @property
    def row(self) -> int:
        return self.members[0].row


Reals = npt.NDArray[np.float32]

# Bucket lengths double from the first to the longest one. Attention lengths are rounded up to a multiple of `_ROUND`, so
# that tensor shapes repeat from step to step.
_SMALLEST_BUCKET, _ROUND = 48, 16
FREE, PREFILLING, DECODING = 0, 1, 2
_NONE: Ints = np.arange(0)
NONE_FRESH: Mapping[Sequence, Prefix] = {}


class _Region(NamedTuple):
    """Rows `start <= row < end` of a bucket at the last compaction.

    `longest` and `shortest` are tokens per row, the next token included; `limit` is the length of the bucket.
    """

    start: int
    end: int
    limit: int
    longest: int
    shortest: int

    def after(self, steps: int) -> LengthBucket:
        """The bucket after `steps` more tokens in every row."""
        needed = self.longest + steps
        if self.longest == self.shortest:
            return LengthBucket(self.start, self.end, needed, equal=True)
        return LengthBucket(self.start, self.end, min(self.limit, -(-needed // _ROUND) * _ROUND))


class RowTable:
    """Assigns rows and holds their state in arrays with one entry per row.

    positions                    cache position of the row's next token
    last                         id of that token: the one sampled last
    counts, budgets              tokens sampled so far, and their limit
    tokens, logprobs             sampled tokens and their log-probs [rows, max_length]
    keys                         key of the request's random numbers
    temperature, top_p, top_k    sampling parameters
    stops                        stop tokens, padded with -1

    `contents` is what rows hold in the cache, also after their sequence has ended.
    `positions`, `last`, `counts`, `tokens` and `logprobs` are up to date after `flush`. `decoding` is the number of decoding
    rows, `used` of all that are not free. `plain` is true if all rows sample at temperature 1 and without truncation.
    """

    def __init__(self, rows: int, max_length: int) -> None:
        limits = [_SMALLEST_BUCKET]
        while limits[-1] < max_length:
            limits.append(2 * limits[-1])
        self._limits: Ints = np.array([*limits[:-1], max_length])
        self._integers: Ints = np.zeros((6, rows), dtype=np.int64)
        self.positions, self.last, self.counts, self.budgets, self.top_k, self.keys = self._integers
        self._reals: Reals = np.zeros((2, rows), dtype=np.float32)
        self.temperature, self.top_p = self._reals
        self.stops: Ints = np.full((rows, 1), -1, dtype=np.int64)
        self.tokens: Ints = np.zeros((rows, max_length), dtype=np.int64)
        self.logprobs: Reals = np.zeros((rows, max_length), dtype=np.float32)
        self.contents = Contents(rows, max_length)
        self._kinds: Ints = np.zeros(rows, dtype=np.int64)
        self._owners: list[Sequence | None] = [None] * rows
        self._row_starts: Ints = np.arange(rows) * max_length
        self._buffered: list[tuple[Tensor, Tensor]] = []
        self._regions: list[_Region] = []
        self._age = 0  # steps since the last compaction
        self._overflow_age = self._earliest_end_age = 0
        self._stop_ids: frozenset[int] = frozenset()
        self.used = 0
        self.decoding = 0
        self.plain = True

    @property
    def free(self) -> int:
        return len(self._owners) - self.used

    def owner(self, row: int) -> Sequence:
        owner = self._owners[row]
        if owner is None:
            raise LookupError(f"row {row} is free")
        return owner

    def free_rows(self) -> Ints:
        return np.flatnonzero(self._kinds == FREE)

    def release(self, sequence: Sequence, versions: tuple[VersionSpan, ...]) -> None:
        """Free the row of a sequence that has ended. `versions`: of the keys and values that others may read."""
        row, prompt_ids = sequence.row, sequence.request.prompt_ids
        if versions:
            sampled = self.tokens[row, : versions[-1].end - len(prompt_ids)].tolist()
            self.contents.hold(row, (*prompt_ids, *sampled), versions)
        else:
            self.contents.forget(row)
        self._kinds[sequence.row] = FREE
        self._owners[sequence.row] = None
        self.used -= 1

    def start_decoding(self, sequence: Sequence) -> None:
        """Mark the sequence as decoding: its prompt is in the cache, at least all but its last token."""
        self._kinds[sequence.row] = DECODING
        versions = sequence.prompt_versions
        if sequence.request.reuses_from is not None and (length := versions[-1].end - 1):
            self.contents.hold(sequence.row, sequence.request.prompt_ids[:length], versions)

    def compact(self, fresh: Mapping[Sequence, Prefix] = NONE_FRESH) -> list[Move]:
        """Sort rows into contiguous buckets and give `fresh` sequences, whose prompts are still to be processed, a row each.

        A row moves only if it lies outside its bucket's new range. Fresh sequences are given with what they begin with, in
        rows as they are before. The caller applies the returned moves to the cache.
        """
        self.flush()
        alive = np.flatnonzero(self._kinds)
        buckets = np.searchsorted(self._limits, self.positions[alive] + 1)
        last_region = len(self._limits)
        regions = np.where(self._kinds[alive] == DECODING, last_region - 1 - buckets, last_region)
        sizes = np.bincount(regions, minlength=last_region + 1)
        self.decoding = int(sizes[:last_region].sum())
        sizes[last_region] += len(fresh)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        sources: list[Ints] = [_NONE]
        targets: list[Ints] = [_NONE]
        self._regions = []
        vacant = _NONE
        for region in range(last_region + 1):
            start, end = int(starts[region]), int(starts[region + 1])
            if start == end:
                vacant = _NONE
                continue
            rows = alive[regions == region]
            if region < last_region:
                held = self.positions[rows] + 1
                limit = int(self._limits[last_region - 1 - region])
                self._regions.append(_Region(start, end, limit, longest=int(held.max()), shortest=int(held.min())))
            inside = (rows >= start) & (rows < end)
            is_vacant = np.ones(end - start, dtype=np.bool_)
            is_vacant[rows[inside] - start] = False
            vacant = start + np.flatnonzero(is_vacant)
            movers = rows[~inside]
            sources.append(movers)
            targets.append(vacant[: len(movers)])
            vacant = vacant[len(movers) :]
        self.used = int(starts[-1])
        prefixes = dict(zip(vacant.tolist(), fresh.values(), strict=True))
        moves = self._place(np.concatenate(sources), np.concatenate(targets), prefixes)
        self._kinds[self.used :] = FREE
        self._owners[self.used :] = [None] * (len(self._owners) - self.used)
        for row, sequence in zip(prefixes, fresh, strict=True):
            self._admit(sequence, row)
        self.plain = self._all_plain(slice(0, self.used))
        decoding = slice(0, self.decoding)
        self._age = 0
        self._overflow_age = 1 + min((region.limit - region.longest for region in self._regions), default=0)
        self._earliest_end_age = int((self.budgets[decoding] - self.counts[decoding]).min()) if self.decoding else 0
        self._stop_ids = frozenset(self.stops[decoding].ravel().tolist())
        return moves

    def overflowed(self) -> bool:
        """Whether a sequence has grown beyond the length of its bucket."""
        return self._age >= self._overflow_age

    def buckets(self) -> tuple[LengthBucket, ...]:
        """The buckets of decoding rows, each with the attention length that this step needs."""
        return tuple([region.after(self._age) for region in self._regions])

    def buffer(self, ids_R: Tensor, logprobs_R: Tensor) -> bool:
        """Add one token per decoding row, after a step without prefill. Returns whether a row may have ended."""
        self._buffered.append((ids_R, logprobs_R))
        self._age += 1
        return self._age >= self._earliest_end_age or not self._stop_ids.isdisjoint(ids_R.tolist())

    def flush(self) -> None:
        """Write the buffered tokens to the arrays.

        Raises FloatingPointError if the log-prob of a token is not finite: its logits defined no distribution. So do all
        methods that flush.
        """
        if not self._buffered:
            return
        ids_SR, logprobs_SR = (torch.stack(tensors).numpy(force=True) for tensors in zip(*self._buffered, strict=True))
        self._buffered.clear()
        if not np.isfinite(logprobs_SR).all():
            raise FloatingPointError
        rows, steps = slice(0, self.decoding), len(ids_SR)
        places_SR = self._row_starts[rows] + self.counts[rows] + np.arange(steps)[:, None]
        self.tokens.reshape(-1)[places_SR] = ids_SR
        self.logprobs.reshape(-1)[places_SR] = logprobs_SR
        self.last[rows] = ids_SR[-1]
        self.counts[rows] += steps
        self.positions[rows] += steps

    def record(self, rows_n: Ints, ids_n: Ints, logprobs_n: Reals) -> None:
        """Add one token for each of `rows_n`: all decoding rows and those whose prompt this step completed."""
        self.flush()
        self._write(rows_n, ids_n, logprobs_n)
        self._age += 1
        self.positions[: self.decoding] += 1

    def _write(self, rows_n: Ints, ids_n: Ints, logprobs_n: Reals) -> None:
        if not np.isfinite(logprobs_n).all():
            raise FloatingPointError
        places_n = self._row_starts[rows_n] + self.counts[rows_n]
        self.tokens.reshape(-1)[places_n] = ids_n
        self.logprobs.reshape(-1)[places_n] = logprobs_n
        self.last[rows_n] = ids_n
        self.counts[rows_n] += 1

    def ended(self, rows_n: Ints) -> list[tuple[int, bool]]:
        """The rows of `rows_n` that ended with their last token; True for a stop token, False for a used-up budget."""
        stopped_n = (self.stops[rows_n] == self.last[rows_n, None]).any(axis=1)
        ended = np.flatnonzero(stopped_n | (self.counts[rows_n] >= self.budgets[rows_n]))
        return list(zip(rows_n[ended].tolist(), stopped_n[ended].tolist(), strict=True))

    def _all_plain(self, rows: slice | Ints) -> bool:
        return bool(((self.temperature[rows] == 1) & (self.top_p[rows] == 1) & (self.top_k[rows] == 0)).all())

    def _place(self, sources: Ints, targets: Ints, prefixes: Mapping[int, Prefix]) -> list[Move]:
        """Move rows in use, and free rows that would be overwritten; give the rows of fresh sequences their prefixes.

        The returned copies are grouped by length: a short row is not copied at a long row's length.
        """
        contents = self.contents
        origins = np.arange(len(self._owners))
        lengths = np.where(self._kinds == FREE, contents.known, 0)
        lengths[targets] = self.positions[sources]
        origins[targets] = sources
        if lengths.any() and contents.known.any():
            overwritten = targets[self._kinds[targets] == FREE]
            vacated = np.setdiff1d(sources, targets)
            origins[vacated] = overwritten
            lengths[vacated] = contents.known[overwritten]
            used_at = contents.used_at[origins]
            used_at[: self.used] = np.iinfo(np.int64).max
            for row, prefix in prefixes.items():
                held, other = int(origins[row]), int(used_at.argmin())
                if used_at[other] < contents.used_at[held] and (held, contents.known[held]) != (prefix.row, prefix.length):
                    origins[other], lengths[other], used_at[other] = held, contents.known[held], contents.used_at[held]
        for row, prefix in prefixes.items():
            origins[row], lengths[row] = prefix.row if prefix.length else row, prefix.length
        moves = self._copy(origins, lengths)
        contents.forget(np.fromiter(prefixes, dtype=np.int64))
        self._move(sources, targets)
        return moves

    def _copy(self, origins: Ints, lengths: Ints) -> list[Move]:
        """Give row i the first `lengths[i]` positions of row `origins[i]`, and what is known of them."""
        changed = np.flatnonzero(origins != np.arange(len(origins)))
        self.contents.rearrange(changed, origins[changed])
        changed = changed[lengths[changed] > 0]
        buckets = np.searchsorted(self._limits, lengths[changed])
        by_length = [changed[buckets == number] for number in np.unique(buckets)]
        return [Move(origins[rows], rows, int(lengths[rows].max())) for rows in by_length]

    def _move(self, sources: Ints, targets: Ints) -> None:
        """Move the rows' state."""
        if not len(sources):
            return
        moved = [self.owner(row) for row in sources.tolist()]
        self._integers[:, targets] = self._integers[:, sources]
        self._reals[:, targets] = self._reals[:, sources]
        self.stops[targets] = self.stops[sources]
        self._kinds[targets] = self._kinds[sources]
        longest = int(self.counts[targets].max())
        self.tokens[targets, :longest] = self.tokens[sources, :longest]
        self.logprobs[targets, :longest] = self.logprobs[sources, :longest]
        for row, sequence in zip(targets.tolist(), moved, strict=True):
            self._owners[row] = sequence
            sequence.row = row

    def _admit(self, sequence: Sequence, row: int) -> None:
        sampling, prompt = sequence.request.sampling, sequence.request.prompt_ids
        self._integers[:, row] = (len(prompt), 0, 0, sampling.max_tokens, sampling.top_k, sequence.key)
        self._reals[:, row] = (sampling.temperature, sampling.top_p)
        stops = sampling.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            wider = np.full((len(self.stops), len(stops)), -1, dtype=np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops
        self._kinds[row] = PREFILLING
        self._owners[row] = sequence
        sequence.row = row


# ---- Computes the KV entries of all sequences in progress again, with the weights of an update (`kv_on_update: recompute`)


@torch.inference_mode()
def recompute(
    runner: Runner, table: RowTable, sequences: Iterable[Sequence], prefills: Seq[Prefill], prefill_tokens: int
) -> None:
    """Recompute the keys and values of `sequences`, by up to `prefill_tokens` tokens at once.

    Those in `prefills` have entries for a part of their prompt, in one row.
    """
    jobs: list[tuple[int, tuple[int, ...]]] = []
    prefilling = {sequence for prefill in prefills for sequence in prefill.members}
    for sequence in sequences:
        if sequence.row >= 0 and sequence not in prefilling:
            sampled = table.tokens[sequence.row, : table.counts[sequence.row] - 1].tolist()
            jobs.append((sequence.row, (*sequence.request.prompt_ids, *sampled)))
    jobs += [(prefill.row, prefill.prompt_ids[: prefill.done]) for prefill in prefills]
    pieces = [
        (row, start, ids[start : start + prefill_tokens])
        for row, ids in jobs
        for start in range(0, len(ids), prefill_tokens)
    ]
    while pieces:
        ids: list[int] = []
        positions: list[int] = []
        chunks = []
        while pieces and (not ids or len(ids) + len(pieces[0][2]) <= prefill_tokens):
            row, offset, piece = pieces.pop(0)
            chunks.append(Chunk(begin=len(ids), count=len(piece), row=row, offset=offset))
            ids += piece
            positions += range(offset, offset + len(piece))
        runner.forward(PackedTokens(ids, positions, keep=[], chunks=tuple(chunks)))
