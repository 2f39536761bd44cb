"""What tests of several commands are made from: recorded rollouts, a calibration, and a command without its main program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pipelinerl.cli.parser import Commands
from pipelinerl.experiments.planner.calibration import Calibration
from pipelinerl.files import JsonLines
from pipelinerl.resources.machine import Machine
from pipelinerl.types import FinishReason, Group, Rollout, Turn
from tests.unit import group_parts

CALIBRATION = Calibration(
    machine=Machine(cpu="a processor", cores=8, memory_gib=4.0, system="Linux", versions={}),
    date="2030-01-01T00:00:00+00:00",
    load_average=0.1,
    model="demo",
    schedule="pipeline",
    slots=16,
    processes=1,
    decode_s={1: 0.001, 4: 0.0013, 16: 0.0025},
    prompt_tokens_mean=6.0,
    rollout_s=0.0004,
    tokens_per_s=5000.0,
    update_pause_s=0.002,
    train_step_s=0.064,
    train_token_s=0.0001,
    prepare_s=0.001,
    used_share=0.5,
    lengths={10: 3, 30: 1},
)


def turn(length: int, *, versions: Sequence[int] = (), prompt: int = 5, reason: FinishReason = "stop") -> Turn:
    return group_parts.turn((2,) * prompt, (1,) * length, 0.0, versions or 0, reason=reason)


def group(index: int, *attempts: Sequence[Turn], rewards: Iterable[float] = ()) -> Group:
    """A group with the turns of each attempt. `rewards` are 0 unless given."""
    given = list(rewards) or [0.0] * len(attempts)
    made = [Rollout(turns=tuple(turns), reward=reward) for turns, reward in zip(attempts, given, strict=True)]
    return group_parts.group(index, made)


def write_rollouts(run_dir: Path, groups: Iterable[Group]) -> Path:
    """Write `groups` as the rollouts of a run; returns `run_dir`."""
    (run_dir / "rollouts").mkdir(parents=True)
    with JsonLines(run_dir / "rollouts" / "rollouts.jsonl") as records:
        for each in groups:
            records.write(each)
    return run_dir


def invoke(add_to: Callable[[Commands], None], *arguments: object) -> int:
    """Run a command that `add_to` defines, and let its errors through."""
    commands = Commands()
    add_to(commands)
    options, settings = commands.parse([str(argument) for argument in arguments])
    status: int = options.run(options, settings)
    return status
