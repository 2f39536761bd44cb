"""The page over HTTP: its files, the list of runs, and what is new of the chosen ones as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelinerl.channel import is_this_machine
from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.watch.page import LOOK_EVERY_S, PageState, WatchedRun
from pipelinerl.process import lower_priority, take_stdin, when_closed
from pipelinerl.process.child import ChildProcess
from pipelinerl.report.series import labels_of
from pipelinerl.serving.server.http import QuietServer, listen, server_sent_event, url_of, uvicorn_config

CLOSE_S = 3
SHOWN_FIRST = 6
"""Runs that are named on the command line and shown at first, without choosing them."""
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
        self.paths = paths
        self.watched: dict[Path, WatchedRun] = {}
        for path in paths:
            if not _runs_in(path):
                missing = "neither it nor a folder in it has a config.yaml" if path.is_dir() else "there is no such folder"
                raise RunDirectoryError(f"{path} is neither a run directory nor a folder of them: {missing}")

    def folders(self) -> dict[str, Path]:
        """The run directories by label, those of a folder newest first. A named run that has gone keeps its label."""
        found = [run for path in self.paths for run in _runs_in(path) or [path]]
        unique = list({run.resolve(): run for run in found}.values())
        return dict(zip(labels_of(unique), unique, strict=True))

    def listed(self) -> list[dict[str, Any]]:
        """The labels. `first`: a page shows the run until its reader chooses others."""
        labels = list(self.folders())
        alone = all((path / "config.yaml").is_file() for path in self.paths)
        return [{"label": label, "first": place < (SHOWN_FIRST if alone else 1)} for place, label in enumerate(labels)]


def _runs_in(path: Path) -> list[Path]:
    try:
        if (path / "config.yaml").is_file():
            return [path]
        configs = [(config.stat().st_mtime, config.parent) for config in path.glob("*/config.yaml")]
    except OSError:
        return []
    return [run for _, run in sorted(configs, reverse=True)]


def make_app(runs: Runs, *, stopping: asyncio.Event, end_note: str = "") -> ASGIApp:
    """The application. `end_note`: what pages show once the server stops."""

    async def list_runs(_: Request) -> Response:
        return JSONResponse(runs.listed())

    async def events(request: Request) -> Response:
        folders = runs.folders()
        labels = request.query_params.getlist("run")
        if unknown := [label for label in labels if label not in folders]:
            return PlainTextResponse(f"no run has the label {unknown[0]!r}", 404)
        chosen = {label: runs.watched.setdefault(folders[label], WatchedRun(folders[label])) for label in labels}
        return StreamingResponse(_events(chosen, stopping, end_note), media_type="text/event-stream")

    assets = StaticFiles(packages=[("pipelinerl", "assets/watch")], html=True)
    app = Starlette(routes=[Route("/runs", list_runs), Route("/events", events), Mount("/", assets)])
    refusal = PlainTextResponse("use the address that `pipelinerl watch` printed", 403)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        """Answers only requests to a name of this machine itself.

        Otherwise a web page could read the runs through a name of its own that resolves to this machine (DNS rebinding).
        """

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if scope["type"] == "http":
            here = is_this_machine(Headers(scope=scope).get("host", ""))
            await (app if here else refusal)(scope, receive, send_guarded)

    return guarded


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


def serve(runs: Runs, listening: socket.socket, *, beside: bool = False) -> int:
    """Serve until Ctrl-C or SIGTERM, and `beside` a run, at a lower priority, until its launcher ends; the exit status."""
    note, lifeline = "The page's server was stopped.", -1
    if beside:
        note = f"The run has ended, and the server of this page with it. `pipelinerl watch {runs.paths[0]}` shows it again."
        lifeline = take_stdin()
        with contextlib.suppress(OSError):
            lower_priority()

    async def run() -> None:
        stopping, loop = asyncio.Event(), asyncio.get_running_loop()
        server = QuietServer(uvicorn_config(make_app(runs, stopping=stopping, end_note=note), close_s=CLOSE_S))

        def stop() -> None:
            stopping.set()
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if beside:

            def stop_from_thread() -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended already
                    loop.call_soon_threadsafe(stop)

            when_closed(lifeline, stop_from_thread, CLOSE_S + 1)
        await server.serve([listening])

    asyncio.run(run())
    return 0


# ---- `pipelinerl train --watch`: the page in a process beside the run, which ends with the run

PATIENCE_S = 5.0


class Beside:
    """The page of a run that is about to begin: it listens already, so that a taken port is an error before the run."""

    def __init__(self, port: int) -> None:
        """Raises UserError if the port is taken."""
        self._listening = listen(("127.0.0.1", port))
        self._child: ChildProcess | None = None

    def begin(self, run_dir: Path) -> str | None:
        """Start the page's process once the run has its directory. Returns what to tell the user, once.

        The run goes on without a page if the process can't be started.
        """
        if self._child is not None:
            return None
        fd = self._listening.fileno()
        command = [sys.executable, "-m", "pipelinerl", "watch", str(run_dir), "--listen-fd", str(fd)]
        log = run_dir / "logs" / "watch.log"
        try:
            self._child = ChildProcess(command, log=log, fds=[fd], watches_parent=True, patience_s=PATIENCE_S)
        except OSError as error:
            return f"no page: its process can't be started: {error.strerror}"
        return f"watch it at {url_of(self._listening)}"

    def close(self) -> None:
        """Stop the process, which shows open pages how the run has ended."""
        self._listening.close()
        if self._child is not None:
            self._child.stop()
