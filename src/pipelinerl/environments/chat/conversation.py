"""Chats in token ids: messages go in, exact ids go to the model, and what it sampled is never encoded again.

The next prompt of a conversation is

    the ids of the prompt before  +  the ids that were sampled, as they were  +  the ids of what the template adds after them

The tokenizer's chat template decides whether that is possible. It is rendered over the whole history, with the model's
answers replaced by exactly what was sampled. If the rendering begins with the rendering before and what was sampled, the
rest is what the template adds, and it alone is encoded. Where it doesn't begin so, the history has been rewritten: by the
template (it strips the thoughts of earlier turns, or says what time it is), or by the caller. The prompt is then encoded
anew, whole. Training sees a new segment there (`preprocess/turns.py`), and `new_segments` counts it.

White space at the edges of an answer that the template trims is no rewriting: the model sees the ids that it sampled.
Where the template does nothing with tools, they are described in the system message (`describe_tools`).

    conversation = Conversation(client)
    answer = await conversation.ask(messages, tools)
    answer.message, answer.finish_reason ...
    return Rollout(turns=conversation.turns, reward=..., metrics=conversation.metrics)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipelinerl.environments.chat.messages import (
    ChatMessage,
    ParsedText,
    PlainMessage,
    ToolCall,
    ToolParser,
    ToolSchema,
    answer_message,
    describe_tools,
    parse_tool_calls,
    plain_message,
    same_messages,
)
from pipelinerl.environments.prompts import encode_prompt, has_chat_template
from pipelinerl.errors import RequestError
from pipelinerl.interfaces import GenerationClient
from pipelinerl.types import Completion, Turn


@dataclass(frozen=True, eq=False)
class Prompt:
    """What the model is to be asked: `ids`, which read as `text`.

    `given` are the caller's messages, `rendered` those that the template was rendered with. `before` is the turn that this
    continues, `rewritten` says that there was one but the template has changed it.
    """

    ids: tuple[int, ...]
    text: str
    given: tuple[PlainMessage, ...] = ()
    rendered: tuple[PlainMessage, ...] = ()
    with_tools: bool = False
    before: Answer | None = None
    rewritten: bool = False


@dataclass(frozen=True, eq=False)
class Answer:
    """What the model said. `text` is without special tokens, `message` what was read from it, for the caller to send back.

    `sampled` is the text with special tokens, but for the one that ended it, which is `ended_by` ("" if it was cut off).
    """

    prompt: Prompt
    completion: Completion
    text: str
    message: PlainMessage
    calls: tuple[ToolCall, ...]
    malformed_calls: int
    sampled: str
    ended_by: str
    next: list[Answer] = field(default_factory=list, repr=False)

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """As OpenAI's API says it."""
        if self.completion.finish_reason == "stop":
            return "tool_calls" if self.calls else "stop"
        return "length"

    @property
    def turn(self) -> Turn:
        return Turn(prompt_ids=self.prompt.ids, completion=self.completion, text=self.text)


