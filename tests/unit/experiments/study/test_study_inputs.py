"""What the study takes from a run directory: checkpoints, records and prompts, and what it says when they do not fit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.experiments.study.kv_cache import choose_starts, make_requests, read_history
from pipelinerl.types import SamplingParams, Turn
from tests.unit.experiments.parts import group, turn, write_rollouts

RUN = Path("r")


@pytest.mark.parametrize(
    ("saved", "wanted", "lag", "expected"),
    [
        (range(16), ["early", "middle", "late"], 5, {"early": 0, "middle": 5, "late": 10}),
        (range(16), ["7", "late"], 5, {"7": 7, "late": 10}),
        ([0, 3, 4, 5], ["early", "middle", "late"], 2, {"early": 3}),
        ([0, 1, 2, 4, 5, 6, 7], ["early", "late"], 2, {"early": 0, "late": 5}),
    ],
)
def test_starts_are_followed_by_enough_checkpoints(
    saved: list[int], wanted: list[str], lag: int, expected: dict[str, int]
) -> None:
    assert choose_starts(RUN, saved, wanted, lag) == expected


def test_starts_that_there_are_not() -> None:
    with pytest.raises(RunDirectoryError, match=r"no 5 consecutive checkpoints.*checkpoint_every 1.*keep_checkpoints N"):
        choose_starts(RUN, [0, 1, 2, 4, 5, 6, 7], ["early"], 4)
    for wrong in ("11", "soon", "-1", "1.5"):
        with pytest.raises(UserError, match=rf"--from {wrong}.*0 to 10 here"):
            choose_starts(RUN, range(16), [wrong], 5)
    with pytest.raises(UserError, match=r"--from : give early"):
        choose_starts(RUN, range(16), [], 5)


def attempts(*lengths: int, turns: int = 1) -> list[list[Turn]]:
    return [[turn(length)] * turns for length in lengths]


def test_the_length_that_most_completions_do_not_exceed(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [group(4, *attempts(1, 2, 3, 4)), group(3, *attempts(5, 6, 7, 8, 9, 10))])
    groups, length = read_history(tmp_path)
    assert ([one.index for one in groups], length) == ([4, 3], 9)


def test_records_that_can_not_be_used(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        read_history(tmp_path)
    write_rollouts(tmp_path, [])
    with pytest.raises(RunDirectoryError, match="holds no rollout"):
        read_history(tmp_path)
    write_rollouts(tmp_path / "turns", [group(0, *attempts(3, turns=2))])
    with pytest.raises(UserError, match="several turns"):
        read_history(tmp_path / "turns")


def test_prompts_are_those_of_the_latest_problems_with_a_seed_for_each_attempt(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [group(n, *([turn(3, prompt=n + 1)] for _ in range(2))) for n in (2, 0, 1)])
    groups, _ = read_history(tmp_path)
    sampling = SamplingParams(max_tokens=33, temperature=0.7, stop_token_ids=(1,))
    found = make_requests(groups[:2], sampling, 3, 4)
    assert [(problem, len(request.prompt_ids)) for problem, request in found] == [(0, 3)] * 3 + [(1, 2)] * 3
    requests = [request for _, request in found]
    assert all(msgspec.structs.replace(request.sampling, seed=None) == sampling for request in requests)
    assert len({request.id for request in requests}) == len({request.sampling.seed for request in requests}) == 6
    assert found == make_requests(groups[:2], sampling, 3, 4) != make_requests(groups[:2], sampling, 3, 5)
