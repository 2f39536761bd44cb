"""A task with tools that is a file of examples and some functions of the user: what may be called, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipelinerl.environments.arguments import checked
from pipelinerl.environments.function import Function
from pipelinerl.environments.tool_functions import read_tools
from pipelinerl.environments.tool_use import require_chat, use_tools
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout


class Tools(Function):
    """Problems are the lines of a file; the model may call functions of the user before it answers.

    functions   `path/to/file.py:function`, or a list of them: the tools. Type hints and docstring tell the model of them
    max_turns   turns of the model, the answer included

    All else is as in `function`: `data`, `reward` (of the last turn's text), `prompt`, `held_out`, `system`, and the limits
    of calls, which are those of tools as well. What a tool raises, or that it ran into a limit, is told to the model.
    """

    def __init__(
        self, tokenizer: Tokenizer, seed: int, *, functions: str | Sequence[str], max_turns: int = 6, **task: Any
    ) -> None:
        """Raises EnvironmentSetupError for what can't be used, and for a model without a chat template."""
        require_chat(tokenizer, "environment.kind tools")
        own = checked(_Own, functions=functions, max_turns=max_turns)
        super().__init__(tokenizer, seed, **task)
        self._tools = read_tools(own.names, isolate=self._isolate, workers=self._workers, limits=self._limits)
        self._max_turns = own.max_turns

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        messages = await self._prompt(problem.payload)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        used = await use_tools(client, messages, self._tools, max_turns=self._max_turns)
        reward, metrics = await self._judged(used.answer, problem.payload)
        return used.rollout(reward, metrics)


class _Own(msgspec.Struct, kw_only=True):
    functions: str | Annotated[list[str], Meta(min_length=1)]
    max_turns: Annotated[int, Meta(ge=1)]

    @property
    def names(self) -> list[str]:
        return [self.functions] if isinstance(self.functions, str) else self.functions
