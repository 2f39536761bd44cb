"""Held-out problems: there are some, and those of further sets are no training problems."""

from __future__ import annotations

from pipelinerl.actor.evaluation import held_out_problems
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.data import ProblemSet
from pipelinerl.environments.registry import make_inner
from pipelinerl.errors import ConfigError, EnvironmentSetupError
from pipelinerl.interfaces import Environment, Tokenizer


def require_held_out(config: RunConfig, environment: Environment, most: int | None = None) -> int:
    """The number of held-out problems that the run evaluates. Raises ConfigError if it shall and there are none.

    With `most`, no more problems are asked for.
    """
    wanted = config.evaluation.problems
    found = len(held_out_problems(environment, wanted if most is None else min(wanted, most))) if wanted else 0
    if wanted and not found:
        raise ConfigError(
            f"evaluation.problems is {wanted}, but environment {config.environment.kind} has no held-out problems: define "
            "`held_out(self, count)` in its class, or set evaluation.problems to 0"
        )
    return found


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
