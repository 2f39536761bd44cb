"""`pipelinerl doctor` and `pipelinerl completion`: the installation, and the shell."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, Parser, refuse_settings, write
from pipelinerl.extras import require

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_to(commands: Commands) -> None:
    text = "Look at this machine and installation: cores, memory, GPUs, packages, Redis, vLLM; say what is wrong."
    flag = commands.add("doctor", text, run=run_doctor).add_argument
    text = "also look at the Python interpreter of vLLM, as in engine.python"
    flag("--vllm-python", type=Path, metavar="PYTHON", help=text)

    text = "Print a script with which a shell completes commands, flags and keys of the run file (extra `completion`)."
    flag = commands.add("completion", text, run=run_completion).add_argument
    flag("shell", choices=SHELLS, help="the shell")


def run_doctor(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Returns exit status 1 if something is wrong."""
    refuse_settings("pipelinerl doctor", settings)
    from pipelinerl.experiments.doctor import WRONG, examine, shown  # noqa: PLC0415 (loads torch)

    found = examine(options.vllm_python)
    return write(shown(found)) or int(any(finding.level == WRONG for finding in found))


def run_completion(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl completion", settings)
    require("completion", "pipelinerl completion")
    import shtab  # noqa: PLC0415 - optional

    return write(shtab.complete(_complete_parser(shtab), options.shell) + "\n")


def _complete_parser(shtab: Any) -> Parser:
    """The parser of all commands, also with the keys of the run file, which `Commands.split` takes away from the others.

    Files and folders are completed where a path is meant.
    """
    from pipelinerl.cli.main import MODULES  # noqa: PLC0415 - it imports this module
    from pipelinerl.config.keys import run_keys  # noqa: PLC0415 (with the schema)

    commands = Commands()
    for module in MODULES:
        importlib.import_module(f"pipelinerl.cli.{module}").add_to(commands)
    for action in commands.root._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = "the command"  # it is left out of our own help, and what has no help is not completed
    for name, parser in commands.parsers.items():
        takes_all = (parser.epilog or "").endswith(SETTINGS_HELP) or name in ("sweep", "study")
        used = getattr(sys.modules[parser.get_default("run").__module__], "KEYS", ())
        for key, of in run_keys().items():
            if (takes_all or key in used) and f"--{key}" not in parser.flags:
                options = [option for option in of.schema.get("anyOf", [of.schema]) if "enum" in option]
                choices = options[0]["enum"] if options else ["true", "false"] if of.types == {"boolean"} else None
                parser.add_argument(f"--{key}", choices=choices, metavar="VALUE", help="a key of the run file")
        for action in parser._actions:
            if action.type is Path:
                folder = "DIR" in str(action.metavar) and "FILE" not in str(action.metavar)
                action.complete = shtab.DIRECTORY if folder else shtab.FILE  # type: ignore[attr-defined]
    return commands.root
