"""Computes the KV entries of all sequences in progress again, with the weights of an update (`kv_on_update: recompute`)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from pipelinerl.engine.attention import Chunk
from pipelinerl.engine.rows import Prefill, RowTable, Sequence
from pipelinerl.engine.runners import Runner


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
        runner.forward(runner.kv, ids, positions, keep=[], chunks=tuple(chunks))