class Conversation:
    """All chats of one rollout: one that goes on from call to call, or several, also at the same time.

    Which chat a call continues is seen from its messages, so callers need not say. `template_options` go to the chat
    template (such as `enable_thinking`); `parser` finds the tool calls in a text, if tools were offered.
    """

    def __init__(
        self,
        client: GenerationClient,
        *,
        template_options: Mapping[str, Any] | None = None,
        parser: ToolParser = parse_tool_calls,
    ) -> None:
        self._client = client
        self._tokenizer = client.tokenizer
        self._options = dict(template_options or {})
        self._parser = parser
        self._answers: list[Answer] = []
        self._first: list[Answer] = []  # those that continue nothing
        self._template_shows_tools: bool | None = None

    async def ask(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = (), *, max_tokens: int | None = None
    ) -> Answer:
        """One call of the model. Raises RequestError for messages that can't be rendered, PromptTooLongError."""
        return await self._generate(self.prompt(messages, tools), max_tokens)

    async def continue_text(self, text: str, *, max_tokens: int | None = None) -> Answer:
        """The same for a plain text, which the model continues. Each such call is a conversation of its own."""
        try:
            ids = encode_prompt(self._tokenizer, text)
        except Exception as error:  # as in `_encode`
            raise RequestError(f"the model's tokenizer can't encode the prompt: {error}") from error
        return await self._generate(Prompt(ids, text), max_tokens)

    async def continue_ids(self, ids: Sequence[int], *, max_tokens: int | None = None) -> Answer:
        """The same for token ids, of a caller that keeps them itself."""
        return await self._generate(Prompt(tuple(ids), ""), max_tokens)

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Prompt:
        """The exact ids for these messages, in continuation of an earlier turn where that is what they are.

        Raises RequestError if the template refuses them, or if there is none.
        """
        if not has_chat_template(self._tokenizer):
            raise RequestError("the model's tokenizer has no chat template: give the prompt as plain text")
        if not messages:
            raise RequestError("messages: there are none")
        given = tuple(map(plain_message, messages))
        before = self._continued(given)
        if before is not None:
            for prompt in self._continuations(before, given, tools):
                return prompt
        text = self._render(given, tools)
        return Prompt(self._encode(text), text, given, given, bool(tools), rewritten=before is not None)

    def record(self, prompt: Prompt, completion: Completion) -> Answer:
        """Note what came of a prompt. `ask` does it."""
        ids = list(completion.token_ids)
        stop = ids[-1:] if completion.finish_reason == "stop" else []
        text = self._decode(ids, skip_special_tokens=True)
        parsed = self._parser(text) if prompt.with_tools else ParsedText(text)
        answer = Answer(
            prompt=prompt,
            completion=completion,
            text=text,
            message=answer_message(parsed, f"call{len(self._answers):05}"),
            calls=parsed.calls,
            malformed_calls=parsed.malformed,
            sampled=self._decode(ids[: len(ids) - len(stop)]),
            ended_by=self._decode(stop),
        )
        self._answers.append(answer)
        (self._first if prompt.before is None else prompt.before.next).append(answer)
        return answer

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All calls so far, each after the one that it continues; conversations one after the other."""
        return tuple(answer.turn for first in self._first for answer in _in_order(first))

    @property
    def metrics(self) -> dict[str, float]:
        """For the rollout. `new_segments` counts turns (after the first) that continue no other turn's ids.

        `rewritten_history`: those of them which would have, had the template not changed what was said before.
        """
        branches = sum(max(0, len(answer.next) - 1) for answer in self._answers)
        return {
            "turns": float(len(self._answers)),
            "new_segments": float(max(0, len(self._first) - 1) + branches),
            "rewritten_history": float(sum(answer.prompt.rewritten for answer in self._answers)),
            "malformed_tool_calls": float(sum(answer.malformed_calls for answer in self._answers)),
        }

    # ------------------------------------------------------------------------------------------------------ how

    async def _generate(self, prompt: Prompt, max_tokens: int | None) -> Answer:
        return self.record(prompt, await self._client.generate(prompt.ids, max_tokens=max_tokens))

    def _continued(self, given: Sequence[PlainMessage]) -> Answer | None:
        """The latest answer that these messages go on from: they repeat its prompt's messages, and it, word by word."""
        found: Answer | None = None
        for answer in reversed(self._answers):
            known = len(answer.prompt.given)
            if known and (found is None or known > len(found.prompt.given)) and len(given) > known:
                said = plain_message(answer.message)
                if same_messages(given[: known + 1], (*answer.prompt.given, said)):
                    found = answer
        return found

    def _continuations(
        self, before: Answer, given: tuple[PlainMessage, ...], tools: Sequence[ToolSchema]
    ) -> Iterator[Prompt]:
        """Prompts that continue `before` by ids. The answer is rendered as it was sampled; failing that as it was parsed,
        for templates that accept no answers of a tool that was not called."""
        known = len(before.prompt.given)
        sampled: PlainMessage = {"role": "assistant", "content": before.sampled}
        for said in (sampled, given[known]):
            rendered = (*before.prompt.rendered, said, *given[known + 1 :])
            try:
                text = self._render(rendered, tools)
            except RequestError:
                continue
            added = _added(text, before)
            if added is not None:
                ids = (*before.prompt.ids, *before.completion.token_ids, *self._encode_after(before, added))
                yield Prompt(ids, text, given, rendered, bool(tools), before)

    def _render(self, messages: Sequence[PlainMessage], tools: Sequence[ToolSchema]) -> str:
        if tools and not self._shows_tools(tools):
            messages, tools = _with_description(messages, describe_tools(tools)), ()
        return self._apply(messages, tools)

    def _shows_tools(self, tools: Sequence[ToolSchema]) -> bool:
        """Whether the template does anything with tools."""
        if self._template_shows_tools is None:
            question: PlainMessage = {"role": "user", "content": "?"}
            self._template_shows_tools = self._apply([question], tools) != self._apply([question], ())
        return self._template_shows_tools

    def _apply(self, messages: Sequence[PlainMessage], tools: Sequence[ToolSchema]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except Exception as error:  # the template is a program of the model's, which raises what it likes
            what = " ".join(str(error).split())
            raise RequestError(f"messages: the model's chat template refuses them: {what}") from error
        return str(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        """Of a rendering: the template has written all special tokens itself."""
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # tokenizers raise plain exceptions for characters they don't have
            raise RequestError(f"the model's tokenizer can't encode the prompt: {error}") from error

    def _encode_after(self, before: Answer, added: str) -> tuple[int, ...]:
        """Of what follows an answer. Behind the token that ended it, if there is one: some tokenizers put a space in front
        of what they take for the beginning of a text."""
        if before.ended_by:
            ids = self._encode(before.ended_by + added)
            if ids[:1] == before.completion.token_ids[-1:]:
                return ids[1:]
        return self._encode(added)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) if ids else ""


def _added(text: str, before: Answer) -> str | None:
    """What `text` says after the turn `before`; None if it doesn't begin with that."""
    said = before.sampled
    for body in (said, said.lstrip(), said.rstrip(), said.strip()):
        known = before.prompt.text + body + before.ended_by
        if text.startswith(known):
            return text[len(known) :]
    return None


def _with_description(messages: Sequence[PlainMessage], described: str) -> list[PlainMessage]:
    """The messages with this at the end of the system message."""
    has_one = messages[0]["role"] == "system"
    first, rest = (messages[0], messages[1:]) if has_one else ({"role": "system", "content": ""}, messages)
    content = f"{first['content']}\n\n{described}" if first["content"] else described
    return [{**first, "content": content}, *rest]


def _in_order(answer: Answer) -> Iterator[Answer]:
    """An answer and all that continues it, the first to do so at once after it."""
    pending = [answer]
    while pending:
        one = pending.pop()
        yield one
        pending += reversed(one.next)
