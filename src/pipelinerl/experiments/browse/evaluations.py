"""Evaluations as the browser shows rollouts: a group for each held-out problem, with the answers of one evaluation each."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import msgspec

from pipelinerl.actor.evaluation import EvaluatedProblem
from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.browse.lines import Lines
from pipelinerl.experiments.browse.records import Attempt, Attempts, Damaged, Sampled, SampledTurn, Trained
from pipelinerl.experiments.browse.tokens import one_line
from pipelinerl.types import Completion, Group, Problem, Rollout, Turn

_NAME = re.compile(r"evaluation-(before|after|v(\d{1,18}))\.jsonl")
_REMEMBERED = 512


class RunEvaluations:
    """The answers in `rollouts/evaluation-*.jsonl`, by problem: before training, those while it went on, and after.

    It is looked at like `RunRollouts`. Group number n is the n-th problem, attempt number n the n-th evaluation that there
    is, and nothing of it was trained on. Log-probs and the ids of prompts are not recorded; the prompt's text is part of the
    problem. An answer that failed is among the group's `dropped`.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises RunDirectoryError for a folder that holds no evaluation."""
        self.path = run_dir / "rollouts"
        if not self.path.is_dir():
            raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {self.path})")
        self.damage: list[str] = []
        self._files: dict[str, Lines] = {}
        self._read: dict[str, int] = {}
        self._problems: list[str] = []
        self._answers: dict[str, dict[str, int]] = {}  # of each problem, by evaluation: which line
        self._decoder = msgspec.json.Decoder(EvaluatedProblem)
        self.summary = lru_cache(_REMEMBERED)(self._summary)
        """The answers at a place without their ids."""
        self.group = lru_cache(2)(self._group)
        """The answers at a place."""
        if not self._names():
            raise RunDirectoryError(f"{run_dir} holds no evaluation yet; runs with evaluation.problems above 0 write some")

    def __len__(self) -> int:
        return len(self._problems)

    @property
    def share(self) -> float:
        return min((lines.share for lines in self._files.values()), default=1.0)

    @property
    def facts(self) -> list[str]:
        return [f"{len(self)} held-out problems", f"evaluations: {', '.join(self._files) or 'none'}", *self.damage[:1]]

    def look(self) -> bool:
        """Take in what the files hold beyond the last look, in part. Returns whether there is more."""
        self._files = {
            name: self._files.get(name) or Lines(self.path / f"evaluation-{name}.jsonl") for name in self._names()
        }
        more, new = False, False
        for name, lines in self._files.items():
            more = lines.look() or more
            for i in range(self._read.get(name, 0), len(lines)):
                new = True
                self._take(name, lines, i)
            self._read[name] = len(lines)
        if new:
            self.summary.cache_clear()
            self.group.cache_clear()
        return more

    def place_of(self, index: int) -> int | None:
        return index if index < len(self) else None

    def is_replaced(self, _place: int) -> bool:
        return False

    def trained(self, _place: int, _rollout_id: str) -> Trained | None:
        return None

    def left_out(self, _place: int, _rollout_id: str) -> str | None:
        return None

    def _names(self) -> list[str]:
        """Of the evaluations that there are, in order."""
        found = [match for path in self.path.glob("evaluation-*.jsonl") if (match := _NAME.fullmatch(path.name))]
        return [match[1] for match in sorted(found, key=lambda match: (match[1] == "after", int(match[2] or 0)))]

    def _take(self, name: str, lines: Lines, i: int) -> None:
        try:
            problem = self._decoder.decode(lines.read(i)).problem_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.damage.append(f"{lines.path}, {Damaged(i + 1, one_line(str(error)))}")
            return
        if problem not in self._answers:
            self._answers[problem] = {}
            self._problems.append(problem)
        self._answers[problem][name] = i  # of several, in a run that went on after its end, the last

    def _at(self, place: int) -> dict[str, EvaluatedProblem]:
        lines = self._answers[self._problems[place]]
        return {name: self._decoder.decode(self._files[name].read(lines[name])) for name in self._files if name in lines}

    def _summary(self, place: int) -> Attempts | Damaged:
        answers = self._at(place)
        attempts = tuple(
            Attempt(
                turns=(SampledTurn(Sampled(one.weight_versions, one.finish_reason or "stop"), one.completion),),
                reward=one.reward,
                id=_id(name, one),
                attempt=number,
                label=name,
            )
            for number, (name, one) in enumerate(answers.items())
            if one.failure is None
        )
        return Attempts(place, self._problem(answers), attempts, len(answers), _failed(answers))

    def _group(self, place: int) -> Group | Damaged:
        answers = self._at(place)
        return Group(
            index=place,
            problem=self._problem(answers),
            rollouts=tuple(
                Rollout(turns=(_turn(one),), reward=one.reward, metrics=one.metrics, id=_id(name, one), attempt=number)
                for number, (name, one) in enumerate(answers.items())
                if one.failure is None
            ),
            started=len(answers),
            dropped=_failed(answers),
        )

    def _problem(self, answers: dict[str, EvaluatedProblem]) -> Problem:
        prompt = next((one.prompt for one in answers.values() if one.prompt), "")
        return Problem(id=next(iter(answers.values())).problem_id, payload={"prompt": prompt})


def _id(name: str, one: EvaluatedProblem) -> str:
    return f"{one.problem_id} {name}"


def _failed(answers: dict[str, EvaluatedProblem]) -> dict[str, int]:
    reasons = [one.failure.partition(":")[0] for one in answers.values() if one.failure is not None]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def _turn(one: EvaluatedProblem) -> Turn:
    """All of its turns as one: which token is of which turn is not recorded."""
    return Turn(
        prompt_ids=(),
        completion=Completion(
            request_id=one.problem_id,
            token_ids=one.token_ids,
            logprobs=(),
            weight_versions=one.weight_versions,
            finish_reason=one.finish_reason or "stop",
        ),
        text=one.completion,
    )
