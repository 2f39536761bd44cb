"""The engine for GPUs: decode steps of fixed shapes that never wait for the host, each replayed as one CUDA graph.

    host     admit, prefill ─▶ launch step n ─▶ read the results of step n - 1 ─▶ ends
    device                  step n - 1 ─▶ step n ─▶ ...

The state between two steps stays on the device: ids, positions, counts, random keys, and which rows still decode. A sequence
that has ended computes one token for nothing. An update of the weights waits for the launched steps, so a token has
the version of the weights at the launch of its step. This costs nothing: the receipt's checksum waits for the device anyway.

Off a GPU, steps run as plain calls, and attention is a slow reference: that is for tests.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipelinerl.engine.attention import Move
from pipelinerl.engine.contents import Prefix
from pipelinerl.engine.fused import compiled
from pipelinerl.engine.local import NOTHING, LocalEngine
from pipelinerl.engine.rows import DECODING, FREE, Prefill, Reals, RowTable, Sequence
from pipelinerl.engine.runner import refuse_longer
from pipelinerl.engine.sampler import Ints, advance
from pipelinerl.engine.varlen import COMPILERS, VarlenBatch, VarlenRunner, row_buckets
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.interfaces import StepOutput
from pipelinerl.models.device import to_device, to_host, try_compiler
from pipelinerl.types import Completion, TokenEvent, VersionSpan

_log = logging.getLogger(__name__)

_STOPS = 4
"""Stop tokens per row that there is room for at the start."""
_HELD_STEPS = 16
"""Decode steps that prompts wait at most, so that many share a forward, which costs as much as one or two of these steps."""


class DeviceRows:
    """The state of all rows on the device, and the decode step that advances it.

    integers    positions, ids, counts, budgets, top_k, keys, active [7, H]: see `RowTable`; `active` is 1 for decoding rows
    reals       temperature, top_p [2, H]
    stops       stop tokens, padded with -1 [H, S]
    results     of the last step: `Results`
    """

    def __init__(self, runner: VarlenRunner, rows: int, max_length: int) -> None:
        self._runner = runner
        self._max_length = max_length
        device = runner.device
        self.integers = torch.zeros((7, rows), dtype=torch.long, device=device)
        self.reals = torch.ones((2, rows), device=device)
        self.stops = torch.full((rows, _STOPS), -1, device=device)
        self.results = torch.zeros((rows, 2), dtype=torch.double, device=device)
        self._bases = torch.arange(rows + 1, device=device) * max_length
        self._begins = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._cu_k = self._bases.int()
        self._advance: Callable[..., tuple[Tensor, Tensor]] = advance
        self._graphs: dict[tuple[int, bool], Any] = {}
        self._pool: Any = None
        self._stream: Any = None

    def compile(self, rows: int) -> None:
        """Compile what follows the model in plain steps, best for `rows`. Raises what compilers do, or if results differ."""
        varying = [(place, 0) for place in (0, 1, *range(3, 10))]  # the rows: of the logits, the stop tokens and the state
        varying.append((1, 1))  # the number of stop tokens

        run = compiled(advance, varying, COMPILERS[self.results.device.type])
        with self.at_rest():
            positions, ids, *_, active = state = self.integers[:, :rows].unbind()
            logits_RV = self._runner.run(ids, positions, None, self._batch(rows, positions, active))
            self.integers.copy_(torch.arange(self.integers.numel()).view_as(self.integers))
            found, expected = (call(logits_RV, self.stops[:rows], None, *state) for call in (run, advance))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        self._advance = run

    def write(self, rows_n: Tensor, integers: Tensor, reals: Tensor, stops: Tensor) -> None:
        """Set the state of n rows: integers [7, n], reals [2, n] and stop tokens [n, S]."""
        self.integers.index_copy_(1, rows_n, integers)
        self.reals.index_copy_(1, rows_n, reals)
        self.stops.index_fill_(0, rows_n, -1)
        self.stops[:, : stops.shape[1]].index_copy_(0, rows_n, stops)

    def step(self, rows: int, plain: bool) -> None:
        """Sample one token for each active row below `rows`. `plain`: all sample at temperature 1, without truncation.

        Reads nothing back to the host, and its shapes depend on nothing but `rows`.
        """
        positions, ids, *_, active = state = self.integers[:, :rows].unbind()
        logits_RV = self._runner.run(ids, positions, None, self._batch(rows, positions, active))
        call = self._advance if plain else advance
        next_7R, results_R2 = call(logits_RV, self.stops[:rows], None if plain else self.reals[:, :rows], *state)
        self.integers[:, :rows].copy_(next_7R)
        self.results[:rows].copy_(results_R2)

    def launch(self, rows: int, plain: bool) -> None:
        """`step`, on a GPU by replaying a CUDA graph that is recorded at the first call with the same arguments."""
        device = self.integers.device
        if device.type != "cuda":
            self.step(rows, plain)
            return
        with torch.cuda.device(device):
            if (rows, plain) not in self._graphs:
                self._graphs[rows, plain] = self._recorded(rows, plain)
            self._graphs[rows, plain].replay()

    def clear_graphs(self) -> None:
        """Must be called after a tensor of the state was replaced."""
        self._graphs.clear()
        self._pool = None  # a pool ends with its last graph

    def _recorded(self, rows: int, plain: bool) -> Any:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # A stream of these graphs alone: libraries keep a workspace for each stream, which ends with the graphs of another.
        self._stream = stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with self.at_rest():
            # Libraries set themselves up at a first call, which a graph can't record.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(rows, plain)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                self.step(rows, plain)
        return graph

    def _batch(self, rows: int, positions: Tensor, active: Tensor) -> VarlenBatch:
        kv = self._runner.kv
        return VarlenBatch(
            kv=kv,
            # Rows that don't decode must not write to their places, which a prompt may be using.
            places_T=torch.where(active.bool(), self._bases[:rows] + positions, kv.spare),
            cu_q=self._begins[: rows + 1],
            cu_k=self._cu_k[: rows + 1],
            used=(positions + 1).int(),
            max_q=1,
            max_k=self._max_length,
            longest=self._max_length,
            checked=True,
        )

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, no row is active, and all state is restored at the end."""
        before = self.integers.clone()
        self.integers[-1].zero_()
        try:
            yield
        finally:
            self.integers.copy_(before)


