"""Builds the environment of a run and tries its first problems with an empty and with wrong answers, without a model.

    python -m pipelinerl.launch.tryout CONFIG.yaml MESSAGES [build]

Messages (`trial.TryoutMessage`) are appended to the file MESSAGES, one per line. `build`: without any attempt.
Attempts have the time limit of a run, `actor.rollout_timeout_s`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from pipelinerl.actor.client import EngineClient, RolloutClient
from pipelinerl.actor.failures import Failure
from pipelinerl.actor.rollouts import attempt, guarded, problem_for, score
from pipelinerl.config.load import config_from_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.registry import find_class, make_environment, notes_of, parts_of
from pipelinerl.environments.single_turn import JudgedTurn, Task
from pipelinerl.environments.user.code import find_function
from pipelinerl.errors import EnvironmentSetupError, PipelineRLError
from pipelinerl.interfaces import Environment, ScoresGroups, Tokenizer
from pipelinerl.launch import GARBAGE_THRESHOLD
from pipelinerl.launch.stages.held_out import evaluation_sets, require_held_out
from pipelinerl.launch.trial import TryoutMessage, TryoutReport
from pipelinerl.models.contract import read_contract
from pipelinerl.types import Completion, GenerationRequest, Problem, Rollout, SamplingParams, TokenEvent, Turn, VersionSpan

WRONG = ("nan", "0", "banana", "banana " * 1000)
"""Answers on which user functions are tried, with the texts of the example."""
ANSWERED = 3
ANSWERS_S = 20.0
"""How many problems are tried with answers that aren't empty, and the time limit for trying them."""

FORMS = ("{0}", "<answer>{0}</answer> \\boxed{{{0}}}")
"""How a model may give an answer: alone, or marked as the usual prompts ask for it."""
NOTHING = Completion(request_id="", token_ids=(), logprobs=(), weight_versions=(), finish_reason="stop")


class Answers(EngineClient):
    """An engine client that answers every request with the tokens `says` and the end-of-text token. Records the requests."""

    def __init__(self, end_id: int) -> None:
        self._end_id = end_id
        self.says: Sequence[int] = ()
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        tokens = (*self.says, self._end_id)
        return Completion(
            request_id=request.id,
            token_ids=tokens,
            logprobs=(0.0,) * len(tokens),
            weight_versions=(VersionSpan(version=0, start=0, end=len(tokens)),),
            finish_reason="stop",
        )

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent | Completion, None]:
        completion = await self.generate(request)
        for index, token in enumerate(completion.token_ids):
            yield TokenEvent(request_id=request.id, index=index, token_id=token, logprob=0.0, version=0)
        yield completion


def main(arguments: Sequence[str]) -> int:
    settings, messages = map(Path, arguments[:2])
    with messages.open("ab", buffering=0) as file:

        def send(message: TryoutMessage) -> None:
            file.write(msgspec.json.encode(message) + b"\n")

        try:
            config = config_from_yaml(settings.read_text(encoding="utf-8"))
            send(asyncio.run(try_environment(config, send, attempts=len(arguments) < 3)))
        except PipelineRLError as error:
            send((type(error).__name__, str(error)))
            return error.exit_status
    return 0


