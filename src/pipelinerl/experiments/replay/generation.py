"""Repeats recorded completions token by token: the engine computes the log-probs of the recorded tokens, with weight updates
where the run had them.

Weights change between two steps of an engine, for all its sequences at once. Recorded sequences are therefore arranged on
timelines: on one timeline, all of them see every update at the token where they saw it in the run. Sequences that shared an
engine fit on one timeline, because they were a fixed number of steps apart.

Each step also draws a token as the run did. If an engine of this package sampled the completion, it is the recorded one,
except where rounding moves a boundary of the distribution across the random number.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipelinerl.actor.client import derive_seed
from pipelinerl.checkpoint import load_checkpoint
from pipelinerl.checkpoint_folders import saved_versions
from pipelinerl.config.schema import ModelConfig, RunConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.engine.rows import Ints
from pipelinerl.errors import ReplayDifferenceError, RunInterruptedError, UserError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import checksum, first_names, named_weights
from pipelinerl.models.tensor_file import write_safetensors
from pipelinerl.types import Completion, GenerationRequest, Group, SamplingParams, Turn, VersionSpan

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}
"""Largest difference of log-probs by `model.dtype`: the run's engine had other sequences in its batches, so it rounded
otherwise.
"""


# ---- weights by version


class Weights:
    """The weights of versions of a run: those that the run kept, and those that were saved here. Cached one at a time.

    `published` has the checksums of the run's weights, by version.
    """

    def __init__(self, run_dir: Path, model: ModelConfig, folder: Path, published: Mapping[int, str]) -> None:
        self._model = model
        self._published = published
        self._folder = folder
        self._kept = saved_versions(run_dir)
        self._aliases: dict[int, dict[str, str]] = {}
        self._latest: tuple[int, Mapping[str, Tensor]] | None = None

    @property
    def kept(self) -> set[int]:
        """Versions that need not be saved here."""
        return {0, *self._kept}

    def save(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Save weights to disk, tied tensors once."""
        self._aliases[version] = first_names(tensors)
        owned = {name: tensors[name] for name in self._aliases[version].values()}
        self._folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(owned, self._file(version))

    def __call__(self, version: int) -> Mapping[str, Tensor]:
        """Raises CheckpointError for damaged files, ReplayDifferenceError for kept weights that the run did not publish."""
        if self._latest is None or self._latest[0] != version:
            self._latest = (version, self._load(version))
        return self._latest[1]

    def new_model(self, device: str) -> Any:
        return load_model(self._model, device)

    def _load(self, version: int) -> Mapping[str, Tensor]:
        if version in self._aliases:
            owned = load_file(self._file(version))
            return {name: owned[first] for name, first in self._aliases[version].items()}
        path, model = self._kept.get(version), self._model
        if path is not None:
            load_checkpoint(path)  # verifies every file
            model = model.model_copy(update={"path": str(path)})
        tensors = named_weights(load_model(model))
        if (published := self._published.get(version)) is not None and checksum(tensors) != published:
            raise ReplayDifferenceError(
                f"the weights in {model.path} are not those that the run published as version {version}"
            )
        return tensors

    def _file(self, version: int) -> Path:
        return self._folder / f"{version}.safetensors"


def versions_of(group: Group, kv: str) -> set[int]:
    """The versions of weights that are needed to repeat the group."""
    turns = [turn for rollout in group.rollouts for turn in rollout.turns]
    return {span.version for turn in turns for span in _steps(turn, kv).spans}


def choose_groups(indices: Sequence[int], count: int, seed: int) -> list[int]:
    """`count` of the indices, or all if there are fewer; ascending."""
    return sorted(random.Random(seed).sample(indices, min(count, len(indices))))


# ---- timelines


class Steps(NamedTuple):
    """The engine steps of one turn, from 0: `spans` are their weight versions.

    The first `len(chunks)` steps process the prompt, `chunks[i]` tokens each. The last of them samples the first token.
    """

    spans: tuple[VersionSpan, ...]
    chunks: tuple[int, ...]


def _steps(turn: Turn, kv: str) -> Steps:
    """If entries are kept, a prompt that was processed by several versions is processed by the same ones, one step each.

    If they are recomputed, all entries are of the version that samples.
    """
    completion, prompt = turn.completion, len(turn.prompt_ids)
    first = completion.weight_versions[0].version
    read = list(completion.prompt_versions)
    if kv == "recompute" or not read or read[-1].version != first:  # not every server says what processed the prompt
        read = [VersionSpan(first, 0, prompt)]
    lead = len(read) - 1
    spans = [VersionSpan(span.version, step, step + 1) for step, span in enumerate(read[:-1])]
    spans += [VersionSpan(span.version, span.start + lead, span.end + lead) for span in completion.weight_versions]
    return Steps(tuple(spans), tuple(span.end - span.start for span in read))


