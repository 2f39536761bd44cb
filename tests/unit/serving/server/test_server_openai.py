"""What clients of vLLM's server send beyond a plain prompt: what is answered, with which contents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import openai
import pytest
import torch
from safetensors.torch import save_file

from pipelinerl.environments.prompts import TextStream, plain_decoder
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.serving.server.api.answers import StopStrings
from pipelinerl.serving.server.api.endpoints import pieces
from pipelinerl.serving.server.served import ServedRequest
from pipelinerl.serving.server.service import Service
from pipelinerl.types import GenerationRequest, SamplingParams, TokenEvent, VersionSpan, cancelled_completion
from tests.unit.fake_engine_servers import in_event_loop, wait_until
from tests.unit.server_parts import EOS, TEMPLATE, byte_model, byte_tokenizer, client_of, running

LENGTH = 768
SHOWS_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + TEMPLATE
TOKENIZER = byte_tokenizer()
PLAIN: dict[str, Any] = {"model": "bytes", "prompt": "hello", "max_tokens": 12, "seed": 1}
CHAT: dict[str, Any] = {"model": "bytes", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 1}
EXACT = {"return_token_ids": True, "return_weight_versions": True}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "sub")]


@asynccontextmanager
async def official(directory: Path, **changes: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx2.AsyncClient, Service]]:
    """OpenAI's client of a service of its own, and a plain one."""
    changes = {"tokenizer": byte_tokenizer(SHOWS_TOOLS), "max_length": LENGTH, "max_queue": 40} | changes
    async with running(directory, **changes) as (service, app), client_of(app) as plain:
        url = "http://localhost/v1"
        yield openai.AsyncOpenAI(base_url=url, api_key="any", http_client=plain, max_retries=0), plain, service


@in_event_loop
async def test_several_answers_to_several_prompts_are_those_of_single_requests(tmp_path: Path) -> None:
    async with official(tmp_path) as (client, plain, _):

        async def single(prompt: Any, seed: int) -> str:
            return (await client.completions.create(**PLAIN | {"prompt": prompt, "seed": seed})).choices[0].text

        wants = PLAIN | {"prompt": ["hello", "other"], "n": 3}
        answer = await client.completions.create(**wants)
        expected = [await single(prompt, 1 + i) for prompt in ("hello", "other") for i in range(3)]
        assert len(set(expected)) == 6
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == 10
        texts, usage = [""] * 6, None
        async for chunk in await client.completions.create(**wants, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == expected
        assert usage == answer.usage
        chat = await client.chat.completions.create(**CHAT | {"n": 2})
        assert [choice.index for choice in chat.choices] == [0, 1]
        assert chat.choices[0].message.content != chat.choices[1].message.content
        failed = await plain.post("/v1/completions", json=wants | {"prompt": ["hello", [1] * LENGTH], "stream": True})
        assert failed.status_code == 400


@in_event_loop
async def test_every_token_has_its_version_also_with_several_answers(tmp_path: Path) -> None:
    async with official(tmp_path) as (_, plain, service):
        body = PLAIN | {"n": 2, "max_tokens": 300, "ignore_eos": True, "logprobs": 0} | EXACT
        asking = asyncio.create_task(plain.post("/v1/completions", json=body))
        await wait_until(lambda: service.engine.progress.tokens_generated > 4)
        weights = {name: tensor.clone() for name, tensor in named_weights(byte_model(1)).items()}
        save_file(weights, tmp_path / "new.safetensors")
        update = {"version": 1, "checksum": checksum(weights), "path": str(tmp_path / "new.safetensors")}
        assert (await plain.post("/request_weight_update", json=update)).status_code == 200
        for choice in (await asking).json()["choices"]:
            spans = choice["weight_versions"]
            assert [span["version"] for span in spans] == [0, 1]
            assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 300)
            assert choice["prompt_versions"] == [{"version": 0, "start": 0, "end": 5}]


