"""What the study takes from a run directory: checkpoints, records and prompts, and what it says when they do not fit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.experiments.recompute import SavedWeights
from pipelinerl.experiments.study.inputs import choose_starts, make_prompts, possible_starts, read_history
from pipelinerl.types import SamplingParams, Turn
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
    assert history.lengths == tuple(range(1, 11))
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


def test_prompts_are_those_of_the_latest_problems_with_a_seed_for_each_attempt(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [group(n, *([turn(3, prompt=n + 1)] for _ in range(2))) for n in (2, 0, 1)])
    history = read_history(tmp_path)
    sampling = SamplingParams(max_tokens=33, temperature=0.7, stop_token_ids=(1,))
    found = make_prompts(history, sampling, problems=2, attempts=3, seed=4)
    assert [(one.problem, len(one.request.prompt_ids)) for one in found] == [(0, 3)] * 3 + [(1, 2)] * 3
    assert all(msgspec.structs.replace(one.request.sampling, seed=None) == sampling for one in found)
    assert len({one.request.id for one in found}) == len({one.request.sampling.seed for one in found}) == 6
    assert found == make_prompts(history, sampling, problems=2, attempts=3, seed=4)
    assert found != make_prompts(history, sampling, problems=2, attempts=3, seed=5)
