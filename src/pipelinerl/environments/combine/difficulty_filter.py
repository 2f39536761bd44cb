"""Training on what a model sometimes gets right: problems chosen by pass rates that were measured before.

A group whose attempts all succeed, or all fail, teaches nothing. Which problems those are depends on the model, so it is
measured with the model that is to be trained (`pipelinerl eval --training` writes `pass_rates.jsonl`), and `curriculum` then
trains on those in between.

It is a file, not something that follows the rewards of the run: `problem` must stay a pure function of the index, else a
resumed run would go on with other problems, several actors would each have a curriculum of their own, and no run could be
repeated. To follow the model, measure again and go on from the checkpoint with the new file.
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

LOOKED_THROUGH = 300_000
"""Training problems among which those of the file are looked for."""


class PassRate(msgspec.Struct, frozen=True):
    """One line of a file of pass rates. Other fields don't matter."""

    id: str
    attempts: int
    passes: int


@dataclass(frozen=True)
class Band:
    """Pass rates from `low` to `high`, both included."""

    low: float
    high: float

    def has(self, measured: PassRate) -> bool:
        return self.low <= measured.passes / measured.attempts <= self.high


class Curriculum:
    """The problems of `environment` whose measured pass rate is within bounds, every one once an epoch.

    environment         `{kind: ..., args: {...}}`, as it was when it was measured, the run's seed included
    pass_rates          file of lines `{"id": ..., "attempts": ..., "passes": ...}`, or a list of them; lines of one id add
                        up. What was not measured is not trained on
    pass_rate_between   the lowest and the highest pass rate, both included

    Held-out problems are all those of `environment`: what is evaluated does not depend on what is trained on.
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
        """Raises EnvironmentSetupError if the file can't be used, fits another environment, or leaves no problem."""
        band = _band(pass_rate_between)
        names = [pass_rates] if isinstance(pass_rates, str) else list(pass_rates)
        measured = read_pass_rates([Path(name).expanduser() for name in names])
        where = "environment.args.environment"
        self._inner = make_inner(where, read_inner(where, environment), tokenizer, seed)
        wanted = {name for name, rate in measured.items() if band.has(rate)}
        if not wanted:
            rates = sorted(rate.passes / rate.attempts for rate in measured.values())
            raise EnvironmentSetupError(
                f"none of the {len(rates)} problems in {', '.join(names)} has a pass rate between {band.low:g} and "
                f"{band.high:g}: they go from {rates[0]:g} to {rates[-1]:g}"
            )
        self._problems = self._found(wanted, ", ".join(names))
        self._epochs = Epochs(len(self._problems), f"curriculum/{seed}")

    def problem(self, index: int) -> Problem:
        return self._problems[self._epochs.place(index)]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._inner.held_out(count)

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        return await self._inner.rollout(problem, client)

    def _found(self, wanted: set[str], where: str) -> list[Problem]:
        missing = set(wanted)
        found = []
        for problem in distinct_problems(self._inner, LOOKED_THROUGH):
            if problem.id in missing:
                missing.remove(problem.id)
                found.append(problem)
            if not missing:
                return sorted(found, key=lambda problem: problem.id)
        raise EnvironmentSetupError(
            f"{len(missing)} of the {len(wanted)} problems chosen from {where} are not among the training problems of "
            f"environment.args.environment, the first of them {min(missing)!r}: was it measured with other arguments or "
            "another seed?"
        )


def read_pass_rates(paths: Sequence[Path]) -> dict[str, PassRate]:
    """The pass rates by problem id. Raises EnvironmentSetupError, naming file and line, for one that can't be right."""
    measured: dict[str, PassRate] = {}
    for path in paths:
        for number, row in read_rows(path):
            try:
                rate = msgspec.convert(row, PassRate)
            except msgspec.ValidationError as error:
                raise EnvironmentSetupError(
                    f'{path}:{number} is no pass rate, {{"id": ..., "attempts": ..., "passes": ...}}: {error}'
                ) from error
            if not 0 <= rate.passes <= rate.attempts or rate.attempts < 1:
                raise EnvironmentSetupError(f"{path}:{number}: {rate.passes} passes in {rate.attempts} attempts can't be")
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
