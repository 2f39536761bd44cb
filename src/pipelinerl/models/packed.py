"""Training forward over many sequences packed in one row, without padding and without attention between sequences.

A Hugging Face model computes everything except attention token by token. So a row `[1, T]` of concatenated sequences gives
correct results under two conditions: positions restart in each sequence (we pass them), and attention stays within a
sequence (we replace the model's attention function). Sequences are sorted by length. Inside attention only, sequences of
similar length are padded to a small batch; with causal attention, right padding does not change the result. On a GPU one
call attends to all sequences without padding, where PyTorch has it (`varlen.py`).

Tokens that sequences share as a prefix can be in the row once (`prefixes.py`). Positions then continue from the prefix to
what follows it, and attention also reads the prefix (`shared.py`).

Shapes: T tokens of the row, P trained tokens, V vocabulary, S sequences of a length bucket, L their padded length,
h heads (query heads Hq, key/value heads Hk), D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate, chain, groupby
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelinerl.errors import ModelLoadError, UnsupportedModelError
from pipelinerl.models.attention import (
    attend,
    choose_attention,
    refuse_changed_positions,
    refuse_states,
    refuse_unknown_features,
    replace_attention,
    unsupported,
)
from pipelinerl.models.loading import model_max_length
from pipelinerl.models.prefixes import LEAST_SHARED, TokenRun, runs_of, shared_prefixes
from pipelinerl.models.state import compute_dtype, is_narrow
from pipelinerl.types import Segment

_log = logging.getLogger(__name__)

# ---- Layout of a packed row, and its length buckets for attention


MAX_PADDING_WASTE = 0.15
"""A bucket takes a shorter sequence only while padding stays below this share of the bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A length bucket: neighbouring sequences of the row, computed in attention as one padded batch of `count` x `length`.

    `pad_index` maps each cell of the batch to a token of the bucket (padding repeats the sequence's last token).
    `cell_index` maps each token to its cell. Both are None if all lengths are equal. With shared prefixes, a bucket has
    blocks: runs of tokens, or parts of the tree, then it is `branched`.
    """

    start: int
    end: int
    count: int
    length: int
    pad_index: Tensor | None
    cell_index: Tensor | None
    branched: bool = False

    def batch(self, part_htD: Tensor) -> Tensor:
        """The tokens of the bucket as a batch [S, h, L, D]."""
        if self.pad_index is not None:
            part_htD = part_htD.index_select(1, self.pad_index)
        heads, _, size = part_htD.shape
        return part_htD.reshape(heads, self.count, self.length, size).transpose(0, 1)

    def tokens(self, x_ShLD: Tensor) -> Tensor:
        cells = x_ShLD.transpose(1, 2).flatten(0, 1)
        return cells if self.cell_index is None else cells.index_select(0, self.cell_index)


@dataclass(slots=True)  # not frozen: torch 2.11 would compile layers again for each number of buckets
class PackedRow:
    """Sequences laid out in one row, with the data that attention needs to separate them. Made once per micro-batch.

    `target_ids_P` are the tokens at the `Segment.trained_positions` of all sequences, in the order given; shared ones are
    there once. `predictor_P` are the row's positions whose logits predict them (the position before each).
    """

    token_ids_1T: Tensor
    position_ids_1T: Tensor
    predictor_P: Tensor
    target_ids_P: Tensor
    longest: int
    """Length of the longest sequence, in tokens."""
    buckets: tuple[Bucket, ...]
    begins: Tensor | None = None
    """Where each run begins, and the end (int32), on devices that attend to all sequences in one call."""
    prefixed: tuple[Tensor, Tensor] | None = None
    """With `begins` and shared prefixes: the places of each run's keys, with those before it, and their begins (int32)."""
    stops_T: Tensor | None = None
    """With shared prefixes: where in the row what continues a token's run ends. All up to there may attend to the token."""
    prefixes: tuple[tuple[Bucket, Bucket], ...] = ()
    """What continues a prefix in other blocks, and the prefix: both as a bucket of one."""
    trained_index: Tensor | None = None
    """Where sequences share trained tokens: the index among the P of each trained token of all sequences."""
    _masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        segments: Sequence[Segment],
        device: torch.device | str = "cpu",
        *,
        waste: float = MAX_PADDING_WASTE,
        least_shared: float = 1.0,
    ) -> PackedRow:
        """Pack `segments` into a row. `waste` is the largest share of padding in a bucket; 1 makes a single bucket.

        `least_shared`: the least part of a sequence that it shares (`shared_prefixes`); 1: none. Raises ValueError if there
        are no segments, one is empty, or its first token is trained.
        """
        return uploaded(cls.on_host(segments, device, waste, least_shared), device)

    @classmethod
    def on_host(
        cls, segments: Sequence[Segment], device: torch.device | str, waste: float, least_shared: float
    ) -> PackedRow:
        """What `of` gives before it is copied to `device`."""
        if not segments or any(not segment.token_ids for segment in segments):
            raise ValueError("a packed row needs at least one segment, and every segment at least one token")
        lengths = [len(segment.token_ids) for segment in segments]
        runs, leaves = runs_of(lengths, *shared_prefixes(segments, least_shared))
        tokens: list[int] = []
        positions: list[int] = []
        for run in runs:
            tokens.extend(segments[run.sequence].token_ids[run.start : run.end])
            positions.extend(range(run.start, run.end))
        trained = [segment.trained_positions for segment in segments]
        if any(0 in of_segment for of_segment in trained):
            raise ValueError("the first token of a segment can't be trained on: no logits predict it")
        predictors = [_place(run, p - 1) for run, of_segment in zip(leaves, trained, strict=True) for p in of_segment]
        targets = [one.token_ids[p] for one, of_segment in zip(segments, trained, strict=True) for p in of_segment]
        target_of = dict(zip(predictors, targets, strict=True))
        index_of = {predictor: index for index, predictor in enumerate(target_of)}
        repeated = len(target_of) < len(predictors)
        in_one_call = _in_one_call(device)
        return cls(
            token_ids_1T=torch.tensor([tokens]),
            position_ids_1T=torch.tensor([positions]),
            predictor_P=torch.tensor([*target_of], dtype=torch.long),
            target_ids_P=torch.tensor([*target_of.values()], dtype=torch.long),
            longest=max(lengths),
            buckets=tuple(_block_buckets(runs, waste)),
            begins=_begins(map(len, runs)) if in_one_call else None,
            trained_index=torch.tensor([index_of[predictor] for predictor in predictors]) if repeated else None,
            **_tree(runs, in_one_call),
        )

    @property
    def length(self) -> int:
        """T, tokens of all sequences."""
        return self.token_ids_1T.shape[1]

    @property
    def cells(self) -> int:
        """Tokens including the padding inside attention."""
        return sum(bucket.count * bucket.length for bucket in self.buckets)

    def causal_mask(self, length: int, window: int) -> Tensor:
        """[L, L], True where row i may attend to column j: i - window < j <= i. Cached for the other layers."""

        def make() -> Tensor:
            ones = torch.ones(length, length, dtype=torch.bool, device=self.token_ids_1T.device)
            return ones.tril() & ones.triu(1 - window)

        return self.cached((length, window), make)

    def cached(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]


