"""Tasks of reasoning-gym, with the real package."""

from __future__ import annotations

import pytest

from pipelinerl.environments import make_environment
from pipelinerl.environments.tasks import reasoning_gym
from pipelinerl.environments.tasks.reasoning_gym import score
from pipelinerl.environments.user.pool import FunctionPool
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from tests.unit.environments.env_client import TOKENIZER, one_line, rollout

pytestmark = pytest.mark.slow  # for what reasoning-gym imports
SUMS = {"task": "chain_sum", "args": {"min_terms": 2, "max_terms": 2, "max_digits": 2}}


def made(seed=0, **args):
    return make_environment("reasoning_gym", args, TOKENIZER, seed)


@pytest.fixture(scope="module", autouse=True)
def shared_pools():
    """All environments here share their processes, since importing reasoning-gym takes a process seconds."""
    pools = {}

    def shared(functions, limits):
        key = repr((functions, limits))
        if key not in pools:
            pools[key] = FunctionPool(functions, limits)
        return pools[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasoning_gym, "FunctionPool", shared)
        yield
    for pool in pools.values():
        pool.close()


def test_an_answer_is_worth_what_the_task_says():
    sums = made(**SUMS)
    problem = sums.problem(3)
    right = problem.payload["answer"]
    texts = (f"<answer>1</answer> <answer>\n {right} </answer>", f"it is {right}", "<answer></answer>", "<answer>1", "")
    outcomes = [rollout(sums, problem, text) for text in texts]
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [outcome.metrics["marked"] for outcome in outcomes] == [1, 0, 1, 0, 0]

    whole = made(**SUMS, marked=False, text="{question}")
    assert rollout(whole, problem, f" {right}").reward == 1.0
    assert rollout(whole, problem, f"<answer>{right}</answer>").reward < 1.0


def test_a_task_with_fewer_entries_than_a_chunk_can_be_used():
    environment = made(task="gsm_symbolic")
    assert [environment.problem(index).payload["question"] for index in (0, 300, 499)]


def test_an_answer_that_takes_too_long_or_over_which_the_task_raises_scores_nothing(monkeypatch):
    environment = made(task="prime_factorization")
    problem = environment.problem(0)
    outcome = rollout(environment, problem, "<answer>banana</answer>")
    assert (outcome.reward, outcome.metrics["score_raised"], outcome.metrics["score_failed"]) == (0, 1, 0)
    outcome = rollout(environment, problem, f"<answer>{problem.payload['answer']}</answer>")
    assert (outcome.reward, outcome.metrics["score_raised"]) == (1, 0)

    async def slow(pool, name, *arguments):
        raise TimeoutError(f"{name}: it took longer than 5 s; its process was ended")

    monkeypatch.setattr(FunctionPool, "call", slow)
    outcome = rollout(environment, problem, "<answer>1</answer>")
    assert (outcome.reward, outcome.metrics["score_raised"], outcome.metrics["score_failed"]) == (0, 0, 1)


def test_what_is_no_fault_of_the_answer_is_raised(monkeypatch):
    """A task that raises over its own answer, and problems that differ from process to process."""

    class Broken:
        def __getitem__(self, index):
            return {"question": "?", "answer": "1"}

        def score_answer(self, answer, entry):
            raise KeyError("a fault of the task")

    monkeypatch.setattr(reasoning_gym, "_cached_tasks", lambda *_: Broken())
    with pytest.raises(KeyError, match="a fault of the task"):
        score("any", "{}", {"seed": 1, "index": 0, "question": "?"}, "2")
    with pytest.raises(RolloutError, match="PYTHONHASHSEED=0"):
        score("any", "{}", {"seed": 1, "index": 0, "question": "another?"}, "1")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"task": "chain_sums"}, r"'chain_sums' is not in reasoning-gym; it has chain_sum"),
        ({"task": "chain_sum", "args": {"terms": 2}}, r"args don't fit chain_sum of reasoning-gym: .*terms"),
        ({"task": "chain_sum", "args": {"min_terms": 5, "max_terms": 2}}, r"args don't fit chain_sum .*: max_terms"),
        ({"task": "composite"}, "args don't fit composite"),
        ({"task": "countdown"}, r"countdown .* evaluates .* set environment.args.runs_answers"),
        ({"task": "spiral_matrix"}, r"spiral_matrix .* evaluates"),
        ({"task": "simple_integration"}, r"simple_integration .* evaluates"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(args, message):
    with one_line(EnvironmentSetupError, match=message):
        made(**args)
    assert made(task="binary_matrix", runs_answers=True).problem(0)
