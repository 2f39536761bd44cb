"""`pipelinerl watch`, `report` and `browse`: what a run does or did."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from pipelinerl.cli.parser import PORTS, Commands, say, write
from pipelinerl.extras import require

PORT = 7117
_QUERY = (
    'QUERY: words, "some text", reward>0.5, and likewise turns, completion_tokens, version_min, version_max, step, lag_min, '
    "lag_max, advantage; finish_reason=length, left_out=REASON. All must hold for the same rollout."
)


def add_to(commands: Commands) -> None:
    text = "Watch runs in a browser: a page on this machine, also for finished runs and several side by side."
    flag = commands.add("watch", text, run=run_watch, keys=False).add_argument
    flag("run_dir", type=Path, nargs="+", metavar="RUN_DIR", help="a run directory, or a folder of them")
    flag("--port", type=PORTS, default=PORT, metavar="PORT", help=f"port to listen on, 0: any free port (default: {PORT})")
    flag("--listen-fd", type=int, metavar="FD", help=argparse.SUPPRESS)  # for `train --watch`; it ends with stdin

    text = "Write the page of `pipelinerl watch` for one or more runs to one HTML file that works offline."
    flag = commands.add("report", text, run=run_report, keys=False).add_argument
    flag("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="a run directory")
    text = "output file (default: report.html in the first run directory)"
    flag("-o", "--out", type=Path, metavar="FILE.html", help=text)

    text = "Print the rollouts of a run, also while it runs: all groups, one group's attempts, or one rollout's tokens."
    flag = commands.add("browse", text, _QUERY, run=run_browse, keys=False).add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    text = "print a group (12) or a rollout (g12.a3) instead of the table of all groups"
    flag("--show", metavar="ID", help=text)
    flag("--find", metavar="QUERY", default="", help="only groups and rollouts that match")


def run_watch(options: argparse.Namespace, _settings: Sequence[str]) -> int:
    require("serve", "pipelinerl watch")
    from pipelinerl.experiments.watch import server  # noqa: PLC0415 - needs the extra `serve`
    from pipelinerl.serving.server.http import listen, url_of  # noqa: PLC0415

    runs = server.Runs(options.run_dir)
    if options.listen_fd is not None:
        return server.serve(runs, socket.socket(fileno=options.listen_fd), beside=True)
    with closing(listen(("127.0.0.1", options.port))) as listening:
        say(f"watching at {url_of(listening)} (Ctrl-C ends it)")
        return server.serve(runs, listening)


def run_report(options: argparse.Namespace, _settings: Sequence[str]) -> int:
    from pipelinerl.experiments.watch.page import report_page  # noqa: PLC0415 (with the others)
    from pipelinerl.report import write_file  # noqa: PLC0415

    run_dirs: list[Path] = options.run_dirs
    out: Path = options.out or run_dirs[0] / "report.html"
    write_file(out, report_page(run_dirs).encode())
    return write(f"{out}\n")


def run_browse(options: argparse.Namespace, _settings: Sequence[str]) -> int:
    """Returns exit status 1 if nothing matches, as grep does."""
    from pipelinerl.experiments import browse  # noqa: PLC0415 (with the others)

    query, run, find = browse.parse(options.find), browse.RunRollouts(options.run_dir), options.find
    if options.show is None:
        lines = browse.table_of_groups(run, query)
    elif options.show.isdecimal():
        lines = browse.attempts_of_group(run, run.find(options.show), query)
    else:
        load = partial(browse.load_token_text, options.run_dir)
        lines, find = browse.tokens_of_rollout(run, run.find(options.show), options.show, load), ""
    found, status = -1, 0  # without the heading
    for line in lines:
        found += 1
        if status := write(line):
            break
    if find and not found:
        say(f"nothing matches --find {find!r}")
        return 1
    return status
