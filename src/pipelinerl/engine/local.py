"""The embedded engine: H sequences in progress, one token per sequence and step, weight updates between two steps."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pipelinerl.engine.attention import Chunk, Move, PackedTokens
from pipelinerl.engine.contents import NO_PREFIX, Prefix
from pipelinerl.engine.rows import NONE_FRESH, Prefill, RowTable, Sequence, VersionMarks, recompute
from pipelinerl.engine.runner import ModelRunner, Runner, refuse_longer
from pipelinerl.engine.sampler import Ints, SamplingRows, StepsAhead, request_key, sample, uniforms
from pipelinerl.errors import (
    LogitsError,
    PromptTooLongError,
    RequestError,
    UnsupportedModelError,
    WeightUpdateError,
)
from pipelinerl.interfaces import StepOutput, WeightUpdate
from pipelinerl.models.attention import choose_attention
from pipelinerl.models.state import checksum, device_checksum, load_weights, named_weights, on_gpu
from pipelinerl.types import (
    Completion,
    EngineProgress,
    FinishReason,
    GenerationRequest,
    TokenEvent,
    UpdateReceipt,
    VersionSpan,
)

NOTHING = StepOutput((), ())

_log = logging.getLogger(__name__)


def make_runner(model: nn.Module, rows: int, max_length: int, *, flatten: bool = True) -> Runner:
    """The fastest runner that is exact for `model`. Takes ownership of the model and changes its attention.

    Raises UnsupportedModelError if there is none, or if the model's positions can't be right up to `max_length`.
    """
    refuse_longer(model, max_length)
    config: Any = model.config
    own = config._attn_implementation
    try:
        return ModelRunner(model, rows, max_length, flatten=flatten)
    except UnsupportedModelError as reason:
        from pipelinerl.engine.cache_runner import CacheRunner  # noqa: PLC0415 - most models don't need it

        choose_attention(model, own)
        try:
            runner = CacheRunner(model, rows, max_length)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}; and not over packed batches: {reason}") from error
        _log.warning("%s runs %s: %s", type(model).__name__, runner.description, reason)
        return runner


class LocalEngine:
    """Continuous batching over any Hugging Face causal LM, in this process and thread.

    The engine owns `model` and changes it: pass a copy. Raises UnsupportedModelError for a model it can't run exactly.

    slots            H, the number of sequences in progress
    max_length       limit on prompt + completion, in tokens
    prefill_tokens   limit on the prompt tokens processed in one step
    kv_on_update     whether a weight update keeps or recomputes the KV entries of older weights
    version          version of the weights that `model` holds now
    flatten          run the model as an exported graph (`flat.py`), which is faster
    """

    copies = 1
    _table_class: type[RowTable] = RowTable
    _left_to_decode = 0
    """Tokens at the end of a prompt that a decode step computes, not the prefill."""

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
        flatten: bool = True,
    ) -> None:
        self.name = name
        self.slots = slots
        self.max_length = max_length
        self._runner = self._make_runner(model, flatten=flatten)
        self._weights = named_weights(self._runner.model)
        self._base: dict[str, Tensor] = {}  # the own weights of layers that an adapter was merged into
        self._prefill_tokens = prefill_tokens
        self._recompute_kv = kv_on_update == "recompute"
        self.version = version
        self._table = self._table_class(slots, max_length)
        self._waiting: deque[Sequence] = deque()
        self._prefills: list[Prefill] = []
        self._requests: dict[str, Sequence] = {}
        self._streamed: dict[str, int] = {}
        self._cancelled: set[str] = set()
        self._rows_changed = False
        self._steps_ahead: StepsAhead | None = None
        self._inference = torch.inference_mode()
        self._last_R = torch.empty(0, dtype=torch.long)
        self._uniforms_R = torch.empty(0, dtype=torch.double)
        self._tokens_generated = 0
        self._tokens_given = self._tokens_prefilled = 0
        self._decode_steps = 0
        self._busy_s = 0.0
        self._updates = 0
        self._update_cpu_s = 0.0
        self._pauses_s: deque[float] = deque(maxlen=512)

    def _make_runner(self, model: nn.Module, *, flatten: bool) -> Runner:
        return make_runner(model, self.slots, self.max_length, flatten=flatten)

    @property
    def in_progress(self) -> int:
        return self._table.used

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def progress(self) -> EngineProgress:
        """Counts since the engine was created."""
        return EngineProgress(
            version=self.version,
            slots=self.slots,
            in_progress=self.in_progress,
            queued=self.queued,
            tokens_generated=self._tokens_generated,
            prompt_tokens=self._tokens_given,
            prefilled_tokens=self._tokens_prefilled,
            decode_steps=self._decode_steps,
            busy_s=self._busy_s,
            weight_updates=self._updates,
            pauses_s=tuple(self._pauses_s),
            update_cpu_s=self._update_cpu_s,
            runner=self._runner.description,
            begun=Counter(first for one in self._requests.values() if (first := one.versions.first) is not None),
        )

    def restart(self, version: int = 0) -> None:
        """Begin again as if it had just been made with the weights that it holds, as `version`: without requests."""
        self._cancelled.update(self._requests)
        self.step()
        self.version = version
        self._table.contents.forget(np.arange(self.slots))
        self._tokens_generated = self._decode_steps = self._updates = 0
        self._tokens_given = self._tokens_prefilled = 0
        self._busy_s = self._update_cpu_s = 0.0
        self._pauses_s.clear()

    # ---- requests

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises PromptTooLongError or RequestError if this request can't be served."""
        prompt, sampling = request.prompt_ids, request.sampling
        if request.id in self._requests:
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
        if not 0 <= sampling.temperature < math.inf or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise RequestError(f"request {request.id!r} has sampling parameters out of range: {sampling}")
        sequence = self._requests[request.id] = Sequence(request, request_key(request.id, sampling.seed))
        if request.turn:
            later_turns = takewhile(lambda one: one.request.turn, self._waiting)
            self._waiting.insert(sum(1 for _ in later_turns), sequence)
        else:
            self._waiting.append(sequence)
        if request.stream:
            self._streamed[request.id] = 0

    def cancel(self, request_id: str) -> None:
        """End a request at the next token boundary, keeping its tokens so far. Unknown ids (already ended) are ignored."""
        if request_id in self._requests:
            self._cancelled.add(request_id)

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Completion]:
        """Run `requests` to completion and return the completions in the same order (for use without an actor)."""
        wanted = list(requests)
        for request in wanted:
            self.submit(request)
        done: dict[str, Completion] = {}
        while len(done) < len(wanted):
            done |= {completion.request_id: completion for completion in self.step().finished}
        return [done[request.id] for request in wanted]

    # ---- one step

    def step(self) -> StepOutput:
        """Handle cancellations, admit requests, and sample one token for every sequence whose prompt is complete.

        Raises LogitsError if the model's logits are not finite, before any token sampled from them is returned.
        """
        if not self._requests:
            return NOTHING
        started_s = time.perf_counter()
        with self._inference:
            try:
                output = self._step()
            except FloatingPointError as error:
                raise self._logits_error() from error
        self._busy_s += time.perf_counter() - started_s
        return output

    def _step(self) -> StepOutput:
        # Most steps skip all of these calls, which matters for small models, whose steps are short.
        finished = self._take_cancelled() if self._cancelled else []
        fresh = self._admit() if self._waiting else NONE_FRESH
        if fresh or self._rows_changed or self._table.overflowed():
            moves = self._table.compact(fresh)
            self._runner.kv.move(moves)
            if fresh or self._rows_changed or moves:  # otherwise the rows are the same, only in longer buckets
                self._steps_ahead = None
            self._rows_changed = False
        chunks = self._next_chunks() if self._prefills else []
        events: list[TokenEvent] = []
        if self._table.decoding or chunks:
            self._decode_steps += 1
            if chunks:
                self._table.flush()
            logits_PV = self._runner.forward(self._packed_inputs(chunks) if chunks else self._decode_inputs())
            self._sample(logits_PV, [prefill for prefill, _ in chunks], events, finished)
        return StepOutput(events, finished) if events or finished else NOTHING

    def _logits_error(self) -> LogitsError:
        return LogitsError(
            f"engine {self.name!r} computes logits that are not finite with the weights of version {self.version}: they "
            "are broken; if training made them so, lower trainer.learning_rate"
        )

    def _take_cancelled(self) -> list[Completion]:
        ended: list[Completion] = []
        self._table.flush()
        for request_id in self._cancelled & self._requests.keys():
            sequence = self._requests[request_id]
            ended.append(self._end(sequence, "cancelled"))
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            for prefill in [prefill for prefill in self._prefills if sequence in prefill.members]:
                if prefill.members[0] is sequence and len(prefill.members) > 1:  # the others continue in the next one's row
                    self._runner.kv.move([Move([sequence.row], [prefill.members[1].row], prefill.done)])
                prefill.members.remove(sequence)
                if not prefill.members:
                    self._prefills.remove(prefill)
        self._cancelled.clear()
        return ended

    def _admit(self) -> Mapping[Sequence, Prefix]:
        """Take as many waiting requests as there are free rows. Requests with the same prompt share one prefill.

        A prefill continues from the longest beginning of its prompt that a row holds and the request may read. Returned are
        the sequences with what their rows begin with.
        """
        fresh = {self._waiting.popleft(): NO_PREFIX for _ in range(min(self._table.free, len(self._waiting)))}
        by_prompt: dict[tuple[tuple[int, ...], int | None], Prefill] = {}
        for sequence in fresh:
            prompt_ids, oldest = sequence.request.prompt_ids, sequence.request.reuses_from
            self._tokens_given += len(prompt_ids)
            prompt_ids = prompt_ids[: len(prompt_ids) - self._left_to_decode]
            by_prompt.setdefault((prompt_ids, oldest), Prefill(prompt_ids, [])).members.append(sequence)
        self._prefills += by_prompt.values()
        whole = self._table.free_rows() if self._runner.kv.has_states else None
        for (_, oldest), prefill in by_prompt.items():
            first = prefill.members[0]
            if oldest is not None and (prefix := self._table.contents.longest(first.request.prompt_ids[:-1], oldest, whole)):
                prefill.begin_with(prefix)
                fresh[first] = prefix
        return fresh

    def _next_chunks(self) -> list[tuple[Prefill, int]]:
        """Prefills to advance in this step, and by how many tokens: oldest first, within the token budget."""
        chunks: list[tuple[Prefill, int]] = []
        budget = self._prefill_tokens
        for prefill in self._prefills:
            if budget == 0:
                break
            count = min(budget, len(prefill.prompt_ids) - prefill.done)
            budget -= count
            chunks.append((prefill, count))
        # Adjacent chunks of equal shape are batched into one attention call.
        return sorted(chunks, key=lambda chunk: (chunk[0].done, chunk[1]))

    def _decode_inputs(self) -> PackedTokens:
        """The decoding rows' tokens, for a step without prefill."""
        table, rows = self._table, slice(0, self._table.decoding)
        if self._steps_ahead is None:
            table.flush()
            self._steps_ahead = StepsAhead(table.keys[rows], table.counts[rows], table.positions[rows])
            self._last_R = torch.from_numpy(table.last[rows])
        positions_R, self._uniforms_R = self._steps_ahead.next()
        return PackedTokens(self._last_R, positions_R, None, table.decoding, table.buckets())

    def _packed_inputs(self, chunks: Seq[tuple[Prefill, int]]) -> PackedTokens:
        """The tokens of decoding rows and chunks. Logits are computed for rows and for complete prompts."""
        table = self._table
        rows = begin = table.decoding
        ids, positions = [table.last[:rows]], [table.positions[:rows]]
        keep = list(range(rows))
        packed = []
        for prefill, count in chunks:
            start, end = prefill.done, prefill.done + count
            ids.append(np.array(prefill.prompt_ids[start:end], dtype=np.int64))
            positions.append(np.arange(start, end))
            packed.append(Chunk(begin=begin, count=count, row=prefill.row, offset=start))
            begin += count
            if end == len(prefill.prompt_ids):
                keep.append(begin - 1)
            prefill.versions.mark(self.version, start)
            prefill.done = end
            self._tokens_prefilled += count
        ids_T, positions_T = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(positions))
        return PackedTokens(ids_T, positions_T, keep, rows, table.buckets(), tuple(packed))

    def _sample(
        self, logits_PV: torch.Tensor, advanced: Seq[Prefill], events: list[TokenEvent], finished: list[Completion]
    ) -> None:
        """Sample a token for every row with logits. Appends what follows from them, as `_pass_on` does."""
        table, rows = self._table, self._table.decoding
        if not advanced:
            ids_R, logprobs_R = self._draw(logits_PV, slice(0, rows), self._uniforms_R)
            self._last_R = ids_R
            self._tokens_generated += rows
            if table.buffer(ids_R, logprobs_R) or self._streamed:
                table.flush()
                self._pass_on(np.arange(rows), events, finished)
            return
        row_n: list[int] = list(range(rows))
        source_n = list(row_n)
        for i, prefill in enumerate(prefill for prefill in advanced if prefill.done == len(prefill.prompt_ids)):
            self._finish_prefill(prefill)
            row_n += [sequence.row for sequence in prefill.members]
            source_n += [rows + i] * len(prefill.members)
        if not row_n:
            return
        if len(source_n) > logits_PV.shape[0]:
            logits_PV = logits_PV[source_n]
        table.flush()
        rows_n = np.array(row_n)
        uniforms_n = uniforms(table.keys[rows_n], table.counts[rows_n])
        ids_n, logprobs_n = (x.numpy(force=True) for x in self._draw(logits_PV, rows_n, uniforms_n))
        table.record(rows_n, ids_n, logprobs_n)
        self._steps_ahead = None
        self._tokens_generated += len(row_n)
        self._pass_on(rows_n, events, finished)

    def _pass_on(self, rows_n: Ints, events: list[TokenEvent], finished: list[Completion]) -> None:
        """Append the new tokens of streams, and the completions of the sequences in `rows_n` that have ended.

        These tokens must be in the row table (`flush`).
        """
        table = self._table
        for request_id, passed_on in self._streamed.items():
            sequence = self._requests[request_id]
            count = int(table.counts[sequence.row]) if sequence.row >= 0 else 0
            events += [self._event(sequence, index) for index in range(passed_on, count)]
            self._streamed[request_id] = count
        for row, by_stop_token in table.ended(rows_n):
            finished.append(self._end(table.owner(row), "stop" if by_stop_token else "length"))

    def _event(self, sequence: Sequence, index: int) -> TokenEvent:
        table, row = self._table, sequence.row
        span = sequence.versions.spans(index + 1)[-1]
        read = self._prompt_versions(sequence, span.version) if span.start == index else ()
        token_id, logprob = int(table.tokens[row, index]), float(table.logprobs[row, index])
        return TokenEvent(sequence.request.id, index, token_id, logprob, span.version, read)

    def _prompt_versions(self, sequence: Sequence, version: int) -> tuple[VersionSpan, ...]:
        """The versions of the prompt's KV entries when a token of `version` was sampled."""
        recomputed = (VersionSpan(version, 0, len(sequence.request.prompt_ids)),)
        return recomputed if self._recompute_kv else sequence.prompt_versions

    def _finish_prefill(self, prefill: Prefill) -> None:
        """Copy the prompt's keys and values to the other members' rows and start decoding all members."""
        leader, *others = prefill.members
        copies = Move([leader.row] * len(others), [other.row for other in others], len(prefill.prompt_ids))
        self._runner.kv.move([copies])
        prompt_versions = prefill.versions.spans(len(leader.request.prompt_ids))
        for sequence in prefill.members:
            sequence.prompt_versions = prompt_versions
            sequence.versions.mark(self.version, 0)
            self._table.start_decoding(sequence)
        self._prefills.remove(prefill)
        self._rows_changed = True

    def _draw(
        self, logits_nV: torch.Tensor, rows_n: Ints | slice, uniforms_n: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample ids [n] and their log-probs [n] for `rows_n`."""
        table, device = self._table, logits_nV.device
        if table.plain:
            return sample(logits_nV, None, uniforms_n.to(device))
        parameters = SamplingRows(
            temperature_n=torch.from_numpy(table.temperature[rows_n]).to(device),
            top_p_n=torch.from_numpy(table.top_p[rows_n]).to(device),
            top_k_n=torch.from_numpy(table.top_k[rows_n]).to(device),
        )
        return sample(logits_nV, parameters, uniforms_n.to(device))

    def _end(self, sequence: Sequence, reason: FinishReason) -> Completion:
        """Remove the request, free its row and return its completion. The table has been flushed."""
        table, row = self._table, sequence.row
        count = int(table.counts[row]) if row >= 0 else 0
        versions = sequence.versions.spans(count)
        if row >= 0:
            table.release(sequence, self._read_by(sequence, versions))
            self._rows_changed = True
        del self._requests[sequence.request.id]
        self._streamed.pop(sequence.request.id, None)
        return Completion(
            request_id=sequence.request.id,
            token_ids=tuple(table.tokens[row, :count].tolist()),
            logprobs=tuple(table.logprobs[row, :count].tolist()),
            weight_versions=versions,
            finish_reason=reason,
            prompt_versions=self._prompt_versions(sequence, versions[-1].version) if versions else (),
        )

    def _read_by(self, sequence: Sequence, sampled: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
        """The versions of the keys and values that others may read: of all tokens but the last sampled one.

        The weights that sample a token compute them for the token before.
        """
        if not sampled or sequence.request.reuses_from is None:
            return ()
        prompt, marks = len(sequence.request.prompt_ids), VersionMarks()
        length = prompt + sampled[-1].end - 1
        if self._recompute_kv:
            return (VersionSpan(self.version, 0, length),)
        for span in sequence.prompt_versions:
            marks.mark(span.version, span.start)
        for span in sampled:
            marks.mark(span.version, prompt + span.start - 1)
        return marks.spans(length)

    # ---- weight updates

    def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        """Replace all weights now. Sequences in progress continue with the new weights from their next token on.

        The receipt carries the update's checksum, verified on the engine's own parameters, or computed from them. Raises
        WeightUpdateError before anything is changed if names, shapes or the version do not fit or a weight is not finite,
        and after the copy if the checksum differs; LogitsError if the weights before gave logits that are not finite.
        """
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        if update.version < self.version:
            raise WeightUpdateError(
                f"version {update.version} is older than the engine's {self.version}; nothing was changed"
            )
        try:
            self._table.flush()
        except FloatingPointError as error:
            raise self._logits_error() from error
        by_device = bool(update.device_checksum) and on_gpu(self._weights)
        if update.adapter:
            from pipelinerl.models.adapters import load_adapter  # noqa: PLC0415 - few runs have one

            load_adapter(self._weights, self._base, update.tensors)
        else:
            load_weights(self._weights, update.tensors, known_finite=by_device)
        self._runner.weights_changed()
        if by_device:
            held, sent = device_checksum(self._weights), update.device_checksum
        else:
            held, sent = checksum(self._weights), update.checksum
        if held != sent and sent:
            raise WeightUpdateError(
                f"after the update to version {update.version} engine {self.name!r} holds weights of checksum {held}, not "
                f"{sent}: it can't go on{'; use weights.encoding: full' if update.adapter else ''}"
            )
        self.version = update.version
        for sequence in self._requests.values():
            if sequence.row >= 0 and (count := int(self._table.counts[sequence.row])):
                sequence.versions.mark(update.version, count)
        if self._recompute_kv:
            for prefill in self._prefills:
                prefill.versions = VersionMarks()
                prefill.versions.mark(self.version, 0)
            recompute(self._runner, self._table, self._requests.values(), self._prefills, self._prefill_tokens)
            self._table.contents.recomputed(self._table.free_rows(), self.version)
        pause_s = time.perf_counter() - started_s
        self._updates += 1
        self._update_cpu_s += time.process_time() - started_cpu_s
        self._pauses_s.append(pause_s)
        self._busy_s += pause_s if self._requests else 0.0
        return UpdateReceipt(
            engine=self.name,
            version=update.version,
            checksum=update.checksum or held,
            pause_s=pause_s,
            sequences_in_flight=self.in_progress,
        )
