"""The contract's tests: a server that keeps it passes all, and each way of breaking it fails the test that is for it."""

from __future__ import annotations

import asyncio
import random

import pytest

from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.serving.client.adapter import TokenListener
from pipelinerl.types import Completion, GenerationRequest, TokenEvent
from tests.contract import test_generation as contract
from tests.contract.conftest import Subject
from tests.unit.fake_engine_servers import VOCABULARY, FakeServer
from tests.unit.group_parts import completion


class Server(FakeServer):
    """Keeps the contract, with a few lines of Python for a model, but for one `fault`."""

    def __init__(self, fault: str = "") -> None:
        super().__init__("fake", slots=4, max_length=40)
        self.fault = fault
        self.sent: dict[str, GenerationRequest] = {}

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        sampling = request.sampling
        if len(request.prompt_ids) + sampling.max_tokens > self.max_length:
            raise PromptTooLongError("too long")
        if not request.prompt_ids or max(request.prompt_ids) >= VOCABULARY or not sampling.top_p:
            raise RequestError("bad")
        if self.sent.setdefault(request.id, request) != request:
            raise RequestError("used for another request")
        work = self.sampled(request, on_token)
        return await (asyncio.shield(work) if self.fault == "goes on after a disconnect" else work)

    async def sampled(self, request: GenerationRequest, on_token: TokenListener | None) -> Completion:
        sampling, tokens = request.sampling, list[int]()
        logprob = 0.0 if sampling.top_k == 1 and self.fault != "raw log-probs" else -1.5
        self.running += 1
        try:
            while len(tokens) < sampling.max_tokens and not set(tokens) & set(sampling.stop_token_ids):
                await asyncio.sleep(0.0005)
                seed = request.id if sampling.seed is None else f"{sampling.seed}"
                if self.fault == "seed depends on the batch":
                    seed += f"/{self.running}"
                source = f"{seed if sampling.temperature else 'greedy'}/{request.prompt_ids}/{len(tokens)}"
                tokens.append(random.Random(source).randrange(VOCABULARY))
                if on_token is not None and request.stream:
                    shown = logprob - 0.5 * (self.fault == "other stream")
                    on_token(TokenEvent(request.id, len(tokens) - 1, tokens[-1], shown, self.version))
        finally:
            self.running -= 1
        stopped = bool(set(tokens) & set(sampling.stop_token_ids))
        if (self.fault == "stop left out" and stopped) or (self.fault == "short" and len(tokens) > 1):
            tokens.pop()
        return completion(tokens, logprob, self.version, name=request.id, reason="stop" if stopped else "length")


def run(server: Server, *names: str) -> None:
    async def all_of_them() -> None:
        subject = Subject(server, await server.info())
        for name in names:
            await getattr(contract, name)(subject)

    asyncio.run(all_of_them())


def test_a_server_that_keeps_the_contract_passes() -> None:
    names = [name for name in vars(contract) if name.startswith("test_")]
    names.remove("test_errors_have_the_agreed_shape")  # it is about HTTP
    assert len(names) == 10
    run(Server(), *names)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("short", "test_completions_are_exact"),
        ("other stream", "test_streamed_tokens_match_the_completion"),
        ("raw log-probs", "test_logprobs_are_of_the_sampled_distribution"),
        ("seed depends on the batch", "test_a_seed_repeats_in_any_batch"),
        ("stop left out", "test_stop_tokens_end_a_completion"),
        ("goes on after a disconnect", "test_a_disconnect_frees_the_slot"),
    ],
)
def test_each_breach_fails_its_test(fault: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "ENDS_S", 0.01)
    with pytest.raises((AssertionError, TimeoutError)):
        run(Server(fault), name)
