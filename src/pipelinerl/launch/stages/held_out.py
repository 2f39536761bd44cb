"""A resume with other data, or with another share that is held out, must not evaluate what the run has trained on."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from pipelinerl.actor.evaluation import held_out_problems
from pipelinerl.environments.data import ProblemSet, by_payload
from pipelinerl.errors import INVALID_DATA, EnvironmentSetupError, RunDirectoryError
from pipelinerl.interfaces import Environment
from pipelinerl.launch.session import Session
from pipelinerl.ledger import GroupLedger
from pipelinerl.types import Problem


class _Group(msgspec.Struct):
    index: int
    problem: Problem


def refuse_trained(environment: Environment, session: Session) -> None:
    """Raise EnvironmentSetupError if the run has sampled training rollouts of a problem that is held out now.

    All held-out rows of data are checked; of other environments, those that this run evaluates.
    """
    rows = isinstance(environment, ProblemSet) and getattr(type(environment), "held_out", None) is ProblemSet.held_out
    held_out = held_out_problems(environment, sys.maxsize if rows else session.config.evaluation.problems)
    key = environment.key if isinstance(environment, ProblemSet) else by_payload
    taken, records = GroupLedger.from_record(session.plan.taken), session.run.rollouts_of(0, shared=False)
    trained = {key(group.problem) for group in _groups(records) if group.index in taken}
    found = [problem.id for problem in held_out if key(problem) in trained]
    if found:
        raise EnvironmentSetupError(
            f"{len(found)} of the {len(held_out)} problems that are held out now were trained on before ({found[0]}): hold "
            "out the same as before, or accept it with --evaluation.accept_trained"
        )


def _groups(path: Path) -> list[_Group]:
    try:
        with path.open("rb") as file:
            return [msgspec.json.decode(line, type=_Group) for line in file]
    except (OSError, *INVALID_DATA) as error:
        raise RunDirectoryError(f"can't read {path}: {error}") from error
