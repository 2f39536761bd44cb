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
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from pipelinerl.errors import UserError
from pipelinerl.files import write_atomically
from pipelinerl.process import when_closed
from pipelinerl.serving.server.app import make_apps
from pipelinerl.serving.server.listening import QuietServer, listen, url_of, uvicorn_config
from pipelinerl.serving.server.options import ServeOptions
from pipelinerl.serving.server.service import Loaded, Service, ServiceHolder, load

CLOSE_S = 5
"""Time for connections to close after their requests have ended."""
POLL_EVERY_S = 0.02


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the ready file. `update_url`: the address for weight updates."""

    url: str
    pid: int
    update_url: str


def serve(options: ServeOptions, *, began: Callable[[], None] = lambda: None) -> int:
    """Serve until SIGTERM, Ctrl-C or the end of the parent process (`lifeline_fd`). Returns the exit status.

    `began` is called when the model is loaded and all threads run, before the ready file is written.
    Raises UserError for an address that can't be used or a model that can't be served.
    """
    options.check()
    with contextlib.ExitStack() as stack:
        addresses = [options.listen] if options.updates is None else [options.listen, options.updates]
        sockets = [stack.enter_context(contextlib.closing(listen(address))) for address in addresses]
        loading = _load_in_background(options)
        asyncio.run(_Process(options, sockets, loading, began).run())
    sys.stderr.flush()
    if not loading.done():
        os._exit(0)  # stopped during loading: the loading thread can't be ended
    return 0


class _Process:
    def __init__(
        self, options: ServeOptions, sockets: list[socket.socket], loading: Future[Loaded], began: Callable[[], None]
    ) -> None:
        self._options, self._began, self._sockets, self._loading = options, began, sockets, loading
        self._stop = asyncio.Event()
        self._stop_now = False

    async def run(self) -> None:
        holder = ServiceHolder()
        apps = make_apps(holder, api_key=self._options.api_key, apart=self._options.updates is not None)
        servers = [
            QuietServer(uvicorn_config(app, close_s=CLOSE_S, tls=self._options.tls)) for app in apps[: len(self._sockets)]
        ]
        self._install_stop_handlers()
        serving = [
            asyncio.create_task(server.serve([listening])) for server, listening in zip(servers, self._sockets, strict=True)
        ]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            loading = asyncio.wrap_future(self._loading)
            first: list[asyncio.Future[Any]] = [loading, stopping, *serving]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                service = Service(loading.result(), self._options)
                self._begin(holder, service)
                await asyncio.wait(first[1:], return_when=asyncio.FIRST_COMPLETED)
                await self._drain(service)
        finally:
            stopping.cancel()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*serving)

    def _install_stop_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_stop)
        if (fd := self._options.lifeline_fd) is not None:
            when_closed(fd, lambda: self._stop_without_waiting(loop), 2 * CLOSE_S)

    def _request_stop(self) -> None:
        """First call: finish the requests in progress, then stop. Second call: stop now."""
        self._stop_now = self._stop.is_set()
        self._stop.set()

    def _stop_without_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """The parent process has ended. Called in another thread."""
        with contextlib.suppress(RuntimeError):  # the event loop has already ended
            for _ in range(2):
                loop.call_soon_threadsafe(self._request_stop)

    def _begin(self, holder: ServiceHolder, service: Service) -> None:
        # Exclude all loaded objects from garbage collection: they stay, and every full collection would visit them.
        gc.collect()
        gc.freeze()
        holder.open(service)
        self._began()
        urls = [url_of(listening, encrypted=self._options.tls is not None) for listening in self._sockets]
        ready = Ready(url=urls[0], pid=os.getpid(), update_url=urls[-1])
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
        until_s = time.monotonic() + self._options.drain_s
        while engine.open_requests and time.monotonic() < until_s and not self._stop_now:
            await asyncio.sleep(POLL_EVERY_S)
        engine.cancel_all()
        until_s = time.monotonic() + CLOSE_S
        while engine.open_requests and time.monotonic() < until_s:
            await asyncio.sleep(POLL_EVERY_S)
        await asyncio.to_thread(engine.close, CLOSE_S)
        await service.updates.close()


def _load_in_background(options: ServeOptions) -> Future[Loaded]:
    """Load in a daemon thread, so that the process can exit meanwhile."""
    future: Future[Loaded] = Future()

    def run() -> None:
        try:
            future.set_result(load(options))
        except BaseException as error:  # noqa: BLE001 - raised again where the future is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return future
