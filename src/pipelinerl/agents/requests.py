"""What an agent may ask for. How tokens are sampled is the run's to say: what would change it is refused by name."""

from __future__ import annotations

from typing import Any, Literal

from pipelinerl.errors import RequestError
from pipelinerl.server.openai_bodies import Body, CompletionBody
from pipelinerl.types import SamplingParams


class ChatRequest(Body, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []


class TextRequest(CompletionBody, frozen=True, kw_only=True):
    """`prompt` is a text or token ids; `max_tokens` is the run's limit by default, not OpenAI's 16."""


Request = ChatRequest | TextRequest


def check(request: Request, sampling: SamplingParams) -> None:
    """Raises RequestError for what this rollout's tokens are not sampled with."""
    for name, asked, there in (
        ("temperature", request.temperature, sampling.temperature),
        ("top_p", request.top_p, sampling.top_p),
        ("top_k", None if request.top_k == -1 else request.top_k, sampling.top_k),
    ):
        if asked is not None and asked != there:
            raise RequestError(
                f"{name} {asked:g}: this rollout is sampled with {there:g}, as the run file says; leave it out"
            )
    for name in ("seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "return_token_ids", "return_weight_versions"):
        value = getattr(request, name)
        if value not in (None, False, [], ()):
            raise RequestError(f"{name}: an agent in training can't set it; leave it out")
    if request.most_tokens is not None and request.most_tokens < 1:
        raise RequestError(f"max_tokens {request.most_tokens}: ask for at least 1")
