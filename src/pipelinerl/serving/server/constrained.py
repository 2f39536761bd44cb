"""Constrained decoding with llguidance (extra `structured`): answers that follow a JSON schema or a regex, or call a tool.

    Grammars.constraints ──▶ ConstrainedRequest ──▶ ServerEngine, before each of its tokens    Constraint.mask
                                                                  after it                     Constraint.sampled

Other requests are computed exactly as by `LocalEngine`, at the same cost. A constraint is written in the engine's thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipelinerl.engine import LocalEngine
from pipelinerl.engine.rows import Ints
from pipelinerl.errors import MissingDependencyError, RequestError
from pipelinerl.extras import require
from pipelinerl.types import GenerationRequest

if TYPE_CHECKING:
    from pipelinerl.serving.server.api.bodies import Grammar

_MAX_GRAMMAR = 256 << 10
"""Characters."""
_WHITE_SPACE = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,32}"}
"""Bounded between two parts of JSON, because small models like to write nothing else."""
_END_OF_CALL = "}\n</tool_call>"


class Grammars:
    """Compiles grammars for one tokenizer; making it takes a second. Thread-safe."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Sequence[int]) -> None:
        """Raises RequestError without the extra, or if the tokenizer does not fit."""
        try:
            require("structured", "constrained answers (response_format, structured_outputs, tool_choice)")
        except MissingDependencyError as error:
            raise RequestError(str(error)) from error
        import llguidance.hf  # noqa: PLC0415 - an extra

        if not end_ids:
            raise RequestError("response_format: the model has no end token, which a structured answer ends with")
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(end_ids))
        except Exception as error:  # whatever a tokenizer without text or without a fast backend raises
            raise RequestError(f"response_format: this model's tokenizer can't be constrained: {error}") from error
        self._matcher: Any = llguidance.LLMatcher
        self._vocabulary = vocabulary

    def constraints(self, grammar: Grammar, count: int) -> list[Constraint]:
        """One for each of `count` requests. Raises RequestError for a grammar that is invalid or not supported."""
        if len(grammar.source) > _MAX_GRAMMAR:
            raise RequestError(f"{grammar.key}: {len(grammar.source)} characters, of at most {_MAX_GRAMMAR}")
        try:
            matcher = self._matcher(self._tokenizer, self._compiled(grammar), log_level=0)
        except ValueError as error:
            raise RequestError(f"{grammar.key}: {error}") from error
        if matcher.is_error():
            raise RequestError(f"{grammar.key}: {' '.join(matcher.get_error().split())[:300]}")
        return [Constraint(matcher.deep_copy(), self._vocabulary) for _ in range(count)]

    def _compiled(self, grammar: Grammar) -> str:
        if grammar.kind == "json":
            return str(self._matcher.grammar_from_json_schema(grammar.source, overrides=_WHITE_SPACE))
        if grammar.kind == "regex":
            return str(self._matcher.grammar_from_regex(grammar.source))
        # one call of a tool, as `parse_tool_calls` reads it
        tools = [tool["function"] for tool in json.loads(grammar.source)]
        lines = ["start: " + " | ".join(f"call{number}" for number in range(len(tools)))]
        for number, tool in enumerate(tools):
            head = f'<tool_call>\n{{"name": {json.dumps(tool["name"])}, "arguments": '
            schema = {"type": "object", **(tool.get("parameters") or {}), "x-guidance": _WHITE_SPACE}
            lines += [
                f"call{number}: {json.dumps(head)} arguments{number} {json.dumps(_END_OF_CALL)}",
                f"arguments{number}: %json {json.dumps(schema)}",
            ]
        return str(self._matcher.grammar_from_lark("\n".join(lines)))


class Constraint:
    """Allows only tokens that continue a grammar, and at its end only an end token. `error`: why it can't go on."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.error: str | None = None

    def mask(self, logits_V: Tensor) -> bool:
        """Exclude the other tokens, in place. If that is not possible: sets `error`, changes nothing, and returns False."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            self.error = f"the answer can't be constrained further: {reason[:300]}"
            return False
        allowed_V = torch.from_numpy(np.unpackbits(bits, bitorder="little", count=self._vocabulary))
        masked_V = logits_V.masked_fill(allowed_V.to(logits_V.device) == 0, float("-inf"))
        if not bool(torch.isfinite(masked_V.max())):
            self.error = "the answer can't be constrained further: the model excludes all tokens that are allowed"
            return False
        logits_V.copy_(masked_V)
        return True

    def sampled(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class ConstrainedRequest(GenerationRequest, frozen=True, kw_only=True):
    """It must be a stream, so that each of its tokens is looked at. It is cancelled at an error of the constraint."""

    constraint: Constraint


class ServerEngine(LocalEngine):
    """The embedded engine, which also serves constrained requests."""

    def _draw(self, logits_nV: Tensor, rows_n: Ints | slice, uniforms_n: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(rows_n, slice) or not self._streaming:
            return super()._draw(logits_nV, rows_n, uniforms_n)
        requests = [self._table.owner(row).request for row in rows_n.tolist()]
        constrained = [(i, request) for i, request in enumerate(requests) if isinstance(request, ConstrainedRequest)]
        if constrained:
            logits_nV = logits_nV.float()
        for i, request in constrained:
            if request.constraint.error is None and not request.constraint.mask(logits_nV[i]):
                self.cancel(request.id)
        ids_n, logprobs_n = super()._draw(logits_nV, rows_n, uniforms_n)
        for i, request in constrained:
            request.constraint.sampled(int(ids_n[i]))
        return ids_n, logprobs_n
