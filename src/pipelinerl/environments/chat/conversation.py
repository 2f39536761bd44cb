"""Multi-turn chats with exact token ids: sampled tokens are never decoded and encoded again.

The next prompt of a conversation is

    the ids of the previous prompt  +  the sampled ids, unchanged  +  the ids of the text that the template adds after them

Whether this is possible depends on the chat template. The template is rendered over the whole history, with the model's
answers replaced by the exact sampled text. If the rendering starts with the previous rendering plus the sampled text, only
the rest is encoded. If not, the history was rewritten: by the template (it strips the reasoning of earlier turns, or inserts
the time) or by the caller. The whole prompt is then encoded again, training gets a new segment (`preprocess/`), and
`new_segments` counts it.

If the template only trims white space around an answer, the history is not considered rewritten: the model keeps the ids
that it sampled. If the template ignores tools, `render` describes them in the system message.

    conversation = Conversation(client)
    answer = await conversation.ask(messages, tools)
    answer.message, answer.finish_reason ...
    return Rollout(turns=conversation.turns, reward=..., metrics=conversation.metrics)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pipelinerl.environments.prompts import text_decoder
from pipelinerl.errors import RequestError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.models.encoding import encode_prompt, has_chat_template
from pipelinerl.types import Completion, Turn

# ---- tool calls in generated text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as in Hermes and Qwen

ToolSchema = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`"""

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class ParsedText(NamedTuple):
    """`content` is the text without the calls. Malformed calls stay in it and are counted."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: int = 0


def parse_tool_calls(text: str) -> ParsedText:
    """The calls in a text, in order. An unclosed block counts if it is complete JSON: some models stop there."""
    calls: list[ToolCall] = []
    content: list[str] = []
    malformed = read = 0
    for block in _BLOCK.finditer(text):
        try:
            value = json.loads(block[1])
        except (ValueError, RecursionError):
            value = None
        name, arguments = (value.get("name"), value.get("arguments", {})) if isinstance(value, dict) else (None, None)
        if not (name and isinstance(name, str) and isinstance(arguments, dict)):
            malformed += 1
            continue
        calls.append(ToolCall(name, arguments))
        content.append(text[read : block.start()])
        read = block.end()
    content.append(text[read:])
    whole = "".join(content)
    return ParsedText(whole.strip() if calls else whole, tuple(calls), malformed)


ChatMessage = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`; also with `tool_calls` (role `assistant`) or `tool_call_id` (role `tool`)."""
PlainMessage = dict[str, Any]

_KEPT = ("name", "tool_call_id", "reasoning_content")


