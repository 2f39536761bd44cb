"""Turns a finished group into training samples, and counts dropped rollouts by reason and length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pipelinerl.config.schema import PreprocessConfig
from pipelinerl.errors import RolloutError
from pipelinerl.preprocess.advantages import advantages
from pipelinerl.preprocess.turns import join_turns
from pipelinerl.types import Group, Prepared, Rollout, Segment, TrainingSample


class ReferenceScorer(Protocol):
    """Computes log-probabilities under the frozen reference model of the KL penalty, usually the initial weights."""

    def score(self, segments: Sequence[Segment]) -> Sequence[Sequence[float]]:
        """For each segment, the log-probability of each of its sampled tokens, in order of position.

        Computed at the temperature of training rollouts, so that they are comparable to `behaviour_logprobs`. One call has
        all segments of a group; the scorer chooses the batching.
        """


class Preprocessor:
    """Turns groups into samples. Advantages are computed over the whole group, before rollouts are dropped.

    A rollout is dropped for the first of these reasons that applies:
    `empty`: it has no sampled tokens; `overlong`: its last completion was cut at its token limit (`overlong: drop`);
    `zero_advantage`: its advantage is 0, so it has no policy gradient (`zero_advantage: drop`).
    """

    def __init__(self, config: PreprocessConfig, reference: ReferenceScorer | None = None) -> None:
        self._config = config
        self._reference = reference

    def process(self, group: Group) -> Prepared:
        """Prepare one group. Raises RolloutError, naming the group and rollout, for an inconsistent rollout."""
        config, rewards = self._config, [rollout.reward for rollout in group.rollouts]
        try:
            found = advantages(rewards, baseline=config.advantage, normalize_std=config.normalize_std)
        except ValueError as error:
            raise RolloutError(f"group {group.index}: {error}") from error
        samples: list[TrainingSample] = []
        dropped: dict[str, list[TrainingSample]] = {}
        for rollout, advantage in zip(group.rollouts, found, strict=True):
            sample = _sample(group, rollout, advantage)
            reason = self._reason_to_drop(sample)
            if reason is None:
                samples.append(sample)
            else:
                dropped.setdefault(reason, []).append(sample)
        if self._reference is not None and samples:
            samples = _with_reference(samples, self._reference)
        return Prepared(
            index=group.index,
            ids=tuple(rollout.id for rollout in group.rollouts),
            samples=tuple(samples),
            dropped_by_length={reason: tuple(out.sampled_count for out in left_out) for reason, left_out in dropped.items()},
            dropped_ids={reason: tuple(out.id for out in left_out) for reason, left_out in dropped.items()},
            dropped_rewards={reason: tuple(out.reward for out in left_out) for reason, left_out in dropped.items()},
        )

    def _reason_to_drop(self, sample: TrainingSample) -> str | None:
        if sample.sampled_count == 0:
            return "empty"
        if not sample.finished and self._config.overlong == "drop":
            return "overlong"
        if sample.advantage == 0.0 and self._config.zero_advantage == "drop":
            return "zero_advantage"
        return None


def newest_version(group: Group) -> int:
    """The newest version that computed any token of the group, including prompts."""
    spans = (
        span
        for rollout in group.rollouts
        for turn in rollout.turns
        for span in (*turn.completion.weight_versions, *turn.completion.prompt_versions)
    )
    return max((span.version for span in spans), default=group.started_version)


def _sample(group: Group, rollout: Rollout, advantage: float) -> TrainingSample:
    try:
        joined = join_turns(rollout.turns)
    except RolloutError as error:
        raise RolloutError(f"group {group.index}, rollout {rollout.id!r}: {error}") from error
    return TrainingSample(
        id=rollout.id,
        group_index=group.index,
        segments=joined.segments,
        behaviour_logprobs=joined.behaviour_logprobs,
        versions=joined.versions,
        advantage=advantage,
        reward=rollout.reward,
        finished=not rollout.turns or rollout.turns[-1].completion.finish_reason != "length",
        metrics=rollout.metrics,
    )


def _with_reference(samples: Sequence[TrainingSample], reference: ReferenceScorer) -> list[TrainingSample]:
    """The same samples with their reference log-probs, from one call of the scorer."""
    segments = [segment for sample in samples for segment in sample.segments]
    scores = reference.score(segments)
    if [len(score) for score in scores] != [len(segment.sampled_positions) for segment in segments]:
        raise ValueError("the reference scorer did not return one log-probability per sampled token of each segment")
    remaining = iter(scores)
    return [
        msgspec.structs.replace(
            sample, reference_logprobs=tuple(logprob for _ in sample.segments for logprob in next(remaining))
        )
        for sample in samples
    ]
