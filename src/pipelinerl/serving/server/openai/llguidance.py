"""Constrained decoding with llguidance (extra `structured`): answers that follow a JSON schema, a regex or a list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.openai.bodies import Grammar

_MAX_GRAMMAR = 256 << 10
"""Characters."""
_WHITE_SPACE = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,32}"}
"""Bounded between two parts of JSON, because small models like to write nothing else."""
_END_OF_CALL = "}\n</tool_call>"


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Sequence[int]) -> None:
        """Raises RequestError if the tokenizer does not fit."""
        if not end_ids:
            raise RequestError("response_format: the model has no end token, which a structured answer ends with")
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(end_ids))
        except Exception as error:  # whatever a tokenizer without text or without a fast backend raises
            raise RequestError(f"response_format: this model's tokenizer can't be constrained: {error}") from error
        self._vocabulary = vocabulary

    def rules(self, grammar: Grammar, count: int) -> list[Constraint]:
        """A rule for each of `count` requests. Raises RequestError for a grammar that is invalid or not supported."""
        if len(grammar.source) > _MAX_GRAMMAR:
            raise RequestError(f"{grammar.key}: {len(grammar.source)} characters, of at most {_MAX_GRAMMAR}")
        try:
            matcher = llguidance.LLMatcher(self._tokenizer, _source(grammar), log_level=0)
        except ValueError as error:
            raise RequestError(f"{grammar.key}: {error}") from error
        if matcher.is_error():
            raise RequestError(f"{grammar.key}: {' '.join(matcher.get_error().split())[:300]}")
        return [Constraint(matcher.deep_copy(), self._vocabulary) for _ in range(count)]


class Constraint:
    """A rule that allows only tokens that continue the grammar. At its end only an end token is allowed."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def apply(self, logits_V: torch.Tensor) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise ValueError(f"the answer can't be constrained further: {reason[:300]}")
        allowed_V = torch.from_numpy(np.unpackbits(bits, bitorder="little", count=self._vocabulary))
        logits_V.masked_fill_(allowed_V.to(logits_V.device) == 0, float("-inf"))

    def sampled(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


def _source(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return str(llguidance.LLMatcher.grammar_from_json_schema(grammar.source, overrides=_WHITE_SPACE))
    if grammar.kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(grammar.source))
    if grammar.kind == "choice":
        lines = ["start: " + " | ".join(json.dumps(text) for text in json.loads(grammar.source))]
    else:  # one call of a tool, as `parse_tool_calls` reads it
        tools = [tool["function"] for tool in json.loads(grammar.source)]
        lines = ["start: " + " | ".join(f"call{number}" for number in range(len(tools)))]
        for number, tool in enumerate(tools):
            head = f'<tool_call>\n{{"name": {json.dumps(tool["name"])}, "arguments": '
            schema = {"type": "object", **(tool.get("parameters") or {}), "x-guidance": _WHITE_SPACE}
            lines += [
                f"call{number}: {json.dumps(head)} arguments{number} {json.dumps(_END_OF_CALL)}",
                f"arguments{number}: %json {json.dumps(schema)}",
            ]
    return str(llguidance.LLMatcher.grammar_from_lark("\n".join(lines)))