# ---- the host's side: which sequence has which row, and the results that have arrived

Results = npt.NDArray[np.float64]
"""[rows, 2]: each row's token id, or -1 if it was not decoding, and the token's log-prob."""


class SlotTable(RowTable):
    """`RowTable` without length buckets. `positions` has the row's last token, which the next step processes.

    Rows never move, except when most of them have ended. The device knows ids, positions and counts of decoding rows one
    step before the host does: results of a step are read after the next one has been launched. `flush` waits for all.
    `pending` has a function for each launched step whose results have not been read; it waits for them.
    """

    def __init__(self, rows: int, max_length: int) -> None:
        super().__init__(rows, max_length)
        self.pending: deque[Callable[[], npt.NDArray[Any]]] = deque()
        self._changed: set[int] = set()
        self.sampled = 0

    def admit(self, fresh: Mapping[Sequence, Prefix], below: int) -> list[Move]:
        """Give each sequence a free row, below `below` if it can be, which was released longest ago.

        A sequence that continues a released row gets that row.
        """
        free = self.free_rows()
        free = free[np.lexsort((self.contents.used_at[free], free >= below))].tolist()
        origins, lengths = np.arange(len(self._owners)), np.zeros(len(self._owners), dtype=np.int64)
        rows: dict[Sequence, int] = {}
        for sequence, prefix in sorted(fresh.items(), key=lambda one: not one[1].length):
            continues = prefix.row in free and prefix.length == self.contents.known[prefix.row]
            row = rows[sequence] = prefix.row if continues else free[0]
            free.remove(row)
            if prefix.length:
                origins[row], lengths[row] = prefix.row, prefix.length
        moves = self._copy(origins, lengths)
        for sequence, row in rows.items():
            self.contents.forget(row)
            self._admit(sequence, row)
        self.used += len(fresh)
        return moves

    def start_decoding(self, sequence: Sequence) -> None:
        """As in `RowTable`; the first decode step processes the prompt's last token."""
        super().start_decoding(sequence)
        prompt_ids = sequence.request.prompt_ids
        self.positions[sequence.row], self.last[sequence.row] = len(prompt_ids) - 1, prompt_ids[-1]
        self._changed.add(sequence.row)

    def release(self, sequence: Sequence, versions: tuple[VersionSpan, ...]) -> None:
        super().release(sequence, versions)
        self._changed.add(sequence.row)

    def decoding_rows(self, *, sampled: bool = False) -> Ints:
        """All, or only those with a token that has been read."""
        return np.flatnonzero((self._kinds == DECODING) & (self.counts > 0) if sampled else self._kinds == DECODING)

    def highest(self) -> int:
        """The number of rows up to the last occupied one."""
        taken = np.flatnonzero(self._kinds)
        return int(taken[-1]) + 1 if len(taken) else 0

    def take_changes(self) -> tuple[Ints, Ints, Reals, Ints] | None:
        """The rows that started or stopped decoding since the last call: the arguments of `DeviceRows.write`."""
        if not self._changed:
            return None
        rows_n = np.array(sorted(self._changed))
        self._changed.clear()
        decoding_n = (self._kinds[rows_n] == DECODING).astype(np.int64)
        integers = np.vstack([self._integers[:, rows_n], decoding_n])
        self.plain = self._all_plain(self.decoding_rows())
        return rows_n, integers, self._reals[:, rows_n], self.stops[rows_n]

    def read_oldest(self) -> None:
        """Write the results of the oldest step to the arrays. Raises FloatingPointError as `RowTable.flush` does."""
        results: Results = self.pending.popleft()()
        rows_n = np.flatnonzero(results[:, 0] >= 0)
        ids_n, logprobs_n = results[rows_n, 0].astype(np.int64), results[rows_n, 1].astype(np.float32)
        self._write(rows_n, ids_n, logprobs_n)
        self.positions[rows_n] += 1
        self.sampled += len(rows_n)

    def flush(self) -> None:
        while self.pending:
            self.read_oldest()

    def gather_below(self, rows: int) -> list[Move]:
        """Move sequences from rows >= `rows` to free rows below. The table has been flushed and no row has ended."""
        sources = rows + np.flatnonzero(self._kinds[rows:])
        targets = np.flatnonzero(self._kinds[:rows] == FREE)[: len(sources)]
        origins, lengths = np.arange(len(self._owners)), np.zeros(len(self._owners), dtype=np.int64)
        origins[targets], lengths[targets] = sources, self.positions[sources]
        moves = self._copy(origins, lengths)
        self._move(sources, targets)
        self.contents.forget(sources)
        self._kinds[sources] = FREE
        for row in sources.tolist():
            self._owners[row] = None
        self._changed.update(sources.tolist(), targets.tolist())
        return moves


