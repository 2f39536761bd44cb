"""Runs a server process.

listen ─▶ load the model (requests get 503 meanwhile) ─▶ serve ─▶ stop signal ─▶ finish requests in progress ─▶ exit
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from pipelinerl.environments.user.code import in_daemon_thread
from pipelinerl.errors import UserError
from pipelinerl.files import write_atomically
from pipelinerl.run_directory import ReadyFile
from pipelinerl.serving.server.app import ServerApp, app_of
from pipelinerl.serving.server.http import QuietServer, listen, url_of, uvicorn_config
from pipelinerl.serving.server.options import ServeOptions
from pipelinerl.serving.server.served import ServedEngine
from pipelinerl.serving.server.service import Service, load

CLOSE_S = 5
"""Time for connections to close after their requests have ended."""
POLL_EVERY_S = 0.02


def serve(options: ServeOptions, *, began: Callable[[], None] = lambda: None) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit status.

    `began` is called when the model is loaded and all threads run, before the ready file is written.
    Raises UserError for an address that can't be used or a model that can't be served.
    """
    options.check()
    with contextlib.closing(listen(options.listen)) as listening:
        asyncio.run(_run(options, listening, began))
    return 0


async def _run(options: ServeOptions, listening: socket.socket, began: Callable[[], None]) -> None:
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def request_stop() -> None:
        """First call: finish the requests in progress, then stop. Second call: stop now."""
        (stop_now if stop.is_set() else stop).set()

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
            _begin(app, service, options, listening, began)
            await asyncio.wait(first[1:], return_when=asyncio.FIRST_COMPLETED)
            service.engine.refuse("the server is stopping")
            await _until_idle(service.engine, options.drain_s, stop_now)
            service.engine.cancel_all()
            await _until_idle(service.engine, CLOSE_S)
            await asyncio.to_thread(service.engine.close, CLOSE_S)
            await service.updates.close()
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving
        if not loading.done():
            sys.stderr.flush()
            os._exit(0)  # stopped during loading: the thread can't be ended


def _begin(
    app: ServerApp, service: Service, options: ServeOptions, listening: socket.socket, began: Callable[[], None]
) -> None:
    # Exclude all loaded objects from garbage collection: they stay, and every full collection would visit them.
    gc.collect()
    gc.freeze()
    app.open(app_of(service))
    began()
    ready = ReadyFile(url=url_of(listening, encrypted=options.tls is not None), pid=os.getpid())
    slots = f"{options.engine.slots} slots of {service.loaded.max_length} tokens"
    print(f"{service.name} is served at {ready.url}, {slots}", file=sys.stderr, flush=True)
    if options.ready_file is not None:
        try:
            write_atomically(options.ready_file, msgspec.json.encode(ready))
        except OSError as error:
            raise UserError(f"can't write --ready-file {options.ready_file}: {error}") from error


async def _until_idle(engine: ServedEngine, timeout_s: float, stop_now: asyncio.Event | None = None) -> None:
    until_s = time.monotonic() + timeout_s
    while engine.open_requests and time.monotonic() < until_s and not (stop_now and stop_now.is_set()):
        await asyncio.sleep(POLL_EVERY_S)
