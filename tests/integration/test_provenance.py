"""Where every trained token comes from: its version, its log-probability and its id, checked on what runs recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.config.schema import ModelConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.loading import load_model
from pipelinerl.trainer.step import Learner
from pipelinerl.types import GenerationRequest, Rollout, SamplingParams, TrainingSample, UpdateReceipt
from tests.integration.runs import (
    assert_provenance,
    groups,
    rollouts_by_id,
    run,
    steps,
    summary,
    trained,
    versions,
    write_environment,
)
from tests.parity.test_engine import full_forward_logprobs, mixed_cache_logprobs

TOLERANCE = 1e-4
EVERY_VERSION = {"trainer__checkpoint_every": 1, "trainer__keep_checkpoints": 100, "trainer__steps": 6}
CHECKED = 4


def models_of(run_dir: Path) -> dict[int, Any]:
    """The weights of every version of a run that kept all of its checkpoints, far enough apart to tell one from another."""
    paths = {0: "demo"} | {int(path.name.split("_")[1]): str(path) for path in (run_dir / "checkpoints").iterdir()}
    models = {version: load_model(ModelConfig(path=path)) for version, path in paths.items()}
    ids = torch.tensor([rollouts_by_id(run_dir)["g0.a0"].turns[0].prompt_ids])
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for _, model in sorted(models.items())]
    assert len(logits) == 7
    assert all(float((a - b).abs().max()) > 100 * TOLERANCE for a, b in pairwise(logits))
    return models


def spanning_rollouts(run_dir: Path) -> list[Rollout]:
    """Rollouts that were trained on, and that an update reached while they were being generated; most versions first."""
    ids = {sample.id for record in trained(run_dir) for sample in record.samples}
    found = [rollout for name, rollout in rollouts_by_id(run_dir).items() if name in ids and len(set(versions(rollout))) > 1]
    return sorted(found, key=lambda rollout: (-len(set(versions(rollout))), len(versions(rollout))))


def assert_recomputed(run_dir: Path) -> None:
    """A full forward with the weights of a token's version gives its log-probability."""
    models, rollouts = models_of(run_dir), spanning_rollouts(run_dir)
    assert len(rollouts) >= 3
    for rollout in rollouts[:CHECKED]:
        for turn in rollout.turns:
            done, found = turn.completion, versions(rollout)
            first = len(turn.prompt_ids) - 1
            rows = {v: full_forward_logprobs(models[v], turn.prompt_ids, done.token_ids) for v in set(found)}
            expected = [float(rows[found[i]][first + i, token]) for i, token in enumerate(done.token_ids)]
            assert max(abs(a - b) for a, b in zip(expected, done.logprobs, strict=True)) < TOLERANCE


def assert_kept(run_dir: Path) -> None:
    """A forward over the mixed cache, token by token, gives its log-probability."""
    models, rollouts = models_of(run_dir), spanning_rollouts(run_dir)
    assert len(rollouts) >= 3
    for rollout in rollouts[:CHECKED]:
        (turn,) = rollout.turns
        request = GenerationRequest(id="r", prompt_ids=turn.prompt_ids, sampling=SamplingParams(max_tokens=1))
        expected = mixed_cache_logprobs(models, request, turn.completion)
        assert max(abs(a - b) for a, b in zip(expected, turn.completion.logprobs, strict=True)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "check"), [("recompute", assert_recomputed), ("keep", assert_kept)])
def test_log_probabilities_are_those_of_the_recorded_versions(kv: str, check: Any, tmp_path: Path) -> None:
    run(tmp_path / "r", engine__kv_on_update=kv, **EVERY_VERSION)
    assert assert_provenance(tmp_path / "r") >= 3
    check(tmp_path / "r")


@pytest.mark.slow
def test_engine_and_trainer_agree_on_tokens_of_the_current_version(tmp_path: Path) -> None:
    """With recomputed entries: kept ones make the last tokens of a sequence a little off policy, by design."""
    run(tmp_path / "r", trainer__steps=4, engine__kv_on_update="recompute")
    gaps = [step.on_policy_gap for step in steps(tmp_path / "r") if step.on_policy_gap is not None]
    assert gaps
    assert max(gaps) < TOLERANCE


def test_what_is_trained_on_is_what_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two turns, the second of which goes on from the first with ids of the environment's in between."""
    kind = write_environment(
        tmp_path,
        """
        async def rollout(self, problem, client):
            prompt = tuple(self.tokenizer.encode(self.prompt(problem)))
            first = await client.generate(prompt, max_tokens=20)
            more = (*prompt, *first.token_ids, *prompt)
            second = await client.generate(more, max_tokens=60)
            turns = tuple(Turn(prompt_ids=p, completion=c) for p, c in ((prompt, first), (more, second)))
            return Rollout(turns=turns, reward=float(len(second.token_ids) % 2))
        """,
        imports=["from pipelinerl.types import Turn"],
    )
    seen, step = list[TrainingSample](), Learner.step

    def watched(learner: Learner, samples: Sequence[TrainingSample], *rest: Any, **options: Any) -> Any:
        seen.extend(samples)
        return step(learner, samples, *rest, **options)

    monkeypatch.setattr(Learner, "step", watched)
    run(tmp_path / "r", environment__kind=kind, trainer__steps=4)
    by_id = rollouts_by_id(tmp_path / "r")
    rewards = {group.index: [rollout.reward for rollout in group.rollouts] for group in groups(tmp_path / "r")}
    assert len(seen) == 4 * 16
    for sample in seen:
        first, second = by_id[sample.id].turns
        (segment,) = sample.segments
        assert segment.token_ids == (*second.prompt_ids, *second.completion.token_ids)
        sampled = tuple(segment.token_ids[position] for position in segment.sampled_positions)
        assert sampled == (*first.completion.token_ids, *second.completion.token_ids)
        assert sample.behaviour_logprobs == (*first.completion.logprobs, *second.completion.logprobs)
        assert list(sample.versions) == versions(by_id[sample.id])
        assert sample.reward == by_id[sample.id].reward
        mean = sum(rewards[sample.group_index]) / len(rewards[sample.group_index])
        assert sample.advantage == pytest.approx(sample.reward - mean)


UpdateWeights = Callable[[LocalEngine, WeightUpdate], UpdateReceipt]


@pytest.mark.slow
@pytest.mark.parametrize("cheat", ["nothing", "all but the head"])
def test_an_update_without_effect_ends_the_run(cheat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update_weights: UpdateWeights = LocalEngine.update_weights

    def lie(self: LocalEngine, update: WeightUpdate) -> UpdateReceipt:
        kept = {name: tensor.clone() for name, tensor in self._weights.items()}
        receipt = update_weights(self, update)
        if update.version >= 2:
            stale = kept if cheat == "nothing" else {name: kept[name] for name in kept if "lm_head" in name}
            with torch.no_grad():
                for name, tensor in stale.items():
                    self._weights[name].copy_(tensor)
        return receipt

    monkeypatch.setattr(LocalEngine, "update_weights", lie)
    with pytest.raises(WeightUpdateError, match=r"acknowledged weights of version [2-4], but does not compute with them"):
        run(tmp_path / "r", trainer__steps=20, trainer__learning_rate=0.01)
    assert summary(tmp_path / "r")["optimizer_steps"] <= 5, "at once, or nearly"
