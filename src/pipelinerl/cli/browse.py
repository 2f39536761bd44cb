"""`pipelinerl browse`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.cli.parser import Commands, refuse_settings, say, write
from pipelinerl.config.load import config_of_file, with_own_model
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.extras import require

if TYPE_CHECKING:
    from pipelinerl.experiments.browse.groups import Query
    from pipelinerl.experiments.browse.records import Browsed, RunRollouts
    from pipelinerl.experiments.browse.tokens import TokenText

_EPILOG = (
    'QUERY: words, "some text", reward>0.5, version=12, lag>=3, length<20, trained, untrained, skipped, dropped, '
    "dropped=REASON. All terms must match the same rollout. Keys are shown at the bottom of the screen."
)


def add_to(commands: Commands) -> None:
    text = "Browse the rollouts of a run, also while it runs: groups, attempts side by side, tokens by version or log-prob."
    flag = commands.add("browse", text, _EPILOG, run=run).add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    text = "start at the first matching rollout; tables and exports have only matching rollouts"
    flag("--find", metavar="QUERY", help=text)
    text = "browse the answers to held-out problems instead, all evaluations side by side"
    flag("--evaluations", action="store_true", help=text)
    flag("--plain", action="store_true", help="print a table (the default without a terminal)")
    flag("--export", type=Path, metavar="FILE", help="write one row per rollout to a .jsonl or .parquet file")
    text = "model folder for log-probs to compare with the engine's (default: the run's newest checkpoint)"
    flag("--weights", type=Path, metavar="DIR", help=text)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl browse", settings)
    from pipelinerl.experiments.browse.groups import parse  # noqa: PLC0415 (with the others)
    from pipelinerl.experiments.browse.records import RunEvaluations, RunRollouts  # noqa: PLC0415

    query = parse(options.find) if options.find else None
    if options.evaluations and options.export:
        raise UserError(
            "--export: evaluations already have one row per answer, in rollouts/evaluation-*.jsonl; use these files"
        )
    if options.export:
        return _export(options, RunRollouts(options.run_dir), query)
    chosen = (RunEvaluations if options.evaluations else RunRollouts)(options.run_dir)
    if options.plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _print(chosen, query)
    return _browse(options, chosen)


def _browse(options: argparse.Namespace, rollouts: Browsed) -> int:
    require("browse", "browsing in a terminal", "; --plain and --export work without it")
    from pipelinerl.experiments.browse.textual_app import RolloutBrowser  # noqa: PLC0415
    from pipelinerl.experiments.browse.tokens import Gaps  # noqa: PLC0415

    config = _config(options.run_dir)
    gaps = Gaps(options.run_dir, config, options.weights)
    app = RolloutBrowser(rollouts, str(options.run_dir), lambda: _texts(config), gaps.of, options.find)
    if (error := app.run()) is not None:
        raise error
    return app.return_code or 0


def _print(rollouts: Browsed, query: Query | None) -> int:
    from pipelinerl.experiments.browse.groups import plain_table  # noqa: PLC0415

    lines = 0
    for line in plain_table(rollouts, query, say):
        if status := write(line):
            return status
        lines += 1
    return _found(query, lines - 1)  # without the heading


def _found(query: Query | None, count: int) -> int:
    """The exit status: 1 if nothing matches the query, as with grep."""
    if query is None or count:
        return 0
    say(f"nothing matches --find {query.text!r}")
    return 1


def _export(options: argparse.Namespace, rollouts: RunRollouts, query: Query | None) -> int:
    from pipelinerl.experiments.browse.export import export  # noqa: PLC0415

    texts = _texts(_config(options.run_dir))
    if texts.missing:
        say(f"prompts, and completions without recorded text, are left out: {texts.missing}")
    count = export(rollouts, texts, options.export, query, say)
    return write(f"{count} rollouts: {options.export}\n") or _found(query, count)


def _config(run_dir: Path) -> RunConfig | str:
    """The run's configuration, or why it can't be read, as rollouts can be browsed without it."""
    try:
        return with_own_model(config_of_file(run_dir / "config.yaml"), run_dir)
    except UserError as error:
        return str(error)


def _texts(config: RunConfig | str) -> TokenText:
    from pipelinerl.experiments.browse.tokens import TokenText, load_token_text  # noqa: PLC0415

    return TokenText(None, config) if isinstance(config, str) else load_token_text(config.model)
