"""Chats in token ids: what was sampled stays as it was, and what can't be continued is a segment of its own."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.environments.chat.conversation import ChatAnswer, Conversation, ToolCall, parse_tool_calls
from pipelinerl.environments.prompts import text_decoder
from pipelinerl.errors import RequestError
from pipelinerl.preprocess.preprocessor import join_turns
from tests.unit.chat_parts import ALTERNATES, STRIPS_THOUGHTS, TEMPLATES, TRIMS, SamplingClient, make_tokenizer
from tests.unit.environments.env_client import one_line

FAMILIES = ("byte level", "metaspace")
TOKENIZERS = {(family, name): make_tokenizer(family, TEMPLATES[name]) for family in FAMILIES for name in TEMPLATES}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"arguments":{"a":2,  "b":3},"name":"add"}\n</tool_call>'


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(tokenizer: Any, *texts: str, tools: Any = (), asked: str = "And now?") -> tuple[Conversation, list[ChatAnswer]]:
    """One chat in which the model says these things."""
    conversation = Conversation(SamplingClient.saying(tokenizer, *texts))
    answers: list[ChatAnswer] = []
    messages: list[Any] = [user("What is it?")]
    for _ in texts:
        answers.append(asyncio.run(conversation.ask(messages, tools)))
        messages += [answers[-1].message, user(asked)]
    return conversation, answers


def continues(before: ChatAnswer, after: ChatAnswer) -> bool:
    ids = (*before.prompt.ids, *before.completion.token_ids)
    return after.prompt.ids[: len(ids)] == ids


def rendered(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    return list(tokenizer.encode(text, add_special_tokens=False))


# ------------------------------------------------------------------------------------------------ any text, any ids


@pytest.mark.parametrize("kind", TOKENIZERS, ids="/".join)
@settings(max_examples=15)
@given(data=st.data())
def test_sampled_ids_are_never_changed_whatever_the_template_does(kind, data) -> None:
    tokenizer = TOKENIZERS[kind]
    end, size = tokenizer.eos_token_id, len(tokenizer)
    ids = st.lists(st.integers(0, size - 1), min_size=1, max_size=12)  # no tokenizer would write most of these
    texts = st.text(st.sampled_from("ab .\n<>é😀"), min_size=1, max_size=12)
    canonical = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    thoughts = texts.map(lambda text: tokenizer.encode(f"<think>{text}</think>\n\n{text}", add_special_tokens=False))
    completion = st.tuples(ids | canonical | thoughts, st.sampled_from([[], [end]])).map(
        lambda parts: [*parts[0], *parts[1]]
    )

    client = SamplingClient(tokenizer, lambda _: data.draw(completion))
    conversation = Conversation(client)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, user("What?")]
    for _ in range(3):
        before = len(messages)
        answer = asyncio.run(conversation.ask(messages))
        messages += [answer.message, user(data.draw(texts))]
        if answer.prompt.before is None:  # then it is what the template makes of the messages, encoded whole
            assert list(answer.prompt.ids) == rendered(tokenizer, messages[:before])
    joined = join_turns(conversation.turns)
    assert [turn.completion for turn in conversation.turns] == client.completions
    assert [turn.prompt_ids for turn in conversation.turns] == client.prompts
    assert len(joined.segments) <= 1 + conversation.metrics["new_segments"]
    # (a rewritten prompt that happens to begin with the very same ids is joined all the same)
    sampled = [segment.token_ids[i] for segment in joined.segments for i in segment.sampled_positions]
    assert sampled == [token for made in client.completions for token in made.token_ids]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["The answer is five.", "é😀", "a\n\nb", "line\n", " spaced"])
def test_what_the_template_adds_is_encoded_as_in_the_whole(family, text) -> None:
    tokenizer = TOKENIZERS[family, "chatml"]
    _, answers = chat(tokenizer, text, "so", "yes", asked=" Is it?\n")
    messages: list[Any] = [user("What is it?")]
    for before, answer in pairwise(answers):
        messages += [{"role": "assistant", "content": before.text}, user(" Is it?\n")]
        added = answer.prompt.ids[len(before.prompt.ids) + len(before.completion.token_ids) :]
        assert list(added) == rendered(tokenizer, messages)[-len(added) :]


def test_an_answer_that_was_cut_off_is_closed_by_the_template() -> None:
    tokenizer = TOKENIZERS["byte level", "chatml"]
    ids = tokenizer.encode("The answer is", add_special_tokens=False)
    conversation = Conversation(SamplingClient(tokenizer, lambda _: ids))
    first = asyncio.run(conversation.ask([user("a")]))
    second = asyncio.run(conversation.ask([user("a"), first.message, user("b")]))
    assert first.finish_reason == "length"
    added = second.prompt.ids[len(first.prompt.ids) + len(ids) :]
    assert tokenizer.decode(added) == "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


# ------------------------------------------------------------------------------------------------ rewritten history


def test_white_space_that_the_template_trims_stays_as_sampled() -> None:
    conversation, answers = chat(make_tokenizer(template=TRIMS), "\n five. \n", "six", "seven")
    assert conversation.metrics["new_segments"] == 0
    assert len(join_turns(conversation.turns).segments) == 1
    assert "\n five. \n<|im_end|>" in make_tokenizer().decode(answers[2].prompt.ids)


def test_stripped_thoughts_begin_a_segment() -> None:
    tokenizer = make_tokenizer(template=STRIPS_THOUGHTS)
    conversation, answers = chat(tokenizer, "<think>\nhm\n</think>\n\nfive", "six", "seven")
    assert [continues(*pair) for pair in pairwise(answers)] == [False, True]
    assert conversation.metrics["new_segments"] == conversation.metrics["rewritten_history"] == 1
    assert len(join_turns(conversation.turns).segments) == 2
    assert "hm" not in tokenizer.decode(answers[1].prompt.ids)
    conversation, _ = chat(TOKENIZERS["byte level", "counts"], "five", "six", "seven")  # its beginning changes
    assert conversation.metrics["rewritten_history"] == 2
    assert len(join_turns(conversation.turns).segments) == 3


ASKED, SAID, MORE = user("What is it?"), {"role": "assistant", "content": "five"}, user("And now?")


@pytest.mark.parametrize(
    "history",
    [
        [ASKED, {"role": "assistant", "content": "six"}, MORE],
        [user("What was it?"), SAID, MORE],
        [MORE],
        [{"role": "system", "content": "!"}, ASKED, SAID, MORE],
    ],
    ids=["another answer", "another question", "forgotten", "another system"],
)
def test_a_history_that_the_caller_changed_is_encoded_whole(history) -> None:
    tokenizer = make_tokenizer()
    conversation = Conversation(SamplingClient.saying(tokenizer, "five", "so"))
    asyncio.run(conversation.ask([ASKED]))
    second = asyncio.run(conversation.ask(history))
    assert list(second.prompt.ids) == rendered(tokenizer, history)
    assert (conversation.metrics["new_segments"], conversation.metrics["rewritten_history"]) == (1, 0)


# ------------------------------------------------------------------------------------------------ tools


def test_a_tool_call_goes_back_as_it_was_written() -> None:
    tokenizer = make_tokenizer()
    conversation = Conversation(SamplingClient.saying(tokenizer, f"I add.\n{CALL}", "five"))
    messages: list[Any] = [user("2 + 3?")]
    first = asyncio.run(conversation.ask(messages, TOOLS))
    assert first.finish_reason == "tool_calls"
    assert first.calls == (ToolCall("add", {"a": 2, "b": 3}),)
    (call,) = first.message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    # A client's library adds fields that say nothing, and keeps the rest.
    message = {**first.message, "refusal": None, "function_call": None}
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
    second = asyncio.run(conversation.ask(messages, TOOLS))
    assert second.finish_reason == "stop"
    assert continues(first, second)
    assert tokenizer.decode(second.prompt.ids).count('{"arguments":{"a":2,  "b":3},"name":"add"}') == 1


def test_a_template_that_wants_to_see_the_call_itself_is_obeyed() -> None:
    tokenizer = make_tokenizer(template=ALTERNATES)
    written = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'  # as the template writes it
    conversation = Conversation(SamplingClient.saying(tokenizer, written, "five"))
    first = asyncio.run(conversation.ask([user("2 + 3?")], TOOLS))
    result = {"role": "tool", "tool_call_id": "call0000000", "content": "5"}
    second = asyncio.run(conversation.ask([user("2 + 3?"), first.message, result], TOOLS))
    assert continues(first, second)


def test_a_template_that_knows_no_tools_has_them_in_the_system_message() -> None:
    plain = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    tokenizer = make_tokenizer(template=plain + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    conversation = Conversation(SamplingClient.saying(tokenizer, CALL, "five"))
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, user("2 + 3?")]
    first = asyncio.run(conversation.ask(messages, TOOLS))
    assert first.prompt.text.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    assert '"description": "Adds."' in first.prompt.text
    second = asyncio.run(conversation.ask([*messages, first.message, {"role": "tool", "content": "5"}], TOOLS))
    assert continues(first, second)
    alone = Conversation(SamplingClient.saying(tokenizer)).prompt([user("2 + 3?")], TOOLS)
    assert alone.text.startswith("<|im_start|>system\nYou may call")


@pytest.mark.parametrize(
    ("text", "content", "names", "malformed"),
    [
        ("no call", "no call", [], 0),
        ('a<tool_call>{"name": "f", "arguments": {}}</tool_call>b', "ab", ["f"], 0),
        (
            '<tool_call>{"name": "f"}</tool_call><tool_call>\n{"name": "g", "arguments": {"x": "}"}}\n</tool_call>',
            "",
            "fg",
            0,
        ),
        ('<tool_call>{"name": "f", "arguments": {}}', "", ["f"], 0),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', [], 1),
        ('<tool_call>[1]</tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>[1]</tool_call>", ["f"], 1),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, [], 1),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, [], 1),
        ("<tool_call>" + "[" * 100_000, None, [], 1),
    ],
)
def test_tool_calls_in_a_text(text, content, names, malformed) -> None:
    parsed = parse_tool_calls(text)
    assert parsed.content == (text if content is None else content)
    assert [call.name for call in parsed.calls] == list(names)
    assert parsed.malformed == malformed


# ------------------------------------------------------------------------------------------------ several at once


def test_one_question_asked_twice_has_two_answers_and_either_can_go_on() -> None:
    tokenizer = make_tokenizer()
    conversation = Conversation(SamplingClient.saying(tokenizer, "five", "six", "a", "b", "c"))

    async def both() -> list[ChatAnswer]:
        return await asyncio.gather(*(conversation.ask([user("?")]) for _ in range(2)))

    first, second = asyncio.run(both())
    after_second = asyncio.run(conversation.ask([user("?"), second.message, user("!")]))
    after_first = asyncio.run(conversation.ask([user("?"), first.message, user("!")]))
    other_branch = asyncio.run(conversation.ask([user("?"), first.message, user("?!")]))
    order = [first, after_first, other_branch, second, after_second]
    assert [turn.completion for turn in conversation.turns] == [answer.completion for answer in order]
    assert conversation.metrics["new_segments"] == 2
    assert len(join_turns(conversation.turns).segments) == 3


def test_an_answer_whose_predecessor_is_withdrawn_meanwhile_is_a_chat_of_its_own() -> None:
    conversation = Conversation(SamplingClient.saying(make_tokenizer(), "five", "six"))
    first = asyncio.run(conversation.ask([user("?")]))

    async def withdrawn() -> ChatAnswer:
        going_on = asyncio.create_task(conversation.ask([user("?"), first.message, user("!")]))
        await asyncio.sleep(0)
        conversation.answers.remove(first)
        return await going_on

    second = asyncio.run(withdrawn())
    assert continues(first, second)
    (turn,) = conversation.turns
    assert (turn.prompt_ids, turn.completion) == (second.prompt.ids, second.completion)
    assert conversation.metrics["new_segments"] == 0


# ------------------------------------------------------------------------------------------------ what can't be


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "there are none"),
        ([{"content": "?"}], "role"),
        ([{"role": "user", "content": 3}], "content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type `text`"),
        ([{"role": "assistant", "tool_calls": [{}]}], "tool_calls"),
        ([{"role": "tool", "content": "5"}], "a result of no call"),
        (None, "no chat template"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_in_one_line(messages, what) -> None:
    template = None if messages is None else ALTERNATES
    conversation = Conversation(SamplingClient.saying(make_tokenizer(template=template)))
    with one_line(RequestError, match=what):
        conversation.prompt([user("?")] if messages is None else messages)


# ------------------------------------------------------------------------------------------------ special tokens are text


MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("template", ["chatml", "strips thoughts"])
def test_markers_are_text_also_if_they_are_special_tokens(family: str, template: str) -> None:
    """What callers see, and what later turns contain, is the same as with ordinary tokens."""
    seen = []
    for special in (True, False):
        tokenizer = make_tokenizer(family, TEMPLATES[template])
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS)})
        conversation, (first, second) = chat(tokenizer, f"<think>hm</think>{CALL}", "It is 5.", tools=TOOLS)
        assert text_decoder(tokenizer)(first.completion.answer_ids) == first.text
        assert first.calls == (ToolCall("add", {"a": 2, "b": 3}),)
        assert conversation.metrics["malformed_tool_calls"] == 0
        seen.append((first.text, first.message, second.prompt.text, second.message))
    assert seen[0] == seen[1]
    assert seen[0][1]["content"] == "<think>hm</think>"
