"""What every transfer of weights offers to engines, and their answers. Plain structs, for any carrier."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pipelinerl.types import UpdateReceipt


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Update `number` (from 1), which has this checksum. `device_checksum`: see `WeightUpdate`.

    In a broadcast, only the first offer has a `layout` (JSON); it is valid for all updates. `delta_bytes`: what is broadcast
    is the delta from the previous update; None: all weights.
    """

    number: int
    version: int
    checksum: str
    device_checksum: str = ""
    layout: str = ""
    delta_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The engine's receipt for update `number`. The coordinator's receipt is for all engines."""

    number: int
    receipt: UpdateReceipt | None = None
