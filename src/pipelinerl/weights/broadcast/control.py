"""Messages between the weight sender and its receivers, over a `Channel`. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from pipelinerl.channel import Channel
from pipelinerl.channel import dial as dial_any
from pipelinerl.types import Encoding, UpdateReceipt

PROTOCOL = "pipelinerl-weights-6"


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


class Report(msgspec.Struct, frozen=True, tag="report"):
    """From a member. `step`:

    ready     it has memory for update `number` and waits for its bytes
    full      it can't use the delta of update `number`: it does not hold the base, or the result had another checksum
    staged    it has all bytes of update `number`, with the right checksum
    failed    `error` says why it can't go on
    running   a heartbeat
    leaving   it closes normally
    """

    step: Literal["ready", "full", "staged", "failed", "running", "leaving"]
    number: int = 0
    error: str = ""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The engine's receipt for update `number`. The coordinator's receipt is for all engines."""

    number: int
    receipt: UpdateReceipt


class Form(msgspec.Struct, frozen=True, kw_only=True, tag="form"):
    """All members have connected: form the group of `size` ranks. The sender is rank 0, this receiver is `rank`.

    The coordinator, which has rank 0 here, is not in the group.

    `backend`: nccl between GPUs, gloo between CPUs. `store_port`: of the group's rendezvous store, at the sender's address.
    `coordinated`: there is a coordinator. `regroups`: a member whose connection or group ends shall connect again.
    """

    backend: str
    size: int
    rank: int
    store_port: int
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1)]
    stall_s: Annotated[float, msgspec.Meta(ge=1)]
    coordinated: bool
    regroups: bool = False


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Get ready for update `number` (from 1). Only a group's first offer has a `layout` (JSON); it is valid for all updates.

    `checksum` is of all weights; so is `device_checksum` (see `WeightUpdate`). `base`: the update can be sent as a delta of
    `delta_bytes`, for receivers that hold the update of this checksum; "": it can't.
    """

    number: int
    version: int
    checksum: str
    layout: str = ""
    base: str = ""
    delta_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    device_checksum: str = ""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """`receive`: all receivers are ready, the broadcast of update `number` begins. `apply`: all have staged it.

    `receive` is sent a second time, with `encoding` full, if a receiver could not use the delta. `apply` is sent to the
    coordinator if there is one, else to the receivers.
    """

    step: Literal["receive", "apply"]
    number: int
    encoding: Encoding = "full"


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The last message of a connection: the sender is done (`error` None) or the transfer failed.

    `again`: this group has ended, and the member shall connect again for the next one.
    """

    error: str | None = None
    again: bool = False


FromMember = Hello | Report | Answer
FromSender = Form | Offer | Go | Close


def dial(host: str, port: int, key: str, timeout_s: float, stop: Callable[[], bool]) -> Channel[FromSender] | None:
    """`channel.dial` to a weight sender."""
    return dial_any(host, port, key, timeout_s, stop, incoming=FromSender)
