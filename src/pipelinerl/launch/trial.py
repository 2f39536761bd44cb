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


class TryoutReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a successful trial.

    built_s          how long it took to build the environment
    held_out         the number of held-out problems
    prompt           the prompt of the first problem, and
    prompt_tokens    its length
    reward, metrics  those of an empty answer to the first problem
    warnings         what is doubtful
    notes            what does not agree between model and tokenizer, and how many steps an epoch is
    """

    built_s: float
    held_out: int
    prompt: str = ""
    prompt_tokens: int = 0
    reward: float = 0.0
    metrics: dict[str, float] = {}
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


TryoutMessage = str | tuple[str, str] | TryoutReport
"""What the process does next, as a phrase that continues "it ..."; the class and the message of its error; its result."""


def try_environment(config: RunConfig, *, attempts: bool = True) -> TryoutReport:
    """Import the callback, build the environment and, with `attempts`, try an empty answer, in a separate process.

    Raises the error that this ended with. Raises EnvironmentSetupError if it took longer than `launch.startup_timeout_s`
    or crashed its process.
    """
    what, bound_s = f"environment {config.environment.kind}", config.launch.startup_timeout_s
    with tempfile.TemporaryDirectory(prefix="pipelinerl-tryout-") as name:
        settings, messages = Path(name, "config.yaml"), Path(name, "messages.jsonl")
        settings.write_text(config_to_yaml(config), encoding="utf-8")
        messages.touch()

        def last() -> TryoutMessage:
            """The last complete line that the process wrote."""
            *_, line, _ = ["", *messages.read_text(encoding="utf-8").split("\n")]
            return msgspec.json.decode(line, type=TryoutMessage) if line else "loads this package"

        command = [sys.executable, "-m", "pipelinerl.launch.tryout", str(settings), str(messages)]
        with ChildProcess([*command, *([] if attempts else ["build"])], log=Path(name, "output")) as process:
            process.wait_until(lambda: not isinstance(last(), str), bound_s)
            match last():
                case TryoutReport() as report:
                    return report
                case (kind, message):
                    raise getattr(pipelinerl.errors, kind, EnvironmentSetupError)(message)
                case doing if process.running:
                    raise EnvironmentSetupError(
                        f"{what} was not ready after {bound_s:g} s (launch.startup_timeout_s): it {doing}"
                    )
                case doing:
                    output = "\n".join(process.log_lines()[-OUTPUT_LINES:])
                    raise EnvironmentSetupError(
                        f"{what}: its process {process.how_it_ended()} while it {doing}"
                        + (f"; the end of its output:\n{output}" if output else "")
                    )