@in_event_loop
async def test_how_texts_end(tmp_path: Path) -> None:
    async with official(tmp_path) as (_, plain, _):

        async def ask(**change: Any) -> Any:
            response = await plain.post("/v1/completions", json=PLAIN | EXACT | {"max_tokens": 40} | change)
            return response.json()["choices"][0]

        free = await ask(ignore_eos=True)
        stop, last = free["text"][20:22], free["token_ids"][7]
        assert (await ask(stop=stop))["stop_reason"] == stop
        included = await ask(stop=[stop, "never"], include_stop_str_in_output=True)
        assert included["text"] == free["text"][: free["text"].index(stop) + 2]
        by_id = await ask(stop_token_ids=[last])
        assert (by_id["finish_reason"], by_id["stop_reason"], by_id["token_ids"][-1]) == ("stop", last, last)
        assert by_id["text"] == TOKENIZER.decode(by_id["token_ids"][:-1])
        named = await ask(logprobs=0, return_tokens_as_token_ids=True)
        assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in named["token_ids"]]


@in_event_loop
async def test_models(tmp_path: Path) -> None:
    async with official(tmp_path) as (client, _, _):
        assert (await client.models.retrieve("bytes")).id == "bytes"
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt/4'"):
            await client.models.retrieve("gpt/4")


@in_event_loop
async def test_tools_are_rendered_and_calls_are_parsed(tmp_path: Path) -> None:
    said = 'Well.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = [*TOKENIZER.encode(said), EOS]
    async with official(tmp_path) as (client, _, service):
        draws = iter(range(10**6))
        engine: Any = service.engine._engine
        own = engine._draw

        def scripted(logits_nV: Any, rows_n: Any, uniforms_n: Any) -> Any:
            """A random model that says what is to be parsed."""
            logits_nV = torch.full_like(logits_nV, -100.0)
            logits_nV[:, ids[next(draws) % len(ids)]] = 100.0
            return own(logits_nV, rows_n, uniforms_n)

        engine._draw = scripted
        wants = CHAT | {"max_tokens": 200, "tools": TOOLS}
        (choice,) = (await client.chat.completions.create(**wants)).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Well."
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1})
        chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**wants, stream=True)]
        assert chunks[-1].finish_reason == "tool_calls"
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "Well."
        (streamed,) = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
        assert (streamed.index, streamed.function.name, streamed.function.arguments) == (0, "add", call.function.arguments)
        async with client.chat.completions.stream(**wants) as stream:
            done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert [(event.name, json.loads(event.arguments)) for event in done] == [("add", {"a": 1})]
        unoffered = (await client.chat.completions.create(**wants | {"tool_choice": "none"})).choices[0]
        assert (unoffered.message.content, unoffered.message.tool_calls) == (said, None)
        history = [*CHAT["messages"], choice.message.model_dump(), {"role": "tool", "tool_call_id": "x", "content": "2"}]
        answer = await client.chat.completions.create(**wants | {"messages": history, "extra_body": EXACT})
        prompt = TOKENIZER.decode(answer.choices[0].prompt_token_ids)  # type: ignore[attr-defined]
        assert prompt.startswith('{"type": "function"')
        assert prompt.endswith("u:hello\na:Well.\nt:2\na:")


@in_event_loop
async def test_a_template_without_tools_has_them_in_the_system_message(tmp_path: Path) -> None:
    async with official(tmp_path, tokenizer=byte_tokenizer()) as (_, plain, _):
        asked = CHAT | {"tools": TOOLS, "max_tokens": 1} | EXACT
        (choice,) = (await plain.post("/v1/chat/completions", json=asked)).json()["choices"]
        assert TOKENIZER.decode(choice["prompt_token_ids"]).startswith("s:You may call these functions")


# ---------------------------------------------------------------------------------------------- constrained answers


