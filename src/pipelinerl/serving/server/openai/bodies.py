"""Request bodies of OpenAI's API: the supported fields, and the known fields that are refused.

Unknown keys are ignored, because clients send many. A known key that would change the result is refused if it is not
supported.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.http import MAX_STOP_STRING, MAX_STOPS, check_sampling, decoded
from pipelinerl.types import SamplingParams

_HARMLESS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "priority": (0,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "reasoning_effort": (),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}
"""Known keys that are not supported, and the values without effect that are accepted (besides null)."""

NOT_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of `apply_chat_template` that are not variables of the template."""

BodyT = TypeVar("BodyT", bound="Body")


def read_body(data: bytes, body_type: type[BodyT]) -> BodyT:
    """Decode a body. Raises RequestError if it is malformed, or uses a key that is not supported."""
    body = decoded(data, body_type)
    for name, raw in decoded(data, dict[str, msgspec.Raw]).items():
        if name not in _HARMLESS or name in body_type.__struct_fields__:
            continue
        if (value := decoded(bytes(raw), object)) is not None and value not in _HARMLESS[name]:
            raise RequestError(f"{name}: this server does not support it; leave it out")
    return body


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both endpoints. Beyond OpenAI's: `top_k`, `stop_token_ids`, `ignore_eos`, `return_token_ids`,
    `return_weight_versions`.
    """

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_weight_versions: bool = False

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self, *, default: int, end_ids: tuple[int, ...]) -> SamplingParams:
        """The sampling parameters. `default`: the token limit if the body has none. `end_ids`: the model's end tokens.

        Raises RequestError for values out of range.
        """
        if len(self.stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_STRING for stop in self.stops):
            raise RequestError(f"stop: give at most {MAX_STOPS} strings of 1 to {MAX_STOP_STRING} characters")
        most = self.most_tokens
        sampling = SamplingParams(
            max_tokens=max(1, default) if most is None else most,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k in (None, -1) else self.top_k,  # many clients send -1 for "off"
            stop_token_ids=(*(() if self.ignore_eos else end_ids), *(self.stop_token_ids or ())),
            seed=self.seed,
        )
        check_sampling(sampling)
        return sampling


class CompletionBody(Body, frozen=True, kw_only=True):
    """`prompt`: a text or token ids (or a list of one of these). `logprobs`: only 0, for the chosen tokens."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        if self.logprobs:
            raise RequestError(
                f"logprobs {self.logprobs}: this server returns only the log-probability of the chosen token; give 0"
            )
        return self.logprobs is not None

    @property
    def one_prompt(self) -> str | list[int]:
        """The text, or the token ids. Raises RequestError for several prompts."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]  # type: ignore[assignment]
        if isinstance(prompt, str):
            return prompt
        ids = [item for item in prompt if isinstance(item, int)]
        if len(ids) != len(prompt):
            raise RequestError("prompt: give one text or one list of token ids; send several prompts as several requests")
        return ids


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None

    def for_template(self) -> dict[str, str]:
        """The message for the chat template. Raises RequestError for tool calls, and for parts that are not text."""
        if self.tool_calls:
            raise RequestError("tool_calls: this server does not support tools")
        parts = self.content
        for part in parts if isinstance(parts, list) else ():
            if part.type != "text":
                raise RequestError(f"messages: a part of type {part.type!r}: this server accepts only text")
        content = "".join(part.text for part in parts) if isinstance(parts, list) else parts or ""
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name else {})


class AnyChatBody(Body, frozen=True, kw_only=True):
    """Fields of every chat."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatBody(AnyChatBody, frozen=True, kw_only=True):
    """`chat_template_kwargs`: variables of the model's chat template, such as Qwen3's `enable_thinking`.

    If `add_generation_prompt` is false, the prompt ends with the last message. With `continue_final_message` too, that
    message is left open, and the model continues it.
    """

    messages: list[Message]
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def template_options(self) -> dict[str, Any]:
        """Arguments for the chat template. Raises RequestError for those that are not variables of the template."""
        options = self.chat_template_kwargs or {}
        if taken := sorted(NOT_VARIABLES & options.keys()):
            raise RequestError(f"chat_template_kwargs: {taken[0]} is not a variable of the chat template; leave it out")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError("continue_final_message: it requires add_generation_prompt false; set that too")
        return {
            **options,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)
