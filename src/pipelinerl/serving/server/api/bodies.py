"""Request bodies of OpenAI's API: the supported fields; and the keys that are refused, by all APIs of the server.

Unknown keys of chats and completions are ignored, because clients send many. A known key that would change the result is
refused if it is not supported. The translated APIs refuse all keys that are not listed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.http import MAX_STOP_STRING, MAX_STOPS, check_sampling, decoded
from pipelinerl.types import SamplingParams

_UNSUPPORTED = """
    add_generation_prompt allowed_token_ids audio bad_words best_of chat_template chat_template_kwargs continue_final_message
    documents early_stopping echo function_call functions guided_choice guided_decoding_backend guided_grammar guided_json
    guided_regex guided_whitespace_pattern length_penalty logit_bias logprob_token_ids min_tokens modalities prediction
    priority prompt_embeds prompt_logprobs reasoning_effort suffix tool_choice tools top_logprobs truncate_prompt_tokens
    use_beam_search web_search_options
"""
"""Known keys that are refused by chats, or by completions, unless the other one has such a field."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_callers": (["direct"],),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "include": ([], ["reasoning.encrypted_content"]),  # there are no items of reasoning
    "length_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "priority": (0,),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Values of unsupported keys that have no effect. Of other keys, null, false and empty values have none."""
_IGNORED = """
    cache_control eager_input_streaming metadata prompt_cache_key prompt_cache_options prompt_cache_retention
    safety_identifier service_tier stream_options strict user
"""
"""Keys that are ignored with any value."""
WHOLE_INPUT = "nothing is stored here: send the whole input each time"
_HINTS = {
    "previous_response_id": WHOLE_INPUT,
    "conversation": WHOLE_INPUT,
    "store": "nothing is stored here: leave it out, or set it to false",
    "parallel_tool_calls": "the model may call several tools in one answer: leave it out",
    "top_logprobs": "log-probs are of the sampled tokens alone: leave it out",
}

OTHER_SAMPLING = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""Sampling parameters that this server lacks, and their neutral values. The gateway of agents may ignore them."""
MAX_CHOICES = 128

_NOT_VARIABLES = """
    add_generation_prompt chat_template continue_final_message conversation documents max_length messages padding
    return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs tools truncation
