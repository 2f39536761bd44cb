"""Offline filtering by difficulty: train only on problems whose measured pass rate is within bounds.

A group whose attempts all succeed, or all fail, has zero advantage and teaches nothing. Which problems these are depends on
the model. So pass rates are measured with the model to be trained (`pipelinerl eval --training` writes `pass_rates.jsonl`),
and `difficulty_filter` trains on the problems in between.

The pass rates come from a file and do not follow the rewards of the run, because `problem` must stay a pure function of the
index. Otherwise a resumed run would continue with other problems, several actors would each choose their own problems, and a
run could not be reproduced. To follow the model, measure again and continue from the checkpoint with the new file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.environments.combine.nested import distinct_problems, make_inner, read_inner
from pipelinerl.environments.data import read_rows
from pipelinerl.environments.single_turn import Epochs
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout

MAX_SEARCHED = 300_000
"""How many training problems of the inner environment are searched for the ids in the file."""


class PassRate(msgspec.Struct, frozen=True):
    """One line of a file of pass rates. Other fields are ignored."""

    id: str
    attempts: int
    passes: int


@dataclass(frozen=True)
class Band:
    """Pass rates from `low` to `high`, both included."""

    low: float
    high: float

    def contains(self, measured: PassRate) -> bool:
        return self.low <= measured.passes / measured.attempts <= self.high


class DifficultyFilter:
    """The problems of `environment` whose measured pass rate is within bounds, each once per epoch.

    environment         `{kind: ..., args: {...}}`, the same as in the measurement, including the run's seed
    pass_rates          file of lines `{"id": ..., "attempts": ..., "passes": ...}`, or a list of files. Lines with the same
                        id are added up. Problems that were not measured are not trained on
    pass_rate_between   lowest and highest pass rate, both included

    Held-out problems are not filtered, so evaluation does not depend on which problems are trained on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        environment: Mapping[str, Any],
        pass_rates: str | Sequence[str],
        pass_rate_between: Sequence[float] = (0.05, 0.95),
    ) -> None:
        """Raises EnvironmentSetupError if the file is invalid, is for another environment, or leaves no problem."""
        band = _band(pass_rate_between)
        names = [pass_rates] if isinstance(pass_rates, str) else list(pass_rates)
        measured = read_pass_rates([Path(name).expanduser() for name in names])
        where = "environment.args.environment"
        self._inner = make_inner(where, read_inner(where, environment), tokenizer, seed)
        wanted = {name for name, rate in measured.items() if band.contains(rate)}
        if not wanted:
            rates = sorted(rate.passes / rate.attempts for rate in measured.values())
            raise EnvironmentSetupError(
                f"none of the {len(rates)} problems in {', '.join(names)} has a pass rate between {band.low:g} and "
                f"{band.high:g}: they go from {rates[0]:g} to {rates[-1]:g}"
            )
        self._problems = self._find(wanted, ", ".join(names))
        # The name is part of the seed of the order, so it keeps the kind's former name.
        self._epochs = Epochs(len(self._problems), f"curriculum/{seed}")

    def problem(self, index: int) -> Problem:
        return self._problems[self._epochs.place(index)]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._inner.held_out(count)

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        return await self._inner.rollout(problem, client)

    def _find(self, wanted: set[str], where: str) -> list[Problem]:
        missing = set(wanted)
        found = []
        for problem in distinct_problems(self._inner, MAX_SEARCHED):
            if problem.id in missing:
                missing.remove(problem.id)
                found.append(problem)
            if not missing:
                return sorted(found, key=lambda problem: problem.id)
        raise EnvironmentSetupError(
            f"{len(missing)} of the {len(wanted)} problems chosen from {where} are not among the training problems of "
            f"environment.args.environment (for example {min(missing)!r}). Were they measured with other arguments or "
            "another seed?"
        )


def read_pass_rates(paths: Sequence[Path]) -> dict[str, PassRate]:
    """The pass rates by problem id. Raises EnvironmentSetupError, naming file and line, for an invalid one."""
    measured: dict[str, PassRate] = {}
    for path in paths:
        for number, row in read_rows(path):
            try:
                rate = msgspec.convert(row, PassRate)
            except msgspec.ValidationError as error:
                raise EnvironmentSetupError(
                    f'{path}:{number} is not a pass rate, {{"id": ..., "attempts": ..., "passes": ...}}: {error}'
                ) from error
            if not 0 <= rate.passes <= rate.attempts or rate.attempts < 1:
                raise EnvironmentSetupError(
                    f"{path}:{number}: {rate.passes} passes in {rate.attempts} attempts is impossible"
                )
            before = measured.get(rate.id, PassRate(rate.id, 0, 0))
            measured[rate.id] = PassRate(rate.id, before.attempts + rate.attempts, before.passes + rate.passes)
    if not measured:
        raise EnvironmentSetupError(f"{', '.join(map(str, paths)) or 'environment.args.pass_rates'} has no pass rates")
    return measured


def _band(bounds: Sequence[float]) -> Band:
    try:
        low, high = msgspec.convert(bounds, tuple[float, float])
    except msgspec.ValidationError:
        low, high = 1.0, 0.0
    if not 0 <= low <= high <= 1:
        raise EnvironmentSetupError(
            f"environment.args.pass_rate_between is {bounds!r}; it must be two numbers from 0 to 1, the lower one first"
        )
    return Band(low, high)
