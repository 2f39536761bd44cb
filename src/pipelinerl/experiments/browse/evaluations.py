"""Presents evaluations to the browser as groups: one per held-out problem, with one attempt per evaluation."""

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
_CACHED_GROUPS = 512


class RunEvaluations:
    """The answers in `rollouts/evaluation-*.jsonl`, by problem: before, during and after training.

    Has the interface of `RunRollouts`. Group n is the n-th problem and attempt n the n-th evaluation; none was trained on.
    Log-probs and prompt ids are not recorded; the prompt's text is part of the problem. Failed answers count in the group's
    `dropped`.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises RunDirectoryError if the folder has no evaluation."""
        self.path = run_dir / "rollouts"
        if not self.path.is_dir():
            raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {self.path})")
        self.damage: list[str] = []
        self._files: dict[str, Lines] = {}
        self._read: dict[str, int] = {}
        self._problems: list[str] = []
        self._answers: dict[str, dict[str, int]] = {}  # problem id -> evaluation -> line number
        self._decoder = msgspec.json.Decoder(EvaluatedProblem)
        self.summary = lru_cache(_CACHED_GROUPS)(self._summary)
        """The answers at a place, without token ids."""
        self.group = lru_cache(2)(self._group)
        """The answers at a place, complete."""
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
        """Read a part of what was added to the files since the last call. Returns whether there is more."""
        self._files = {
            name: self._files.get(name) or Lines(self.path / f"evaluation-{name}.jsonl") for name in self._names()
        }
        more, new = False, False
        for name, lines in self._files.items():
            more = lines.look() or more
            for i in range(self._read.get(name, 0), len(lines)):
                new = True
                self._add(name, lines, i)
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
        """Names of the evaluations on disk, in order."""
        found = [match for path in self.path.glob("evaluation-*.jsonl") if (match := _NAME.fullmatch(path.name))]
        return [match[1] for match in sorted(found, key=lambda match: (match[1] == "after", int(match[2] or 0)))]

    def _add(self, name: str, lines: Lines, i: int) -> None:
        try:
            problem = self._decoder.decode(lines.read(i)).problem_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.damage.append(f"{lines.path}, {Damaged(i + 1, one_line(str(error)))}")
            return
        if problem not in self._answers:
            self._answers[problem] = {}
            self._problems.append(problem)
        self._answers[problem][name] = i  # the last line counts, in a run continued after its end

    def _answers_at(self, place: int) -> dict[str, EvaluatedProblem]:
        lines = self._answers[self._problems[place]]
        return {name: self._decoder.decode(self._files[name].read(lines[name])) for name in self._files if name in lines}

    def _summary(self, place: int) -> Attempts | Damaged:
        answers = self._answers_at(place)
        attempts = tuple(
            Attempt(
                turns=(SampledTurn(Sampled(answer.weight_versions, answer.finish_reason or "stop"), answer.completion),),
                reward=answer.reward,
                id=_id(name, answer),
                attempt=number,
                label=name,
            )
            for number, (name, answer) in enumerate(answers.items())
            if answer.failure is None
        )
        return Attempts(place, self._problem(answers), attempts, len(answers), _failed(answers))

    def _group(self, place: int) -> Group | Damaged:
        answers = self._answers_at(place)
        return Group(
            index=place,
            problem=self._problem(answers),
            rollouts=tuple(
                Rollout(
                    turns=(_turn(answer),),
                    reward=answer.reward,
                    metrics=answer.metrics,
                    id=_id(name, answer),
                    attempt=number,
                )
                for number, (name, answer) in enumerate(answers.items())
                if answer.failure is None
            ),
            started=len(answers),
            dropped=_failed(answers),
        )

    def _problem(self, answers: dict[str, EvaluatedProblem]) -> Problem:
        prompt = next((answer.prompt for answer in answers.values() if answer.prompt), "")
        return Problem(id=next(iter(answers.values())).problem_id, payload={"prompt": prompt})


def _id(name: str, answer: EvaluatedProblem) -> str:
    return f"{answer.problem_id} {name}"


def _failed(answers: dict[str, EvaluatedProblem]) -> dict[str, int]:
    reasons = [answer.failure.partition(":")[0] for answer in answers.values() if answer.failure is not None]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def _turn(answer: EvaluatedProblem) -> Turn:
    """All turns of the answer as a single one: turn boundaries are not recorded."""
    return Turn(
        prompt_ids=(),
        completion=Completion(
            request_id=answer.problem_id,
            token_ids=answer.token_ids,
            logprobs=(),
            weight_versions=answer.weight_versions,
            finish_reason=answer.finish_reason or "stop",
        ),
        text=answer.completion,
    )
