"""The `pipelinerl` command: parses arguments, runs a subcommand, and turns errors into one line and an exit status.

Exit status: 0 the run reached its goal (or the command succeeded), 2 user error, 130 after Ctrl-C, 143 after SIGTERM; see
`errors.py` for the others. Only the module of the given command is imported, and it imports heavy modules after it has
checked its arguments.
"""

from __future__ import annotations

import errno
import gc
import importlib
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from pipelinerl.cli.parser import Commands
from pipelinerl.errors import PipelineRLError, RunInterruptedError
from pipelinerl.files import UNWRITABLE, remedy
from pipelinerl.launch import GARBAGE_THRESHOLD
from pipelinerl.process import counted_interrupts

COMMANDS = {
    **{"init": "project", "try": "eval", "train": "project", "sweep": "lab", "config": "project"},
    **{"watch": "watch", "browse": "watch", "report": "watch", "eval": "eval", "push": "eval"},
    **{"replay": "lab", "serve": "project", "doctor": "project", "lab": "lab"},
}
"""The commands in the order of `pipelinerl --help`, and the module of this package that adds each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Raises only on bugs."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    with counted_interrupts(signal.SIGTERM, raises_at=1) as stopped:
        status = _status(list(sys.argv[1:] if argv is None else argv))
    return 128 + signal.SIGTERM if stopped.terminated and status == RunInterruptedError.exit_status else status


def _status(arguments: list[str]) -> int:
    failure: BaseException
    try:
        return _run(arguments)
    except RunInterruptedError as stopped:  # requested by the user, so the message has no "error: "
        status, message, failure = stopped.exit_status, str(stopped), stopped
    except PipelineRLError as error:
        status, message, failure = error.exit_status, f"error: {error}", error
    except KeyboardInterrupt as stop:
        status, message, failure = 130, "interrupted", stop
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        if _is_out_of_memory(error):
            message = f"error: no memory is left: {why}. Free some, or lower what the command needs"
        elif isinstance(error, OSError) and error.errno in UNWRITABLE:
            message = f"error: can't write: {why}; {remedy(error)}"
        else:
            raise
        status, message, failure = PipelineRLError.exit_status, f"{message}; a run goes on with --resume", error
    except SystemExit as exit_:  # argparse, after --help and --version
        return exit_.code if isinstance(exit_.code, int) else 1
    if "--debug" in arguments:
        traceback.print_exception(failure)
    with suppress(OSError):  # nobody reads it, and the status tells it too
        print(message, file=sys.stderr, flush=True)
    return status


def _run(arguments: list[str]) -> int:
    commands = Commands()
    given = [name for name in arguments[:1] if name in COMMANDS]
    for module in {COMMANDS[name]: None for name in given or COMMANDS}:  # help and spelling need all commands
        importlib.import_module(f"pipelinerl.cli.{module}").add_to(commands)
    if not given:
        commands.describe(COMMANDS)
    options, settings = commands.parse(arguments)
    if options.command is None:
        commands.root.print_help(sys.stderr)
        return 2
    status: int = options.run(options, settings)
    return status


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was refused, to this error or the one during whose handling it arose.

    Python and PyTorch have a class for it only in some places. Elsewhere they, and the loader of libraries, use these words.
    """
    words = (
        r"can't allocate memory|out of memory|can't start new thread|unable to start watchdog thread|failed to map segment"
    )
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, (RuntimeError, ImportError)) and re.search(words, str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
