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
    from pipelinerl.experiments.browse.groups import Query
    from pipelinerl.experiments.browse.records import Browsed, RunRollouts
    from pipelinerl.experiments.browse.tokens import TokenText

_EPILOG = (
    'QUERY: words, "some text", reward>0.5, version=12, lag>=3, length<20, trained, untrained, skipped, dropped, '
    "dropped=REASON. All terms must match the same rollout."
)


def add_to(commands: Commands) -> None:
    text = "Print the rollouts of a run, also while it runs: all groups, one group's attempts, or one rollout's tokens."
    flag = commands.add("browse", text, _EPILOG, run=run).add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    text = "print a group (12) or a rollout (g12.a3) instead of the table of all groups"
    flag("--show", metavar="ID", help=text)
    flag("--find", metavar="QUERY", help="only groups and rollouts that match")
    flag("--evaluations", action="store_true", help="the answers to held-out problems instead, all evaluations together")
    flag("--export", type=Path, metavar="FILE", help="write one row per rollout to a .jsonl file")


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl browse", settings)
    from pipelinerl.experiments.browse.groups import attempts_of_group, parse, table_of_groups  # noqa: PLC0415 (and others)
    from pipelinerl.experiments.browse.records import RunEvaluations, RunRollouts  # noqa: PLC0415

    query = parse(options.find or "")
    if options.evaluations and options.export:
        raise UserError("--export: rollouts/evaluation-*.jsonl already have one row per answer; use these files")
    if options.export and options.show:
        raise UserError("--export writes all rollouts, or those that match --find; leave out --show")
    if options.export:
        return _export(options, RunRollouts(options.run_dir), query)
    run = (RunEvaluations if options.evaluations else RunRollouts)(options.run_dir)
    if options.show is None or options.show.isdecimal():
        lines = table_of_groups(run, query, say) if options.show is None else attempts_of_group(run, options.show, query)
        return _print(lines, query)
    return _print(_rollout(options, run), query)


def _rollout(options: argparse.Namespace, run: Browsed) -> list[str]:
    from pipelinerl.experiments.browse.groups import named  # noqa: PLC0415
    from pipelinerl.experiments.browse.tokens import rollout_text  # noqa: PLC0415

    place, group = named(run, options.show)
    rollout = next((one for one in group.rollouts if one.id == options.show), None)
    if rollout is None:
        raise UserError(
            f"group {group.index} has no rollout {options.show!r}: {', '.join(one.id for one in group.rollouts)}"
        )
    try:
        return list(rollout_text(rollout, run.fate(place, rollout.id), _texts(options.run_dir)))
    except ValueError as error:
        raise RunDirectoryError(f"{run.path}: {rollout.id} is damaged: {error}") from error


def _print(lines: Iterable[str], query: Query) -> int:
    count = -1  # without the heading
    for line in lines:
        if status := write(line):
            return status
        count += 1
    return _found(query, count)


def _found(query: Query, count: int) -> int:
    """The exit status: 1 if nothing matches the query, as with grep."""
    if not query.terms or count:
        return 0
    say(f"nothing matches --find {query.text!r}")
    return 1


def _export(options: argparse.Namespace, rollouts: RunRollouts, query: Query) -> int:
    from pipelinerl.experiments.browse.tokens import export  # noqa: PLC0415

    texts = _texts(options.run_dir)
    if texts.missing:
        say(f"prompts, and completions without recorded text, are left out: {texts.missing}")
    count = export(rollouts, texts, options.export, query, say)
    return write(f"{count} rollouts: {options.export}\n") or _found(query, count)


def _texts(run_dir: Path) -> TokenText:
    """The run's tokenizer, or why there is none, as rollouts can be browsed without it."""
    from pipelinerl.experiments.browse.tokens import TokenText, load_token_text  # noqa: PLC0415

    try:
        return load_token_text(with_own_model(config_of_file(run_dir / "config.yaml"), run_dir).model)
    except UserError as error:
        return TokenText(None, str(error))
