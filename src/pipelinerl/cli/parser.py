"""Shared by the subcommands: their parsers, flags that set keys of the run file, and printing."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from pipelinerl._version import __version__
from pipelinerl.config import yaml_text
from pipelinerl.config.keys import LIKE, OLD_NAMES
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError

SETTINGS_HELP = (
    "Every key of the run file is also a flag (--trainer.steps 20). `pipelinerl config` prints all keys with their "
    "documentation."
)
"""Epilog of the subcommands that take a run file."""


_USAGE = "pipelinerl COMMAND ...          (pipelinerl COMMAND --help has the flags of each)"
Run = Callable[[argparse.Namespace, Sequence[str]], int]
"""Runs a subcommand with its options and the flags of the run file. Returns the exit status."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as other user errors: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


class Commands:
    """The command's parser, and those of its subcommands by name."""

    def __init__(self) -> None:
        text = "Reinforcement learning for language models, with in-flight weight updates."
        form = argparse.RawDescriptionHelpFormatter
        self.root = Parser("pipelinerl", _USAGE, description=text, formatter_class=form, allow_abbrev=False)
        self.root.add_argument("--version", action="version", version=f"pipelinerl {__version__}")
        self.root.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
        self._subparsers = self.root.add_subparsers(
            dest="command", prog="pipelinerl", help=argparse.SUPPRESS, parser_class=Parser
        )
        self.parsers: dict[str, Parser] = {}

    def add(self, name: str, text: str, epilog: str | None = None, *, run: Run, keys: bool = True) -> Parser:
        """Add the parser of a subcommand, which `run` executes. `keys`: it takes keys of the run file as flags."""
        parser = self.parsers[name] = self._subparsers.add_parser(
            name, description=text, epilog=epilog, help=text, allow_abbrev=False
        )
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        parser.set_defaults(run=run, keys=keys)
        return parser

    def describe(self, names: Iterable[str]) -> None:
        """Have the help list these commands."""
        wrap = textwrap.TextWrapper(min(100, shutil.get_terminal_size().columns - 2), subsequent_indent=" " * 16)
        self.root.epilog = "\n".join(wrap.fill(f"  {name:12}  {self.parsers[name].description}") for name in names)

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options of the command, and the run-file settings. `lab NAME` is one command. Raises UserError."""
        if len(arguments) > 1 and arguments[0] == "lab" and not arguments[1].startswith("-"):
            arguments = [f"lab {arguments[1]}", *arguments[2:]]
        parsers = [self.root, *(self.parsers[argument] for argument in arguments if argument in self.parsers)]
        flags = [flag for parser in parsers[:2] for flag in parser._option_string_actions]
        own, settings = _split(arguments, flags)
        command = next((argument for argument in own if not argument.startswith("-")), "without a command")
        if command not in self.parsers and command in own:
            old = None if "." in command else OLD_NAMES.get(command)  # a key, not a command
            near = old or next(iter(difflib.get_close_matches(command, self.parsers, n=1)), None)
            hint = f"did you mean `{near}`?" if near else f"there are {', '.join(self.parsers)}"
            raise UserError(f"unknown command {command!r}; {hint} (see `pipelinerl --help`)")
        for flag in (setting.partition("=")[0] for setting in settings if setting.startswith("--")):
            like = difflib.get_close_matches(flag, flags, n=1, cutoff=LIKE)
            if like and "." not in flag and flag[2:] not in RunConfig.model_fields:
                raise UserError(f"unknown flag {flag}; did you mean `{like[0]}`?")
            hint = OLD_NAMES.get(f"{command} {flag}", "")
            if hint or command not in own or not self.parsers[command].get_default("keys"):
                raise UserError(f"pipelinerl {command} has no flag {flag} ({hint or 'see `pipelinerl --help`'})")
        return self.root.parse_args(own), settings


def _split(arguments: Sequence[str], flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into arguments for argparse (`flags`) and run-file settings (`--key value`, `--key=value`, `--switch`).

    An argument after a run-file flag is its value unless it starts with `--`; such values need `--key=value`. The path of
    the run file may therefore stand anywhere except right after a switch.
    """
    own: list[str] = []
    settings: list[str] = []
    takes_value = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        is_flag = flag.startswith("--")
        is_setting = is_flag and flag not in (*flags, "--")
        if equals and "." in flag and flag.partition(".")[0] in RunConfig.model_fields and not takes_value:
            raise UserError(f"{argument}: a key of the run file is set by a flag: `--{argument}`")
        (settings if is_setting or (takes_value and not is_flag) else own).append(argument)
        takes_value = is_setting and not equals
    return own, settings


def at_least(least: float, kind: Callable[[str], float] = int, most: float = sys.float_info.max) -> Callable[[str], float]:
    """For argparse: a number of `kind` from `least` to `most`."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            bounds = f"at least {least:g}" if most == sys.float_info.max else f"{least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text}: give a {'whole ' if kind is int else ''}number of {bounds}")
        return value

    return number


PORTS = at_least(0, most=65535)


def keyed_values(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse the values of a KEY=VALUE flag. Each VALUE is YAML, as in run-file flags. Raises UserError."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UserError(f"{flag} {text}: give KEY=VALUE")
        found[key] = yaml_text.parse(value, f"{flag} {key}").value
    return found


def api_key_from(variable: str | None, flag: str = "--api-key-env") -> str | None:
    """The API key in an environment variable, which keeps it off the command line. Raises UserError if it is not set."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise UserError(f"{flag} {variable}: this environment variable is not set")
    return key


def say(line: str) -> None:
    """Print a line on progress, or a warning."""
    print(line, file=sys.stderr, flush=True)


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
