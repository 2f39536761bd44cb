"""The Responses API and Anthropic's Messages API of the server, with the official clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pipelinerl.serving.server.dialects import messages, responses
from pipelinerl.serving.server.dialects.common import EventWriter
from pipelinerl.serving.server.http import error_body, unavailable
from pipelinerl.serving.server.openai.answers import choice_of, usage_of
from pipelinerl.serving.server.text import ToolCallStream
from tests.unit.fake_engine_servers import in_event_loop
from tests.unit.server_parts import client_of, running
from tests.unit.serving.server.test_server_openai import CHAT, SCHEMA, official

FUNCTION: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
TOOL: Any = {"name": "add", "input_schema": SCHEMA}
HELLO: Any = [{"role": "user", "content": "hello"}]
GREEDY: Any = {"model": "bytes", "max_tokens": 12, "messages": HELLO, "extra_body": {"temperature": 0.0}}


def messages_of(client: Any, key: str = "any") -> Any:
    return anthropic.AsyncAnthropic(base_url="http://localhost", api_key=key, http_client=client, max_retries=0).messages


@in_event_loop
async def test_three_apis_give_the_same_answer_whole_and_streamed(tmp_path: Path) -> None:
    async with official(tmp_path) as (client, plain, _):
        chat = await client.chat.completions.create(**CHAT | {"temperature": 0.0})
        text, used = chat.choices[0].message.content, chat.usage
        asked: Any = {"model": "bytes", "input": "hello", "max_output_tokens": 12, "temperature": 0.0}
        response = await client.responses.create(**asked)
        assert (response.output_text, response.status) == (text, "incomplete")
        assert (response.usage.input_tokens, response.usage.output_tokens) == (used.prompt_tokens, used.completion_tokens)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
        assert events[-1].type == "response.incomplete"
        message = await messages_of(plain).create(**GREEDY)
        assert (message.content[0].text, message.stop_reason) == (text, "max_tokens")
        assert (message.usage.input_tokens, message.usage.output_tokens) == (used.prompt_tokens, used.completion_tokens)
        async with messages_of(plain).stream(**GREEDY) as stream:
            streamed = await stream.get_final_message()
        assert (streamed.content[0].text, streamed.stop_reason) == (text, "max_tokens")
        assert streamed.usage.model_dump() == message.usage.model_dump()


@in_event_loop
async def test_a_call_that_a_request_requires(tmp_path: Path) -> None:
    async with official(tmp_path) as (client, plain, _):
        required: Any = {"model": "bytes", "input": "hello", "tools": [FUNCTION], "tool_choice": "required"}
        response = await client.responses.create(**required)
        (call,) = response.output
        assert (call.type, call.name, response.status) == ("function_call", "add", "completed")
        assert json.loads(call.arguments)["a"] in range(10)
        chosen = {"type": "tool", "name": "add"}
        wants: Any = {"model": "bytes", "max_tokens": 300, "messages": HELLO, "tools": [TOOL], "tool_choice": chosen}
        message = await messages_of(plain).create(**wants)
        assert (message.content[0].type, message.content[0].name, message.stop_reason) == ("tool_use", "add", "tool_use")
        async with messages_of(plain).stream(**wants) as stream:
            streamed = await stream.get_final_message()
        assert (streamed.content[0].input.keys(), streamed.stop_reason) == ({"a"}, "tool_use")
        schema = {"type": "json_schema", "name": "x", "schema": SCHEMA}
        formatted = await client.responses.create(model="bytes", input="hello", text={"format": schema})
        assert json.loads(formatted.output_text).keys() == {"a"}
        again = [*HELLO, *(item.model_dump() for item in response.output)]
        again.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
        await client.responses.create(model="bytes", input=again, tools=[FUNCTION], max_output_tokens=3)


@in_event_loop
async def test_keys_and_errors_are_those_of_each_api(tmp_path: Path) -> None:
    async with running(tmp_path, api_key="secret") as (_, app), client_of(app) as plain:
        right = messages_of(plain, "secret")
        assert (await right.create(**GREEDY)).role == "assistant"
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            await messages_of(plain).create(**GREEDY)
        with pytest.raises(anthropic.NotFoundError) as error:
            await right.create(**GREEDY | {"model": "other"})
        assert error.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_parts_of_a_stream_are_in_order() -> None:
    """A text after a call is a part of its own; sent back, text and call are one message again."""
    calls = ToolCallStream("call")
    text = 'So.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> Done.'
    deltas = [calls.feed(letter, end=False) for letter in text] + [calls.feed("", end=True)]
    of_response = responses.read(b'{"input": "?", "tools": [{"type": "function", "name": "f"}]}')
    of_message = messages.read(b'{"messages": [], "max_tokens": 5}')
    for read in (of_response, of_message):
        whole = read.writer("chatcmpl-1", "m", 5)
        streamed = read.writer("chatcmpl-1", "m", 5)
        assert isinstance(streamed, EventWriter)
        events = b"".join(streamed.chunk([choice_of({"delta": delta}, None)], usage=None) for delta in deltas)
        events += streamed.chunk([choice_of({"delta": {}}, "tool_calls")], usage=None)
        events += streamed.chunk([], usage=usage_of(5, 7)) + streamed.end()
        frames = [frame.split("\n") for frame in events.decode().strip().split("\n\n")]
        sent = [json.loads(data.removeprefix("data: ")) for _, data in frames]
        assert [name.removeprefix("event: ") for name, _ in frames] == [event["type"] for event in sent]
        call = {"id": "call00", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        answered = whole.whole(
            [choice_of({"message": {"content": "So.", "tool_calls": [call]}}, "tool_calls")], usage_of(5, 7)
        )
        if read is of_response:
            first, second, third = sent[-1]["response"]["output"]
            assert [first, second] == answered["output"]
            assert third["content"][0]["text"] == " Done."
            sent_back = json.dumps({"input": [first, second, third]}).encode()
            (message,) = responses.read(sent_back).body.messages
        else:
            blocks = [event["content_block"]["type"] for event in sent if event["type"] == "content_block_start"]
            assert blocks == ["text", "tool_use", "text"]
            text_block = {"type": "text", "text": " Done."}
            chat = [{"role": "assistant", "content": [*answered["content"], text_block]}, {"role": "user", "content": "?"}]
            chat[0]["content"][1]["input"] = {"a": 1}
            message, _ = messages.read(json.dumps({"max_tokens": 1, "messages": chat}).encode()).body.messages
        assert message["content"] == "So. Done."
        (kept,) = message["tool_calls"]
        assert (kept["id"], kept["function"]["name"]) == ("call00", "f")


def test_an_error_ends_a_stream() -> None:
    failed = error_body(unavailable("the server stops"))
    of_response = responses.read(b'{"input": "?"}').writer("1", "m", 5).error(failed)
    of_message = messages.MessagesWriter("1", "m", 5).error(failed)
    events = [json.loads(frame.removeprefix(b"event: error\ndata: ")) for frame in (of_response, of_message)]
    assert openai.types.responses.ResponseErrorEvent.model_validate(events[0]).message == "the server stops"
    assert anthropic.types.ErrorResponse.model_validate(events[1]).error.message == "the server stops"