Batch = TypeVar("Batch")


def uploaded(batch: Batch, device: torch.device | str) -> Batch:
    """The batch with its tensors on `device`: by one transfer, which the host does not wait for.

    `batch`: a dataclass of tensors on the CPU, of such dataclasses, and of tuples of them.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return batch
    from pipelinerl.models.device import to_device  # noqa: PLC0415 - for GPUs

    found: list[Tensor] = []
    _with_tensors(batch, found.append)
    padded = [F.pad(tensor.reshape(-1).view(torch.uint8), (0, -tensor.nbytes % 16)) for tensor in found]  # for any type
    parts = iter(torch.split(to_device(torch.cat(padded), device), [part.nbytes for part in padded]))
    made: Batch = _with_tensors(batch, lambda tensor: next(parts)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    return made


def _with_tensors(value: Any, change: Callable[[Tensor], Tensor | None]) -> Any:
    """A copy of `value` with `change` of each of its tensors, called in the order of the fields."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_with_tensors(part, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _with_tensors(getattr(value, one.name), change) for one in fields(value)})
    return value


def _in_one_call(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def _place(run: TokenRun | None, position: int) -> int:
    """Where the row has the token at `position` of a sequence that ends with `run`."""
    while run is not None and position < run.start:
        run = run.parent
    return run.row_start + position - run.start if run is not None else -1


def _begins(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _tree(runs: Sequence[TokenRun], in_one_call: bool) -> dict[str, Any]:
    """The fields of a `PackedRow` with shared prefixes. Empty if there are none."""
    if not any(run.parent for run in runs):
        return {}
    stops, prefixes = [], []
    places: dict[TokenRun, list[int]] = {}
    for run in runs:
        start, end, stop = run.row_start, run.row_start + len(run), run.row_start + run.tokens
        stops += [stop] * len(run)
        if run.apart:
            prefixes.append((_bucket(end, [stop - end]), _bucket(start, [end - start])))
        if in_one_call:
            places[run] = [*(places[run.parent] if run.parent else ()), *range(start, end)]
    tree: dict[str, Any] = {"stops_T": torch.tensor(stops), "prefixes": tuple(prefixes)}
    if in_one_call:
        tree["prefixed"] = torch.tensor([*chain(*places.values())]), _begins(map(len, places.values()))
    return tree


def _block_buckets(runs: Sequence[TokenRun], waste: float) -> Iterator[Bucket]:
    """Buckets of neighbouring blocks of the same kind: sequences or runs, and parts of the tree."""
    blocks = [run for run in runs if run.parent is None or run.parent.apart]
    for branched, of_kind in groupby(blocks, lambda run: bool(run.children) and not run.apart):
        alike = [*of_kind]
        lengths = [run.tokens if branched else len(run) for run in alike]
        for bucket in _buckets(lengths, waste, alike[0].row_start):
            yield replace(bucket, branched=branched)


def _buckets(lengths: Sequence[int], waste: float, row_start: int = 0) -> list[Bucket]:
    """Split lengths into buckets that begin with the longest, and whose padding is at most `waste` of the padded batch."""
    buckets: list[Bucket] = []
    first = total = 0
    for i, length in enumerate([*lengths, 0]):
        cells = (i + 1 - first) * lengths[first]
        if 0 < length <= lengths[first] and cells - total - length <= waste * cells:
            total += length
            continue
        buckets.append(_bucket(row_start, lengths[first:i]))
        first, row_start, total = i, row_start + total, length
    return buckets


def _bucket(start: int, lengths: Sequence[int]) -> Bucket:
    count, longest, total = len(lengths), lengths[0], sum(lengths)
    if min(lengths) == longest:
        return Bucket(start, start + total, count, longest, None, None)
    lengths_S1 = torch.tensor(lengths)[:, None]
    column_L = torch.arange(longest)[None]
    starts_S1 = lengths_S1.cumsum(0) - lengths_S1
    pad_index = (starts_S1 + torch.minimum(column_L, lengths_S1 - 1)).flatten()
    cell_index = (column_L < lengths_S1).flatten().nonzero()[:, 0]
    return Bucket(start, start + total, count, longest, pad_index, cell_index)


ATTENTION_NAME = "pipelinerl_packed"


def training_forward(model: Any) -> TrainingForward:
    """The fastest exact way to compute the logits of a `PackedRow` with `model`, a Hugging Face causal LM in eval mode.

    Raises UnsupportedModelError if there is none: if the model is not causal, or its own forward fails.
    """
    own = model.config._attn_implementation
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} asks for an auxiliary loss of its router (output_router_logits in config.json), which "
            "the objective does not have; set it to false, and the router is trained by the objective alone"
        )
    try:
        use_packed_attention(model)
        return TrainingForward(model)
    except UnsupportedModelError as error:
        reason = error
    choose_attention(model, own)
    from pipelinerl.models.own_forward import use_configured_time_steps  # noqa: PLC0415 - most models don't need it

    use_configured_time_steps(model)
    forward = TrainingForward(model, padded=True)
    try:
        _verify(model, forward, "on padded batches")
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; and not packed: {reason}") from error
    _log.warning("%s is trained on padded batches: %s", type(model).__name__, reason)
    return forward


