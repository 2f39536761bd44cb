"""`pipelinerl browse`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.cli.parser import Commands, refuse_settings, say, write
from pipelinerl.config.load import config_of_file, with_own_model
from pipelinerl.errors import RunDirectoryError, UserError

if TYPE_CHECKING:
    from pipelinerl.experiments.browse.records import RunRollouts
    from pipelinerl.experiments.browse.rows import TokenText

_EPILOG = (
    'QUERY: words, "some text", reward>0.5, and likewise turns, completion_tokens, version_min, version_max, step, lag_min, '
    "lag_max, advantage; finish_reason=length, left_out=REASON. All must hold for the same rollout."
)


def add_to(commands: Commands) -> None:
    text = "Print the rollouts of a run, also while it runs: all groups, one group's attempts, or one rollout's tokens."
    flag = commands.add("browse", text, _EPILOG, run=run).add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    text = "print a group (12) or a rollout (g12.a3) instead of the table of all groups"
    flag("--show", metavar="ID", help=text)
    flag("--find", metavar="QUERY", default="", help="only groups and rollouts that match")
    flag("--evaluations", action="store_true", help=argparse.SUPPRESS)  # an option of earlier versions
    flag("--export", type=Path, metavar="FILE", help="write one row per rollout to a .jsonl file")


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl browse", settings)
    from pipelinerl.experiments.browse.records import RunRollouts  # noqa: PLC0415 (and others)
    from pipelinerl.experiments.browse.rows import export, parse  # noqa: PLC0415
    from pipelinerl.experiments.browse.tables import attempts_of_group, table_of_groups  # noqa: PLC0415

    if options.evaluations:
        raise UserError("--evaluations: read rollouts/evaluation-*.jsonl of the run, which have one row per answer")
    if options.export and options.show:
        raise UserError("--export writes all rollouts, or those that match --find; leave out --show")
    query, run = parse(options.find), RunRollouts(options.run_dir)
    if options.export:
        texts = _texts(options.run_dir)
        if texts.missing:
            say(f"prompts, and completions without recorded text, are left out: {texts.missing}")
        count = export(run, texts, options.export, query, say)
        return write(f"{count} rollouts: {options.export}\n") or _found(options.find, count)
    if options.show is None:
        return _print(table_of_groups(run, query, say), options.find)
    if (place := run.find(options.show)) is None:
        raise UserError(f"{options.show!r} is not among the {len(run)} groups of {run.path}; `pipelinerl browse` lists them")
    if options.show.isdecimal():
        return _print(attempts_of_group(run, place, query), options.find)
    return _print(_rollout(options, run, place), "")


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


def _print(lines: Iterable[str], find: str) -> int:
    count = -1  # without the heading
    for line in lines:
        if status := write(line):
            return status
        count += 1
    return _found(find, count)


def _found(find: str, count: int) -> int:
    """The exit status: 1 if nothing matches, as with grep."""
    if not find or count:
        return 0
    say(f"nothing matches --find {find!r}")
    return 1


def _texts(run_dir: Path) -> TokenText:
    """The run's tokenizer, or why there is none, as rollouts can be browsed without it."""
    from pipelinerl.experiments.browse.rows import TokenText, load_token_text  # noqa: PLC0415

    try:
        return load_token_text(with_own_model(config_of_file(run_dir / "config.yaml"), run_dir).model)
    except UserError as error:
        return TokenText(missing=str(error))
