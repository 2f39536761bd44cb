"""What clients send to OpenAI's API, side by side: `pipelinerl serve` and vLLM's server, with one model and the same bodies.

    python -m benchmarks.calls --model PATH/TO/SmolLM2-135M-Instruct --vllm-python VLLM_ENV/bin/python

Columns: the status of each answer (a 400 with the option that it names), whether greedy answers have the same text, and the
fields of an answer that only one of the two has. Streams are compared by the fields of all their chunks. Each call is made
once; without `--vllm-python` only our server is asked.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from benchmarks import common
from benchmarks.common import Record
from benchmarks.servers import running_serve
from benchmarks.vllm_switch import float32_settings, running_vllm
from pipelinerl.models.folder import resolve_path

ROOM, SLOTS = 1024, 16
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TEXT = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Name one colour."}], "max_tokens": 12, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paint it.", "parameters": SCHEMA}}
CALLED = [
    {"role": "user", "content": "Paint it red."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "done"},
]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
NAMED = {"type": "function", "function": {"name": "paint"}}

OF_TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a list of texts": {"prompt": ["One", "Two three"]},
    "token ids": {"prompt": [504, 3575, 282]},
    "lists of token ids": {"prompt": [[504, 3575], [282]]},
    "max_tokens missing": {"max_tokens": None},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens 0 with echo and logprobs": {"max_tokens": 0, "echo": True, "logprobs": 1},
    "echo": {"echo": True},
    "echo, logprobs, a list (lm-evaluation-harness)": {"prompt": [[504, 3575], [282, 504]], "echo": True, "logprobs": 1},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "logprobs 21": {"logprobs": 21},
    "n 3": {"n": 3, "temperature": 1},
    "n 3, greedy": {"n": 3},
    "n 0": {"n": 0},
    "best_of 3": {"best_of": 3, "temperature": 1},
    "suffix": {"suffix": "."},
    "stop text": {"stop": " Paris"},
    "stop texts": {"stop": [" Paris", "."]},
    "include_stop_str_in_output": {"stop": ["."], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [30]},
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 5},
    "seed": {"seed": 7, "temperature": 1},
    "temperature 3": {"temperature": 3},
    "temperature -1": {"temperature": -1},
    "top_p": {"top_p": 0.5, "temperature": 1},
    "top_p 0": {"top_p": 0, "temperature": 1},
    "top_k": {"top_k": 5, "temperature": 1},
    "min_p": {"min_p": 0.1, "temperature": 1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"504": 5}},
    "bad_words": {"bad_words": ["Paris"]},
    "allowed_token_ids": {"allowed_token_ids": [504, 3575]},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "return_token_ids": {"return_token_ids": True},
    "return_tokens_as_token_ids": {"logprobs": 1, "return_tokens_as_token_ids": True},
    "skip_special_tokens false": {"skip_special_tokens": False},
    "structured_outputs regex": {"structured_outputs": {"regex": "(red|blue)"}},
    "structured_outputs choice": {"structured_outputs": {"choice": ["red", "blue"]}},
    "structured_outputs json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 40},
    "response_format json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_tokens": 40,
    },
    "stream": {"stream": True},
    "stream with usage": USAGE,
    "stream with logprobs": USAGE | {"logprobs": 2},
    "stream of n 2": {"stream": True, "n": 2, "temperature": 1},
    "stream with echo": {"stream": True, "echo": True},
    "user and unknown keys": {"user": "me", "no_such_key": 1},
    "unknown model": {"model": "none"},
    "prompt missing": {"prompt": None},
    "too long": {"prompt": [504] * (ROOM + 1)},
}
OF_CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "system and assistant": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Again"},
        ]
    },
    "content parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Name one colour."}]}]},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "logprobs": {"logprobs": True},
    "top_logprobs 5": {"logprobs": True, "top_logprobs": 5},
    "top_logprobs 20": {"logprobs": True, "top_logprobs": 20},
    "top_logprobs 21": {"logprobs": True, "top_logprobs": 21},
    "top_logprobs without logprobs": {"top_logprobs": 2},
    "n 2": {"n": 2, "temperature": 1},
    "stop": {"stop": ["."]},
    "seed": {"seed": 3, "temperature": 1},
    "stream with usage": USAGE,
    "stream with top_logprobs": USAGE | {"logprobs": True, "top_logprobs": 2},
    "tools, auto": {"tools": [TOOL]},
    "tools, none": {"tools": [TOOL], "tool_choice": "none"},
    "tools, required": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    "tools, named": {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 60},
    "tools, named, streamed": {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 60, "stream": True},
    "a tool's result": {"messages": CALLED, "tools": [TOOL]},
    "tool_choice without tools": {"tool_choice": "required"},
    "response_format json_object": {"response_format": {"type": "json_object"}, "max_tokens": 60},
    "response_format json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_tokens": 60,
    },
    "response_format text": {"response_format": {"type": "text"}},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "continue_final_message": {
        "messages": [*CHAT["messages"], {"role": "assistant", "content": "The colour"}],  # type: ignore[misc]
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    "messages missing": {"messages": None},
    "no messages": {"messages": []},
}


class Call(NamedTuple):
    name: str
    method: str
    path: str
    body: dict[str, Any] | None


def calls(model: str) -> Iterator[Call]:
    for path, kind, usual, changes in ((COMPLETIONS, "text", TEXT, OF_TEXTS), (CHATS, "chat", CHAT, OF_CHATS)):
        for name, change in changes.items():
            body = {key: value for key, value in ({"model": model} | usual | change).items() if value is not None}
            yield Call(f"{kind}: {name}", "POST", path, body)
    yield Call("models", "GET", "/v1/models", None)
    yield Call("model", "GET", f"/v1/models/{model}", None)


class Answer(NamedTuple):
    """`fields`: paths of everything that has a value. `text`: of the answer, or of the error."""

    status: int
    fields: frozenset[str]
    text: str


def ask(client: httpx2.Client, call: Call, model: str) -> Answer:
    response = client.request(call.method, call.path, json=call.body)
    if "event-stream" in response.headers.get("content-type", ""):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        parts = [json.loads(line) for line in lines if line != "[DONE]"]
    else:
        parts = [response.json()]
    text = "".join(_text(part) for part in parts)
    return Answer(
        response.status_code, frozenset(field for part in parts for field in _fields(part)), text.replace(model, "MODEL")
    )


def _fields(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            named = "*" if path.endswith("top_logprobs[]") and key not in ("token", "logprob", "bytes") else key
            yield from _fields(inner, f"{path}.{named}" if path else named)
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner, f"{path}[]")
    elif value is not None:
        yield path


def _text(part: Any) -> str:
    if "error" in part:
        return str(part["error"].get("message", ""))
    if "choices" not in part:
        return json.dumps(part.get("tokens") or part.get("prompt") or "")
    found = []
    for choice in part["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        tools = "".join(tool["function"].get("arguments") or "" for tool in message.get("tool_calls") or [])
        found.append(choice.get("text") or message.get("content") or tools)
    return "".join(found)


def compare(ours: Answer, theirs: Answer | None, *, greedy: bool) -> Record:
    row: Record = {"pipelinerl": _shown(ours)}
    if theirs is None:
        return row
    row["vLLM"] = _shown(theirs)
    both = ours.status == theirs.status == 200
    row["same text"] = ("yes" if ours.text == theirs.text else "no") if both and greedy else None
    row["only ours"] = ", ".join(sorted(ours.fields - theirs.fields)) if both else None
    row["only vLLM's"] = ", ".join(sorted(theirs.fields - ours.fields)) if both else None
    return row


def _shown(answer: Answer) -> str:
    return str(answer.status) if answer.status == 200 else f"{answer.status}: {answer.text.splitlines()[0][:80]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of a chat model")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    folder = resolve_path(options.model)
    before = common.machine()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        own = running_serve(folder, directory, "--engine.slots", str(SLOTS), "--engine.max_length", str(ROOM))
        urls = {"pipelinerl": stack.enter_context(own)}
        if options.vllm_python:
            settings = float32_settings(options.vllm_python, folder, slots=SLOTS, max_length=ROOM)
            tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
            vllm = stack.enter_context(running_vllm(settings, directory / "vllm.log", timeout_s=900, more=tools))
            urls["vllm"] = vllm.url
        found: dict[str, dict[str, Answer]] = {}
        bodies: dict[str, Any] = {}
        for system, url in urls.items():
            with httpx2.Client(base_url=url, timeout=300) as client:
                model = client.get("/v1/models").json()["data"][0]["id"]
                for call in calls(model):
                    found.setdefault(call.name, {})[system] = ask(client, call, model)
                    bodies[call.name] = call.body
    records: list[Record] = [
        {"call": name, **compare(of["pipelinerl"], of.get("vllm"), greedy=(bodies[name] or {}).get("temperature", 0) == 0)}
        for name, of in found.items()
    ]
    settings_shown = common.settings_of(options)
    del settings_shown["vllm_python"]
    settings_shown["model"] = common.model_label(options.model)
    common.write_results(
        "calls", settings=settings_shown, machine_before=before, records=records, table=records, directory=options.results
    )


if __name__ == "__main__":
    main()
