"""Agents that use OpenAI's Responses API or Anthropic's Messages API, with the official clients over real HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from pipelinerl.preprocess.preprocessor import join_turns
from pipelinerl.serving.agents.gateway import Gateway
from tests.unit.serving.agents.test_agents import CALL, TOKENIZER, ask, at, gateway, play, user

__all__ = ["gateway"]
pytestmark = pytest.mark.slow

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": True}
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}


def of_anthropic(base_url: str) -> Any:
    import anthropic  # takes a second

    return anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0)


def solve_by_chat(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    messages: list[Any] = [{"role": "system", "content": "Add."}, user("2 + 3?")]
    while True:
        answer = at(base_url).chat.completions.create(model="any", messages=messages, tools=[CHAT_TOOL], max_tokens=90)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(message.content or 0)
        for call in message.tool_calls:
            result = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def solve_by_responses(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    items: list[Any] = [user("2 + 3?")]
    while True:
        answer = at(base_url).responses.create(
            model="any", instructions="Add.", input=items, tools=[FUNCTION], max_output_tokens=90, temperature=1.0
        )
        type(answer).model_validate(answer.model_dump(by_alias=True), strict=False)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        for call in calls:
            result = str(sum(json.loads(call.arguments).values()))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not calls:
            return float(answer.output_text)


def solve_by_messages(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    messages: list[Any] = [user("2 + 3?")]
    while True:
        answer = of_anthropic(base_url).messages.create(
            model="any", system="Add.", messages=messages, tools=[TOOL], max_tokens=90, extra_body={"temperature": 1.0}
        )
        type(answer).model_validate(answer.model_dump())
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            (block,) = answer.content
            assert block.type == "text"
            return float(block.text)
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [(call.id, str(sum(int(str(value)) for value in call.input.values()))) for call in calls]
        blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": result} for call_id, result in results]
        messages.append({"role": "user", "content": blocks})


@pytest.mark.parametrize("first", ["I add.\n" + CALL, CALL, CALL + "\n" + CALL], ids=["text", "call", "two"])
def test_every_api_gives_the_same_turns(first: str, tmp_path: Path) -> None:
    """Ids, log-probs and versions of a conversation with a tool do not depend on the API."""
    rollouts = [play(solve, tmp_path, first, "5") for solve in (solve_by_chat, solve_by_responses, solve_by_messages)]
    for rollout in rollouts:
        assert rollout.reward == 5.0
        assert rollout.turns == rollouts[0].turns
        assert rollout.metrics == rollouts[0].metrics | {"new_segments": 0.0}
    (segment,) = join_turns(rollouts[0].turns).segments
    text = TOKENIZER.decode(segment.token_ids)
    assert f"assistant\n{first}<|im_end|>\n<|im_start|>tool\n5<|im_end|>" in text
    assert "Add.<|im_end|>" in text


def test_streams_of_both_apis(gateway: Gateway) -> None:
    def stream(base_url: str) -> Any:
        responses, messages = at(base_url).responses, of_anthropic(base_url).messages
        with responses.stream(model="mine", input="?", tools=[FUNCTION]) as events:
            seen = list(events)
            response = events.get_final_response()
        wants: Any = {"model": "mine", "messages": [user("?")], "tools": [TOOL], "max_tokens": 90}
        with messages.stream(**wants) as events:
            return seen, response, events.get_final_message()

    seen, response, message = ask(gateway, stream, *["Well. " + CALL] * 2)
    assert [event.type.removeprefix("response.") for event in seen] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in seen] == list(range(13))
    for event in seen:
        if event.type in ("response.created", "response.completed"):
            openai.types.responses.Response.model_validate(event.response.model_dump(by_alias=True))
    assert (response.model, response.status, response.output_text) == ("mine", "completed", "Well.")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 0
    assert (response.output[1].name, json.loads(response.output[1].arguments)) == ("add", {"a": 2, "b": 3})
    text, call = message.content
    assert (message.model, message.stop_reason, text.text) == ("mine", "tool_use", "Well.")
    assert (call.name, call.input) == ("add", {"a": 2, "b": 3})
    assert message.usage.output_tokens == len(TOKENIZER.encode("Well. " + CALL)) + 1


def test_why_an_answer_ended(gateway: Gateway) -> None:
    def answers(base_url: str) -> Any:
        create, ask_openai = of_anthropic(base_url).messages.create, at(base_url).responses.create
        wants: Any = {"model": "any", "messages": [user("?")]}
        return (
            create(**wants, max_tokens=90, stop_sequences=["END"]),
            create(**wants, max_tokens=3),
            create(**wants, max_tokens=90),
            ask_openai(input="?", max_output_tokens=3),
            ask_openai(input="?"),
        )

    stopped, cut, ended, incomplete, completed = ask(gateway, answers, "so END of it", *["a long answer"] * 4)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert stopped.content[0].text == "so "
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    assert (incomplete.status, incomplete.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert incomplete.output[0].status == "incomplete"
    assert (completed.status, completed.incomplete_details) == ("completed", None)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"temperature": 0.2}, "temperature 0.2: this rollout is sampled with 1"),
    ("chat", {"seed": 1}, "seed"),
    ("chat", {"stop": [""]}, "stop: give at most"),
    ("chat", {"logprobs": True}, "logprobs"),
    ("chat", {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs"),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id: .*send the whole input"),
    ("responses", {"input": [{"type": "item_reference", "id": "1"}]}, r"input\[0\]: .*send the whole input"),
    ("responses", {"input": [{"type": "reasoning", "id": "1", "summary": []}]}, r"input\[0\]: .*'reasoning'"),
    ("responses", {"input": [user([{"type": "input_image", "image_url": "data:,"}])]}, r"input\[0\]: .*'input_image'"),
    ("responses", {"input": [{"type": "function_call_output", "output": "5"}]}, r"input\[0\]: .*call_id"),
    ("responses", {"tools": [{"type": "web_search"}]}, "'web_search' - at .*tools"),
    ("responses", {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    ("messages", {"messages": [user([{"type": "image", "source": {}}])]}, "'image' - at .*messages"),
    ("messages", {"messages": [user("?"), {"role": "assistant", "content": "It is"}]}, "does not continue an answer"),
    ("messages", {"messages": [user([{"type": "tool_result", "content": "5"}])]}, "tool_use_id"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' - at .*tools"),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel"),
    ("messages", {"extra_body": {"mcp_servers": [{}]}}, "mcp_servers: this server does not support it"),
]


def test_what_an_api_would_lose_is_refused_by_name(gateway: Gateway) -> None:
    import anthropic

    def refused(base_url: str) -> None:
        creates: dict[str, tuple[Any, dict[str, Any]]] = {
            "chat": (at(base_url).chat.completions.create, {"messages": [user("?")]}),
            "responses": (at(base_url).responses.create, {"input": "?"}),
            "messages": (of_anthropic(base_url).messages.create, {"messages": [user("?")], "max_tokens": 9}),
        }
        for api, options, named in REFUSED:
            create, wants = creates[api]
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=named) as error:
                create(**{"model": "any", **wants, **options})
            assert "\n" not in str(error.value)

    ask(gateway, refused)


def test_results_of_tools_beside_text_and_errors(tmp_path: Path) -> None:
    """A user's message with two results and a text is three messages; an error is shown as this package's tools show it."""

    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        create = of_anthropic(base_url).messages.create
        first = create(model="any", messages=[user("?")], tools=[TOOL], max_tokens=90)
        blocks: list[Any] = [{"type": "tool_result", "tool_use_id": call.id} for call in first.content]
        blocks[0] |= {"is_error": True, "content": [{"type": "text", "text": "too large"}]}
        blocks.append({"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}})
        messages: list[Any] = [user("?"), {"role": "assistant", "content": first.content}, user(blocks)]
        create(model="any", messages=messages, tools=[TOOL], max_tokens=90)
        return 1.0

    rollout = play(solve, tmp_path, CALL + CALL, "5")
    (segment,) = join_turns(rollout.turns).segments
    tool, end = "<|im_start|>tool\n", "<|im_end|>\n"
    after = f"{tool}Error: too large{end}{tool}{end}<|im_start|>user\nGo on.{end}"
    assert after in TOKENIZER.decode(segment.token_ids)
