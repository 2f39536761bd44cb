"""Options of a server. Imports nothing heavy, so that invalid options are reported at once."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pipelinerl.config.schema import EngineConfig, ModelConfig
from pipelinerl.errors import UserError
from pipelinerl.files import SHARED_MEMORY


class Address(NamedTuple):
    """Where to listen; port 0: any free port."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """`engine`: only the keys of the embedded engine are used. `name`: the model's name in OpenAI's API and the engine's
    name in receipts. `tls`: PEM files of a certificate and its key. `drain_s`: how long requests in progress may take when
    the server is stopped.
    """

    model: ModelConfig
    engine: EngineConfig
    name: str
    listen: Address
    tls: tuple[Path, Path] | None = None
    api_key: str | None = field(default=None, repr=False)
    max_queue: int = 256
    weight_directories: Sequence[Path] = (SHARED_MEMORY,)
    drain_s: float = 30.0
    ready_file: Path | None = None

    def check(self) -> None:
        """Raises UserError for an address that is invalid, or that other machines can reach without a key."""
        host, port = self.listen
        if not 0 <= port <= 65535:
            raise UserError(f"--port {port}: give 0 (any) to 65535")
        if self.api_key is None and not is_loopback(host):
            raise UserError(
                f"--host {host} can be reached by others: name an environment variable with a key that clients must send "
                "(--api-key-env NAME), or listen on 127.0.0.1"
            )
        for directory in self.weight_directories:
            if not directory.is_dir() and directory != SHARED_MEMORY:
                raise UserError(f"--weights-dir {directory} is not a directory")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Raises UserError for a name that can't be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"can't listen on {host!r}: {error}") from error
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
