"""The gap between the engine's log-probs and those of saved weights, against transformers' own forward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from pipelinerl.config.schema import ModelConfig, RunConfig
from pipelinerl.errors import ModelLoadError, RolloutError, UserError
from pipelinerl.experiments.browse.tokens import gaps_of
from pipelinerl.models.loading import load_model
from pipelinerl.types import Completion, Rollout
from tests.unit.experiments.browse.browse_parts import rollout, turn

TEMPERATURE = 0.5


def config(temperature: float = TEMPERATURE) -> RunConfig:
    default = RunConfig()
    return default.model_copy(update={"actor": default.actor.model_copy(update={"temperature": temperature})})


def two_turns() -> Rollout:
    """The second continues the first; their log-probs are to be overwritten."""
    shape = turn([3, 2, 12], "")
    again = completion(shape.completion, [6, 1], [0.0, 0.0])
    first = msgspec.structs.replace(shape, completion=completion(shape.completion, [4, 2, 5], [0.0, 0.0, 0.0]))
    second = msgspec.structs.replace(shape, prompt_ids=(3, 2, 12, 4, 2, 5, 7), completion=again)
    return rollout(0, 0, 1.0, first, second)


def completion(shape: Completion, ids: Sequence[int], logprobs: Sequence[float]) -> Completion:
    spans = (msgspec.structs.replace(shape.weight_versions[0], end=len(ids)),)
    return msgspec.structs.replace(shape, token_ids=tuple(ids), logprobs=tuple(logprobs), weight_versions=spans)


@torch.no_grad()
def as_sampled_by_the_demo(of: Rollout) -> Rollout:
    model = load_model(ModelConfig(path="demo"))
    turns = []
    for one in of.turns:
        ids = (*one.prompt_ids, *one.completion.token_ids)
        logprobs = (model(torch.tensor([ids])).logits[0] / TEMPERATURE).log_softmax(-1)
        start = len(one.prompt_ids)
        sampled = [float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))]
        turns.append(msgspec.structs.replace(one, completion=completion(one.completion, one.completion.token_ids, sampled)))
    return msgspec.structs.replace(of, turns=tuple(turns))


def test_the_gap_is_zero_for_the_weights_that_sampled_and_what_differs_shows() -> None:
    same = as_sampled_by_the_demo(two_turns())
    assert gaps_of(same, config(), Path("demo")) == pytest.approx([0.0] * 5, abs=1e-4)
    last = same.turns[1].completion
    lower = completion(last, last.token_ids, [last.logprobs[0] - 0.75, last.logprobs[1]])
    other = msgspec.structs.replace(same, turns=(same.turns[0], msgspec.structs.replace(same.turns[1], completion=lower)))
    assert gaps_of(other, config(), Path("demo")) == pytest.approx([0.0, 0.0, 0.0, 0.75, 0.0], abs=1e-4)
    beyond = completion(last, [10**6, 1], last.logprobs)
    with pytest.raises(UserError, match="can't score"):
        gaps_of(
            msgspec.structs.replace(same, turns=(msgspec.structs.replace(same.turns[1], completion=beyond),)),
            config(),
            Path("demo"),
        )


def test_what_is_missing_for_a_gap_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        gaps_of(two_turns(), config(), tmp_path / "nowhere")
    with pytest.raises(UserError, match="greedily"):
        gaps_of(two_turns(), config(temperature=0.0), Path("demo"))
    shape = turn("p", "text")
    odd = msgspec.structs.replace(shape, completion=msgspec.structs.replace(shape.completion, logprobs=(0.0,)))
    with pytest.raises(RolloutError, match="log-probabilities"):
        gaps_of(rollout(0, 0, 1.0, odd), config(), Path("demo"))