@dataclass(frozen=True, slots=True)
class TrainingForward:
    """Computes logits [P, V], in the type of the model's head, at the positions that predict a row's trained tokens.

    `padded`: each length bucket of the row is a padded batch for the model's own forward. Otherwise the model has packed
    attention, and gets the whole row. `compiled`: its layers are compiled (`layers`).

    Raises UnsupportedModelError if a sequence is longer than the model's position encoding allows next to others, or if a
    layer uses an attention feature that is not implemented here.
    """

    model: Any
    padded: bool = False
    compiled: bool = False

    @property
    def least_shared(self) -> float:
        """For the rows that it gets: see `shared_prefixes`."""
        return 1.0 if self.padded else LEAST_SHARED

    @property
    def description(self) -> str:
        if self.padded:
            return "on padded batches, through its own forward"
        return "on packed batches" + (", with compiled layers" if self.compiled else "")

    def __call__(self, row: PackedRow) -> Tensor:
        model: Any = self.model
        refuse_changed_positions(model, row.longest)
        if self.padded:
            from pipelinerl.models.own_forward import padded_logits  # noqa: PLC0415 - most models don't need it

            return padded_logits(model, row)
        logits: Tensor = model(
            input_ids=row.token_ids_1T,
            position_ids=row.position_ids_1T,
            # Without one, transformers looks for sequences in the positions, which waits for the device.
            attention_mask=torch.ones_like(row.token_ids_1T, dtype=torch.bool),
            use_cache=False,
            logits_to_keep=row.predictor_P,
            packed_row=row,
        ).logits
        return logits.squeeze(0)  # the gradient of an index would be a second tensor of this size


