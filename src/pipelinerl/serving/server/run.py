"""Runs a server process. What is heavy is imported late, so that invalid options are reported at once.

listen ─▶ load the model (requests get 503 meanwhile) ─▶ serve ─▶ stop signal ─▶ finish requests in progress ─▶ exit
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipelinerl.config.schema import EngineConfig, ModelConfig
from pipelinerl.errors import UserError
from pipelinerl.files import SHARED_MEMORY, write_atomically
from pipelinerl.run_directory import ReadyFile

if TYPE_CHECKING:
    from pipelinerl.serving.server.service import Service

CLOSE_S = 5
"""Time for connections to close after their requests have ended."""
POLL_EVERY_S = 0.02


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """`engine`: only the keys of the embedded engine are used. `name`: the model's name in OpenAI's API and the engine's
    name in receipts. `listen`: host and port, 0: any free port. `tls`: PEM files of a certificate and its key. `drain_s`:
    how long requests in progress may take when the server is stopped. `train`: serve the Tinker API instead, and keep what
    its clients save in this folder.
    """

    model: ModelConfig
    engine: EngineConfig
    name: str
    listen: tuple[str, int]
    tls: tuple[Path, Path] | None = None
    api_key: str | None = field(default=None, repr=False)
    max_queue: int = 256
    weight_directories: Sequence[Path] = (SHARED_MEMORY,)
    drain_s: float = 30.0
    ready_file: Path | None = None
    train: Path | None = None

    def check(self) -> None:
        """Raises UserError for an address that is invalid, or that other machines can reach without a key."""
        host, _ = self.listen
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise UserError(f"can't listen on {host!r}: {error}") from error
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        if self.api_key is None and not all(address.is_loopback for address in addresses):
            raise UserError(
                f"--host {host} can be reached by others: name an environment variable with a key that clients must send "
                "(--api-key-env NAME), or listen on 127.0.0.1"
            )
        if self.train is not None and not (self.api_key or "").startswith("tml-"):
            raise UserError(
                "--train: the key of a Tinker server begins with tml-, since its clients' SDK sends no others: for instance "
                "export TINKER_API_KEY=tml-$(openssl rand -hex 16), for the server and its clients"
            )
        for directory in self.weight_directories:
            if not directory.is_dir() and directory != SHARED_MEMORY:
                raise UserError(f"--weights-dir {directory} is not a directory")


def serve(options: ServeOptions, *, began: Callable[[], None] = lambda: None) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit status.

    `began` is called when the model is loaded and all threads run, before the ready file is written.
    Raises UserError for an address that can't be used or a model that can't be served.
    """
    options.check()
    from pipelinerl.serving.server.http import listen  # noqa: PLC0415 - needs an extra

    with closing(listen(options.listen)) as listening:
        asyncio.run(_run(options, listening, began))
    return 0


async def _run(options: ServeOptions, listening: socket.socket, began: Callable[[], None]) -> None:
    from pipelinerl.environments.user.code import in_daemon_thread  # noqa: PLC0415 - as above
    from pipelinerl.serving.server.endpoints import app_of  # noqa: PLC0415 - as above
    from pipelinerl.serving.server.http import QuietServer, ServerApp, uvicorn_config  # noqa: PLC0415 - as above
    from pipelinerl.serving.server.service import Service, load  # noqa: PLC0415 - as above

    stop, stop_now = asyncio.Event(), asyncio.Event()

    def request_stop() -> None:
        """First call: finish the requests in progress, then stop. Second call: stop now."""
        (stop_now if stop.is_set() else stop).set()

    async def until_idle(timeout_s: float, stop_now: asyncio.Event) -> None:
        until_s = time.monotonic() + timeout_s
        while service.engine.open_requests and time.monotonic() < until_s and not stop_now.is_set():
            await asyncio.sleep(POLL_EVERY_S)

    app = ServerApp(options.api_key)
    server = QuietServer(uvicorn_config(app, close_s=CLOSE_S, tls=options.tls))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, request_stop)
    serving = asyncio.create_task(server.serve([listening]))
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.wrap_future(in_daemon_thread(partial(load, options)))  # a loop would wait for a pool's thread
    first: list[asyncio.Future[Any]] = [loading, stopping, serving]
    try:
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            service = Service(loading.result(), options)
            app.app = app_of(service)
            began()
            _announce(service, options, listening)
            await asyncio.wait(first[1:], return_when=asyncio.FIRST_COMPLETED)
            service.engine.refuse("the server is stopping")
            await until_idle(options.drain_s, stop_now)
            service.engine.cancel_all()
            await until_idle(CLOSE_S, asyncio.Event())
            await asyncio.to_thread(service.engine.close, CLOSE_S)
            await service.updates.close()
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving
        if not loading.done():
            sys.stderr.flush()
            os._exit(0)  # stopped during loading: the thread can't be ended


def _announce(service: Service, options: ServeOptions, listening: socket.socket) -> None:
    from pipelinerl.serving.server.http import url_of  # noqa: PLC0415 - as above

    # Exclude all loaded objects from garbage collection: they stay, and every full collection would visit them.
    gc.collect()
    gc.freeze()
    ready = ReadyFile(url=url_of(listening, encrypted=options.tls is not None), pid=os.getpid())
    slots = f"{options.engine.slots} slots of {service.loaded.engine.max_length} tokens"
    print(f"{service.name} is served at {ready.url}, {slots}", file=sys.stderr, flush=True)
    if options.ready_file is not None:
        try:
            write_atomically(options.ready_file, msgspec.json.encode(ready))
        except OSError as error:
            raise UserError(f"can't write --ready-file {options.ready_file}: {error}") from error