@dataclass(frozen=True)
class Recorded:
    """One recorded completion: turn number `turn` of a rollout of group `group`."""

    group: int
    rollout: str
    turn: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    steps: Steps
    seed: int

    @property
    def id(self) -> str:
        return f"{self.rollout}.t{self.turn}"


def recorded_completions(group: Group, config: RunConfig) -> Iterator[Recorded]:
    """The completions of a group that have tokens."""
    for rollout in group.rollouts:
        seed = derive_seed(config.seed, group.index, rollout.attempt)
        for number, turn in enumerate(rollout.turns):
            if turn.completion.token_ids:
                steps = _steps(turn, config.engine.kv_on_update)
                yield Recorded(
                    group.index, rollout.id, number, turn.prompt_ids, turn.completion, steps, derive_seed(seed, number)
                )


@dataclass
class Timeline:
    """Completions that one engine can repeat together: `members` begin at these steps.

    `used`: the first step with each version and the one after the last; these intervals are disjoint and in order.
    """

    members: list[tuple[int, Recorded]] = field(default_factory=list)
    used: dict[int, tuple[int, int]] = field(default_factory=dict)

    def takes(self, recorded: Recorded) -> bool:
        """Add the completion if it fits."""
        if not self.members:
            return self._add(recorded, 0)
        if len(recorded.steps.chunks) > 1 or len(self.members[0][1].steps.chunks) > 1:
            return False  # an engine that processes a prompt in such chunks has no other sequence
        for span in recorded.steps.spans:
            if span.version in self.used:
                first, end = self.used[span.version]
                if self._add(recorded, first - span.start) or self._add(recorded, end - span.end):
                    return True
        return False

    def _add(self, recorded: Recorded, begin: int) -> bool:
        used = dict(self.used)
        for span in recorded.steps.spans:
            first, end = used.get(span.version, (begin + span.start, begin + span.end))
            used[span.version] = (min(first, begin + span.start), max(end, begin + span.end))
        intervals = [used[version] for version in sorted(used)]
        if any(earlier[1] > later[0] for earlier, later in pairwise(intervals)):
            return False
        self.used = used
        self.members.append((begin, recorded))
        return True


def arrange(completions: Sequence[Recorded], most: int) -> list[Timeline]:
    """Timelines of at most `most` completions each, those with many updates first, so that the others find a place."""
    timelines: list[Timeline] = []
    for recorded in sorted(completions, key=lambda one: -len(one.steps.spans)):
        if not any(len(timeline.members) < most and timeline.takes(recorded) for timeline in timelines):
            timelines.append(Timeline())
            timelines[-1].takes(recorded)
    return sorted(timelines, key=lambda timeline: min(timeline.used))


# ---- the engine


class ForcedEngine(LocalEngine):
    """An engine that emits given tokens with their log-probs. `drawn` counts the tokens that it would have drawn itself."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.drawn: dict[str, int] = defaultdict(int)

    def process_prompts(self, tokens: int) -> None:
        """The number of prompt tokens in the next step."""
        self._prefill_tokens = tokens

    def _draw(self, logits_nV: Tensor, rows_n: Ints | slice, uniforms_n: Tensor) -> tuple[Tensor, Tensor]:
        table, device = self._table, logits_nV.device
        drawn_n, _ = super()._draw(logits_nV, rows_n, uniforms_n)
        rows = np.atleast_1d(np.arange(table.decoding)[rows_n] if isinstance(rows_n, slice) else rows_n).tolist()
        ids = [table.owner(row).request.id for row in rows]
        tokens = [self.tokens[name][table.counts[row]] for name, row in zip(ids, rows, strict=True)]
        for name, token, drawn in zip(ids, tokens, drawn_n.tolist(), strict=True):
            self.drawn[name] += token == drawn
        temperature_n1 = torch.from_numpy(table.temperature[rows])[:, None].to(device)
        tokens_n = torch.tensor(tokens, device=device)
        logprobs_nV = (logits_nV.double() / temperature_n1).log_softmax(-1)
        return tokens_n, logprobs_nV.gather(1, tokens_n[:, None])[:, 0].float()


class Gap(NamedTuple):
    """The token of a completion whose log-prob differs most. `logprob` is the replay's."""

    difference: float
    group: int
    rollout: str
    turn: int
    token: int
    version: int
    recorded: float
    logprob: float

    def __str__(self) -> str:
        turn = f", turn {self.turn}" if self.turn else ""
        return (
            f"group {self.group}, rollout {self.rollout}{turn}, token {self.token} (version {self.version}): its log-prob "
            f"is {self.recorded:.6f} in the record and {self.logprob:.6f} in the replay"
        )


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """`switches`: weight updates within completions. `drawn`: tokens that the replay drew again; None if another package's
    engine drew them. `gaps`: one per completion, largest first.
    """

    groups: int
    completions: int
    tokens: int
    switches: int
    drawn: int | None
    timelines: int
    gaps: tuple[Gap, ...]


