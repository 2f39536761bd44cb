"""Problems of every environment: they depend on index and seed only, and held-out ones are never trained on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipelinerl.config.schema import ActorConfig, EnvironmentConfig, RunConfig, TrainerConfig
from pipelinerl.environments import make_environment
from pipelinerl.environments.registry import notes_of
from pipelinerl.interfaces import Environment
from pipelinerl.types import Problem
from tests.unit.chat_parts import make_tokenizer
from tests.unit.environments.env_client import COUNTDOWN

TOKENIZER = make_tokenizer()
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "gcd": ({}, 300),
    COUNTDOWN: ({}, 100),
    f"{COUNTDOWN} with few problems": ({"numbers": 2, "highest": 9}, 5),
    "math": ({"path": "rows.jsonl", "judge": "numbers"}, 5),
    "function": ({"data": "rows.jsonl", "reward": "rewards.py:reward", "prompt": "question", "isolate": False}, 20),
    "reasoning_gym": ({"task": "chain_sum", "args": {"max_terms": 2, "max_digits": 2}}, 200),
    "mixture": ({"environments": {"gcd": {"kind": "gcd", "weight": 3}, "numbers": {"kind": COUNTDOWN}}}, 100),
}
"""For each kind: arguments, and a number of held-out problems that it has."""
IDENTIFYING = ("question", "a", "b", "number", "target")


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.slow if kind == "reasoning_gym" else ()) for kind in KINDS], scope="module"
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Environment], int]:
    """The same environment twice, and once with another seed; and how many held-out problems there are at least."""
    folder = tmp_path_factory.mktemp("problems")
    rows = [json.dumps({"question": f"How much is {n} + 1?", "answer": f"We add.\n#### {n + 1}"}) for n in range(200)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "rewards.py").write_text("def reward(completion, example): return 0.0")
    args, held_out = KINDS[request.param]
    kind = request.param.partition(" ")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return [make_environment(kind, args, TOKENIZER, seed) for seed in (1, 1, 2)], held_out


def content(problem: Problem) -> str:
    """What makes two problems the same, as opposed to their ids and places."""
    payload = problem.payload.get("problem", problem.payload)
    return str([sorted(payload.get("numbers", ())), *(payload.get(key) for key in IDENTIFYING)])


def test_problems_depend_on_index_and_seed_only(made: tuple[list[Environment], int]) -> None:
    (one, again, other), _ = made
    problems = [one.problem(index) for index in (*range(60), 12345)]
    assert [again.problem(index) for index in (12345, *reversed(range(60)))] == problems[::-1]
    assert [other.problem(index) for index in (*range(60), 12345)] != problems


def test_held_out_problems_do_not_depend_on_the_seed_and_are_never_trained_on(made: tuple[list[Environment], int]) -> None:
    (one, _, other), count = made
    held_out = one.held_out(count)
    assert held_out == other.held_out(count)
    assert len({problem.id for problem in held_out}) == count
    assert list(map(content, held_out[:5])) == list(map(content, one.held_out(5)))
    assert set(map(content, held_out)).isdisjoint(content(one.problem(index)) for index in range(1000))


def test_a_limit_of_the_task_below_the_one_that_was_asked_for_and_the_length_of_an_epoch_are_named(
    made: tuple[list[Environment], int], request: pytest.FixtureRequest
) -> None:
    kind, environment = request.node.callspec.params["made"], made[0][0]
    trainer = TrainerConfig(batch_size=64, steps=7)
    for asked in (900, 10, ActorConfig().max_tokens):
        actor = ActorConfig(max_tokens=asked, group_size=8)
        config = RunConfig(environment=EnvironmentConfig(kind=kind.partition(" ")[0]), actor=actor, trainer=trainer)
        notes = notes_of(environment, config)
        limited = kind in ("gcd", "mixture") and asked == 900
        message = ["actor.max_tokens is 900, but gcd limits a turn to 240 tokens"] * limited
        assert [note for note in notes if "max_tokens" in note] == message
    note = "".join(note for note in notes if note.startswith("data: "))
    assert bool(note) == (kind in ("math", "function")), "the problems of the others have no end"
    if note:
        count = int(note.split()[1])
        assert len({environment.problem(index).id for index in range(2 * count)}) == count
        assert note.endswith(f"an epoch is {count / 8:.4g} steps (trainer.steps: 7)")
