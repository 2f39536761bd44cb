"""Recomputes the distributions that sampled tokens were drawn from, with the weights that sampled each of them.

A sequence is fed to the model in pieces, one for each version of the weights that sampled a part of it. As in the engine, KV
entries of earlier pieces stay, or all are computed again with the new weights.

    positions    0 ... prompt-1 | prompt ... prompt+3 | prompt+4 ...
    predict                  t0 | t1     ...       t4 | t5 ...           token t is predicted at position prompt + t - 1

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipelinerl.checkpoint import load_checkpoint, saved_versions
from pipelinerl.config.schema import ModelConfig
from pipelinerl.engine.attention import Chunk, PackedTokens
from pipelinerl.engine.local import make_runner
from pipelinerl.errors import ReplayDifferenceError
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import checksum, first_names, load_weights, named_weights, write_safetensors
from pipelinerl.types import Completion

KV = Literal["keep", "recompute"]
Tensors = Callable[[int], Mapping[str, Tensor]]
"""Function from a version to its weights by name."""

CACHED_BYTES = 2 << 30
LONGEST_PIECE = 256
FED_TOKENS = 8192
DISTRIBUTIONS = 1 << 23
"""Limits per forward: `FED_TOKENS` input tokens, and `DISTRIBUTIONS` log-probabilities in its output (tokens x vocabulary).
A piece of one sequence, of up to `LONGEST_PIECE` sampled tokens, is never split, so it may exceed them."""


class SavedWeights:
    """Weights of a run by version, loaded on demand. The latest are cached, up to `CACHED_BYTES` (at least two).

    Version 0 is the model that the run started from, the others are its checkpoints and copies of weights (`saved` has these
    versions), and weights that `save` wrote to `folder`. `published`: the checksums of the run's weights, by version.
    """

    def __init__(
        self,
        run_dir: Path,
        model: ModelConfig,
        *,
        published: Mapping[int, str] | None = None,
        folder: Path = Path(),
    ) -> None:
        self._model, self._folder = model, folder
        self._published = published or {}
        self._folders = saved_versions(run_dir)
        self.saved = sorted({0, *self._folders})
        self._aliases: dict[int, dict[str, str]] = {}
        self._loaded: OrderedDict[int, Mapping[str, Tensor]] = OrderedDict()

    def save(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Save weights to disk, tied tensors once."""
        self._aliases[version] = first_names(tensors)
        owned = {name: tensors[name] for name in self._aliases[version].values()}
        self._folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(owned, self._folder / f"{version}.safetensors")

    def new_model(self, version: int, device: str) -> Any:
        """A new model with weights that the run saved. Raises ModelLoadError, and CheckpointError for damaged files."""
        path = self._folders.get(version)
        if path is None:
            return load_model(self._model, device)
        load_checkpoint(path)  # verifies every file
        return load_model(self._model.model_copy(update={"path": str(path)}), device)

    def __call__(self, version: int) -> Mapping[str, Tensor]:
        """The weights of `version` on the CPU, by name. Read only.

        Raises as `new_model`, and ReplayDifferenceError for saved weights that the run did not publish.
        """
        if version not in self._loaded:
            self._loaded[version] = self._load(version)
            size = sum(tensor.numel() * tensor.element_size() for tensor in self._loaded[version].values())
            while len(self._loaded) > max(2, CACHED_BYTES // size):
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(version)
        return self._loaded[version]

    def _load(self, version: int) -> Mapping[str, Tensor]:
        if version in self._aliases:
            owned = load_file(self._folder / f"{version}.safetensors")
            return {name: owned[first] for name, first in self._aliases[version].items()}
        tensors = named_weights(self.new_model(version, "cpu"))
        if (published := self._published.get(version)) is not None and checksum(tensors) != published:
            where = self._folders.get(version, self._model.path)
            raise ReplayDifferenceError(f"the weights in {where} are not what the run published as version {version}")
        return tensors


class Sampled(NamedTuple):
    """A prompt and its completion. `of`: what they are to the caller."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    of: Any = None


class Feed(NamedTuple):
    """Positions `start <= p < end` of a sequence in row `row`; the last `predicted` ones predict tokens from `token` on."""

    sequence: Sampled
    row: int
    start: int
    end: int
    predicted: int
    token: int


def feeds_of(sequence: Sampled, kv: KV, row: int = 0) -> dict[int, list[Feed]]:
    """What is fed of a sequence, by the version of the weights that it is fed to; versions ascend.

    If entries stay, a prompt that several versions processed is processed by them. If they are recomputed, all entries
    are of the version that samples. Each feed has at most `LONGEST_PIECE` sampled tokens, which changes no result.
    """
    prompt, spans = len(sequence.prompt_ids), sequence.completion.weight_versions
    read, start = sequence.completion.prompt_versions, 0
    found: dict[int, list[Feed]] = {}
    if kv == "keep" and read and read[-1].version == spans[0].version:  # not every server says what processed it
        found = {span.version: [Feed(sequence, row, span.start, span.end, 0, 0)] for span in read[:-1]}
        start = read[-1].start
    for span in spans:
        feeds = found[span.version] = []
        start = 0 if kv == "recompute" else start
        for token in range(span.start, span.end, LONGEST_PIECE):
            predicted = min(LONGEST_PIECE, span.end - token)
            end = prompt + token + predicted - 1
            feeds.append(Feed(sequence, row, start, end, predicted, token))
            start = end
    return found


class Recompute:
    """Feeds sequences to a model, as many at once as it has slots."""

    def __init__(self, model: Any, *, slots: int, max_length: int, temperature: float) -> None:
        """Takes ownership of the model: its weights are replaced."""
        self._runner = make_runner(model, slots, max_length)
        self._temperature = temperature
        self._slots = slots

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        load_weights(named_weights(self._runner.model), tensors)
        self._runner.weights_changed()

    @torch.inference_mode()
    def run(self, sequences: Sequence[Sampled], tensors: Tensors, kv: KV) -> Iterator[tuple[int, list[Feed], Tensor]]:
        """For all tokens of the sequences: version, feeds, and log-probabilities [N, V] of the feeds in order."""
        # Neighbours with equal prompt length share one attention call.
        ordered = sorted(sequences, key=lambda one: (len(one.prompt_ids), -len(one.completion.token_ids)))
        for begin in range(0, len(ordered), self._slots):
            by_version: dict[int, list[list[Feed]]] = defaultdict(list)
            for row, sequence in enumerate(ordered[begin : begin + self._slots]):
                for version, feeds in feeds_of(sequence, kv, row).items():
                    by_version[version].append(feeds)
            for version, rows in sorted(by_version.items()):
                self.load(tensors(version))
                for together in zip_longest(*rows):  # a row's feeds come one after the other
                    for feeds in _batches([feed for feed in together if feed is not None], self._runner.vocabulary):
                        yield version, feeds, self.log_probabilities(feeds)

    @torch.inference_mode()
    def log_probabilities(self, feeds: Sequence[Feed]) -> Tensor:
        """Feed these positions. Returns the log-probabilities [N, V] in float64 at the positions that predict tokens.

        In float64, because divergences can be as small as float32 rounding errors.
        """
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        chunks = []
        for feed in feeds:
            chunks.append(Chunk(begin=len(ids), count=feed.end - feed.start, row=feed.row, offset=feed.start))
            prompt_ids, completion, _ = feed.sequence
            ids += (*prompt_ids, *completion.token_ids)[feed.start : feed.end]
            positions += range(feed.start, feed.end)
            keep += range(len(ids) - feed.predicted, len(ids))
        logits_NV = self._runner.forward(PackedTokens(ids, positions, keep, chunks=tuple(chunks)))
        return (logits_NV.double() / self._temperature).log_softmax(-1)


def values_of(feeds: Sequence[Feed]) -> tuple[list[int], list[float]]:
    """The token ids and the recorded log-probs that the feeds predict, in order."""
    parts = [(feed.sequence.completion, slice(feed.token, feed.token + feed.predicted)) for feed in feeds]
    ids = [token_id for completion, part in parts for token_id in completion.token_ids[part]]
    return ids, [logprob for completion, part in parts for logprob in completion.logprobs[part]]


def _batches(feeds: Sequence[Feed], vocabulary: int) -> Iterator[list[Feed]]:
    """Consecutive feeds that fit into one forward, by `FED_TOKENS` and `DISTRIBUTIONS`."""
    batch: list[Feed] = []
    fed = predicted = 0
    for feed in feeds:
        fed, predicted = fed + feed.end - feed.start, predicted + feed.predicted
        if batch and (fed > FED_TOKENS or predicted * vocabulary > DISTRIBUTIONS):
            yield batch
            batch, fed, predicted = [], feed.end - feed.start, feed.predicted
        batch.append(feed)
    if batch:
        yield batch
