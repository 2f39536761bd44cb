"""Scores sampled tokens by a server: `pipelinerl serve`, or one with log-probabilities of prompts, such as vLLM."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.models.encoding import vocabulary_digest
from pipelinerl.serving.client.adapter import ServerBusyError, ServerError, ServerUnreachableError, back_off_s
from pipelinerl.serving.client.http import HttpClient, RefusalError
from pipelinerl.serving.wire import ScoreRequest, Scores, ServerInfo
from pipelinerl.types import Segment

T = TypeVar("T")
SCORE_S = 120.0
"""How long a server may take for an answer: less than the watchdog's patience."""
TRIES = 36
"""Times that a server is asked, over about a minute, which is busy or can't be reached."""
MOST_IDS = 500_000
"""Token ids in a request to our own server, whose bodies are limited."""


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class _Token(msgspec.Struct, frozen=True):
    logprob: float


class _Choice(msgspec.Struct, frozen=True):
    prompt_logprobs: list[dict[str, _Token] | None] | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class ServerScorer:
    """A teacher behind HTTP. Log-probabilities are at temperature 1. Raises UserError, and ServerError if it fails."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url, self._key = url, api_key
        self._model: str | None = None  # the name of vLLM's model, once it is known; "" for our own server

    def score(self, segments: Sequence[Segment]) -> list[list[float]]:
        """For each segment, the log-probabilities of its sampled tokens in order of position."""
        for failures in count(1):
            try:
                return self._run(lambda client, model: self._scores(client, model, segments))
            except (ServerBusyError, ServerUnreachableError):
                if failures == TRIES:
                    raise
                time.sleep(back_off_s(failures))
        raise AssertionError("unreachable")

    def check(self, tokenizer: Tokenizer, ids: Sequence[int], longest: int) -> None:
        """Raises ConfigError if the server has another vocabulary, and errors of `score` for so many tokens like these."""

        async def same(client: HttpClient, model: str) -> bool:
            if not model:
                info = await client.ask("GET", "/info", ServerInfo, timeout_s=SCORE_S)
                return info.vocabulary_digest == vocabulary_digest(tokenizer)
            text = tokenizer.decode(ids)
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            found = await client.ask("POST", "/tokenize", _Tokens, body, timeout_s=SCORE_S)
            return found.tokens == tokenizer.encode(text, add_special_tokens=False)

        if not self._run(same):
            raise ConfigError(f"trainer.teacher: {self._url} has another vocabulary than the trained model")
        many = (*ids, *[ids[-1]] * (longest - len(ids)))
        self._run(lambda client, model: self._scores(client, model, [Segment(token_ids=many, sampled=((1, 2),))]))

    async def _scores(self, client: HttpClient, model: str, segments: Sequence[Segment]) -> list[list[float]]:
        if model:
            return await asyncio.gather(*(self._score_prompt(client, model, segment) for segment in segments))
        scores: list[list[float]] = []
        step = max(1, MOST_IDS // max(len(segment.token_ids) for segment in segments))
        for start in range(0, len(segments), step):
            wanted = ScoreRequest(tuple(segments[start : start + step]))
            scores += (await client.ask("POST", "/score", Scores, wanted, timeout_s=SCORE_S)).logprobs
        return scores

    async def _score_prompt(self, client: HttpClient, model: str, segment: Segment) -> list[float]:
        body = {"model": model, "prompt": segment.token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = await client.ask("POST", "/v1/completions", _Answer, body, timeout_s=SCORE_S)
        found = answer.choices[0].prompt_logprobs if answer.choices else None
        try:
            tokens = [(at, str(segment.token_ids[at])) for at in segment.sampled_positions]
            return [((found or [])[at] or {})[token].logprob for at, token in tokens]
        except (IndexError, KeyError) as error:
            raise ServerError(self._url, "does not return `prompt_logprobs`, so it can't be a teacher") from error

    def _run(self, work: Callable[[HttpClient, str], Awaitable[T]]) -> T:
        async def with_client() -> T:
            client = HttpClient(self._url, api_key=self._key)
            try:
                if self._model is None:
                    self._model = await self._name(client)
                return await work(client, self._model)
            finally:
                await client.close()

        with ThreadPoolExecutor(1) as thread:  # this thread may have an event loop, in a run of one process
            return thread.submit(asyncio.run, with_client()).result()

    async def _name(self, client: HttpClient) -> str:
        try:
            await client.ask("GET", "/info", ServerInfo, timeout_s=SCORE_S)
            return ""
        except RefusalError:
            models = (await client.ask("GET", "/v1/models", _Models, timeout_s=SCORE_S)).data
            return models[0].id if models else "?"