def plain_message(message: ChatMessage) -> PlainMessage:
    """The form that templates expect: content is one text, arguments of tool calls are objects, and no field is null.

    Raises RequestError for a message that isn't text.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("messages: each must have a `role`")
    plain: PlainMessage = {"role": role, "content": _text(message.get("content"))}
    plain |= {key: message[key] for key in _KEPT if message.get(key) is not None}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def answer_message(parsed: ParsedText, id_prefix: str) -> PlainMessage:
    """The model's answer as a message of OpenAI's API, with `arguments` as JSON text."""
    message: PlainMessage = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {
                "id": f"{id_prefix}{number:02}",  # some templates require at least nine letters and digits
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for number, call in enumerate(parsed.calls)
        ]
    return message


def _same(one: PlainMessage, other: PlainMessage) -> bool:
    """Whether these are the same. Answers are compared by text and calls only: callers drop ids, or strip the text."""
    if not one["role"] == other["role"] == "assistant":
        return one == other
    calls, others = ([call["function"] for call in message.get("tool_calls", ())] for message in (one, other))
    return bool(one["content"].strip() == other["content"].strip() and calls == others)


# ---- in the model's chat template, and as ids


def render(
    tokenizer: Tokenizer, messages: Sequence[PlainMessage], tools: Sequence[ToolSchema], options: Mapping[str, Any]
) -> str:
    """The messages in the model's chat template; `options` go to `apply_chat_template`.

    If the template ignores tools, they are described in the system message. Raises RequestError if it refuses the messages.
    """
    if tools:
        question: list[PlainMessage] = [{"role": "user", "content": "?"}]
        if _apply(tokenizer, question, tools, options) == _apply(tokenizer, question, (), options):
            described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = (
                f"You may call these functions, described as JSON:\n<tools>\n{described}\n</tools>\n"
                'To call one, write\n<tool_call>\n{"name": "its name", "arguments": {"an argument": "its value"}}\n'
                "</tool_call>\nand end your turn: the next message has the result."
            )
            tools = ()
            if messages[0]["role"] == "system":
                content = "\n\n".join(filter(None, [messages[0]["content"], system]))
                messages = [{**messages[0], "content": content}, *messages[1:]]
            else:
                messages = [{"role": "system", "content": system}, *messages]
    return _apply(tokenizer, messages, tools, options)


def encode_text(tokenizer: Tokenizer, text: str, *, special: bool = False) -> tuple[int, ...]:
    """The ids of a text; `special`: with the tokens that the model expects before it. Raises RequestError."""
    try:
        return encode_prompt(tokenizer, text) if special else tuple(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # tokenizers raise plain exceptions for characters that they can't encode
        raise RequestError(f"the model's tokenizer can't encode the prompt: {error}") from error


def _apply(
    tokenizer: Tokenizer, messages: Sequence[PlainMessage], tools: Sequence[ToolSchema], options: Mapping[str, Any]
) -> str:
    shown = [dict(tool) for tool in tools] or None
    try:
        return str(tokenizer.apply_chat_template([dict(one) for one in messages], tools=shown, tokenize=False, **options))
    except Exception as error:  # a template is code and may raise anything
        what = " ".join(str(error).split())
        raise RequestError(f"messages: the model's chat template refuses them: {what}") from error


# ---- parts of messages


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    types = [part.get("type") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    raise RequestError(
        f"messages: only text is taken: `content` is a text, or parts of type `text`, not {str(types or content)[:80]}"
    )


def _plain_call(call: Any) -> PlainMessage:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("messages: each of `tool_calls` must have a `function` with a `name`")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):  # if it isn't JSON, the template gets the text unchanged
            arguments = json.loads(arguments)
    plain = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return plain | ({"id": call["id"]} if call.get("id") is not None else {})


# ---- conversations


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt: `ids`, and `text`, the text that they encode.

    `given` are the caller's messages; `rendered` are the messages that the template got. `before` is the answer that
    this prompt continues by ids. `rewritten`: the messages continue an answer, but the history was rewritten.
    """

    ids: tuple[int, ...]
    text: str
    given: tuple[PlainMessage, ...] = ()
    rendered: tuple[PlainMessage, ...] = ()
    with_tools: bool = False
    before: ChatAnswer | None = None
    rewritten: bool = False


@dataclass(frozen=True, eq=False)
class ChatAnswer:
    """An answer of the model. `text` is as from `text_decoder`; `message` is parsed from it, for the caller to send back.

    `sampled` is the text of all ids but the stop token, which is `ended_by` ("" if it was cut off).
    `stop`: the stop string of the caller that ended it; `text` excludes it.
    """

    prompt: Prompt
    completion: Completion
    text: str
    message: PlainMessage
    calls: tuple[ToolCall, ...]
    malformed_calls: int
    sampled: str
    ended_by: str
    stop: str | None = None

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """As in OpenAI's API."""
        if self.stop is not None or self.completion.finish_reason == "stop":
            return "tool_calls" if self.calls else "stop"
        return "length"