class Tryout:
    """Plays the first problems of an environment with answers that no model gave."""

    def __init__(
        self, config: RunConfig, environment: Environment, tokenizer: Tokenizer, end_id: int, part: str = ""
    ) -> None:
        """`part`: the name of this environment within the one of `config`."""
        self.client = Answers(end_id)
        self._environment = environment
        self._tokenizer = tokenizer
        self._name = f"{config.environment.kind} ({part})" if part else config.environment.kind
        self._timeout_s = config.actor.rollout_timeout_s
        self._sampling = SamplingParams(max_tokens=config.actor.max_tokens)

    async def play(self, index: int, says: str = "") -> Rollout | Failure:
        made = problem_for(self._environment, index)
        if isinstance(made, Failure):
            return made
        self.client.says = self._tokenizer.encode(says, add_special_tokens=False)
        view = RolloutClient(self.client, self._tokenizer, self._sampling, name=f"g{index}.a0", seed=0)
        return await attempt(self._environment, made[0], view, self._timeout_s)

    async def play_first(self) -> Rollout:
        """Play the first problem with an empty answer. Raises EnvironmentSetupError if it, or its group, fails."""
        played = await self.play(0)
        if isinstance(played, Failure):
            raise self._refused("an empty answer to its first problem", played)
        if isinstance(environment := self._environment, ScoresGroups):
            made = problem_for(environment, 0)
            scored = made if isinstance(made, Failure) else await score(environment, made[0], [played] * 2, self._timeout_s)
            if isinstance(scored, Failure):
                raise self._refused("a group of two empty answers", scored)
        return played

    async def credited(self) -> str | None:
        """A wrong answer that gets as much as any answer that was tried, if most wrong ones do.

        Each problem is also answered with its own texts, one of which may be right. Raises EnvironmentSetupError if a reward
        fails.
        """
        best = 0.0
        wrong: dict[str, list[float]] = {text: [] for text in WRONG}
        until_s = time.monotonic() + ANSWERS_S
        for index in range(ANSWERED):
            if isinstance(made := problem_for(self._environment, index), Failure):
                continue
            own = [str(value) for value in made[0].payload.values() if isinstance(value, str | int | float)]
            for text in (*WRONG, *filter(None, own)):
                if time.monotonic() > until_s:
                    break
                reward = await self._reward_of(made[0], index, text)
                best = max(best, reward)
                if text in wrong and text not in own:
                    wrong[text].append(reward)
        credited = [text for text, given in wrong.items() if given and min(given) >= best > 0]
        if 2 * len(credited) <= len(WRONG):
            return None
        return f"wrong answers, such as {credited[0]!r}, get the reward {best:g}, and no answer that was tried gets more"

    async def _reward_of(self, problem: Problem, index: int, text: str) -> float:
        """The highest reward in any form; 0 for one that takes too long, whose rollout would be dropped."""
        best = 0.0
        for said in [form.format(text) for form in FORMS]:
            if isinstance(scorer := self._environment, JudgedTurn):
                turn = Turn(prompt_ids=(), completion=NOTHING, text=said)
                judged = await guarded(partial(scorer.judge, problem, turn), self._timeout_s, "the reward")
                outcome = judged if isinstance(judged, Failure) else judged.reward
            else:
                played = await self.play(index, said)
                outcome = played if isinstance(played, Failure) else played.reward
            if not isinstance(outcome, Failure):
                best = max(best, outcome)
            elif outcome.reason != "timeout":
                raise self._refused(f"the answer {said[:40]!r} to problem {index}", outcome)
        return best

    def _refused(self, what: str, failure: Failure) -> EnvironmentSetupError:
        return EnvironmentSetupError(f"environment {self._name}, tried with {what}: {failure.line}")


async def try_environment(
    config: RunConfig, send: Callable[[TryoutMessage], None], *, attempts: bool = True
) -> TryoutReport:
    """Raises EnvironmentSetupError, ConfigError or ModelLoadError for what would end the run or fail every rollout."""
    kind = config.environment.kind
    if config.metrics.callback is not None:
        send("imports metrics.callback")
        try:
            find_function(config.metrics.callback)
        except EnvironmentSetupError as error:
            raise EnvironmentSetupError(f"metrics.callback: {error}") from error
    send("loads the class of the environment")
    find_class(kind)
    send("loads the tokenizer")
    from pipelinerl.models.loading import load_config, load_tokenizer, slot_length  # noqa: PLC0415 - takes seconds

    tokenizer = load_tokenizer(config.model)
    contract = read_contract(model := load_config(config.model), tokenizer, config.engine.max_length)
    send("builds the environment")
    began_s = time.monotonic()
    environment = make_environment(kind, config.environment.args, tokenizer, config.seed)
    built_s = time.monotonic() - began_s
    send("asks for held-out problems")
    held_out = require_held_out(config, environment)
    evaluation_sets(config, environment, tokenizer)
    end_id = min(contract.stop_token_ids, default=0)
    report = TryoutReport(built_s=built_s, held_out=held_out)
    if attempts:
        tryout = Tryout(config, environment, tokenizer, end_id)
        send("tries the first problem with an empty answer")
        played = await tryout.play_first()
        first, longest = tryout.client.requests[0], slot_length(model, config.engine.max_length)
        fits = config.engine.urls or len(first.prompt_ids) + first.sampling.max_tokens <= longest  # servers have own slots
        fit = f"engine.max_length ({longest}) with actor.max_tokens ({config.actor.max_tokens})"
        report = msgspec.structs.replace(
            report,
            prompt=tokenizer.decode(first.prompt_ids),
            prompt_tokens=len(first.prompt_ids),
            reward=played.reward,
            metrics=dict(played.metrics),
            notes=(*(f"model: {note}" for note in contract.notes), *notes_of(environment, config)),
            warnings=() if fits else (f"the first prompt does not fit {fit}: such rollouts are dropped",),
        )
    send("tries answers that are texts")
    doubts = []
    for name, part in parts_of(environment):
        if not getattr(part, "untried", Task.untried):
            doubt = await Tryout(config, part, tokenizer, end_id, name).credited()
            doubts += [f"{name}: {doubt}".removeprefix(": ")] if doubt else []
    return msgspec.structs.replace(report, warnings=(*doubts, *report.warnings))


if __name__ == "__main__":
    gc.set_threshold(GARBAGE_THRESHOLD)
    sys.exit(main(sys.argv[1:]))
