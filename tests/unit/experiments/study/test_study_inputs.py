"""What the study takes from a run directory: checkpoints, records and prompts, and what it says when they do not fit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.schema import ActorConfig, ModelConfig
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import EnvironmentSetupError, RunDirectoryError, UserError
from pipelinerl.experiments.recompute import SavedWeights
from pipelinerl.experiments.study.inputs import History, Prompt, choose_starts, make_prompts, possible_starts, read_history
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.types import Problem, Rollout, Turn
from tests.unit.experiments.parts import group, turn, write_rollouts

DEMO = ModelConfig()


def run_with(tmp_path: Path, versions: list[int]) -> Path:
    for version in versions:
        (tmp_path / "checkpoints" / f"step_{version:08d}").mkdir(parents=True)
    return tmp_path


# ------------------------------------------------------------------------------------------------ checkpoints


def test_starts_are_followed_by_enough_checkpoints(tmp_path: Path) -> None:
    weights = SavedWeights(run_with(tmp_path, [1, 2, 4, 5, 6, 7]), DEMO)
    assert weights.kept == [0, 1, 2, 4, 5, 6, 7]
    assert possible_starts(tmp_path, weights.kept, 1) == [0, 1, 4, 5, 6]
    assert possible_starts(tmp_path, weights.kept, 2) == [0, 4, 5]
    assert possible_starts(tmp_path, weights.kept, 3) == [4]


def test_too_few_checkpoints_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no 5 consecutive.*at most 4.*checkpoint_every 1.*--lag 3 or less"):
        possible_starts(tmp_path, [0, 1, 2, 4, 5, 6, 7], 4)
    with pytest.raises(RunDirectoryError, match=r"no 5 consecutive checkpoints .*keep_checkpoints N"):
        possible_starts(tmp_path, [0], 4)


def test_names_of_starts() -> None:
    assert choose_starts(["early", "middle", "late"], range(11), 5) == {"early": 0, "middle": 5, "late": 10}
    assert choose_starts(["7", "late"], range(11), 5) == {"7": 7, "late": 10}
    assert choose_starts(["early", "middle", "late"], [3], 5) == {"early": 3}
    for wrong in ("11", "soon", "-1", "1.5"):
        with pytest.raises(UserError, match=rf"--from {wrong}.*0 to 10 here"):
            choose_starts([wrong], range(11), 5)
    with pytest.raises(UserError, match="names no version"):
        choose_starts([], range(11), 5)


# ------------------------------------------------------------------------------------------------ records


def attempts(*lengths: int, turns: int = 1) -> list[list[Turn]]:
    return [[turn(length)] * turns for length in lengths]


def test_history(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [group(4, *attempts(1, 2, 3, 4)), group(3, *attempts(5, 6, 7, 8, 9, 10))])
    history = read_history(tmp_path)
    assert history == History(5, tuple(range(1, 11)))
    assert history.length_quantile(0.9) == 9
    assert history.length_quantile(0.91) == 10


def test_records_that_can_not_be_used(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        read_history(tmp_path)
    write_rollouts(tmp_path, [])
    with pytest.raises(RunDirectoryError, match="holds no rollout"):
        read_history(tmp_path)
    (tmp_path / "rollouts" / "rollouts.jsonl").write_text('{"no": "group"}\n')
    with pytest.raises(RunDirectoryError, match="damaged records"):
        read_history(tmp_path)


def test_several_turns_are_refused(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [group(0, *attempts(3, turns=2))])
    with pytest.raises(UserError, match="several turns"):
        read_history(tmp_path)


# ------------------------------------------------------------------------------------------------ prompts


def prompts_of(environment: Any, tokenizer: Any, **changed: Any) -> list[Prompt]:
    options = {"first_index": 10, "problems": 3, "attempts": 2, "max_tokens": 33, "stop_token_ids": (1,), "seed": 4}
    return asyncio.run(make_prompts(environment, tokenizer, ActorConfig(temperature=0.7), **(options | changed)))


def test_prompts_are_those_of_the_environment() -> None:
    tokenizer = load_tokenizer(DEMO)
    environment = make_environment("gcd", {}, tokenizer, 0)
    found = prompts_of(environment, tokenizer)
    assert [prompt.problem for prompt in found] == [0, 0, 1, 1, 2, 2]
    for prompt in found:
        problem = environment.problem(10 + prompt.problem).payload
        assert tokenizer.decode(prompt.request.prompt_ids) == f"{problem['a']:02d},{problem['b']:02d}:"
        sampling = prompt.request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.stop_token_ids) == (33, 0.7, (1,))
    assert len({prompt.request.id for prompt in found}) == len({prompt.request.sampling.seed for prompt in found}) == 6
    assert found == prompts_of(environment, tokenizer)
    assert found != prompts_of(environment, tokenizer, seed=5)


class Late:
    """Asks for a completion only after something else has been awaited, and for less than the study wants."""

    def problem(self, index: int) -> Problem:
        return Problem(id=str(index), payload={})

    async def rollout(self, problem: Problem, client: Any) -> Rollout:
        await asyncio.sleep(0.01)
        await client.generate([1, 2, int(problem.id)], max_tokens=1)
        raise AssertionError("the rollout went on")


class Never(Late):
    async def rollout(self, problem: Problem, client: Any) -> Rollout:
        raise ValueError("no completion needed")


def test_a_rollout_is_followed_to_its_first_request() -> None:
    (prompt,) = prompts_of(Late(), None, problems=1, attempts=1)
    assert prompt.request.prompt_ids == (1, 2, 10)
    assert prompt.request.sampling.max_tokens == 33


def test_an_environment_that_asks_for_nothing() -> None:
    with pytest.raises(EnvironmentSetupError, match=r"no completion for problem 10.*no completion needed"):
        prompts_of(Never(), None)
