"""`train --dry-run`: checks that devices and model exist, that the run fits into memory, and that the environment works.

User code runs in a separate process (`tryout`), which has a time limit and is killed with all processes that it started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from pipelinerl import errors
from pipelinerl.config import config_to_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.registry import check_statically
from pipelinerl.errors import EnvironmentSetupError, PipelineRLError
from pipelinerl.launch.hosts.resources import check_devices
from pipelinerl.launch.memory import Judgement, check_memory

SHOWN_CHARACTERS = 80
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
    the prompt lengths of the first problems. `single_turn`: an attempt has one prompt only. `built_s` is how long it took
    to build the environment, `held_out` the number of held-out problems.
    """

    built_s: float
    prompt: str
    prompt_tokens: tuple[int, ...]
    single_turn: bool
    reward: float
    metrics: dict[str, float]
    held_out: int

    @property
    def longest_prompt(self) -> int | None:
        """The longest prompt of the first problems, in tokens; None if prompts of later turns are not known."""
        return max(self.prompt_tokens, default=None) if self.single_turn else None


TryoutMessage = Step | Mistake | TryoutReport


def dry_run(config: RunConfig) -> list[str]:
    """Check everything that can be checked without the model's weights. Returns the report, as lines of text.

    Raises the error that the run would end with: UserError for settings, models and environments that can't be used.
    """
    _check_without_running(config)
    report = try_environment(config)
    return [*check_memory(config, report.longest_prompt).report(), *_report_lines(report, config)]


def check_before_the_start(config: RunConfig) -> Judgement:
    """The checks of a run before its processes start. Raises UserError for what would end the run.

    If the run may not fit into memory, it is judged again with the environment's actual prompt lengths: the first prediction
    assumes that a prompt may be as long as a slot. If the environment can't be tried, the first judgement stands.
    """
    memory = _check_without_running(config)
    if memory.warnings:
        with suppress(EnvironmentSetupError):
            return check_memory(config, try_environment(config).longest_prompt)
    return memory


def _check_without_running(config: RunConfig) -> Judgement:
    """Check the devices, the model and its memory, and the environment's code statically. Raises UserError."""
    check_devices(config)
    memory = check_memory(config)
    check_statically(config.environment.kind, config.environment.args, held_out=config.evaluation.problems)
    return memory


def try_environment(config: RunConfig) -> TryoutReport:
    """Build the environment and try an empty answer, in a separate process.

    Raises the error that this ended with. Raises EnvironmentSetupError if it took longer than `launch.startup_timeout_s`
    or crashed its process.
    """
    bound_s = config.launch.startup_timeout_s
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "pipelinerl.launch.tryout", str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[write_fd],
            start_new_session=True,
        )
        os.close(write_fd)
        try:
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.write(config_to_yaml(config).encode())
                    process.stdin.close()
            doing = "loads this package"
            for message in _messages(read_fd, time.monotonic() + bound_s):
                if isinstance(message, Step):
                    doing = message.doing
                elif isinstance(message, Mistake):
                    raise _to_error(message)
                else:
                    return message
            if process.poll() is None and _wait(process) is None:
                raise EnvironmentSetupError(
                    f"environment {config.environment.kind} was not ready after {bound_s:g} s "
                    f"(launch.startup_timeout_s): it {doing}"
                )
            output.seek(0)
            last = b"\n".join(output.read().splitlines()[-OUTPUT_LINES:]).decode(errors="replace")
            raise EnvironmentSetupError(
                f"environment {config.environment.kind} ended its process (status {process.returncode}) while it {doing}"
                + (f"; the end of its output:\n{last}" if last else "")
            )
        finally:
            os.close(read_fd)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _messages(fd: int, deadline_s: float) -> Iterator[TryoutMessage]:
    """The messages that arrive, one per line, until the other end closes or `deadline_s` has passed."""
    decoder, waiting = msgspec.json.Decoder(TryoutMessage), b""
    while select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        received = os.read(fd, 1 << 16)
        if not received:
            return
        *lines, waiting = (waiting + received).split(b"\n")
        yield from map(decoder.decode, lines)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status of the process, or None if it still runs after a second."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(1.0)
    return None


def _to_error(mistake: Mistake) -> PipelineRLError:
    kind = getattr(errors, mistake.kind, EnvironmentSetupError)
    error: PipelineRLError = kind(mistake.message)
    return error


def _report_lines(report: TryoutReport, config: RunConfig) -> list[str]:
    tokens = report.prompt_tokens
    longest = f", {min(tokens)} to {max(tokens)} in the first {len(tokens)} problems" if len(tokens) > 1 else ""
    shown = report.prompt if len(report.prompt) <= SHOWN_CHARACTERS else f"{report.prompt[:SHOWN_CHARACTERS]}..."
    metrics = "".join(f", {name} {value:g}" for name, value in report.metrics.items())
    lines = [
        f"environment: {config.environment.kind} is built in {report.built_s:.1f} s",
        f"  the first prompt has {tokens[0]} tokens{longest}: {shown!r}",
        f"  an empty answer to it has reward {report.reward:g}{metrics}",
    ]
    if config.evaluation.problems:
        lines.append(f"  {report.held_out} held-out problems, {config.evaluation.problems} asked for")
    return lines
