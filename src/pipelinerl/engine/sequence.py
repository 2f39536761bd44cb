"""What the engine knows of one request while it serves it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipelinerl.types import Completion, FinishReason, GenerationRequest, VersionSpan


class VersionMarks:
    """Which weights produced each of a growing row of tokens, kept as the points where the version changes."""

    __slots__ = ("_length", "_marks")

    def __init__(self) -> None:
        self._marks: list[tuple[int, int]] = []
        self._length = 0

    def extend(self, version: int, count: int = 1) -> None:
        if not self._marks or self._marks[-1][0] != version:
            self._marks.append((version, self._length))
        self._length += count

    def spans(self) -> tuple[VersionSpan, ...]:
        ends = [*(start for _, start in self._marks[1:]), self._length]
        # Shortest first: without marks there is nothing to cover, and `ends` is only the length 0.
        return tuple(VersionSpan(version, start, end) for (version, start), end in zip(self._marks, ends, strict=False))


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in a row of the KV cache. `row` is -1 until it has one."""

    request: GenerationRequest
    key: int
    stop: frozenset[int]
    row: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: VersionMarks = field(default_factory=VersionMarks)
    prompt_versions: tuple[VersionSpan, ...] = ()

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in the cache once the prompt is: all but the newest."""
        return len(self.request.prompt_ids) + len(self.tokens) - 1

    def append(self, token_id: int, logprob: float, version: int) -> FinishReason | None:
        """Take a sampled token; say why the completion ends with it, if it does."""
        self.tokens.append(token_id)
        self.logprobs.append(logprob)
        self.versions.extend(version)
        if token_id in self.stop:
            return "stop"
        return "length" if len(self.tokens) >= self.request.sampling.max_tokens else None

    def complete(self, reason: FinishReason) -> Completion:
        return Completion(
            request_id=self.request.id,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            weight_versions=self.versions.spans(),
            finish_reason=reason,
            prompt_versions=self.prompt_versions,
        )


@dataclass(eq=False, slots=True)
class Prefill:
    """A prompt being processed, for one or more requests that share it: computed once, in the first one's row."""

    prompt_ids: tuple[int, ...]
    members: list[Sequence]
    done: int = 0
    versions: VersionMarks = field(default_factory=VersionMarks)

    @property
    def row(self) -> int:
        return self.members[0].row
