"""The embedded engine: H sequences in progress, one token each a step, new weights between two steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Literal

import numpy as np
import torch
from torch import nn

from pipelinerl.engine.attention import Chunk
from pipelinerl.engine.rows import RowTable
from pipelinerl.engine.runner import ModelRunner
from pipelinerl.engine.sampler import SamplingRows, sample
from pipelinerl.engine.sequence import Prefill, Sequence, VersionMarks
from pipelinerl.engine.uniform import request_key, uniforms
from pipelinerl.errors import PromptTooLongError, RequestError, WeightUpdateError
from pipelinerl.interfaces import StepOutput, WeightUpdate
from pipelinerl.models.state import checksum, load_weights, named_weights
from pipelinerl.types import Completion, EngineProgress, GenerationRequest, TokenEvent, UpdateReceipt


class LocalEngine:
    """Continuous batching over any Hugging Face causal LM, in this process and thread.

    `step` reads: schedule, run, sample, hand out. The engine owns `model` (give it a copy of its own).

    Parameters: `slots` H; `max_length` of prompt + completion; `prefill_tokens`, the most prompt tokens in one step;
    `kv_on_update`, whether KV entries computed by older weights are kept or recomputed at an update; `version` of the
    weights that `model` holds now. Raises UnsupportedModelError for a model it can't run exactly.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int,
        max_length: int,
        prefill_tokens: int = 2048,
        kv_on_update: Literal["keep", "recompute"] = "keep",
        version: int = 0,
        name: str = "engine",
    ) -> None:
        self.name = name
        self.slots = slots
        self.max_length = max_length
        self._runner = ModelRunner(model, slots, max_length)
        self._weights = named_weights(self._runner.model)
        self._prefill_tokens = prefill_tokens
        self._recompute_kv = kv_on_update == "recompute"
        self._version = version
        self._table = RowTable(slots, max_length)
        self._waiting: deque[Sequence] = deque()
        self._prefills: list[Prefill] = []
        self._decoding: list[Sequence] = []
        self._known: dict[str, Sequence] = {}
        self._cancelled: set[str] = set()
        self._rearrange = False
        self._tokens_generated = 0
        self._decode_steps = 0
        self._busy_s = 0.0
        self._updates = 0
        self._pauses_s: deque[float] = deque(maxlen=512)

    @property
    def version(self) -> int:
        return self._version

    @property
    def in_progress(self) -> int:
        return len(self._decoding) + sum(len(prefill.members) for prefill in self._prefills)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def progress(self) -> EngineProgress:
        """Counts since the engine was made."""
        return EngineProgress(
            version=self._version,
            slots=self.slots,
            in_progress=self.in_progress,
            queued=self.queued,
            tokens_generated=self._tokens_generated,
            decode_steps=self._decode_steps,
            busy_s=self._busy_s,
            weight_updates=self._updates,
            pauses_s=tuple(self._pauses_s),
        )

    # ---------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises PromptTooLongError or RequestError, for this request alone, if it can't be served."""
        prompt, sampling = request.prompt_ids, request.sampling
        if request.id in self._known:
            raise RequestError(f"request {request.id!r} is already in the engine; give each request an id of its own")
        if not prompt:
            raise RequestError(f"request {request.id!r} has an empty prompt; give it at least one token")
        if sampling.max_tokens < 1:
            raise RequestError(f"request {request.id!r} asks for {sampling.max_tokens} tokens; ask for at least 1")
        if len(prompt) + sampling.max_tokens > self.max_length:
            raise PromptTooLongError(
                f"request {request.id!r} can't fit: {len(prompt)} prompt tokens + {sampling.max_tokens} new tokens > "
                f"{self.max_length} (engine.max_length)"
            )
        if min(prompt) < 0 or max(prompt) >= self._runner.vocabulary:
            raise RequestError(
                f"request {request.id!r} has token ids outside the model's vocabulary of {self._runner.vocabulary}"
            )
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise RequestError(f"request {request.id!r} has sampling parameters out of range: {sampling}")
        key = request_key(request.id, sampling.seed)
        sequence = Sequence(request=request, key=key, stop=frozenset(sampling.stop_token_ids))
        self._known[request.id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request at the next token boundary, with what it has. Unknown ids (already ended) are ignored."""
        if request_id in self._known:
            self._cancelled.add(request_id)

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Completion]:
        """Serve `requests` to the end and return their completions in the same order (for use without an actor)."""
        order = []
        for request in requests:
            self.submit(request)
            order.append(request.id)
        done: dict[str, Completion] = {}
        while len(done) < len(order):
            done |= {completion.request_id: completion for completion in self.step().finished}
        return [done[request_id] for request_id in order]

    # ---------------------------------------------------------------------------------------------- one step

    def step(self) -> StepOutput:
        """One token boundary (cancellations, admissions), then one token for every sequence that has its prompt."""
        if not self._known:
            return StepOutput((), ())
        started_s = time.perf_counter()
        tokens: list[TokenEvent] = []
        finished = self._take_cancelled()
        self._admit()
        chunks, completed = self._next_chunks()
        if self._rearrange or self._table.outgrown():
            self._arrange()
        if self._decoding or chunks:
            self._advance(chunks, completed, tokens, finished)
        self._busy_s += time.perf_counter() - started_s
        return StepOutput(tokens, finished)

    def _take_cancelled(self) -> list[Completion]:
        if not self._cancelled:
            return []
        cancelled, self._cancelled = self._cancelled, set()
        ended = []
        for request_id in cancelled & self._known.keys():
            sequence = self._known.pop(request_id)
            ended.append(sequence.complete("cancelled"))
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            elif sequence in self._decoding:
                self._decoding.remove(sequence)
            else:
                self._leave_prefill(sequence)
        self._rearrange = True
        return ended

    def _leave_prefill(self, sequence: Sequence) -> None:
        prefill = next(prefill for prefill in self._prefills if sequence in prefill.members)
        leads = prefill.members[0] is sequence
        prefill.members.remove(sequence)
        if not prefill.members:
            self._prefills.remove(prefill)
        elif leads:
            self._runner.kv.move([sequence.row], [prefill.row], prefill.done)

    def _admit(self) -> None:
        """Move waiting requests into free rows; requests with the same prompt are prefilled together."""
        free = self.slots - self.in_progress
        if not free or not self._waiting:
            return
        fresh: dict[tuple[int, ...], Prefill] = {}
        while free and self._waiting:
            sequence = self._waiting.popleft()
            prompt_ids = sequence.request.prompt_ids
            if prompt_ids in fresh:
                fresh[prompt_ids].members.append(sequence)
            else:
                fresh[prompt_ids] = Prefill(prompt_ids, [sequence])
            free -= 1
        self._prefills += fresh.values()
        self._arrange()
        for prefill in fresh.values():
            for sequence in prefill.members:
                self._table.admit(sequence)

    def _arrange(self) -> None:
        prefilling = [sequence for prefill in self._prefills for sequence in prefill.members]
        moves = self._table.place(self._decoding, prefilling)
        self._runner.kv.move(moves.sources, moves.targets, moves.length)
        self._decoding = list(self._table.decoding)
        self._rearrange = False

    def _next_chunks(self) -> tuple[list[tuple[Prefill, int]], list[Prefill]]:
        """Prompt tokens to process in this step, oldest prompts first, within the budget."""
        chunks: list[tuple[Prefill, int]] = []
        completed = []
        budget = self._prefill_tokens
        for prefill in self._prefills:
            if budget == 0:
                break
            count = min(budget, len(prefill.prompt_ids) - prefill.done)
            budget -= count
            chunks.append((prefill, count))
            if prefill.done + count == len(prefill.prompt_ids):
                completed.append(prefill)
        return chunks, completed

    def _advance(
        self,
        chunks: Seq[tuple[Prefill, int]],
        completed: Seq[Prefill],
        tokens: list[TokenEvent],
        finished: list[Completion],
    ) -> None:
        """Run the model once over decoding rows and chunks, sample where a sequence has all of its context."""
        table, rows = self._table, len(self._decoding)
        ids = [table.last[:rows]]
        positions = [table.positions[:rows]]
        ragged: list[Chunk] = []
        keep = list(range(rows))
        begin = rows
        for prefill, count in chunks:
            end = prefill.done + count
            ids.append(np.asarray(prefill.prompt_ids[prefill.done : end], dtype=np.int64))
            positions.append(np.arange(prefill.done, end, dtype=np.int64))
            ragged.append(Chunk(begin=begin, count=count, row=prefill.row, offset=prefill.done))
            begin += count
            if end == len(prefill.prompt_ids):
                keep.append(begin - 1)
            prefill.done = end
            prefill.versions.extend(self._version, count)
        logits_PV = self._runner.forward(
            self._runner.kv,
            torch.from_numpy(np.concatenate(ids)),
            torch.from_numpy(np.concatenate(positions)),
            keep=keep,
            decoding=rows,
            classes=table.classes(),
            chunks=tuple(ragged),
        )
        self._decode_steps += 1
        if keep:
            self._sample(logits_PV, completed, tokens, finished)

    def _sample(
        self, logits_PV: torch.Tensor, completed: Seq[Prefill], tokens: list[TokenEvent], finished: list[Completion]
    ) -> None:
        table, rows = self._table, len(self._decoding)
        sequences = list(self._decoding)
        source = list(range(rows))
        for i, prefill in enumerate(completed):
            self._share(prefill)
            sequences += prefill.members
            source += [rows + i] * len(prefill.members)
        if len(source) > logits_PV.shape[0]:
            logits_PV = logits_PV[source]
        row_n = np.fromiter((sequence.row for sequence in sequences), dtype=np.int64, count=len(sequences))
        table.positions[:rows] += 1
        ids_n, logprobs_n = self._draw(logits_PV, row_n)
        table.last[row_n] = ids_n
        table.counts[row_n] += 1
        self._hand_out(sequences, ids_n.tolist(), logprobs_n, tokens, finished)
        if completed:
            for prefill in completed:
                self._prefills.remove(prefill)
                self._decoding += [sequence for sequence in prefill.members if sequence.request.id in self._known]
            self._rearrange = True

    def _share(self, prefill: Prefill) -> None:
        """The prompt is done: copy its keys and values to the other members' rows."""
        leader, *others = prefill.members
        self._runner.kv.move([leader.row] * len(others), [other.row for other in others], len(prefill.prompt_ids))
        for sequence in prefill.members:
            sequence.prompt_versions = prefill.versions.spans()

    def _draw(self, logits_nV: torch.Tensor, row_n: np.ndarray) -> tuple[np.ndarray, list[float]]:
        table, device = self._table, logits_nV.device
        temperature_n, top_p_n, top_k_n = table.temperature[row_n], table.top_p[row_n], table.top_k[row_n]
        plain = bool((temperature_n == 1).all() and (top_p_n == 1).all() and (top_k_n == 0).all())
        parameters = SamplingRows(
            temperature_n=torch.from_numpy(temperature_n).to(device),
            top_p_n=torch.from_numpy(top_p_n).to(device),
            top_k_n=torch.from_numpy(top_k_n).to(device),
            plain=plain,
        )
        uniforms_n = torch.from_numpy(uniforms(table.keys[row_n], table.counts[row_n])).to(device)
        with torch.inference_mode():
            ids_n, logprobs_n = sample(logits_nV, parameters, uniforms_n)
        return ids_n.cpu().numpy(), logprobs_n.tolist()

    def _hand_out(
        self,
        sequences: Seq[Sequence],
        ids: Seq[int],
        logprobs: Seq[float],
        tokens: list[TokenEvent],
        finished: list[Completion],
    ) -> None:
        version = self._version
        ended = False
        for sequence, token_id, logprob in zip(sequences, ids, logprobs, strict=True):
            reason = sequence.append(token_id, logprob, version)
            if sequence.request.stream:
                index = len(sequence.tokens) - 1
                tokens.append(TokenEvent(sequence.request.id, index, token_id, logprob, version))
            if reason is not None:
                finished.append(sequence.complete(reason))
                del self._known[sequence.request.id]
                ended = True
        self._tokens_generated += len(sequences)
        if ended:
            self._decoding = [sequence for sequence in self._decoding if sequence.request.id in self._known]
            self._rearrange = True

    # ---------------------------------------------------------------------------------------------- weights

    def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        """Replace all weights now. Sequences in progress go on with their next token.

        The receipt carries the checksum of what the engine holds afterwards, computed from its own parameters. Raises
        WeightUpdateError, before anything is changed, if names, shapes or the version do not fit.
        """
        started_s = time.perf_counter()
        if update.version < self._version:
            raise WeightUpdateError(
                f"version {update.version} is older than the engine's {self._version}; nothing was changed"
            )
        load_weights(self._runner.model, update.tensors)
        held = checksum(self._weights)
        if held != update.checksum:
            raise WeightUpdateError(
                f"after the update to version {update.version} engine {self.name!r} holds weights of checksum {held}, not "
                f"{update.checksum}: it can't go on"
            )
        self._version = update.version
        if self._recompute_kv:
            self._recompute()
        pause_s = time.perf_counter() - started_s
        self._updates += 1
        self._pauses_s.append(pause_s)
        self._busy_s += pause_s if self._known else 0.0
        return UpdateReceipt(
            engine=self.name,
            version=update.version,
            checksum=held,
            pause_s=pause_s,
            sequences_in_flight=self.in_progress,
        )

    def _recompute(self) -> None:
        """Compute all keys and values again with the weights of now, as if they had always been these."""
        jobs: list[tuple[int, tuple[int, ...]]] = []
        for sequence in self._decoding:
            ids = (*sequence.request.prompt_ids, *sequence.tokens)
            jobs.append((sequence.row, ids[: sequence.cached]))
        for prefill in self._prefills:
            jobs.append((prefill.row, prefill.prompt_ids[: prefill.done]))
            prefill.versions = VersionMarks()
            if prefill.done:
                prefill.versions.extend(self._version, prefill.done)
        pieces = [
            (row, start, ids[start : start + self._prefill_tokens])
            for row, ids in jobs
            for start in range(0, len(ids), self._prefill_tokens)
        ]
        while pieces:
            self._fill(pieces)

    def _fill(self, pieces: list[tuple[int, int, tuple[int, ...]]]) -> None:
        """Process the first pieces (row, offset, ids), as many as the token budget allows, and remove them."""
        ids: list[int] = []
        positions: list[int] = []
        chunks = []
        while pieces and (not ids or len(ids) + len(pieces[0][2]) <= self._prefill_tokens):
            row, offset, piece = pieces.pop(0)
            chunks.append(Chunk(begin=len(ids), count=len(piece), row=row, offset=offset))
            ids += piece
            positions += range(offset, offset + len(piece))
        self._runner.forward(self._runner.kv, ids, positions, keep=[], chunks=tuple(chunks))
