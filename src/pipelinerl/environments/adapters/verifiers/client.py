"""A verifiers client for the policy model: messages become exact ids, and sampled tokens are never encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.clients.client import Client
from verifiers.errors import OverlongPromptError
from verifiers.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage

from pipelinerl.environments.chat.conversation import Answer, Conversation
from pipelinerl.environments.prompts import has_chat_template
from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.interfaces import GenerationClient

MODEL = "policy"


class PolicyClient(Client):  # type: ignore[misc]  # verifiers is not typed for mypy
    """The model calls of one rollout. Sampling follows the run's settings; `sampling_args` of an environment are ignored.

    `failure` is the exception of the latest call. `too_long` is set when a prompt did not fit: verifiers then ends the
    rollout and scores it as it is.
    """

    def __init__(self, client: GenerationClient, template_options: Mapping[str, Any]) -> None:
        self.conversation = Conversation(client, template_options=template_options)
        super().__init__(self.conversation)
        self.failure: Exception | None = None
        self.too_long: PromptTooLongError | None = None
        self._has_template = has_chat_template(client.tokenizer)

    def setup_client(self, config: Any) -> Any:
        raise TypeError(f"a client of the policy can't be made from a {type(config).__name__}")

    async def close(self) -> None:
        """Does nothing."""

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        """The tool without `strict`: it is a decoding option of APIs, and a template would show it to the model."""
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [_openai_message(message) for message in messages], {}

    async def get_native_response(
        self,
        prompt: list[dict[str, Any]],
        model: str,  # noqa: ARG002 - there is only one
        sampling_args: Mapping[str, Any],  # noqa: ARG002 - the run's settings apply
        tools: list[dict[str, Any]] | None = None,
        **_: Any,
    ) -> Answer:
        self.failure = None
        try:
            return await self._ask(prompt, tools or ())
        except PromptTooLongError as error:
            self.too_long = error
            raise OverlongPromptError(str(error)) from error
        except Exception as error:
            self.failure = error
            raise

    async def raise_from_native_response(self, response: Answer) -> None:
        """Accepts every answer, even an empty one: it is the model's behaviour, and the reward should see it."""

    async def from_native_response(self, response: Answer) -> Any:
        prompt_ids, sampled = list(response.prompt.ids), list(response.completion.token_ids)
        calls = [
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in response.message.get("tool_calls", ())
        ]
        return Response(
            id=response.completion.request_id,
            created=0,
            model=MODEL,
            usage=Usage(
                prompt_tokens=len(prompt_ids),
                reasoning_tokens=0,
                completion_tokens=len(sampled),
                total_tokens=len(prompt_ids) + len(sampled),
            ),
            message=ResponseMessage(
                content=response.message["content"] or "",
                tool_calls=calls or None,
                finish_reason=response.finish_reason,
                is_truncated=response.finish_reason == "length",
                tokens=ResponseTokens(
                    prompt_ids=prompt_ids,
                    prompt_mask=[0] * len(prompt_ids),
                    completion_ids=sampled,
                    completion_mask=[1] * len(sampled),
                    completion_logprobs=list(response.completion.logprobs),
                ),
            ),
        )

    async def _ask(self, prompt: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Answer:
        if self._has_template:
            return await self.conversation.ask(prompt, tools)
        if len(prompt) > 1 or tools or not isinstance(prompt[0]["content"], str):
            raise RequestError("the model's tokenizer has no chat template, so it can only be given one plain text")
        return await self.conversation.continue_text(prompt[0]["content"])


def _openai_message(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = message.model_dump(exclude_none=True)
    if plain["role"] == "text":  # a plain-text prompt becomes the user's message, as in verifiers' own chat clients
        plain["role"] = "user"
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
    return plain
