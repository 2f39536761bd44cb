"""The endpoints over a small model, without a network: what they answer, and what they refuse in which words."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import torch

from pipelinerl.config.schema import ModelConfig
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.serving.server.http import MAX_BODY_BYTES, RefusedError, listen
from pipelinerl.serving.wire import ErrorBody, ServerInfo
from tests.unit.fake_engine_servers import request, wait_until
from tests.unit.server_parts import EOS, MAX_LENGTH, TEMPLATE, byte_model, byte_tokenizer, running

TOKENIZER = byte_tokenizer()
PLAIN = {"model": "bytes", "prompt": "hello", "max_tokens": 12, "seed": 1, "temperature": 1.0}
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 1}


def messages_of(client: Any, key: str = "any") -> Any:
    import anthropic  # takes a second

    return anthropic.AsyncAnthropic(base_url="http://localhost", api_key=key, http_client=client, max_retries=0).messages


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PLAIN), ("/v1/chat/completions", CHAT)])
async def test_a_stream_is_the_whole_answer_in_parts(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    chat = "chat" in path
    wants = body | {"logprobs": True if chat else 0, "return_token_ids": True, "return_weight_versions": True}
    async with running(tmp_path) as (_, client):
        whole = await client.json(path, wants)
        *chunks, last, usage = await client.events(path, wants | {"stream_options": {"include_usage": True}})
        sampling = {"max_tokens": 12, "seed": 1, "stop_token_ids": [EOS]}
        prompt_ids = whole["choices"][0]["prompt_token_ids"]
        own = await client.json("/generate", {"id": path, "prompt_ids": prompt_ids, "sampling": sampling})
    (choice,), (ended,) = whole["choices"], last["choices"]
    counts = {"prompt_tokens": 10 if chat else 5, "completion_tokens": 12, "total_tokens": 22 if chat else 17}
    assert whole["usage"] == usage["usage"] == counts
    assert usage["choices"] == []
    assert all(chunk["usage"] is None for chunk in (*chunks, last))
    pieces = [chunk["choices"][0] for chunk in chunks]
    if chat:
        assert pieces.pop(0)["delta"] == {"role": "assistant", "content": ""}
        text = "".join(piece["delta"]["content"] for piece in pieces)
        assert choice.pop("message") == {"content": text, "role": "assistant", "refusal": None}
        assert ended.pop("delta") == {}
    else:
        text = "".join(piece["text"] for piece in pieces)
        assert (choice.pop("text"), ended.pop("text")) == (text, "")
    assert ended == choice
    assert choice["finish_reason"] == "length"
    assert TOKENIZER.decode(choice["token_ids"], skip_special_tokens=True) == text
    assert choice["prompt_token_ids"] == TOKENIZER.encode("u:hello\na:" if chat else "hello")
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 12}]
    assert choice["prompt_versions"] == [{"version": 0, "start": 0, "end": counts["prompt_tokens"]}]
    logprobs = (
        [token["logprob"] for token in choice["logprobs"]["content"]] if chat else choice["logprobs"]["token_logprobs"]
    )
    assert (own["token_ids"], own["logprobs"]) == (choice["token_ids"], pytest.approx(logprobs, abs=1e-5))


async def test_a_stop_string_cuts_the_text_and_the_tokens_behind_it(tmp_path: Path) -> None:
    wants = PLAIN | {"return_token_ids": True, "return_weight_versions": True, "max_tokens": 60, "ignore_eos": True}
    async with running(tmp_path) as (service, client):
        (free,) = (await client.json("/v1/completions", wants))["choices"]
        stop = free["text"][20:22]
        cut = await client.json("/v1/completions", wants | {"stop": [stop, "never there"]})
        streamed = await client.events("/v1/completions", wants | {"stop": stop})
        assert service.engine.open_requests == 0
    (choice,) = cut["choices"]
    assert choice["text"] == "".join(chunk["choices"][0]["text"] for chunk in streamed) == free["text"].partition(stop)[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    count = cut["usage"]["completion_tokens"]
    assert choice["token_ids"] == free["token_ids"][:count]
    seen = [TOKENIZER.decode(free["token_ids"][:n], skip_special_tokens=True) for n in (count - 1, count)]
    assert [stop in text for text in seen] == [False, True]
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": count}]


async def test_defaults_ends_and_other_parameters(tmp_path: Path) -> None:
    endless = {"ignore_eos": True, "seed": 3}
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = {"messages": [{"role": "user", "content": parts}]}
    without_effect = {"user": "me", "metadata": {}, "n": 1, "tools": [], "echo": False, "response_format": {"type": "text"}}
    greedy = PLAIN | without_effect | {"temperature": 0, "top_k": -1, "top_p": 0.5, "frequency_penalty": 0}
    async with running(tmp_path) as (_, client):

        async def finish(path: str, body: dict[str, Any]) -> tuple[str, int]:
            answer = await client.json(path, body)
            return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

        for prompt, tokens in (("hello", 16), (TOKENIZER.encode("hello"), 16), ("x" * 90, MAX_LENGTH - 90)):
            assert await finish("/v1/completions", {"prompt": prompt} | endless) == ("length", tokens)
        assert await finish("/v1/chat/completions", messages | endless) == ("length", MAX_LENGTH - 10)
        assert await finish("/v1/chat/completions", CHAT | {"max_completion_tokens": 3}) == ("length", 3)
        wanted = [greedy | {"seed": seed, "return_token_ids": True} for seed in (1, 2)]
        ids, others = [(await client.json("/v1/completions", one))["choices"][0]["token_ids"] for one in wanted]
        assert ids == others
        assert (await finish("/v1/completions", greedy | {"stop_token_ids": [ids[4]]}))[0] == "stop"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "bytes"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("text", {"n": 2}, "n: this server does not support it; send several requests"),
    ("text", {"skip_special_tokens": False}, "skip_special_tokens"),
    ("text", {"presence_penalty": 0.5}, "presence_penalty"),
    ("text", {"logprobs": 1}, "$.logprobs"),
    ("text", {"prompt": []}, "empty prompt"),
    ("text", {"stream": True, "prompt": [300]}, "vocabulary of 259"),
    ("text", {"max_tokens": 0}, "ask for at least 1"),
    ("text", {"max_tokens": 92}, "5 prompt tokens + 92 new tokens > 96 (the model's max_model_len)"),
    ("text", {"prompt": "x" * 100_000}, "100000 characters can't fit into 96 tokens"),
    ("text", {"temperature": -1}, "temperature -1"),
    ("text", {"temperature": 1e-30}, "temperature 1e-30"),
    ("text", {"top_p": 0}, "sampling parameters out of range"),
    ("text", {"top_k": 2**70}, "top_k"),
    ("text", {"stop": [""]}, "stop: give at most"),
    ("text", {"stop_token_ids": [2**65]}, "stop_token_ids"),
    ("native", {"prompt_ids": [2**62]}, "vocabulary of 259"),
    ("native", {"prompt_ids": [-1]}, "vocabulary of 259"),
    ("native", {"sampling": {"max_tokens": 2**62}}, "new tokens >"),
    ("native", {"id": ""}, "a request id has 1 to 256 characters"),
    ("chat", {"messages": [{"role": "clown", "content": "x"}]}, "no clowns"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls"),
    ("chat", {"messages": []}, "there are none"),
    ("chat", {"tools": [{"type": "function"}]}, "tools: Object missing required field `function`"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template is not a variable of the chat template"),
]


async def test_what_can_not_be_honoured_is_refused_by_name_and_harms_nobody(tmp_path: Path) -> None:
    own: dict[str, Any] = {"id": "n", "prompt_ids": [5, 6], "sampling": {"max_tokens": 4}}
    paths = {"text": ("/v1/completions", PLAIN), "chat": ("/v1/chat/completions", CHAT), "native": ("/generate", own)}
    async with running(tmp_path) as (_, client):
        for kind, change, words in REFUSED:
            path, body = paths[kind]
            content = json.dumps(body | change).encode()  # also with numbers of any size
            assert words in (await client.refusal(path, content)).message, (kind, change)
        too_large = b"[" + b"1," * (MAX_BODY_BYTES // 2) + b"1]"
        assert "larger than" in (await client.refusal("/generate", too_large)).message
        for path in ("/nowhere", "/info"):
            assert (await client.refusal(path, {}, 404)).code == "not_found"
        other = await client.refusal("/v1/completions", PLAIN | {"model": "gpt"}, 404)
        assert "there is no model 'gpt'; this server has 'bytes'" in other.message
        assert (await client.json("/v1/completions", PLAIN))["choices"]


@pytest.mark.slow
async def test_three_apis_give_the_same_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, plain):
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="any", http_client=plain, max_retries=0)
        chat = await client.chat.completions.create(model="bytes", messages=CHAT["messages"], max_tokens=12, temperature=0.0)
        text, used = chat.choices[0].message.content, chat.usage
        assert used is not None
        asked: Any = {"model": "bytes", "input": "hello", "max_output_tokens": 12, "temperature": 0.0}
        response = await client.responses.create(**asked)
        assert (response.output_text, response.status) == (text, "incomplete")
        assert (response.usage.input_tokens, response.usage.output_tokens) == (used.prompt_tokens, used.completion_tokens)
        wants: Any = {"model": "bytes", "max_tokens": 12, "messages": CHAT["messages"], "extra_body": {"temperature": 0.0}}
        async with messages_of(plain).stream(**wants) as stream:
            message = await stream.get_final_message()
        assert (message.content[0].text, message.stop_reason) == (text, "max_tokens")
        assert message.usage.output_tokens == used.completion_tokens


async def test_what_a_chat_may_change_about_its_template(tmp_path: Path) -> None:
    off = "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
    tokenizer = byte_tokenizer(template=TEMPLATE.replace("{% if add", off + "{% if add"))
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "return_token_ids": True}
    async with running(tmp_path, tokenizer=tokenizer) as (_, client):
        for options, prompt in (({}, "u:hi\na:"), ({"enable_thinking": False}, "u:hi\n!a:"), ({"x": 1}, "u:hi\na:")):
            answer = await client.json("/v1/chat/completions", asked | {"chat_template_kwargs": options})
            assert tokenizer.decode(answer["choices"][0]["prompt_token_ids"]) == prompt


async def test_what_the_models_tokenizer_can_not_do_is_said(tmp_path: Path) -> None:
    of_numbers = load_tokenizer(ModelConfig(path="demo"))
    async with running(tmp_path, tokenizer=of_numbers) as (_, client):
        for path, body, words in (("chat/completions", CHAT, "use /v1/completions"), ("completions", PLAIN, "can't encode")):
            assert words in (await client.refusal(f"/v1/{path}", body)).message


@pytest.mark.slow
async def test_tools_are_rendered_and_calls_are_parsed(tmp_path: Path) -> None:
    written = 'Well.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = [*TOKENIZER.encode(written), EOS]
    shows_tools = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + TEMPLATE
    changes: Any = {"tokenizer": byte_tokenizer(shows_tools), "max_length": 768}
    async with running(tmp_path, **changes) as (service, plain):
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="any", http_client=plain, max_retries=0)
        draws = iter(range(10**6))
        engine: Any = service.engine._engine
        own = engine._draw

        def scripted(logits_nV: Any, rows_n: Any, uniforms_n: Any) -> Any:
            """A random model that says what is to be parsed."""
            logits_nV = torch.full_like(logits_nV, -100.0)
            logits_nV[:, ids[next(draws) % len(ids)]] = 100.0
            return own(logits_nV, rows_n, uniforms_n)

        engine._draw = scripted
        wants: Any = CHAT | {"max_tokens": 200, "tools": [{"type": "function", "function": {"name": "add"}}]}
        (choice,) = (await client.chat.completions.create(**wants)).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1})
        strict = {
            "tools": [{"type": "function", "function": {"name": "add", "strict": True}}]
        }  # the client parses no others
        async with client.chat.completions.stream(**wants | strict) as stream:
            done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
            streamed = (await stream.get_final_completion()).choices[0]
        assert [(event.name, json.loads(event.arguments)) for event in done] == [("add", {"a": 1})]
        assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "Well.")
        unoffered = (await client.chat.completions.create(**wants | {"tool_choice": "none"})).choices[0]
        assert (unoffered.message.content, unoffered.message.tool_calls) == (written, None)
        history = [*CHAT["messages"], choice.message.model_dump(), {"role": "tool", "tool_call_id": "x", "content": "2"}]
        body = {"messages": history, "extra_body": {"return_token_ids": True}}
        answer: Any = (await client.chat.completions.create(**wants | body)).choices[0]
        prompt = TOKENIZER.decode(answer.prompt_token_ids)
        assert prompt.startswith('{"type": "function"')
        assert prompt.endswith("u:hello\na:Well.\nt:2\na:")


# ---------------------------------------------------------------------------------------------- our own


async def test_who_it_is_and_how_it_is(tmp_path: Path) -> None:
    async with running(tmp_path) as (service, client):
        await client.json("/generate", request("a"))
        info = msgspec.json.decode((await client.get("/info")).content, type=ServerInfo)
        assert (info.name, info.slots, info.max_length, info.vocabulary) == ("bytes", 4, MAX_LENGTH, 259)
        assert (info.version, info.checksum) == service.engine.holding
        assert (await client.get("/health")).json() == {"status": "ready", "version": 0}
        service.engine.refuse("the server stops")
        for response in (await client.get("/health"), await client.post("/v1/completions", json=PLAIN)):
            assert response.status_code == 503
            assert "retry-after" in response.headers
            assert response.json()["error"]["message"] == "the server stops"


async def test_overload_is_a_429_with_a_hint(tmp_path: Path) -> None:
    async with running(tmp_path, max_queue=2) as (service, client):
        waiting = [asyncio.create_task(client.json("/generate", request(f"r{i}", 90))) for i in range(6)]
        await wait_until(lambda: service.engine.open_requests == 6)
        for path, body in (("/v1/completions", PLAIN), ("/generate", request("more"))):
            error = await client.refusal(path, body, 429)
            assert (error.code, "4 requests are in progress and 2 wait" in error.message) == ("overloaded", True)
        assert (await client.post("/v1/completions", json=PLAIN)).headers["retry-after"] == "1"
        await asyncio.gather(*waiting)
        assert (await client.post("/v1/completions", json=PLAIN)).status_code == 200


# ---------------------------------------------------------------------------------------------- who is let in


async def test_a_key_is_asked_for_everywhere_but_at_the_door(tmp_path: Path) -> None:
    async with running(tmp_path, api_key="secret") as (_, client):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Bearer "}):
            for path in ("/v1/completions", "/generate", "/request_weight_update", "/nowhere"):
                assert (await client.post(path, json=PLAIN, headers=headers)).status_code == 401
            assert (await client.get("/info", headers=headers)).status_code == 401
            assert (await client.get("/health", headers=headers)).status_code == 200
        right = {"authorization": "Bearer secret", "origin": "https://elsewhere.example"}
        assert (await client.post("/v1/completions", json=PLAIN, headers=right)).status_code == 200


@pytest.mark.slow
async def test_clients_of_anthropic_send_the_key_in_another_header(tmp_path: Path) -> None:
    import anthropic

    async with running(tmp_path, api_key="secret") as (_, client):
        wants: Any = {"messages": CHAT["messages"], "max_tokens": 5}
        assert (await messages_of(client, "secret").create(model="bytes", **wants)).role == "assistant"
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            await messages_of(client).create(model="bytes", **wants)
        with pytest.raises(anthropic.NotFoundError, match="there is no model 'other'"):
            await messages_of(client, "secret").create(model="other", **wants)


async def test_without_a_key_web_pages_of_others_are_not_answered(tmp_path: Path) -> None:
    """Neither of other origins, nor pages that reach the server through a name of their own (DNS rebinding)."""
    names = {b"localhost:3000": 200, b"127.0.0.1": 200, b"[::1]:8": 200}
    names |= dict.fromkeys((b"elsewhere.example", b"127.0.0.1.elsewhere.example", b"null", b"\xff", b"["), 401)
    async with running(tmp_path) as (_, client):
        for name, status in names.items():
            for header in ((b"host", name), (b"origin", name if name == b"null" else b"http://" + name)):
                assert (await client.get("/info", headers=[header])).status_code == status, header
        assert (await client.get("/health", headers=[(b"origin", b"null")])).status_code == 200


async def test_a_stream_that_breaks_off_says_why(tmp_path: Path) -> None:
    async with running(tmp_path) as (service, client):
        body = PLAIN | {"stream": True, "max_tokens": 90, "ignore_eos": True}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        lines = asyncio.create_task(client.post("/generate", content=msgspec.json.encode(request("a", 90, stream=True))))
        await wait_until(lambda: service.engine.progress.in_progress == 2)
        service.engine.cancel_all()
        *events_, last = [line for line in (await asking).text.split("\n\n") if line]
        assert all("choices" in json.loads(event.removeprefix("data: ")) for event in events_)
        error = msgspec.json.decode(last.removeprefix("data: "), type=ErrorBody).error
        assert (error.code, error.message) == ("unavailable", "the request was cancelled")
        completion = json.loads((await lines).content.splitlines()[-1])["completion"]
        assert completion["finish_reason"] == "cancelled"


def test_connections_to_the_server_send_at_once() -> None:
    """A response is sent in parts: without TCP_NODELAY the second one waits up to 40 ms for the client's confirmation."""
    with (
        listen(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as _,
        listening.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_given_tokens_have_the_scores_of_a_forward_while_requests_go_on(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("hello world")
    segments = [{"token_ids": ids, "sampled": [[2, 4], [4, 5], [8, 9]]}, {"token_ids": ids[:4], "sampled": [[1, 4]]}]
    wrong = [
        {"token_ids": [], "sampled": []},
        {"token_ids": [1, 999], "sampled": []},
        {"token_ids": ids, "sampled": [[0, 2]]},
        {"token_ids": ids, "sampled": [[2, 99]]},
        {"token_ids": ids, "sampled": [[3, 5], [2, 4]]},
        {"token_ids": ids, "sampled": [[3, 3]]},
    ]
    async with running(tmp_path) as (_, client):
        alone = await client.json("/v1/completions", PLAIN)
        asked = [*[("/v1/completions", PLAIN)] * 3, *[("/score", {"segments": segments})] * 3]
        *texts, first, second, third = await asyncio.gather(*(client.json(path, body) for path, body in asked))
        refused = [await client.refusal("/score", {"segments": [one]}) for one in wrong]
    assert [one["choices"][0]["text"] for one in texts] == [alone["choices"][0]["text"]] * 3
    with torch.no_grad():
        logprobs_TV = byte_model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [[logprobs_TV[at - 1, ids[at]].item() for at in places] for places in ((2, 3, 4, 8), (1, 2, 3))]
    assert first == second == third == {"logprobs": [pytest.approx(part, abs=1e-4) for part in expected]}
    assert {one.code for one in refused} == {"bad_request"}


async def test_what_fails_between_two_steps_is_answered_and_the_engine_goes_on(tmp_path: Path) -> None:
    def fails() -> None:
        raise RuntimeError("no memory")

    async with running(tmp_path) as (service, client):
        with pytest.raises(RefusedError, match="RuntimeError: no memory"):
            await service.engine.between_steps(fails)
        assert await service.engine.between_steps(lambda: 3) == 3
        assert (await client.json("/v1/completions", PLAIN))["choices"]
        service.engine.refuse("it stops")
        with pytest.raises(RefusedError, match="it stops"):
            await service.engine.between_steps(fails)