@pytest.mark.parametrize(
    ("path", "change", "follows"),
    [
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "schema"),
        ("text", {"structured_outputs": {"json": SCHEMA}, "ignore_eos": True}, "schema"),
        ("text", {"structured_outputs": {"regex": "(yes|no)!{2}"}}, {"yes!!", "no!!"}),
        ("chat", {"structured_outputs": {"regex": "red"}, "stop": "e"}, {"r"}),
    ],
)
@in_event_loop
async def test_answers_follow_what_they_must(tmp_path: Path, path: str, change: dict[str, Any], follows: Any) -> None:
    """A random model can't help it. The log-probs are those of the constrained distribution."""
    pytest.importorskip("llguidance")
    async with official(tmp_path) as (_, plain, _):
        body = (CHAT if path == "chat" else PLAIN) | {"max_tokens": 300, "n": 3} | change
        url = "/v1/chat/completions" if path == "chat" else "/v1/completions"
        response = await plain.post(url, json=body)
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            text = choice["message"]["content"] if path == "chat" else choice["text"]
            assert choice["finish_reason"] == "stop"
            if follows == "schema":
                value = json.loads(text)
                assert list(value) == ["a"]
                assert 0 <= value["a"] <= 9
            else:
                assert text in follows
        if path == "text":
            (choice,) = (await plain.post(url, json=body | {"n": 1, "logprobs": 0, "stop": None} | EXACT)).json()["choices"]
            logprobs = choice["logprobs"]["token_logprobs"]
            assert min(abs(value) for value in logprobs) < 1e-5, "a token without an alternative has probability 1"


@in_event_loop
async def test_a_tool_that_must_be_called_is_called(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    async with official(tmp_path) as (client, _, _):
        named: Any = {"type": "function", "function": {"name": "sub"}}
        for choice, names, reason in (("required", {"add", "sub"}, "tool_calls"), (named, {"sub"}, "stop")):
            wants = CHAT | {"max_tokens": 250, "tools": TOOLS, "tool_choice": choice}
            (answer,) = (await client.chat.completions.create(**wants)).choices
            (call,) = answer.message.tool_calls
            assert call.function.name in names
            assert list(json.loads(call.function.arguments)) == ["a"]
            assert answer.finish_reason == reason


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"$ref": "http://127.0.0.1:9/x"}, "does not fetch"),
        ({"enum": ["x" * 1000] * 300}, "characters, of at most"),
    ],
)
@in_event_loop
async def test_schemas_that_can_not_be_followed_are_refused(tmp_path: Path, schema: dict[str, Any], words: str) -> None:
    pytest.importorskip("llguidance")
    async with official(tmp_path) as (_, plain, _):
        format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        response = await plain.post("/v1/completions", json=PLAIN | {"response_format": format_})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("response_format: ")
        assert words in response.json()["error"]["message"]


@in_event_loop
async def test_an_answer_that_gets_stuck_is_an_error_of_its_request_alone(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    async with official(tmp_path) as (_, plain, service):
        endless = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
        response = await plain.post("/v1/completions", json=PLAIN | {"structured_outputs": {"json": endless}})
        assert response.status_code == 400
        assert "can't be constrained further" in response.json()["error"]["message"]
        assert (await plain.post("/v1/completions", json=PLAIN)).status_code == 200
        assert service.engine.refusing is None


@in_event_loop
async def test_without_the_extra_constrained_answers_are_refused_by_its_name(
    tmp_path: Path, not_installed: Callable[[str], None]
) -> None:
    not_installed("llguidance")
    async with official(tmp_path) as (client, _, _):
        for wants in ({"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError, match="pip install 'llguidance>="):
                await client.chat.completions.create(**CHAT | wants)
        assert (await client.completions.create(**PLAIN)).choices


@in_event_loop
async def test_an_update_after_a_stop_string_does_not_change_what_read_the_prompt() -> None:
    """The engine ends the request a step later than the text ends, perhaps with a recomputed prompt."""
    request = GenerationRequest(id="r", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=9))
    served, read = ServedRequest(request), {v: (VersionSpan(v, 0, 2),) for v in range(3)}
    ids = TOKENIZER.encode("abcd")
    events = [TokenEvent("r", i, ids[i], -1.0, v, read[v]) for i, v in enumerate((0, 1, 2))]
    for event in events:
        served.add(event)
    engine = mock.Mock()
    engine.cancel = lambda _: served.end(cancelled_completion("r", events))
    text = TextStream(plain_decoder(TOKENIZER))
    found = [piece async for piece in pieces(engine, served, text, StopStrings(["b"]), singly=True, silent=())]
    assert [event.version for piece in found for event in piece.tokens] == [0, 1]
    assert (found[-1].stop, found[-1].prompt_versions) == ("b", read[1])