"""
"""Arguments of `apply_chat_template` that are not variables of the template."""

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def read_body(data: bytes, body_type: type[BodyT], *, strict: bool = False) -> BodyT:
    """Decode a body. Raises RequestError if it is malformed, or uses a key that is not supported; see `refuse_keys`."""
    body = decoded(data, body_type)
    refuse_keys(decoded(data, dict[str, Any]), body_type, strict=strict)
    return body


def refuse_keys(given: Mapping[str, Any], kind: type[msgspec.Struct], where: str = "", *, strict: bool) -> None:
    """Raises RequestError for a key that `kind` does not have, if its value has an effect.

    Unknown keys are refused if `strict`, otherwise ignored.
    """
    unsupported, ignored = frozenset(_UNSUPPORTED.split()), frozenset(_IGNORED.split())
    for name, value in given.items():
        if name in kind.__struct_fields__ or name in ignored or not (strict or name in unsupported):
            continue
        empty = value is False or value in ("", [], {})
        if value is not None and not (value in _NEUTRAL[name] if name in _NEUTRAL else empty):
            hint = _HINTS.get(name, "leave it out")
            raise RequestError(f"{where}{name[:60]}: this server does not support it; {hint}")


def check_stops(stops: Sequence[str]) -> None:
    """Raises RequestError for too many stop strings, or for one of the wrong length."""
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_STRING for stop in stops):
        raise RequestError(f"stop: give at most {MAX_STOPS} strings of 1 to {MAX_STOP_STRING} characters")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class Grammar(NamedTuple):
    """What an answer must follow. `source`: the regex, or JSON: a schema, or a list of tools. `key`: who asked."""

    kind: Literal["json", "regex", "tools"]
    source: str
    key: str


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    json: dict[str, Any] | None = None
    regex: str | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both endpoints: OpenAI's, and those of vLLM's server that are supported."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
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

    @property
    def choices(self) -> int:
        """Number of answers to each prompt. Raises RequestError if it is out of range."""
        count = 1 if self.n is None else self.n
        if not 1 <= count <= MAX_CHOICES:
            raise RequestError(f"n {count}: give 1 to {MAX_CHOICES}")
        return count

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must follow, if anything. Raises RequestError for more or less than one specification."""
        wanted: list[Grammar] = []
        if (format_ := self.response_format) is not None and format_.type != "text":
            schema = format_.json_schema.schema if format_.json_schema is not None else None
            if format_.type == "json_object":
                schema = {"type": "object"}
            if schema is None:
                raise RequestError("response_format: give `json_schema` with a `schema`")
            wanted.append(Grammar("json", _json(schema), "response_format"))
        if (outputs := self.structured_outputs) is not None:
            if (outputs.json is None) == (outputs.regex is None):
                raise RequestError("structured_outputs: give either `json` or `regex`")
            if outputs.regex is not None:
                wanted.append(Grammar("regex", outputs.regex, "structured_outputs"))
            else:
                wanted.append(Grammar("json", _json(outputs.json), "structured_outputs"))
        if len(wanted) > 1:
            raise RequestError("structured_outputs: an answer can't follow response_format too; leave out one of them")
        return wanted[0] if wanted else None

    def sampling(self, *, default: int, end_ids: tuple[int, ...]) -> SamplingParams:
        """The sampling parameters. `default`: the token limit if the body has none. `end_ids`: the model's end tokens.

        Raises RequestError for values out of range, and for parameters that this server lacks.
        """
        for name, neutral in OTHER_SAMPLING.items():
            if getattr(self, name) not in (None, neutral):
                raise RequestError(f"{name}: this server does not support it; leave it out")
        check_stops(self.stops)
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
    """`prompt`: a text or token ids, or a list of texts or of lists of ids. `logprobs`: 0, for those of sampled tokens."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def wants_logprobs(self) -> bool:
        """Raises RequestError if alternatives to the sampled tokens are asked for."""
        if self.logprobs:
            raise RequestError(f"logprobs {self.logprobs}: this server has no alternatives to the sampled tokens; give 0")
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The texts, or lists of token ids. Raises RequestError for other lists."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        ids = [item for item in prompt if isinstance(item, int)]
        if len(ids) == len(prompt):
            return [ids]
        several = [item for item in prompt if not isinstance(item, int)]
        if len({type(item) for item in prompt}) > 1:
            raise RequestError("prompt: give a text, a list of token ids, or a list of texts or of such lists")
        return several

    @property
    def one_prompt(self) -> str | list[int]:
        """The text, or the token ids. Raises RequestError for several prompts."""
        if len(prompts := self.prompts) > 1:
            raise RequestError("prompt: give one text or one list of token ids; send several prompts as several requests")
        return prompts[0]


class _Function(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any] | None = None


class ChatTool(msgspec.Struct, frozen=True):
    """A function that the model may call; as a `tool_choice`: the one that it must call."""

    type: Literal["function"]
    function: _Function


def choice_of_function(name: str) -> ChatTool:
    """The `tool_choice` that requires a call of this function."""
    return ChatTool("function", _Function(name))


class ChatBody(Body, frozen=True, kw_only=True):
    """`chat_template_kwargs`: variables of the model's chat template, such as Qwen3's `enable_thinking`.

    If `add_generation_prompt` is false, the prompt ends with the last message. With `continue_final_message` too, that
    message is left open, and the model continues it.
    """

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ChatTool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call. Raises RequestError for tools that are not functions."""
        for tool in self.tools or []:
            try:
                msgspec.convert(tool, ChatTool)
            except msgspec.ValidationError as error:
                raise RequestError(f"tools: {error}") from error
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def grammar(self) -> Grammar | None:
        """As for completions, or a call of one of the tools. Raises RequestError for a choice that is not offered."""
        wanted, choice, tools = super().grammar, self.tool_choice, self.offered_tools
        if choice in (None, "none", "auto"):
            return wanted
        if isinstance(choice, ChatTool):
            tools = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
        elif choice != "required":
            raise RequestError('tool_choice: give "auto", "none", "required", or a function')
        if not tools:
            raise RequestError("tool_choice: no such function is in `tools`")
        if wanted is not None:
            raise RequestError(f"tool_choice: an answer can't be both a call and follow {wanted.key}")
        return Grammar("tools", _json(tools), "tool_choice")

    @property
    def template_options(self) -> dict[str, Any]:
        """Arguments for the chat template. Raises RequestError for those that are not variables of the template."""
        options = self.chat_template_kwargs or {}
        if taken := sorted(options.keys() & _NOT_VARIABLES.split()):
            raise RequestError(f"chat_template_kwargs: {taken[0]} is not a variable of the chat template; leave it out")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError("continue_final_message: it requires add_generation_prompt false; set that too")
        ends = {"add_generation_prompt": self.add_generation_prompt, "continue_final_message": self.continue_final_message}
        return {**options, **ends}


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
