"""What the engine expects of a runner. For type checkers: `runner.make_runner` makes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from pipelinerl.engine.attention import Chunk, LengthBucket, Move


class Slots(Protocol):
    """What a runner keeps of the past tokens of every row."""

    @property
    def kv_bytes(self) -> int: ...

    def move(self, moves: Sequence[Move]) -> None: ...


class Runner(Protocol):
    """Runs a model over slots: `ModelRunner`, or `CacheRunner` for models that it can't run."""

    model: Any
    vocabulary: int

    @property
    def kv(self) -> Slots: ...

    @property
    def flat(self) -> bool: ...

    @property
    def description(self) -> str: ...

    def weights_changed(self) -> None: ...

    def forward(
        self,
        kv: Any,
        token_ids: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        *,
        keep: Sequence[int] | Tensor | None,
        decoding: int = 0,
        buckets: tuple[LengthBucket, ...] = (),
        chunks: tuple[Chunk, ...] = (),
    ) -> Tensor: ...
