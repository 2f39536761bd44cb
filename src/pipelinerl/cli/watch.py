"""`pipelinerl watch`, `report` and `browse`: what a run does or did."""

from __future__ import annotations

import argparse
import secrets
import socket
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.cli.parser import PORTS, Commands, api_key_from, say, write
from pipelinerl.config.load import config_of_file, with_own_model
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.extras import require

if TYPE_CHECKING:
    from pipelinerl.experiments.browse.records import RunRollouts
    from pipelinerl.experiments.browse.rows import TokenText
    from pipelinerl.experiments.watch.beside import Beside

PORT = 7117
_QUERY = (
    'QUERY: words, "some text", reward>0.5, and likewise turns, completion_tokens, version_min, version_max, step, lag_min, '
    "lag_max, advantage; finish_reason=length, left_out=REASON. All must hold for the same rollout."
)


def add_to(commands: Commands) -> None:
    text = "Watch runs in a browser: a page on this machine, also for finished runs and several side by side."
    flag = commands.add("watch", text, run=run_watch, keys=False).add_argument
    flag("run_dir", type=Path, nargs="+", metavar="RUN_DIR", help="a run directory, or a folder of them")
    flag("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    flag(
        "--port",
        type=PORTS,
        default=PORT,
        metavar="PORT",
        help=f"port to listen on, 0: any free port (default: {PORT})",
    )
    text = "environment variable with a key that readers must send; other hosts than this machine need one (default: random)"
    flag("--api-key-env", metavar="NAME", help=text)
    flag("--listen-fd", type=int, metavar="FD", help=argparse.SUPPRESS)  # of `train --watch`, with its end as that of stdin

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
    flag("--evaluations", action="store_true", help=argparse.SUPPRESS)  # an option of earlier versions
    flag("--export", type=Path, metavar="FILE", help="write one row per rollout to a .jsonl file")


def run_watch(options: argparse.Namespace, _settings: Sequence[str]) -> int:
    require("serve", "pipelinerl watch")
    from pipelinerl.experiments.watch import beside, server  # noqa: PLC0415 - need the extra `serve`
    from pipelinerl.serving.server.http import listen, url_of  # noqa: PLC0415
    from pipelinerl.serving.server.options import Address, is_loopback  # noqa: PLC0415

    if options.listen_fd is not None:
        return beside.serve_beside(options.run_dir[0], socket.socket(fileno=options.listen_fd))
    runs = server.Runs(options.run_dir)
    key = api_key_from(options.api_key_env)
    if key is None and not is_loopback(options.host):
        key = secrets.token_urlsafe(24)
    with closing(listen(Address(options.host, options.port))) as listening:
        address = url_of(listening)
        asked = f"/?key={key}" if key is not None and options.api_key_env is None else ""
        note = f"; its key is in {options.api_key_env}: {address}/?key=KEY" if options.api_key_env else ""
        say(f"watching at {address}{asked}{note} (Ctrl-C ends it)")
        return server.serve(runs, listening, key=key, end_note="The page's server was stopped.")


def page_beside(port: int) -> Beside:
    """The page of `train --watch`. Raises UserError, before anything of the run exists, if there can be none."""
    require("serve", "pipelinerl train --watch")
    from pipelinerl.experiments.watch.beside import Beside  # noqa: PLC0415 - needs the extra `serve`

    return Beside(port)


def run_report(options: argparse.Namespace, _settings: Sequence[str]) -> int:
    from pipelinerl.experiments.watch.page import report_page  # noqa: PLC0415 (with the others)
    from pipelinerl.report import write_file  # noqa: PLC0415

    run_dirs: list[Path] = options.run_dirs
    out: Path = options.out or run_dirs[0] / "report.html"
    write_file(out, report_page(run_dirs).encode())
    return write(f"{out}\n")


def run_browse(options: argparse.Namespace, _settings: Sequence[str]) -> int:
    """Returns exit status 1 if nothing matches, as grep does."""
    if options.evaluations:
        raise UserError("--evaluations: read rollouts/evaluation-*.jsonl of the run, which have one row per answer")
    if options.export and options.show:
        raise UserError("--export writes all rollouts, or those that match --find; leave out --show")
    from pipelinerl.experiments.browse.records import RunRollouts  # noqa: PLC0415 (and others)
    from pipelinerl.experiments.browse.rows import export, parse  # noqa: PLC0415
    from pipelinerl.experiments.browse.tables import attempts_of_group, table_of_groups  # noqa: PLC0415

    query, run, find, status = parse(options.find), RunRollouts(options.run_dir), options.find, 0
    if options.export:
        texts = _texts(options.run_dir)
        if texts.missing:
            say(f"prompts, and completions without recorded text, are left out: {texts.missing}")
        found = export(run, texts, options.export, query, say)
        status = write(f"{found} rollouts: {options.export}\n")
    else:
        lines: Iterable[str]
        if options.show is None:
            lines = table_of_groups(run, query, say)
        elif (place := run.find(options.show)) is None:
            raise UserError(
                f"{options.show!r} is not among the {len(run)} groups of {run.path}; `pipelinerl browse` lists them"
            )
        elif options.show.isdecimal():
            lines = attempts_of_group(run, place, query)
        else:
            lines, find = _rollout(options, run, place), ""
        found = -1  # without the heading
        for line in lines:
            found += 1
            if status := write(line):
                break
    if find and not found:
        say(f"nothing matches --find {find!r}")
        return 1
    return status


def _rollout(options: argparse.Namespace, run: RunRollouts, place: int) -> list[str]:
    from pipelinerl.experiments.browse.rows import row_of  # noqa: PLC0415
    from pipelinerl.experiments.browse.tables import rollout_text  # noqa: PLC0415

    group = run.group(place)
    rollout = next((one for one in group.rollouts if one.id == options.show), None)
    if rollout is None:
        raise UserError(
            f"group {group.index} has no rollout {options.show!r}: {', '.join(one.id for one in group.rollouts)}"
        )
    texts = _texts(options.run_dir)
    try:
        return list(rollout_text(rollout, row_of(group, rollout, run.fate(place, rollout.id), texts), texts))
    except ValueError as error:
        raise RunDirectoryError(f"{run.path}: {rollout.id} is damaged: {error}") from error


def _texts(run_dir: Path) -> TokenText:
    """The run's tokenizer, or why there is none, as rollouts can be browsed without it."""
    from pipelinerl.experiments.browse.rows import TokenText, load_token_text  # noqa: PLC0415

    try:
        return load_token_text(with_own_model(config_of_file(run_dir / "config.yaml"), run_dir).model)
    except UserError as error:
        return TokenText(missing=str(error))
