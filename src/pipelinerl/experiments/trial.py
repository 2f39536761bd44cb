"""Plays one group of a run without training: `pipelinerl try`, and `pipelinerl.try_run`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pipelinerl.actor.evaluation import evaluated
from pipelinerl.actor.failures import Failure, FailureLog
from pipelinerl.actor.groups import GroupRunner
from pipelinerl.actor.rollouts import advance, problem_for
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.registry import make_environment, notes_of
from pipelinerl.environments.user.code import run_to_end
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.experiments.evaluate.models import Target, ready_context
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.metrics.evaluations import EvaluatedProblem
from pipelinerl.models.loading import load_config, load_tokenizer, slot_length
from pipelinerl.types import Group, Problem, Rollout


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A group that was played, and not trained on. `str` gives the report that `pipelinerl try` prints.

    `group` has the rollouts with their rewards, `attempts` a record of every attempt, also of failed ones.
    """

    config: RunConfig
    group: Group
    attempts: tuple[EvaluatedProblem, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        kind, limit = self.config.environment.kind, f"token limit (actor.max_tokens: {self.config.actor.max_tokens})"
        metrics = [set(rollout.metrics.items()) for rollout in self.group.rollouts]
        same = set.intersection(*metrics) if len(metrics) > 1 else set()
        head = f"{kind}, problem {self.group.index} ({self.group.problem.id}), {self.config.model.path}"
        lines, prompt = [*self.notes, head], ""
        for number, one in enumerate(self.attempts):
            if one.prompt != prompt:
                prompt = one.prompt
                lines += ["", "the prompt, as the model sees it:", prompt]
            scored = one.failure or f"reward {one.reward:g}{_listed(one.metrics.items() - same)}"
            cut = f", CUT at its {limit}" if one.finish_reason == "length" else ""
            lines += ["", f"attempt {number}: {scored} ({one.length} tokens{cut})", one.completion]
        lines += ["", f"all attempts: {_listed(same)[2:]}"] if same else [""]
        count, rewards = len(self.attempts), [rollout.reward for rollout in self.group.rollouts]
        if failed := count - len(rewards):
            lines.append(f"{failed} of {count} attempts FAILED: a run drops them (see actor.max_failure_fraction)")
        if cut_count := sum(one.finish_reason == "length" for one in self.attempts):
            overlong = f"preprocess.overlong: {self.config.preprocess.overlong}"
            lines.append(f"{cut_count} of {count} answers were cut at their {limit}; {overlong}")
        if len(set(rewards)) > 1:
            lines.append(f"the rewards differ, from {min(rewards):g} to {max(rewards):g}: this group teaches something")
        elif rewards:
            lines.append(f"every reward is {rewards[0]:g}: a group of equal rewards teaches nothing; try --problem N")
        return "\n".join(lines)


def _listed(metrics: Iterable[tuple[str, float]]) -> str:
    return "".join(f", {name} {value:g}" for name, value in sorted(metrics))


def try_group(config: RunConfig, problem: int = 0) -> Trial:
    """Play the group of training problem number `problem` as the run would do at its start. No file is written.

    Servers that a run would start itself are replaced by the embedded engine. Raises EnvironmentSetupError and
    ModelLoadError, and what the engine raises. Errors of attempts are in the result.
    """
    tokenizer = load_tokenizer(config.model)
    environment = make_environment(config.environment.kind, config.environment.args, tokenizer, config.seed)
    return run_to_end(_play(config, problem, environment, tokenizer))


async def _play(config: RunConfig, problem: int, environment: Environment, tokenizer: Tokenizer) -> Trial:
    settings = config.engine
    if not settings.urls:
        length = slot_length(load_config(config.model), settings.max_length)
        slots = min(settings.slots, config.actor.group_size)
        settings = settings.model_copy(update={"kind": "local", "slots": slots, "max_length": length})
    target = Target(config.model.path, config.model)
    async with ready_context(target, config.model_copy(update={"engine": settings}), environment, tokenizer) as context:
        groups = GroupRunner(context, config.actor, failures=FailureLog(1.0, 1, shown=0))  # the result has all of them
        if isinstance(made := problem_for(environment, problem), Failure):
            raise EnvironmentSetupError(f"environment {config.environment.kind}: {made.line}")
        groups.start(problem, context.engine.version)
        played = groups.open[problem]
        try:
            while not groups.finished:
                await advance(context.engine, context.awake)
                groups.check()
        finally:
            groups.cancel()
    attempts = tuple(_record(played.problem, played.outcomes[number], tokenizer) for number in range(played.size))
    return Trial(config=config, group=groups.finished[0], attempts=attempts, notes=notes_of(environment, config))


def _record(problem: Problem, outcome: Rollout | Failure, tokenizer: Tokenizer) -> EvaluatedProblem:
    """Of a failed attempt with what the model had answered."""
    if isinstance(outcome, Rollout):
        return evaluated(problem, outcome, tokenizer)
    answered = Rollout(turns=outcome.turns, reward=0.0) if outcome.turns else outcome
    return msgspec.structs.replace(evaluated(problem, answered, tokenizer), failure=outcome.line)
