"""The ends of a weight broadcast (`weights.kind: collective`), and the address at which they meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from pipelinerl.channel import listen
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.interfaces import WeightReceiver, WeightSender
from pipelinerl.launch.session import Session
from pipelinerl.types import MAX_RECEIVERS

LOOPBACK = "127.0.0.1"


def listen_for(config: RunConfig) -> int:
    """The file descriptor of the socket at which the sender listens. Does not import torch.

    Raises UserError if there are too many engine servers, or one has no route to it.
    """
    if (count := _receivers(config)) > MAX_RECEIVERS:
        raise UserError(
            f"weights.kind: {count} engine servers, but weights are broadcast to at most {MAX_RECEIVERS}; set it to shared"
        )
    return listen(_host(config)).detach()


def broadcast_sender(session: Session, fd: int, timeout_s: float, give_up: Callable[[], bool]) -> WeightSender:
    """The trainer's end. Engines have `timeout_s` to acknowledge weights."""
    import torch  # noqa: PLC0415 - the launcher does not import it

    from pipelinerl.weights.broadcast.sender import CollectiveWeightSender  # noqa: PLC0415 - with torch

    config = session.config
    return CollectiveWeightSender(
        socket.socket(fileno=os.dup(fd)),
        session.plan.weights_key,
        _receivers(config),
        timeout_s=timeout_s,
        join_timeout_s=config.launch.startup_timeout_s,
        device=torch.device(config.trainer.device),
        coordinated=config.engine.kind != "local",
        encoding=config.weights.encoding,
        full_every=config.weights.full_every,
        give_up=give_up,
    )


def broadcast_receiver(session: Session, fd: int, index: int, engine: str) -> WeightReceiver:
    """The end of generation process number `index`. A local engine joins when it has loaded its model."""
    import torch  # noqa: PLC0415 - as above

    from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver  # noqa: PLC0415 - as above

    config = session.config
    coordinates = config.engine.kind != "local"  # engine servers receive the weights, not this process
    return CollectiveWeightReceiver(
        *_address(session, fd),
        session.plan.weights_key,
        None if coordinates else index,
        engine=engine,
        receivers=_receivers(config),
        join_timeout_s=config.launch.startup_timeout_s,
        device=torch.device("cpu" if coordinates else config.engine.device),
        at_once=coordinates,
    )


def sender_address(session: Session, fd: int) -> tuple[str, int, str]:
    """Host and port at which engine servers join the trainer's broadcast, and the key that they prove to have."""
    return *_address(session, fd), session.plan.weights_key


def _receivers(config: RunConfig) -> int:
    """The number of receivers of a broadcast: engine servers, or generation processes with a local engine."""
    engine = config.engine
    return engine.processes if engine.kind == "local" else len(engine.urls) or engine.servers


def _address(session: Session, fd: int) -> tuple[str, int]:
    if session.here.weights_from is not None:
        return session.here.weights_from
    with socket.socket(fileno=os.dup(fd)) as listening:
        host, port = listening.getsockname()[:2]
    return host, port


def _host(config: RunConfig) -> str:
    """The address of this machine that all engine servers can reach: loopback, or the source address to a remote server."""
    return next(filter(lambda host: host != LOOPBACK, map(_source_address, config.engine.urls)), LOOPBACK)


def _source_address(url: str) -> str:
    """This machine's address for packets to the server. Raises UserError if there is no route."""
    host = urlsplit(url).hostname
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # connecting a datagram socket sends nothing
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"engine.urls: there is no route to {url}: {error.strerror or error}") from error
    return LOOPBACK if found == "::1" else found
