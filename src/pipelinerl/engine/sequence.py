"""What the engine knows of one request while it serves it. Its tokens are in the row table until it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipelinerl.types import GenerationRequest, VersionSpan


class VersionMarks:
    """Which weights produced each of a growing row of tokens, kept as the points where the version changes."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: list[tuple[int, int]] = []

    def mark(self, version: int, start: int) -> None:
        """Tokens from `start` on are by the weights of `version`."""
        if not self._marks or self._marks[-1][0] != version:
            self._marks.append((version, start))

    def spans(self, length: int) -> tuple[VersionSpan, ...]:
        """Spans over the first `length` tokens; marks that no token followed leave no trace."""
        starts = [start for _, start in self._marks]
        ends = [*starts[1:], length]
        return tuple(
            VersionSpan(version, start, min(end, length))
            for (version, start), end in zip(self._marks, ends, strict=False)
            if start < min(end, length)
        )


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in a row of the KV cache. `row` is -1 until it has one."""

    request: GenerationRequest
    key: int
    row: int = -1
    versions: VersionMarks = field(default_factory=VersionMarks)
    prompt_versions: tuple[VersionSpan, ...] = ()


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