def use_packed_attention(model: Any) -> None:
    """Make `model` (a Hugging Face causal LM in eval mode) attend only within the sequences of a `PackedRow`.

    Raises UnsupportedModelError if its attention can't be replaced, if it has recurrent layers, or if the logits of a short
    packed row differ from the logits of the model's own attention for each sequence alone.
    """
    from transformers import DynamicCache  # noqa: PLC0415 - heavy, and only needed here

    with unsupported(f"{type(model).__name__} can't be trained packed"):
        replace_attention(model, ATTENTION_NAME, packed_attention)
        refuse_states(DynamicCache(config=model.config.get_text_config(decoder=True)), type(model).__name__)
    _verify(model, TrainingForward(model), "packed")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    packed_row: PackedRow | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query [1, Hq, T, D], key and value [1, Hk, T, D] -> output [1, T, Hq, D]; `s_aux`: sinks [Hq].

    Raises UnsupportedModelError for attention features that are not implemented here.
    """
    if packed_row is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was called without a packed row: either it does not pass keyword arguments to its "
            "attention (then it can't be trained packed), or the model in training was not called through a TrainingForward"
        )
    refuse_unknown_features(module, attention_mask, sliding_window=sliding_window, longest=packed_row.longest, other=other)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed_row.begins is not None and softcap is None and s_aux is None:
        from pipelinerl.models.varlen import attend_row  # noqa: PLC0415 - for GPUs

        attended = attend_row(packed_row, query, key, value, scale=scale, window=sliding_window)
        if attended is not None:
            return attended, None
    if packed_row.stops_T is not None:
        from pipelinerl.models.shared import ScoreRule, attend_shared  # noqa: PLC0415 - some workloads have no shared prefixes

        scores = ScoreRule(scale, sliding_window, softcap)
        return attend_shared(packed_row, (query, key, value), scores, s_aux), None
    sinks = None if s_aux is None else s_aux[:, None]
    # Split at once: the gradient of each slice alone would be as large as the row.
    sizes = [bucket.end - bucket.start for bucket in packed_row.buckets]
    of_buckets = zip(*(torch.split(x_1hTD.squeeze(0), sizes, 1) for x_1hTD in (query, key, value)), strict=True)
    parts = []
    for bucket, of_bucket in zip(packed_row.buckets, of_buckets, strict=True):
        windowed = sliding_window is not None and sliding_window < bucket.length
        mask = packed_row.causal_mask(bucket.length, sliding_window) if sliding_window is not None and windowed else None
        if mask is None and (softcap is not None or sinks is not None):
            mask = packed_row.causal_mask(bucket.length, bucket.length)
        query_ShLD, key_ShLD, value_ShLD = map(bucket.batch, of_bucket)
        out_ShLD = attend(query_ShLD, key_ShLD, value_ShLD, mask, scale=scale, softcap=softcap, sinks=sinks)
        parts.append(bucket.tokens(out_ShLD))
    return torch.cat(parts)[None], None


def probe_segments(model: Any, longer: Sequence[int] = ()) -> list[Segment]:
    """Short sequences of different lengths, and those of the lengths `longer`, to compare two ways of computing with."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [
        Segment(token_ids=tuple((17 * i + 7 * n) % vocabulary for i in range(n)), sampled=((1, n),))
        for n in (5, 11, 2, 12, *longer)
    ]


