"""The Responses API and Anthropic's Messages API of the server, with the official clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.unit.server_parts import running

HELLO: Any = [{"role": "user", "content": "hello"}]
GREEDY: Any = {"model": "bytes", "max_tokens": 12, "messages": HELLO, "extra_body": {"temperature": 0.0}}


def messages_of(client: Any, key: str = "any") -> Any:
    return anthropic.AsyncAnthropic(base_url="http://localhost", api_key=key, http_client=client, max_retries=0).messages


async def test_three_apis_give_the_same_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, plain):
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="any", http_client=plain, max_retries=0)
        chat = await client.chat.completions.create(model="bytes", messages=HELLO, max_tokens=12, temperature=0.0)
        text, used = chat.choices[0].message.content, chat.usage
        assert used is not None
        asked: Any = {"model": "bytes", "input": "hello", "max_output_tokens": 12, "temperature": 0.0}
        response = await client.responses.create(**asked)
        assert (response.output_text, response.status) == (text, "incomplete")
        assert (response.usage.input_tokens, response.usage.output_tokens) == (used.prompt_tokens, used.completion_tokens)
        async with messages_of(plain).stream(**GREEDY) as stream:
            message = await stream.get_final_message()
        assert (message.content[0].text, message.stop_reason) == (text, "max_tokens")
        assert message.usage.output_tokens == used.completion_tokens


async def test_keys_and_errors_are_those_of_each_api(tmp_path: Path) -> None:
    async with running(tmp_path, api_key="secret") as (_, plain):
        right = messages_of(plain, "secret")
        assert (await right.create(**GREEDY)).role == "assistant"
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            await messages_of(plain).create(**GREEDY)
        with pytest.raises(anthropic.NotFoundError, match="there is no model 'other'"):
            await right.create(**GREEDY | {"model": "other"})
