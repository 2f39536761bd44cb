"""The page over HTTP: its files, the list of runs, and what is new of the chosen ones as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.resources
import signal
import socket
from collections.abc import AsyncGenerator, Sequence
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.watch.run import LOOK_EVERY_S, PageState, WatchedRun
from pipelinerl.ports import is_this_machine
from pipelinerl.process import when_closed
from pipelinerl.report.series import labels_of
from pipelinerl.serving.server.http import QuietServer, server_sent_event, uvicorn_config

CLOSE_S = 3
SHOWN_FIRST = 6
"""Runs that are named on the command line and shown at first, without choosing them."""
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Runs:
    """The runs of some paths, each a run directory or a folder of run directories, which may get more of them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises RunDirectoryError for a path that has no run."""
        self._paths = paths
        self._watched: dict[Path, WatchedRun] = {}
        for path in paths:
            if not _runs_in(path):
                missing = "neither it nor a folder in it has a config.yaml" if path.is_dir() else "there is no such folder"
                raise RunDirectoryError(f"{path} is neither a run directory nor a folder of them: {missing}")

    def folders(self) -> dict[str, Path]:
        """The run directories by label, those of a folder newest first. A named run that has gone keeps its label."""
        found = [run for path in self._paths for run in _runs_in(path) or [path]]
        unique = list({run.resolve(): run for run in found}.values())
        return dict(zip(labels_of(unique), unique, strict=True))

    def first(self) -> list[str]:
        """The labels of the runs that a page shows until its reader chooses others."""
        named = list(self.folders())
        alone = all((path / "config.yaml").is_file() for path in self._paths)
        return named[:SHOWN_FIRST] if alone else named[:1]

    def watched(self, root: Path) -> WatchedRun:
        if root not in self._watched:
            self._watched[root] = WatchedRun(root)
        return self._watched[root]


def _runs_in(path: Path) -> list[Path]:
    try:
        if (path / "config.yaml").is_file():
            return [path]
        configs = [(config.stat().st_mtime, config.parent) for config in path.glob("*/config.yaml")]
    except OSError:
        return []
    return [run for _, run in sorted(configs, reverse=True)]


def make_app(runs: Runs, *, key: str | None, stopping: asyncio.Event, end_note: str = "") -> ASGIApp:
    """The application. `key`: what a reader must send; None: only readers on this machine are answered.

    `end_note`: what pages show once the server has been told to stop.
    """

    async def list_runs(_: Request) -> Response:
        first = runs.first()
        return JSONResponse([{"label": label, "first": label in first} for label in runs.folders()])

    async def events(request: Request) -> Response:
        folders = runs.folders()
        labels = request.query_params.getlist("run")
        if unknown := [label for label in labels if label not in folders]:
            return PlainTextResponse(f"no run has the label {unknown[0]!r}", 404)
        chosen = {label: runs.watched(folders[label]) for label in labels}
        return StreamingResponse(_events(chosen, stopping, end_note), media_type="text/event-stream")

    routes = [Route("/runs", list_runs), Route("/events", events)]
    assets = importlib.resources.files("pipelinerl").joinpath("assets", "watch").iterdir()
    sent = [(file, kind) for file in assets if (kind := _TYPES.get(Path(file.name).suffix)) is not None]
    routes += [_file("/" if file.name == "index.html" else f"/{file.name}", file.read_bytes(), kind) for file, kind in sent]
    return ReaderGuard(Starlette(routes=routes), key)


def _file(path: str, content: bytes, kind: str) -> Route:
    async def send(_: Request) -> Response:
        return Response(content, media_type=kind)

    return Route(path, send)


async def _events(chosen: dict[str, WatchedRun], stopping: asyncio.Event, end_note: str) -> AsyncGenerator[bytes]:
    """What is new of each run about once a second: everything at first, and at last what a stopped run has written."""
    pages = {label: PageState() for label in chosen}
    while True:
        last = stopping.is_set()
        for run in chosen.values():
            run.look(at_once=last)
            await asyncio.sleep(0)
        yield server_sent_event({label: run.news(pages[label]) for label, run in chosen.items()})
        if last:
            yield b"event: end\n" + server_sent_event(end_note)
            return
        behind = any(run.behind for run in chosen.values())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), 0.05 if behind else LOOK_EVERY_S + 0.05)


class ReaderGuard:
    """Answers only readers who may read.

    With a key, a reader must send it: as `?key=` of the page's address, which sets a cookie, or as a bearer token. Without
    one, only requests to a name of this machine itself are answered. Otherwise a web page could read the runs through a
    name of its own that resolves to this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._answer(scope)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> ASGIApp:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self._key is None:
            here = is_this_machine(host)
            return self._app if here else PlainTextResponse("use the address that `pipelinerl watch` printed", 403)
        cookie = f"pipelinerl-watch-{scope['server'][1] if scope.get('server') else 0}"  # cookies are shared by all ports
        given = parse_qs(scope["query_string"].decode("latin-1")).get("key", [])
        if scope["path"] == "/" and given and self._is_key(given[0]):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie, given[0], httponly=True, samesite="strict")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_key(_cookies(headers.get("cookie", "")).get(cookie, "")) or self._is_key(bearer):
            return self._app
        return PlainTextResponse("this page needs its key: use the address that `pipelinerl watch` printed", 401)

    def _is_key(self, given: str) -> bool:
        return self._key is not None and hmac.compare_digest(given.encode(), self._key.encode())


def _cookies(header: str) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}


def serve(
    runs: Runs, listening: socket.socket, *, key: str | None = None, lifeline_fd: int | None = None, end_note: str = ""
) -> int:
    """Serve until Ctrl-C, SIGTERM or the end of the parent process (`lifeline_fd`). Returns the exit status."""

    async def run() -> None:
        stopping, loop = asyncio.Event(), asyncio.get_running_loop()
        server = QuietServer(uvicorn_config(make_app(runs, key=key, stopping=stopping, end_note=end_note), close_s=CLOSE_S))

        def stop() -> None:
            stopping.set()
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if lifeline_fd is not None:

            def stop_from_thread() -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended already
                    loop.call_soon_threadsafe(stop)

            when_closed(lifeline_fd, stop_from_thread, CLOSE_S + 1)
        await server.serve([listening])

    asyncio.run(run())
    return 0