def repeat_groups(
    groups: Sequence[Group], config: RunConfig, weights: Weights, *, stop: Callable[[], bool] = lambda: False
) -> GenerationResult:
    """Repeat the completions of these groups. Raises UserError if they do not fit the engine, RunInterruptedError."""
    completions = [one for group in groups for one in recorded_completions(group, config)]
    if not completions:
        raise UserError("the chosen groups have no completion to repeat")
    slots = min(config.engine.slots, len(completions))
    timelines = arrange(completions, slots)
    engine = ForcedEngine(
        weights.new_model(config.engine.device),
        slots=slots,
        max_length=max(len(one.prompt_ids) + len(one.completion.token_ids) for one in completions),
        kv_on_update=config.engine.kv_on_update,
    )
    repeater = _Repeater(engine, config, weights)
    gaps = []
    for timeline in timelines:
        if stop():
            raise RunInterruptedError("the replay was stopped while it repeated generation")
        gaps += repeater.repeat(timeline)
    return GenerationResult(
        groups=len(groups),
        completions=len(completions),
        tokens=sum(len(one.completion.token_ids) for one in completions),
        switches=sum(len(one.completion.weight_versions) - 1 for one in completions),
        drawn=None if config.engine.kind == "vllm" else sum(engine.drawn.values()),
        timelines=len(timelines),
        gaps=tuple(sorted(gaps, reverse=True)),
    )


class _Repeater:
    """Runs timelines on an engine. Its versions only rise, so updates are numbered, over all timelines."""

    def __init__(self, engine: ForcedEngine, config: RunConfig, weights: Weights) -> None:
        self._engine = engine
        self._config = config
        self._weights = weights
        self._updates = 0

    def repeat(self, timeline: Timeline) -> list[Gap]:
        switches = {first: version for version, (first, _) in timeline.used.items()}
        begins: dict[int, list[Recorded]] = defaultdict(list)
        for begin, recorded in timeline.members:
            begins[begin].append(recorded)
        done: dict[str, Completion] = {}
        step = min(begins)
        whole = sum(len(recorded.prompt_ids) for _, recorded in timeline.members)
        chunks = timeline.members[0][1].steps.chunks
        while len(done) < len(timeline.members):
            if step in switches:
                self._update(switches[step])
            for recorded in begins[step]:
                self._submit(recorded)
            at = step - min(begins)
            self._engine.process_prompts(chunks[at] if len(chunks) > 1 and at < len(chunks) else whole)
            done |= {completion.request_id: completion for completion in self._engine.step().finished}
            step += 1
        return [_gap(recorded, done[recorded.id]) for _, recorded in timeline.members]

    def _update(self, version: int) -> None:
        tensors = self._weights(version)
        self._updates += 1
        self._engine.update_weights(WeightUpdate(self._updates, checksum(tensors), tensors))

    def _submit(self, recorded: Recorded) -> None:
        tokens = recorded.completion.token_ids
        self._engine.tokens[recorded.id] = tokens
        sampling = SamplingParams(max_tokens=len(tokens), temperature=self._config.actor.temperature, seed=recorded.seed)
        # Streamed, so that the engine counts tokens one by one.
        request = GenerationRequest(id=recorded.id, prompt_ids=recorded.prompt_ids, sampling=sampling, stream=True)
        self._engine.submit(request)


def _gap(recorded: Recorded, again: Completion) -> Gap:
    before, after = recorded.completion.logprobs, again.logprobs
    differences = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(before, after, strict=True)]
    token = max(range(len(differences)), key=differences.__getitem__)
    version = next(span.version for span in recorded.completion.weight_versions if span.start <= token < span.end)
    return Gap(
        differences[token], recorded.group, recorded.rollout, recorded.turn, token, version, before[token], after[token]
    )
