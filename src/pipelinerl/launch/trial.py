"""The trial of an environment before a run, in a process of its own (`tryout`).

That process has a time limit and is killed with all processes that it started.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

import pipelinerl.errors
from pipelinerl.child import ChildProcess
from pipelinerl.config.load import config_to_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import EnvironmentSetupError

OUTPUT_LINES = 5


class Step(msgspec.Struct, frozen=True, tag="step"):
    """What the process does next, as a phrase that continues "it ..."."""

    doing: str


class Mistake(msgspec.Struct, frozen=True, tag="mistake"):
    """The process ended with an error: its class in `errors`, and its message."""

    kind: str
    message: str


class TryoutReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The result of a successful trial.

    `prompt` is the first problem's prompt, `reward` and `metrics` are those of an empty answer to it. `prompt_tokens` are
    the prompt lengths of the first problems. `built_s` is how long it took
    to build the environment, `held_out` the number of held-out problems. `notes`: what
    does not agree between model and tokenizer, and how many steps an epoch is.
    """

    built_s: float
    held_out: int
    prompt: str = ""
    prompt_tokens: tuple[int, ...] = ()
    reward: float = 0.0
    metrics: dict[str, float] = {}
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


TryoutMessage = Step | Mistake | TryoutReport


def try_environment(config: RunConfig, *, attempts: bool = True) -> TryoutReport:
    """Import the callback, build the environment and, with `attempts`, try an empty answer, in a separate process.

    Raises the error that this ended with. Raises EnvironmentSetupError if it took longer than `launch.startup_timeout_s`
    or crashed its process.
    """
    kind, bound_s = config.environment.kind, config.launch.startup_timeout_s
    with tempfile.TemporaryDirectory(prefix="pipelinerl-tryout-") as name:
        folder = Path(name)
        settings, messages = folder / "config.yaml", folder / "messages.jsonl"
        settings.write_text(config_to_yaml(config), encoding="utf-8")
        messages.touch()
        command = [sys.executable, "-m", "pipelinerl.launch.tryout", str(settings), str(messages)]
        command += [] if attempts else ["build"]
        with ChildProcess(command, log=folder / "output") as process:
            process.wait_until(lambda: not isinstance(_last_message(messages), Step), bound_s)
            message = _last_message(messages)
            if isinstance(message, TryoutReport):
                return message
            if isinstance(message, Mistake):
                raise getattr(pipelinerl.errors, message.kind, EnvironmentSetupError)(message.message)
            if process.running:
                raise EnvironmentSetupError(
                    f"environment {kind} was not ready after {bound_s:g} s (launch.startup_timeout_s): it {message.doing}"
                )
            last = "\n".join(process.log_lines()[-OUTPUT_LINES:])
            raise EnvironmentSetupError(
                f"environment {kind}: its process {process.how_it_ended()} while it {message.doing}"
                + (f"; the end of its output:\n{last}" if last else "")
            )


def _last_message(path: Path) -> TryoutMessage:
    """The last complete line that the process wrote."""
    *_, last, _ = ["", *path.read_text(encoding="utf-8").split("\n")]
    return msgspec.json.decode(last, type=TryoutMessage) if last else Step("loads this package")
