"""`train --dry-run`, and the trial of an environment.

User code runs in a separate process (`tryout`), which has a time limit and is killed with all processes that it started.
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
from pipelinerl.launch.checks import check_without_running
from pipelinerl.launch.memory import check_memory, on_gpus

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
    to build the environment, `held_out` the number of held-out problems. `notes`: what
    does not agree between model and tokenizer, and how many steps an epoch is.
    """

    built_s: float
    held_out: int
    prompt: str = ""
    prompt_tokens: tuple[int, ...] = ()
    single_turn: bool = False
    reward: float = 0.0
    metrics: dict[str, float] = {}
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def longest_prompt(self) -> int | None:
        """The longest prompt of the first problems, in tokens; None if prompts of later turns are not known."""
        return max(self.prompt_tokens, default=None) if self.single_turn else None


TryoutMessage = Step | Mistake | TryoutReport


def dry_run(config: RunConfig) -> list[str]:
    """Check everything that can be checked without the model's weights. Returns the report, as lines of text.

    Raises the error that the run would end with: UserError for settings, models and environments that can't be used.
    """
    check_without_running(config)
    placement = _placement(config)
    report = try_environment(config)
    return [*placement, *check_memory(config, report.longest_prompt).report(), *_report_lines(report, config)]


def _placement(config: RunConfig) -> list[str]:
    """Where the processes of a run on several machines, or on GPUs of this one, would be started."""
    if config.launch.kind == "embedded" or (config.launch.kind == "processes" and not on_gpus(config)):
        return []
    from pipelinerl.launch.hosts.placement import place_here, placement_lines  # noqa: PLC0415 - few runs need it

    if config.launch.kind == "processes":
        places, here = place_here(config)
        return placement_lines(places, [here])
    from pipelinerl.launch.hosts.ray import connected, machines_away, placement_of  # noqa: PLC0415 - an extra

    with connected(config.launch) as cluster:
        places = placement_of(config, cluster)
        return [*placement_lines(places, cluster.machines), *machines_away(config, cluster, places)]


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


def _report_lines(report: TryoutReport, config: RunConfig) -> list[str]:
    tokens = report.prompt_tokens
    longest = f", {min(tokens)} to {max(tokens)} in the first {len(tokens)} problems" if len(tokens) > 1 else ""
    shown = report.prompt if len(report.prompt) <= SHOWN_CHARACTERS else f"{report.prompt[:SHOWN_CHARACTERS]}..."
    metrics = "".join(f", {name} {value:g}" for name, value in report.metrics.items())
    lines = [
        *report.notes,
        f"environment: {config.environment.kind} was built in {report.built_s:.1f} s",
        f"  the first prompt has {tokens[0]} tokens{longest}: {shown!r}",
        f"  an empty answer to it gets reward {report.reward:g}{metrics}",
    ]
    lines += [f"warning: {warning}" for warning in report.warnings]
    if config.evaluation.problems:
        lines.append(f"  {report.held_out} held-out problems (evaluation.problems: {config.evaluation.problems})")
    return lines