class Conversation:
    """All chats of one rollout: one or several, which may be concurrent.

    A call's messages determine which chat it continues. `template_options` are passed to the chat template (such as
    `enable_thinking`). `answers` are the calls so far, in order.
    """

    def __init__(self, client: GenerationClient, *, template_options: Mapping[str, Any] | None = None) -> None:
        self.answers: list[ChatAnswer] = []
        self._client = client
        self._tokenizer = client.tokenizer
        self._text, self._whole_text = (text_decoder(client.tokenizer, special=special) for special in (False, True))
        self._options = {"add_generation_prompt": True, **(template_options or {})}
        self._made = 0  # by `answer_of`

    async def ask(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = (), *, max_tokens: int | None = None
    ) -> ChatAnswer:
        """One call of the model. Raises RequestError for messages that can't be rendered, and PromptTooLongError."""
        prompt = self.prompt(messages, tools)
        answer = self.answer_of(prompt, await self._client.generate(prompt.ids, max_tokens=max_tokens))
        self.answers.append(answer)
        return answer

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Prompt:
        """The exact ids for these messages, continuing an earlier turn where possible.

        Raises RequestError if the template refuses the messages, or if there is no template.
        """
        if not has_chat_template(self._tokenizer):
            raise RequestError("the model's tokenizer has no chat template: give the prompt as plain text")
        if not messages:
            raise RequestError("messages: there are none")
        given = tuple(map(plain_message, messages))
        before = self._find_previous(given)
        if before is not None and (prompt := self._continuation(before, given, tools)):
            return prompt
        text = render(self._tokenizer, given, tools, self._options)
        return Prompt(encode_text(self._tokenizer, text), text, given, given, bool(tools), rewritten=before is not None)

    def plain_prompt(self, ids: Sequence[int], text: str = "") -> Prompt:
        """A prompt that is no chat. It continues the answer with the most ids, if it begins with all ids of one."""
        given = tuple(ids)

        def known(answer: ChatAnswer) -> int:
            whole = (*answer.prompt.ids, *answer.completion.token_ids)
            return len(whole) if given[: len(whole)] == whole else 0

        before = max(self.answers, key=known, default=None)
        return Prompt(given, text, before=before if before is not None and known(before) else None)

    def answer_of(
        self, prompt: Prompt, completion: Completion, text: str | None = None, stop: str | None = None
    ) -> ChatAnswer:
        """The completion of a prompt as an answer, which is not one of `answers` yet.

        `text` is what the caller gets to see, if the stop string `stop` ended the completion: the text before it.
        """
        ids = completion.answer_ids
        text = self._text(ids) if text is None else text
        parsed = parse_tool_calls(text) if prompt.with_tools else ParsedText(text)
        self._made += 1
        return ChatAnswer(
            prompt=prompt,
            completion=completion,
            text=text,
            message=answer_message(parsed, f"call{self._made - 1:05}"),
            calls=parsed.calls,
            malformed_calls=parsed.malformed,
            sampled=self._whole_text(ids),
            ended_by=self._whole_text(completion.token_ids[len(ids) :]),
            stop=stop,
        )

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All calls so far, chat by chat; each call follows the call that it continues."""
        paths: dict[ChatAnswer | None, tuple[int, ...]] = {None: ()}
        for number, answer in enumerate(self.answers):
            paths[answer] = (*paths.get(answer.prompt.before, ()), number)
        ordered = sorted(self.answers, key=paths.__getitem__)
        return tuple(Turn(prompt_ids=one.prompt.ids, completion=one.completion, text=one.text) for one in ordered)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the rollout. `new_segments` counts turns after the first that do not extend another turn's ids.

        `rewritten_history` counts those of them whose messages continue a turn, but whose history was rewritten.
        """
        return {
            "turns": float(len(self.answers)),
            "new_segments": float(len(self.answers) - len({answer.prompt.before for answer in self.answers})),
            "rewritten_history": float(sum(answer.prompt.rewritten for answer in self.answers)),
            "malformed_tool_calls": float(sum(answer.malformed_calls for answer in self.answers)),
        }

    def _find_previous(self, given: Sequence[PlainMessage]) -> ChatAnswer | None:
        """The answer with the longest history that `given` starts with; the history includes the answer. Latest on ties."""
        found: ChatAnswer | None = None
        for answer in reversed(self.answers):
            known = len(answer.prompt.given)
            if not 0 < known < len(given) or (found is not None and known <= len(found.prompt.given)):
                continue
            if all(map(_same, (*answer.prompt.given, plain_message(answer.message)), given)):
                found = answer
        return found

    def _continuation(
        self, before: ChatAnswer, given: tuple[PlainMessage, ...], tools: Sequence[ToolSchema]
    ) -> Prompt | None:
        """The prompt that continues `before` by ids; None if the history was rewritten.

        The answer is rendered as it was sampled, or else as it was parsed, for templates that reject a tool's result without
        a parsed tool call.
        """
        known, body = len(before.prompt.given), before.sampled
        sampled: PlainMessage = {"role": "assistant", "content": body}
        for answer in (sampled, given[known]):
            rendered = (*before.prompt.rendered, answer, *given[known + 1 :])
            try:
                text = render(self._tokenizer, rendered, tools, self._options)
            except RequestError:
                continue
            for shown in (body, body.lstrip(), body.rstrip(), body.strip()):
                history = before.prompt.text + shown + before.ended_by
                if text.startswith(history):
                    added = self._encode_after(before, text[len(history) :])
                    ids = (*before.prompt.ids, *before.completion.token_ids, *added)
                    return Prompt(ids, text, given, rendered, bool(tools), before)
        return None

    def _encode_after(self, before: ChatAnswer, added: str) -> tuple[int, ...]:
        """The ids of the text `added` after an answer.

        It is encoded together with the answer's stop token, if there is one, because some tokenizers insert a space at the
        start of a text.
        """
        if before.ended_by:
            ids = encode_text(self._tokenizer, before.ended_by + added)
            if ids[:1] == before.completion.token_ids[-1:]:
                return ids[1:]
        return encode_text(self._tokenizer, added)
