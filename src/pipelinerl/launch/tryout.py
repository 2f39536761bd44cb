"""Builds the environment of a run and tries its first problem with an empty answer and a word, without a model.

    python -m pipelinerl.launch.tryout CONFIG.yaml MESSAGES [build]

Messages (`checks.TryoutMessage`) are appended to the file MESSAGES, one per line. `build`: without any attempt.
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
from pipelinerl.config.schema import RunConfig, is_function
from pipelinerl.environments.registry import find_class, make_environment, notes_of
from pipelinerl.environments.single_turn import SingleTurn
from pipelinerl.errors import ConfigError, EnvironmentSetupError, PipelineRLError, RolloutError
from pipelinerl.interfaces import Environment, ScoresGroups, Tokenizer
from pipelinerl.launch import GARBAGE_THRESHOLD
from pipelinerl.launch.checks import TryoutMessage, TryoutReport
from pipelinerl.launch.stages.preprocessing import server_scorer
from pipelinerl.models.contract import read_contract
from pipelinerl.models.encoding import vocabulary_digest
from pipelinerl.preprocess.advantages import make_advantages
from pipelinerl.preprocess.warm_start import read_examples
from pipelinerl.types import Completion, GenerationRequest, Group, Rollout, SamplingParams, TokenEvent, VersionSpan
from pipelinerl.user_code import find_function

SHOWN_CHARACTERS = 80
WORD = "banana"


class Answers(EngineClient):
    """An engine client that answers every request with the end-of-text token alone. Records the requests."""

    def __init__(self, end_id: int) -> None:
        self._end_id = end_id
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        return Completion(
            request_id=request.id,
            token_ids=(self._end_id,),
            logprobs=(0.0,),
            weight_versions=(VersionSpan(version=0, start=0, end=1),),
            finish_reason="stop",
        )

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent | Completion, None]:
        completion = await self.generate(request)
        yield TokenEvent(request_id=request.id, index=0, token_id=self._end_id, logprob=0.0, version=0)
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


async def play_first(
    config: RunConfig, environment: Environment, tokenizer: Tokenizer, end_id: int
) -> tuple[GenerationRequest, Rollout]:
    """The first problem's first request, and its rollout with empty answers.

    Raises EnvironmentSetupError if an empty answer, a group of them, or the reward of a word fails.
    """

    def refused(what: str, failure: Failure) -> EnvironmentSetupError:
        return EnvironmentSetupError(f"environment {config.environment.kind}, tried with {what}: {failure.line}")

    alone = "an empty answer to its first problem"
    if isinstance(made := problem_for(environment, 0), Failure):
        raise refused(alone, made)
    engine, timeout_s = Answers(end_id), config.actor.rollout_timeout_s
    sampling = SamplingParams(max_tokens=config.actor.max_tokens)
    client = RolloutClient(engine, tokenizer, sampling, name="g0.a0", seed=0)
    if isinstance(played := await attempt(environment, made[0], client, timeout_s), Failure):
        raise refused(alone, played)
    if isinstance(environment, SingleTurn) and not environment.costs:
        turn = msgspec.structs.replace(played.turns[-1], text=WORD)
        judged = await guarded(partial(environment.judge, made[0], turn), timeout_s, "the reward")
        if isinstance(judged, Failure):
            raise refused(f"the answer {WORD!r} to its first problem", judged)
    if isinstance(environment, ScoresGroups):
        scored = await score(environment, made[0], [played] * 2, timeout_s)
        if isinstance(scored, Failure):
            raise refused("a group of two empty answers", scored)
    return engine.requests[0], played


def try_functions(config: RunConfig, environment: Environment, played: Rollout) -> None:
    """Raises UserError if the user's function of `preprocess.advantage` or `trainer.loss` fails on made-up rewards."""
    if is_function(config.preprocess.advantage):
        pair = (msgspec.structs.replace(played, id=f"g0.a{reward}", reward=float(reward)) for reward in (0, 1))
        group = Group(index=0, problem=environment.problem(0), rollouts=tuple(pair), started=2)
        try:
            make_advantages(config.preprocess)(group)
        except RolloutError as error:
            raise EnvironmentSetupError(f"{error} (tried with two empty answers)") from error
    if is_function(config.trainer.loss):
        from pipelinerl.trainer.losses import try_loss  # noqa: PLC0415 - few runs have one

        try_loss(config.trainer, config.correction)


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
    from pipelinerl.launch.stages.generation import held_out_sets  # noqa: PLC0415 - takes seconds
    from pipelinerl.models.loading import load_config, load_tokenizer, slot_length  # noqa: PLC0415 - as above

    tokenizer = load_tokenizer(config.model)
    server = server_scorer(config)
    if (teacher := config.trainer.teacher) and server is None:
        send("loads the teacher's tokenizer")
        theirs = load_tokenizer(config.trainer.reference(config.model))
        if vocabulary_digest(theirs) != vocabulary_digest(tokenizer):
            raise ConfigError(f"trainer.teacher: {teacher} has another vocabulary than {config.model.path}")
    if config.trainer.warm_start:
        send("reads the examples of the warm start")
        model = load_config(config.model)
        read_examples(config.trainer.warm_start, tokenizer, slot_length(model, None))
    contract = read_contract(model := load_config(config.model), tokenizer, config.engine.max_length)
    send("builds the environment")
    began_s = time.monotonic()
    environment = make_environment(kind, config.environment.args, tokenizer, config.seed)
    lines = [f"environment: {kind} was built in {time.monotonic() - began_s:.1f} s"]
    send("asks for held-out problems")
    found, _ = held_out_sets(config, environment, tokenizer)
    if not attempts:
        return TryoutReport(lines=tuple(lines))
    send("tries the first problem with an empty answer")
    first, played = await play_first(config, environment, tokenizer, min(contract.stop_token_ids, default=0))
    try_functions(config, environment, played)
    if server is not None:
        send("asks the teacher")
        server.check(tokenizer, first.prompt_ids, len(first.prompt_ids) + first.sampling.max_tokens)
    prompt, longest = tokenizer.decode(first.prompt_ids), slot_length(model, config.engine.max_length)
    shown = prompt if len(prompt) <= SHOWN_CHARACTERS else f"{prompt[:SHOWN_CHARACTERS]}..."
    fits = config.engine.urls or len(first.prompt_ids) + first.sampling.max_tokens <= longest  # servers have own slots
    fit = f"engine.max_length ({longest}) with actor.max_tokens ({config.actor.max_tokens})"
    lines += [
        f"  the first prompt has {len(first.prompt_ids)} tokens: {shown!r}",
        ", ".join(
            [
                f"  an empty answer to it gets reward {played.reward:g}",
                *(f"{name} {value:g}" for name, value in played.metrics.items()),
            ]
        ),
        *([f"  {found} held-out problems (evaluation.problems: {config.evaluation.problems})"] if found else []),
    ]
    if not fits:
        lines.append(f"warning: the first prompt does not fit {fit}: such rollouts are dropped")
    return TryoutReport(lines=(*(f"model: {note}" for note in contract.notes), *notes_of(environment, config), *lines))


if __name__ == "__main__":
    gc.set_threshold(GARBAGE_THRESHOLD)
    sys.exit(main(sys.argv[1:]))
