"""Shared by the subcommands: their parsers, flags that set keys of the run file, and printing."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipelinerl import __version__
from pipelinerl.config import RunConfig, load_config, yaml_text
from pipelinerl.errors import UserError

SETTINGS_HELP = (
    "every key of the run file is also a flag, e.g. --trainer.steps 20; `pipelinerl config` prints all keys with their docs"
)
"""Epilog of the subcommands that take a run file."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as other user errors: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


class Commands:
    """The command's parser, and one for each subcommand."""

    def __init__(self) -> None:
        self.root = Parser(
            prog="pipelinerl",
            description="Reinforcement learning for language models, with in-flight weight updates.",
            allow_abbrev=False,
        )
        self.root.add_argument("--version", action="version", version=f"pipelinerl {__version__}")
        self.root.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
        self._common_flags = Parser(add_help=False)
        self._common_flags.add_argument("--debug", action="store_true", help="show the traceback of an error")
        self._subparsers = self.root.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
        self._parsers: dict[str, argparse.ArgumentParser] = {}

    def add(self, name: str, text: str, epilog: str | None = None) -> argparse.ArgumentParser:
        """Add the parser of a subcommand, which must set the default `run`: (options, settings) -> exit status."""
        parser = self._subparsers.add_parser(
            name, help=text, description=text, parents=[self._common_flags], allow_abbrev=False, epilog=epilog
        )
        self._parsers[name] = parser
        return parser

    def split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split into arguments for argparse and run-file settings (`--key value`, `--key=value`, `--switch`).

        An argument after a run-file flag is its value unless it starts with `--`; such values need `--key=value`. The path
        of the run file may therefore stand anywhere except right after a switch.
        """
        flags = self._flags(arguments)
        own: list[str] = []
        settings: list[str] = []
        rest = list(arguments)
        while rest:
            argument = rest.pop(0)
            flag, equals, _ = argument.partition("=")
            is_setting = flag.startswith("--") and flag not in flags and flag != "--"
            target = settings if is_setting else own
            target.append(argument)
            most = 1 if is_setting else _most_values(flags.get(flag))
            while most and not equals and rest and not rest[0].startswith("--"):
                target.append(rest.pop(0))
                most -= 1
        self._check_command(own)
        _check_spelling(settings, flags)
        return own, settings

    def _check_command(self, own: Sequence[str]) -> None:
        command = next((argument for argument in own if not argument.startswith("-")), None)
        if command is None or command in self._parsers:
            return
        near = difflib.get_close_matches(command, self._parsers, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(self._parsers)}"
        raise UserError(f"unknown command {command!r}; {hint} (see `pipelinerl --help`)")

    def _flags(self, arguments: Sequence[str]) -> Mapping[str, argparse.Action]:
        """The flags of the subcommand among the arguments, and the common ones."""
        command = next((argument for argument in arguments if argument in self._parsers), None)
        parsers = [self.root] if command is None else [self.root, self._parsers[command]]
        return {flag: action for parser in parsers for action in parser._actions for flag in action.option_strings}


def _most_values(action: argparse.Action | None) -> int:
    if action is None or action.nargs == 0:
        return 0
    if isinstance(action.nargs, int):
        return action.nargs
    return 1 if action.nargs in (None, "?") else sys.maxsize


def _check_spelling(settings: Sequence[str], flags: Mapping[str, argparse.Action]) -> None:
    keys = {f"--{name}" for name in RunConfig.__struct_fields__}
    for setting in settings:
        flag = setting.partition("=")[0]
        if flag in keys:
            continue
        near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.75) if flag.startswith("--") else []
        if near and "." not in flag:
            raise UserError(f"unknown flag {flag}; did you mean `{near[0]}`?")


def load(run_file: Path | None, settings: Sequence[str]) -> RunConfig:
    """The configuration of a run file (None: the demo) with flags applied on top. Raises ConfigError."""
    return load_config(run_file, settings)


def keyed_values(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse the values of a KEY=VALUE flag. Each VALUE is YAML, as in run-file flags. Raises UserError."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UserError(f"{flag} {text}: give KEY=VALUE")
        found[key] = yaml_text.parse(value, f"{flag} {key}").value
    return found


def refuse_settings(command: str, settings: Sequence[str]) -> None:
    """For subcommands without a run file: raises UserError for flags that the subcommand does not have."""
    if settings:
        raise UserError(f"{command} has no flag {settings[0].partition('=')[0]} (see `pipelinerl --help`)")


def api_key_from(variable: str | None) -> str | None:
    """The API key in an environment variable, which keeps it off the command line. Raises UserError if it is not set."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise UserError(f"--api-key-env {variable}: this environment variable is not set")
    return key


def write(text: str) -> int:
    """Print a command's result. Returns its exit status: 0, or 141 if the reader of the pipe (`| head`) has closed it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python prints an error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
