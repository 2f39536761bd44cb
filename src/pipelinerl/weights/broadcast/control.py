"""Messages between the sender of a broadcast and its members: plain structs, for any carrier.

member -> sender   Hello          Report staged          Answer                        Report leaving
sender -> member          Form  Offer            Apply           the next Offer  ...                   Close
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pipelinerl.weights.messages import Answer, Offer

PROTOCOL = "pipelinerl-weights-7"


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that nccl can be used on: a globally unique name, and the version of NCCL there."""

    name: str
    nccl: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A member's first message. `receivers`: how many receivers it expects (None: unknown).

    `index` None: the coordinator. `gpu`: on which it could receive.
    """

    protocol: str
    index: int | None
    engine: str = ""
    receivers: int | None = None
    gpu: Gpu | None = None


class Form(msgspec.Struct, frozen=True, kw_only=True, tag="form"):
    """All members have connected: form the group of `size` ranks. The sender is rank 0, this receiver is `rank`.

    The coordinator, which has rank 0 here, is not in the group.

    `backend`: nccl between GPUs, gloo between CPUs. `store_port`: of the group's rendezvous store, at the sender's address.
    `stall_s`: a member is lost that has sent nothing for so long. `coordinated`: there is a coordinator.
    """

    backend: str
    size: int
    rank: int
    store_port: int
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1)]
    stall_s: Annotated[float, msgspec.Meta(ge=1)]
    coordinated: bool


class Report(msgspec.Struct, frozen=True, tag="report"):
    """From a member. `step`:

    staged    it has all of update `number`, with the right checksum
    failed    `error` says why it can't go on
    running   a heartbeat
    leaving   it closes normally
    """

    step: Literal["staged", "failed", "running", "leaving"]
    number: int = 0
    error: str = ""


class Apply(msgspec.Struct, frozen=True, tag="apply"):
    """All receivers have staged update `number`. To the coordinator if there is one, else to the receivers."""

    number: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The last message: the sender is done (`error` None) or the transfer failed."""

    error: str | None = None


FromMember = Hello | Report | Answer
FromSender = Form | Offer | Apply | Close
