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
from typing import Any

import msgspec

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
        asyncio.run(_Process(options, listening, began).run())
    return 0


class _Process:
    def __init__(self, options: ServeOptions, listening: socket.socket, began: Callable[[], None]) -> None:
        self._options, self._began, self._listening = options, began, listening
        self._stop = asyncio.Event()
        self._stop_now = False

    async def run(self) -> None:
        app = ServerApp(self._options.api_key)
        server = QuietServer(uvicorn_config(app, close_s=CLOSE_S, tls=self._options.tls))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._request_stop)
        serving = asyncio.create_task(server.serve([self._listening]))
        stopping = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(asyncio.to_thread(load, self._options))
        try:
            first: list[asyncio.Future[Any]] = [loading, stopping, serving]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                service = Service(loading.result(), self._options)
                self._begin(app, service)
                await asyncio.wait(first[1:], return_when=asyncio.FIRST_COMPLETED)
                await self._drain(service)
        finally:
            stopping.cancel()
            server.should_exit = True
            await serving
            if not loading.done():
                sys.stderr.flush()
                os._exit(0)  # stopped during loading: the thread can't be ended

    def _request_stop(self) -> None:
        """First call: finish the requests in progress, then stop. Second call: stop now."""
        self._stop_now = self._stop.is_set()
        self._stop.set()

    def _begin(self, app: ServerApp, service: Service) -> None:
        # Exclude all loaded objects from garbage collection: they stay, and every full collection would visit them.
        gc.collect()
        gc.freeze()
        app.open(app_of(service))
        self._began()
        ready = ReadyFile(url=url_of(self._listening, encrypted=self._options.tls is not None), pid=os.getpid())
        slots = f"{self._options.engine.slots} slots of {service.loaded.max_length} tokens"
        print(f"{service.name} is served at {ready.url}, {slots}", file=sys.stderr, flush=True)
        if (path := self._options.ready_file) is not None:
            try:
                write_atomically(path, msgspec.json.encode(ready))
            except OSError as error:
                raise UserError(f"can't write --ready-file {path}: {error}") from error

    async def _drain(self, service: Service) -> None:
        """Accept no more requests, wait up to `drain_s` for those in progress, and cancel the rest."""
        engine = service.engine
        engine.refuse("the server is stopping")
        await self._until_idle(engine, self._options.drain_s)
        engine.cancel_all()
        self._stop_now = False
        await self._until_idle(engine, CLOSE_S)
        await asyncio.to_thread(engine.close, CLOSE_S)
        await service.updates.close()

    async def _until_idle(self, engine: ServedEngine, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while engine.open_requests and time.monotonic() < until_s and not self._stop_now:
            await asyncio.sleep(POLL_EVERY_S)
