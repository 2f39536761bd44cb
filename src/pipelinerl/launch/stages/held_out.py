"""Held-out problems are no training problems: those of further sets, and those of a resume with other data."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec

from pipelinerl.actor.evaluation import held_out_problems
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.data import ProblemSet, by_payload
from pipelinerl.environments.registry import make_inner
from pipelinerl.errors import ConfigError, EnvironmentSetupError
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.launch.session import Session
from pipelinerl.metrics.reading import read_lines
from pipelinerl.types import Problem


class _Sampled(msgspec.Struct):
    """Of a group in `rollouts.jsonl`."""

    index: int
    problem: Problem


def no_held_out(kind: str, problems: int) -> ConfigError:
    """The error for a run that evaluates an environment without held-out problems."""
    return ConfigError(
        f"evaluation.problems is {problems}, but environment {kind} has no held-out problems: define "
        "`held_out(self, count)` in its class, or set evaluation.problems to 0"
    )


def evaluation_sets(config: RunConfig, environment: Environment, tokenizer: Tokenizer) -> dict[str, Environment]:
    """The environments of `evaluation.sets`, by name.

    Raises EnvironmentSetupError for one that can't be built, has no held-out problems, or some of the training data.
    """
    kind, made = config.environment.kind, {}
    for name, args in config.evaluation.sets.items():
        where = f"evaluation.sets.{name}"
        made[name] = make_inner(where, kind, {**config.environment.args, **args}, tokenizer, config.seed)
        problems = held_out_problems(made[name], config.evaluation.problems)
        if not problems:
            raise EnvironmentSetupError(f"{where}: it has no held-out problems")
        if isinstance(environment, ProblemSet) and (trained := [one.id for one in problems if environment.trains_on(one)]):
            raise EnvironmentSetupError(
                f"{where}: {len(trained)} of its {len(problems)} problems are also training problems ({trained[0]}); hold "
                "them out of environment.args.data"
            )
    return made


def refuse_trained(environment: Environment, sets: Iterable[Environment], session: Session) -> None:
    """Raise EnvironmentSetupError if the run has sampled training rollouts of a problem that is held out now.

    All held-out rows of data are checked; of other environments, those that this run evaluates. Raises RunDirectoryError for
    damaged records.
    """
    rows = isinstance(environment, ProblemSet) and getattr(type(environment), "held_out", None) is ProblemSet.held_out
    wanted = session.config.evaluation.problems
    held_out = [*held_out_problems(environment, sys.maxsize if rows else wanted)]
    held_out += [problem for one in sets for problem in held_out_problems(one, wanted)]
    key = environment.key if isinstance(environment, ProblemSet) else by_payload
    taken, records = session.plan.taken, session.run.recorded
    sampled = read_lines(records, _Sampled) if records.exists() else []
    trained = {key(group.problem) for group in sampled if group.index in taken}
    found = [problem.id for problem in held_out if key(problem) in trained]
    if found:
        raise EnvironmentSetupError(
            f"{len(found)} of the {len(held_out)} problems that are held out now were trained on before ({found[0]}): hold "
            "out the same as before, or accept it with --evaluation.accept_trained"
        )
