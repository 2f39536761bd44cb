"""Multi-turn chats with exact token ids: sampled tokens are never decoded and encoded again.

The next prompt of a conversation is

    the ids of the previous prompt  +  the sampled ids, unchanged  +  the ids of the text that the template adds after them

Whether this is possible depends on the chat template. The template is rendered over the whole history, with the model's
answers replaced by the exact sampled text. If the rendering starts with the previous rendering plus the sampled text, only
the rest is encoded. If not, the history was rewritten: by the template (it strips the reasoning of earlier turns, or inserts
the time) or by the caller. The whole prompt is then encoded again, training gets a new segment (`preprocess/turns.py`), and
`new_segments` counts it.

If the template only trims white space around an answer, the history is not considered rewritten: the model keeps the ids
that it sampled. If the template ignores tools, `render` describes them in the system message.

    conversation = Conversation(client)
    answer = await conversation.ask(messages, tools)
    answer.message, answer.finish_reason ...
    return Rollout(turns=conversation.turns, reward=..., metrics=conversation.metrics)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipelinerl.environments.chat.messages import (
    ChatMessage,
    ParsedText,
    PlainMessage,
    ToolCall,
    ToolSchema,
    answer_message,
    encode_text,
    parse_tool_calls,
    plain_message,
    render,
    same_messages,
)
from pipelinerl.environments.prompts import has_chat_template, text_decoder
from pipelinerl.errors import RequestError
from pipelinerl.interfaces import GenerationClient
from pipelinerl.types import Completion, Turn


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
            if known and (found is None or known > len(found.prompt.given)) and len(given) > known:
                message = plain_message(answer.message)
                if same_messages(given[: known + 1], (*answer.prompt.given, message)):
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
