"""What was trained on, step by step: a line per optimizer step in `rollouts/trained.jsonl`, to be checked afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pipelinerl.types import TrainingSample

TRAINED_FILE = "trained.jsonl"


class TrainedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a step: its sampled tokens, and the smallest and largest lag among them."""

    id: str
    group_index: int
    tokens: int
    lag_min: int
    lag_max: int


class TrainedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. `version` is that of the weights after it.

    `dropped_lengths`: the sampled tokens of each rollout that the trainer dropped since the record before, by reason;
    `dropped_ids`: which ones these were. A resumed run repeats the steps after its checkpoint: of equal versions the last
    line counts.
    """

    version: int
    samples: tuple[TrainedSample, ...]
    dropped_lengths: dict[str, list[int]] = {}
    dropped_ids: dict[str, list[str]] = {}


def trained_record(
    samples: Sequence[TrainingSample],
    *,
    version: int,
    dropped_lengths: Mapping[str, list[int]],
    dropped_ids: Mapping[str, list[str]],
) -> TrainedRecord:
    """The record of the step from the weights of `version` to those of `version + 1`."""
    return TrainedRecord(
        version=version + 1,
        samples=tuple(
            TrainedSample(
                id=sample.id,
                group_index=sample.group_index,
                tokens=sample.sampled_count,
                lag_min=version - max(sample.versions),
                lag_max=version - min(sample.versions),
            )
            for sample in samples
        ),
        dropped_lengths=dict(dropped_lengths),
        dropped_ids=dict(dropped_ids),
    )
