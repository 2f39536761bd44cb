"""The demo's task as an environment. The task itself is defined in `gcd_task`."""

from __future__ import annotations

from collections.abc import Sequence

from pipelinerl.environments.single_turn import SingleTurn
from pipelinerl.environments.tasks import gcd_task
from pipelinerl.types import Problem


class Gcd(SingleTurn):
    """Greatest common divisors by repeated subtraction; reward 1 for the right result, else 0."""

    max_tokens = gcd_task.MAX_COMPLETION_TOKENS

    def problem(self, index: int) -> Problem:
        return _problem(f"gcd/{index}", gcd_task.problem_at(index, self.seed, held_out=False))

    def held_out(self, count: int) -> Sequence[Problem]:
        problems = gcd_task.held_out_problems(count)
        return [_problem(f"gcd/held-out/{number}", problem) for number, problem in enumerate(problems)]

    def prompt(self, problem: Problem) -> str:
        return gcd_task.prompt_text(_task(problem))

    def reward(self, problem: Problem, text: str) -> float:
        return gcd_task.score(_task(problem), text)


def _problem(name: str, task: gcd_task.GcdProblem) -> Problem:
    return Problem(id=name, payload=dict(vars(task)))


def _task(problem: Problem) -> gcd_task.GcdProblem:
    return gcd_task.GcdProblem(**problem.payload)
