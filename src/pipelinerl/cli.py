"""The `pipelinerl` command. Parses arguments, turns errors into one line and an exit status; the work is done elsewhere.

Exit status: 0 the run reached its goal (or the command did what was asked), 2 the user's mistake, 130 interrupted; see
`errors.py` for the others. Heavy modules are imported by the subcommand that needs them, once its arguments are right.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pipelinerl import __version__
from pipelinerl.config import RunConfig, load_config, render
from pipelinerl.errors import PipelineRLError, RunDirectoryError, RunInterruptedError, UserError

_VALUE_FLAGS = ("--resume",)
_OWN_FLAGS = (*_VALUE_FLAGS, "--debug", "--help", "--version")
_SETTINGS_HELP = (
    "every key of the run file is a flag too: --trainer.steps 20; `pipelinerl config` prints them with their docs"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Nothing escapes but bugs."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    failure: BaseException
    try:
        return _run(arguments)
    except RunInterruptedError as stopped:  # asked for, so not an error
        status, message, failure = stopped.exit_status, str(stopped), stopped
    except PipelineRLError as error:
        status, message, failure = error.exit_status, f"error: {error}", error
    except KeyboardInterrupt as stop:
        status, message, failure = 130, "interrupted", stop
    except SystemExit as exit_:  # argparse, after --help and --version
        return exit_.code if isinstance(exit_.code, int) else 1
    if "--debug" in arguments:
        traceback.print_exception(failure)
    print(message, file=sys.stderr)
    return status


def _run(arguments: list[str]) -> int:
    own, settings = _split_settings(arguments)
    options = _parser().parse_args(own)
    match options.command:
        case "train":
            return _train(options.run_file, options.resume, settings)
        case "config":
            return _write(render(_load(options.run_file, settings)))
        case "convert-gguf" if not settings:
            return _convert_gguf(options.source, options.out_dir)
    if settings:
        command = f"pipelinerl {options.command}" if options.command else "pipelinerl without a command"
        raise UserError(f"{command} knows no flag {settings[0].partition('=')[0]} (see `pipelinerl --help`)")
    _parser().print_help(sys.stderr)
    return 2


def _write(text: str) -> int:
    """Print a command's result. Returns its exit status: 0, or 141 when whoever read it (`| head`) has gone."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would complain at exit, when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _train(run_file: Path | None, resume: Path | None, settings: Sequence[str]) -> int:
    if resume is not None:
        run_file = _config_of_run(run_file, resume)
    config = _load(run_file, settings)
    from pipelinerl.launch import train  # noqa: PLC0415 (loads torch, which a mistake above should not wait for)

    train(config, resume=resume)
    return 0


def _config_of_run(run_file: Path | None, run_dir: Path) -> Path:
    if run_file is not None:
        raise UserError(f"--resume takes the configuration from {run_dir / 'config.yaml'}; leave out {run_file}")
    config = run_dir / "config.yaml"
    if not config.is_file():
        raise RunDirectoryError(f"can't resume {run_dir}: it is not a run directory (there is no {config})")
    return config


def _load(run_file: Path | None, settings: Sequence[str]) -> RunConfig:
    for setting in settings:
        flag = setting.partition("=")[0]
        near = difflib.get_close_matches(flag, _OWN_FLAGS, n=1, cutoff=0.75) if flag.startswith("--") else []
        if near and "." not in flag:
            raise UserError(f"unknown flag {flag}; did you mean `{near[0]}`?")
    return load_config(run_file, settings)


def _convert_gguf(source: str, out_dir: Path) -> int:
    from pipelinerl.models.gguf import convert_gguf  # noqa: PLC0415 (loads torch and transformers)

    model = convert_gguf(source, out_dir)
    template = "with a chat template" if model.chat_template else "without a chat template"
    return _write(
        f"{model.path}: {model.architecture}, {model.parameters / 1e6:.1f}M parameters, {model.layers} layers, "
        f"vocabulary of {model.vocab_size}, {template}, ends on token {', '.join(map(str, model.eos_token_ids))}\n"
        f"train it with: pipelinerl train RUN.yaml --model.path {model.path}\n"
    )


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong the way everything else does: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pipelinerl",
        description="Reinforcement learning for language models, with weight updates while sequences are being generated.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pipelinerl {__version__}")
    everywhere = _Parser(add_help=False)
    everywhere.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str, epilog: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, description=text, parents=[everywhere], allow_abbrev=False, epilog=epilog
        )

    train = add("train", "Train a model. Without a run file: the built-in demo.", epilog=_SETTINGS_HELP)
    train.add_argument("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    train.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on with a run from its last checkpoint")
    config = add("config", "Print the resolved configuration, with the documentation of every key.", epilog=_SETTINGS_HELP)
    config.add_argument("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file (none: the demo's)")
    convert = add("convert-gguf", "Convert a GGUF file to a Hugging Face model folder (extra `pipelinerl[gguf]`).")
    convert.add_argument("source", metavar="FILE_OR_PACKAGE", help="a .gguf file, a wheel, or an installed package with one")
    convert.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="the new model folder")
    return parser


def _split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments for argparse, and those that set keys of the run file (`--key value`, `--key=value`, `--switch`).

    What follows a flag of the run file is its value unless it is a flag itself (values that start with `--` are given with
    `=`), so that a run file may stand anywhere but right behind a switch.
    """
    own: list[str] = []
    settings: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, equals, _ = argument.partition("=")
        is_setting = flag.startswith("--") and flag not in _OWN_FLAGS and flag != "--"
        target = settings if is_setting else own
        target.append(argument)
        takes_value = is_setting or flag in _VALUE_FLAGS
        if takes_value and not equals and rest and not rest[0].startswith("--"):
            target.append(rest.pop(0))
    return own, settings
