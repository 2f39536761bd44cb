"""`pipelinerl watch`."""

from __future__ import annotations

import argparse
import secrets
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.cli.parser import Commands, api_key_from, refuse_settings, say
from pipelinerl.errors import UserError
from pipelinerl.extras import require

if TYPE_CHECKING:
    from pipelinerl.experiments.watch.beside import Beside

PORT = 7117


def add_to(commands: Commands) -> None:
    text = "Watch runs in a browser: a page on this machine, also for finished runs and several side by side."
    flag = commands.add("watch", text, run=run).add_argument
    flag("run_dir", type=Path, nargs="+", metavar="RUN_DIR", help="a run directory, or a folder of them")
    flag("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    flag("--port", type=int, default=PORT, metavar="PORT", help=f"port to listen on, 0: any free port (default: {PORT})")
    text = "environment variable with a key that readers must send; other hosts than this machine need one (default: random)"
    flag("--api-key-env", metavar="NAME", help=text)
    flag("--listen-fd", type=int, metavar="FD", help=argparse.SUPPRESS)  # of `train --watch`, with its end as that of stdin


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl watch", settings)
    require("serve", "pipelinerl watch")
    from pipelinerl.experiments.watch import beside, server  # noqa: PLC0415 - need the extra `serve`
    from pipelinerl.serving.server.http import listen, url_of  # noqa: PLC0415
    from pipelinerl.serving.server.options import Address, is_loopback  # noqa: PLC0415

    if options.listen_fd is not None:
        return beside.serve_beside(options.run_dir[0], socket.socket(fileno=options.listen_fd))
    port = checked_port("--port", options.port)
    runs = server.Runs(options.run_dir)
    key = api_key_from(options.api_key_env)
    if key is None and not is_loopback(options.host):
        key = secrets.token_urlsafe(24)
    with closing(listen(Address(options.host, port))) as listening:
        address = url_of(listening)
        asked = f"/?key={key}" if key is not None and options.api_key_env is None else ""
        note = f"; its key is in {options.api_key_env}: {address}/?key=KEY" if options.api_key_env else ""
        say(f"watching at {address}{asked}{note} (Ctrl-C ends it)")
        return server.serve(runs, listening, key=key, end_note="The page's server was stopped.")


def page_beside(port: int | None) -> Beside:
    """The page of `train --watch`. Raises UserError, before anything of the run exists, if there can be none."""
    require("serve", "pipelinerl train --watch")
    from pipelinerl.experiments.watch.beside import Beside  # noqa: PLC0415 - needs the extra `serve`

    return Beside(PORT if port is None else checked_port("--watch-port", port))


def checked_port(flag: str, port: int) -> int:
    """Raises UserError."""
    if not 0 <= port <= 65535:
        raise UserError(f"{flag} {port}: give 0 (any) to 65535")
    return port
