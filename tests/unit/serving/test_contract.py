"""The contract's tests: a server that keeps it passes all, and each way of breaking it fails the test that is for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec
import pytest

from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.serving.client.adapter import TokenListener
from pipelinerl.types import Completion, FinishReason, GenerationRequest, TokenEvent, VersionSpan
from tests.contract import test_generation as contract
from tests.contract.conftest import Subject
from tests.unit.fake_engine_servers import VOCABULARY, FakeServer


class GoodServer(FakeServer):
    """Keeps the contract, with a few lines of Python for a model. Subclasses break one thing each."""

    def __init__(self) -> None:
        super().__init__("fake", slots=4, max_length=40)
        self.sent: dict[str, GenerationRequest] = {}

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        if len(request.prompt_ids) + request.sampling.max_tokens > self.max_length:
            raise PromptTooLongError("too long")
        if not request.prompt_ids or max(request.prompt_ids) >= VOCABULARY or not request.sampling.top_p:
            raise RequestError("bad")
        if self.sent.setdefault(request.id, request) != request:
            raise RequestError("used for another request")
        self.running += 1
        try:
            tokens: list[int] = []
            seed = request.sampling.seed
            for index in range(request.sampling.max_tokens):
                await asyncio.sleep(0.0005)
                tokens.append(self.sample(request, index, request.id if seed is None else seed))
                if on_token is not None and request.stream:
                    on_token(TokenEvent(request.id, index, tokens[-1], self.logprob(request), self.version))
                if tokens[-1] in request.sampling.stop_token_ids:
                    return self.completion(request, tokens, "stop")
            return self.completion(request, tokens, "length")
        finally:
            self.running -= 1

    def sample(self, request: GenerationRequest, index: int, seed: object) -> int:
        source = "greedy" if request.sampling.temperature == 0 else seed
        return random.Random(f"{source}/{request.prompt_ids}/{index}").randrange(VOCABULARY)

    def logprob(self, request: GenerationRequest) -> float:
        return 0.0 if request.sampling.top_k == 1 else -1.5

    def completion(self, request: GenerationRequest, tokens: list[int], reason: FinishReason) -> Completion:
        return Completion(
            request_id=request.id,
            token_ids=tuple(tokens),
            logprobs=(self.logprob(request),) * len(tokens),
            weight_versions=(VersionSpan(self.version, 0, len(tokens)),),
            finish_reason=reason,
        )


class Short(GoodServer):
    def completion(self, request: GenerationRequest, tokens: list[int], reason: FinishReason) -> Completion:
        return super().completion(request, tokens[: 1 if len(tokens) == 1 else -1], reason)


class OtherStream(GoodServer):
    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        def skewed(event: TokenEvent) -> None:
            assert on_token is not None
            on_token(msgspec.structs.replace(event, logprob=event.logprob - 0.5))

        return await super().generate(request, skewed)


class RawLogprobs(GoodServer):
    def logprob(self, request: GenerationRequest) -> float:
        return -1.5


class SeedDependsOnTheBatch(GoodServer):
    def sample(self, request: GenerationRequest, index: int, seed: object) -> int:
        return super().sample(request, index, f"{seed}/{self.running}")


class StopLeftOut(GoodServer):
    def completion(self, request: GenerationRequest, tokens: list[int], reason: FinishReason) -> Completion:
        return super().completion(request, tokens[:-1] if reason == "stop" else tokens, reason)


class GoesOnAfterADisconnect(GoodServer):
    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        return await asyncio.shield(super().generate(request, on_token))


def run(server: GoodServer, *names: str) -> None:
    async def all_of_them() -> None:
        subject = Subject(server, await server.info())
        for name in names:
            await getattr(contract, name)(subject)

    asyncio.run(all_of_them())


def test_a_server_that_keeps_the_contract_passes() -> None:
    names = [name for name in vars(contract) if name.startswith("test_")]
    names.remove("test_errors_have_the_agreed_shape")  # it is about HTTP
    assert len(names) == 10
    run(GoodServer(), *names)


@pytest.mark.parametrize(
    ("server", "name"),
    [
        (Short, "test_completions_are_exact"),
        (OtherStream, "test_streamed_tokens_match_the_completion"),
        (RawLogprobs, "test_logprobs_are_of_the_sampled_distribution"),
        (SeedDependsOnTheBatch, "test_a_seed_repeats_in_any_batch"),
        (StopLeftOut, "test_stop_tokens_end_a_completion"),
        (GoesOnAfterADisconnect, "test_a_disconnect_frees_the_slot"),
    ],
)
def test_each_breach_fails_its_test(server: Callable[[], GoodServer], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "ENDS_S", 0.01)
    with pytest.raises((AssertionError, TimeoutError)):
        run(server(), name)
