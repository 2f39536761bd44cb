"""The ends of a weight broadcast (`weights.kind: collective`), and the address at which its receivers meet."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import torch

from pipelinerl.errors import UserError
from pipelinerl.hub.client import HubClient
from pipelinerl.interfaces import WeightReceiver, WeightSender
from pipelinerl.launch.session import Session
from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender

LOOPBACK = "127.0.0.1"


def broadcast_sender(session: Session, hub: HubClient, timeout_s: float, give_up: Callable[[], bool]) -> WeightSender:
    """The trainer's end. Engines have `timeout_s` to acknowledge weights.

    Raises UserError if there is no route to an engine server.
    """
    config, here = session.config, session.here
    engine = config.engine
    remote = filter(lambda host: host != LOOPBACK, map(_source_address, engine.urls))
    return CollectiveWeightSender(
        here.address if here.machine else next(remote, LOOPBACK),
        session.plan.weights_key,
        engine.processes if engine.kind == "local" else len(engine.urls) or engine.servers,
        hub,
        engines=engine.processes,
        timeout_s=timeout_s,
        join_timeout_s=config.launch.startup_timeout_s,
        device=torch.device(config.trainer.device),
        encoding=config.weights.encoding,
        full_every=config.weights.full_every,
        give_up=give_up,
    )


def broadcast_receiver(session: Session, hub: HubClient, index: int, engine: str) -> WeightReceiver:
    """The end of generation process number `index`, whose engine joins when it has loaded its model."""
    config = session.config
    return CollectiveWeightReceiver(
        hub,
        session.plan.weights_key,
        index,
        engine=engine,
        join_timeout_s=config.launch.startup_timeout_s,
        device=torch.device(config.engine.device),
    )


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