# ---- the engine


class StaticEngine(LocalEngine):
    """`LocalEngine` with static decode steps. Raises UnsupportedModelError for a model or a PyTorch that can't have them."""

    _runner: VarlenRunner
    _table: SlotTable
    _table_class = SlotTable
    _left_to_decode = 1

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._admitted_at = -_HELD_STEPS
        self._buckets = row_buckets(self.slots)
        self._rows = DeviceRows(self._runner, self.slots, self.max_length)
        on_gpu = self._runner.device.type == "cuda"
        steps = "one CUDA graph each" if on_gpu else "plain calls"
        with self._inference:
            if self._runner.compiled and self.slots > 1:
                steps += try_compiler("sampling", lambda: self._rows.compile(self._buckets[0]))
            try:
                for rows in self._buckets if on_gpu else ():
                    with self._rows.at_rest():
                        self._rows.launch(rows, True)
            except Exception as error:
                reason = str(error).partition("\n")[0]
                raise UnsupportedModelError(f"its decode step can't be recorded as a CUDA graph ({reason})") from error
        self._runner.description = f"in static decode steps ({steps}), {self._runner.description}"

    def _make_runner(self, model: nn.Module, *, flatten: bool) -> VarlenRunner:
        refuse_longer(model, self.max_length)
        return VarlenRunner(model, self.slots, self.max_length, flatten=flatten)

    def _step(self) -> StepOutput:
        table = self._table
        events: list[TokenEvent] = []
        finished: list[Completion] = []
        sparse = not self._waiting and self._bucket(table.used) < self._bucket(table.highest())
        if self._cancelled or sparse:
            table.flush()
            finished += self._take_cancelled()
            self._pass_on(table.decoding_rows(sampled=True), events, finished)
            self._runner.kv.move(table.gather_below(self._bucket(table.used)))
        ready = min(len(self._waiting), table.free)
        held = self._decode_steps - self._admitted_at < _HELD_STEPS and len(table.decoding_rows()) > 0
        if ready and (not held or ready >= self.slots // 16):  # a forward over the waiting prompts is worth its time
            fresh = self._admit()
            self._runner.kv.move(table.admit(fresh, self._bucket(table.used + len(fresh))))
            self._admitted_at = self._decode_steps
        if self._prefills:
            self._run_prefills()
        launched = bool(len(table.decoding_rows()))
        if launched:
            if (changes := table.take_changes()) is not None:
                self._write(*changes)
            rows = self._bucket(table.highest())
            self._rows.launch(rows, table.plain)
            table.pending.append(to_host(self._rows.results[:rows]))
            self._decode_steps += 1
        while len(table.pending) > launched:
            table.read_oldest()
        self._pass_on(table.decoding_rows(sampled=True), events, finished)
        self._tokens_generated = table.sampled
        return StepOutput(events, finished) if events or finished else NOTHING

    def _write(self, rows_n: Ints, integers: Ints, reals: Reals, stops: Ints) -> None:
        """Tell the device which rows started or stopped decoding."""
        missing = stops.shape[1] - self._rows.stops.shape[1]
        if missing > 0:
            self._rows.stops = nn.functional.pad(self._rows.stops, (0, missing), value=-1)
            self._rows.clear_graphs()
        self._rows.write(*(to_device(part, self._runner.device) for part in (rows_n, integers, reals, stops)))

    def _bucket(self, rows: int) -> int:
        return next(size for size in self._buckets if size >= rows)

    def _run_prefills(self) -> None:
        """Advance the prompts, except for the last token of each, and start to decode complete ones."""
        chunks = sorted(self._next_chunks(), key=lambda chunk: chunk[0].row)
        tokens = self._packed_inputs(chunks)
        if len(tokens.ids):
            self._runner.forward(tokens._replace(keep=[], chunks=tuple(chunk for chunk in tokens.chunks if chunk.count)))
        for prefill, _ in chunks:
            if prefill.done == len(prefill.prompt_ids):
                self._finish_prefill(prefill)

    def _finish_prefill(self, prefill: Prefill) -> None:
        prefill.versions.mark(self.version, prefill.done)  # the last token is processed by the next decode step
        self._tokens_prefilled += len(prefill.members)
        super()._finish_prefill(prefill)


def engine_for(model: nn.Module, *, decoding: Literal["auto", "packed", "static"] = "auto", **options: Any) -> LocalEngine:
    """The embedded engine. `decoding`: see the run file's `engine.decoding`; `options`: see `LocalEngine`."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    if decoding == "static" or (decoding == "auto" and on_gpu):
        try:
            return StaticEngine(model, **options)
        except UnsupportedModelError as reason:
            if decoding == "static":
                raise
            _log.warning("%s runs without static decode steps: %s", type(model).__name__, str(reason))
        gc.collect()  # of the engine that failed, its K/V cache and what it recorded: there may be no room for two
        torch.cuda.empty_cache()
    return LocalEngine(model, **options)
