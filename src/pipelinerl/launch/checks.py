"""The checks before a run: the devices and the model exist, the run fits into memory, the user's code is right, and the
trackers are installed. `dry_run` (`train --dry-run`) reports all of them.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import pipelinerl.errors
from pipelinerl.config.load import config_to_yaml
from pipelinerl.config.schema import EnvironmentConfig, RunConfig, is_function
from pipelinerl.errors import EnvironmentSetupError, UserError
from pipelinerl.process.child import ChildProcess
from pipelinerl.process.forks import ForkServer
from pipelinerl.resources.machine import usable_gpus
from pipelinerl.resources.memory import MemoryCheck, check_memory
from pipelinerl.resources.roles import on_gpus

OUTPUT_LINES = 5


def settled(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """`config` with what it leaves open chosen for this machine's GPUs, if there are any; and what to say of that."""
    if not (gpus := usable_gpus()):
        return config, []
    from pipelinerl.resources.gpus import with_gpus  # noqa: PLC0415 - not without a GPU

    return with_gpus(config, gpus)


def check_before_the_start(config: RunConfig, forks: ForkServer | None = None) -> MemoryCheck:
    """The checks of a run before its processes start. Raises UserError for what would end the run.

    User code is tried before any model is loaded: reward functions, losses and advantages with answers; a class, files or a
    callback are only loaded. Arguments may name files or functions. An embedded run builds its environment before all else.
    """
    memory, environment, trainer = check_without_running(config), config.environment, config.trainer
    functions = environment.kind in ("function", "tools") or trainer.teacher is not None
    functions = functions or any(map(is_function, (trainer.loss, config.preprocess.advantage)))
    named = ":" in environment.kind or bool(environment.args or config.evaluation.sets)
    named = named and config.launch.kind != "embedded"
    if not (functions or named or trainer.warm_start or config.metrics.callback is not None):
        return memory
    found = try_environment(config, forks, attempts=functions).lines
    return memory._replace(lines=[*memory.lines, *(line for line in found if line.startswith("warning: "))])


def check_without_running(config: RunConfig) -> MemoryCheck:
    """Check the devices, the model and its memory, and the arguments of a built-in environment. Raises UserError."""
    engine, trainer = config.engine, config.trainer
    devices = {"trainer.device": trainer.device, "trainer.ranks": trainer.rank_device(trainer.ranks - 1)}
    if engine.kind != "vllm" and not engine.urls:  # vLLM has its own Python environment and PyTorch
        devices["engine.device"] = engine.device
    for setting, device in devices.items() if config.launch.kind != "ray" else ():  # there they are of other machines
        if device != "cpu":
            from pipelinerl.models.device import require_device  # noqa: PLC0415 - loads torch into this process

            try:
                require_device(device)
            except UserError as error:
                raise UserError(f"{setting}: {error}") from error
    memory = check_memory(config)
    if config.environment != EnvironmentConfig() and ":" not in config.environment.kind:
        from pipelinerl.environments.registry import check_arguments  # noqa: PLC0415 - not for the demo

        check_arguments(config.environment.kind, config.environment.args)
    for name in config.metrics.trackers:
        from pipelinerl.extras import require  # noqa: PLC0415 - few runs have one

        require(name, "metrics.trackers")
    return memory


# ---- the trial of an environment


class TryoutReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a successful trial: what it found, and warnings, as lines of text."""

    lines: tuple[str, ...] = ()


TryoutMessage = str | tuple[str, str] | TryoutReport
"""What the process does next, as a phrase that continues "it ..."; the class and the message of its error; its result."""


def try_environment(config: RunConfig, forks: ForkServer | None = None, *, attempts: bool = True) -> TryoutReport:
    """Import the callback, build the environment and, with `attempts`, try an empty answer, in a process of `tryout`.

    It is killed with all processes that it started. Raises the error that this ended with. Raises EnvironmentSetupError if
    it took longer than `launch.startup_timeout_s` or crashed its process.
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
        with ChildProcess([*command, *([] if attempts else ["build"])], log=Path(name, "output"), forks=forks) as process:
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


# ---- what is reported and recorded


def inputs_of(config: RunConfig) -> dict[str, str]:
    """Path -> checksum of each file of data and code that the configuration names. Not what the code imports."""
    found: dict[str, str] = {}
    values: list[Any] = [config.environment.kind, config.environment.args, config.evaluation.sets]
    values += [config.preprocess.advantage, config.trainer.loss]
    values += [config.trainer.warm_start.data] if config.trainer.warm_start else []
    while values:
        value = values.pop()
        if isinstance(value, dict | list):
            values += [*value, *value.values()] if isinstance(value, dict) else value
        elif isinstance(value, str):
            named = value.removeprefix("dataset:").rpartition(":")[0]
            path = Path(named or value).expanduser()
            with suppress(OSError, ValueError):  # most texts name no file
                folder = value.startswith("dataset:") and path.is_dir()
                if not folder and not path.is_file() and not (path := Path(value)).is_file():
                    continue
                from pipelinerl.checkpoint import FileRecord  # noqa: PLC0415 - not for the demo

                files = sorted(file for file in path.rglob("*") if file.is_file()) if folder else [path]
                found |= {str(file.absolute()): FileRecord.of(file).checksum for file in files}
    return dict(sorted(found.items()))


def dry_run(config: RunConfig) -> list[str]:
    """Check everything that can be checked without the model's weights. Returns the report, as lines of text.

    Raises the error that the run would end with: UserError for settings, models and environments that can't be used.
    """
    config, chosen = settled(config)
    memory, placement = check_without_running(config), []
    if config.launch.kind == "ray":
        from pipelinerl.launch.hosts.ray import connected  # noqa: PLC0415 - an extra
        from pipelinerl.resources.placement import place, placement_lines, roles_of  # noqa: PLC0415 - few runs need it

        with connected(config.launch) as cluster:
            places = place(roles_of(config), cluster.machines, config.launch.place)
            placement = placement_lines(places, cluster.machines)
    elif config.launch.kind == "processes" and on_gpus(config):
        from pipelinerl.resources.placement import place_here, placement_lines  # noqa: PLC0415 - few runs need it

        places, here = place_here(config)
        placement = placement_lines(places, [here])
    uses = [
        f"  {use.role:<26} {use.name:<30} {'up to ' * use.varies + f'{use.size / 1e6:.0f} MB':>18}  {use.device}"
        for use in memory.uses
    ]
    return [*chosen, *placement, memory.lines[0], *uses, *memory.lines[1:], *try_environment(config).lines]
