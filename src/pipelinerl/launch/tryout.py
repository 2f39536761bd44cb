"""Builds the environment of a run and tries its first problem with an empty answer, without a model.

    python -m pipelinerl.launch.tryout CONFIG.yaml MESSAGES

Messages (`dry_run.TryoutMessage`) are appended to the file MESSAGES, one per line.
Attempts have the time limits of a run, `actor.code_timeout_s` and `actor.rollout_timeout_s`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import msgspec

from pipelinerl.actor.client import EngineClient, RolloutClient
from pipelinerl.actor.deadline import CodeAlarm
from pipelinerl.actor.evaluation import held_out_problems
from pipelinerl.actor.rollouts import FRAME, NOT_USERS, Failure, TimeLimits, attempt, problem_for
from pipelinerl.config.load import config_from_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.registry import make_environment, no_held_out
from pipelinerl.environments.single_turn import JudgedTurn
from pipelinerl.environments.user.function import Function
from pipelinerl.errors import EnvironmentSetupError, PipelineRLError
from pipelinerl.launch.dry_run import Mistake, Step, TryoutMessage, TryoutReport
from pipelinerl.models.contract import read_contract
from pipelinerl.models.loading import load_config, load_tokenizer
from pipelinerl.types import Completion, GenerationRequest, Rollout, SamplingParams, TokenEvent, VersionSpan

PROMPTS = 16
PROMPTS_S = 10.0
"""How many problems are tried for the length of their prompts, and the time limit for trying them."""


class EmptyAnswers(EngineClient):
    """An engine client that answers every request with the end-of-text token, and records the prompts."""

    def __init__(self, end_id: int) -> None:
        self._end_id = end_id
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.prompts.append(request.prompt_ids)
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
    settings, messages = map(Path, arguments)
    with messages.open("ab", buffering=0) as file:

        def send(message: TryoutMessage) -> None:
            file.write(msgspec.json.encode(message) + b"\n")

        try:
            send(asyncio.run(try_environment(config_from_yaml(settings.read_text(encoding="utf-8")), send)))
        except PipelineRLError as error:
            send(Mistake(type(error).__name__, str(error)))
            return error.exit_status
    return 0


async def try_environment(config: RunConfig, send: Callable[[TryoutMessage], None]) -> TryoutReport:
    """Raises EnvironmentSetupError, ConfigError or ModelLoadError for what would end the run or fail every rollout."""
    kind = config.environment.kind
    send(Step("loads the tokenizer"))
    tokenizer = load_tokenizer(config.model)
    contract = read_contract(load_config(config.model), tokenizer, config.engine.max_length)
    send(Step("builds the environment"))
    began_s = time.monotonic()
    environment = make_environment(kind, config.environment.args, tokenizer, config.seed)
    built_s = time.monotonic() - began_s
    send(Step("asks for held-out problems"))
    wanted = config.evaluation.problems
    held_out = len(held_out_problems(environment, wanted)) if wanted else 0
    if wanted and not held_out:
        raise no_held_out(kind, wanted)
    send(Step("tries the first problem with an empty answer"))
    client = EmptyAnswers(min(contract.stop_token_ids, default=0))
    limits = TimeLimits(config.actor.rollout_timeout_s, CodeAlarm(config.actor.code_timeout_s))
    sampling = SamplingParams(max_tokens=config.actor.max_tokens)

    async def play(index: int) -> Rollout | Failure:
        made = problem_for(environment, index, limits)
        if isinstance(made, Failure):
            return made
        view = RolloutClient(client, tokenizer, sampling, name=f"g{index}.a0", seed=0)
        return await attempt(environment, made[0], view, limits)

    played = await play(0)
    if isinstance(played, Failure):
        places = [frame[0] for frame in FRAME.finditer(played.traceback) if not frame[1].startswith(NOT_USERS)]
        where = f" ({places[-1].splitlines()[0].strip()})" if places else ""
        raise EnvironmentSetupError(
            f"environment {kind}, tried with an empty answer to its first problem: {played.reason}: {played.message}{where}"
        )
    prompt = client.prompts[0]
    single_turn = isinstance(environment, JudgedTurn) or type(environment) is Function
    if single_turn:
        until_s = time.monotonic() + PROMPTS_S
        for index in range(1, PROMPTS):
            if time.monotonic() < until_s:
                await play(index)
    return TryoutReport(
        built_s=built_s,
        prompt=tokenizer.decode(prompt),
        prompt_tokens=tuple(map(len, client.prompts)) if single_turn else (len(prompt),),
        single_turn=single_turn,
        reward=played.reward,
        metrics=dict(played.metrics),
        held_out=held_out,
        notes=contract.notes,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