@torch.no_grad()
def _verify(model: Any, forward: TrainingForward, way: str) -> None:
    """Compare the logits of a small row with each sequence alone under the model's own attention.

    Raises UnsupportedModelError if they differ. Finds problems that no list of features can: recurrent layers that carry
    state from one sequence to the next, learned positions, position biases, layers that are not causal.
    """
    name, chosen = type(model).__name__, model.config._attn_implementation
    with unsupported(f"{name} can't be trained {way}"):
        device = next(model.parameters()).device
        longer: tuple[int, ...] = ()
        if forward.padded:  # own layers may be recurrent: then also sequences that are longer than their chunks
            from pipelinerl.models.own_forward import recurrence_chunk  # noqa: PLC0415 - as above

            longest = min(recurrence_chunk(model) + 7, model_max_length(model) or 1 << 30)
            longer = (max(2, longest - 5), longest)
        segments = probe_segments(model, longer)
        shared = (*segments[-1].token_ids[:8], *segments[1].token_ids[:3])
        segments.append(Segment(token_ids=shared, sampled=((1, 11),)))
        row = PackedRow.of(segments, device, least_shared=1.0 if forward.padded else 0.0)
        row_PV = forward(row).float()
        row_PV = row_PV if row.trained_index is None else row_PV[row.trained_index]
        choose_attention(model, "eager")
        alone = [model(torch.tensor([s.token_ids], device=device), use_cache=False).logits[0, :-1].float() for s in segments]
        choose_attention(model, chosen)
    alone_PV = torch.cat(alone)
    errors_P = (row_PV - alone_PV).abs().amax(-1) / alone_PV.abs().max().clamp_min(1e-6)
    error, tolerance = errors_P.max(), 1e-4
    if is_narrow(compute_dtype(model)):
        from pipelinerl.models.own_forward import largest_beyond_rounding  # noqa: PLC0415 - as above

        error, tolerance = largest_beyond_rounding(model, errors_P), 0.05
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"{name} can't be trained {way}: its logits differ from those of single sequences (relative error {error:.1g})"
        )


def checkpoint_activations(model: Any) -> None:
    """Recompute each decoder layer's activations in the backward pass: less memory for a third more compute.

    transformers enables this in training mode only, which also enables dropout. So only the layers' own flag is set, and
    the modules inside them stay in eval mode. Raises ModelLoadError if the model does not support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: PLC0415 - few runs have it

    if not model.supports_gradient_checkpointing:
        raise ModelLoadError(
            f"{type(model).__name__} has no gradient checkpointing: set trainer.gradient_checkpointing to false"
        )
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # an older name
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
