"""The faults of a run as a function of its seed: which, in which process, when, and for how long.

A fault becomes due a number of optimizer steps after the run has recovered from the previous one, or, to hit a session that
is starting, a number of seconds after the previous one was injected.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from pipelinerl.config.schema import RunConfig
from pipelinerl.resources.roles import generation_roles, server_roles, worker_roles

Kind = Literal["kill", "stop", "slow", "disk", "memory", "cut", "silence", "delay", "weights", "environment"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LAUNCHER, FORKS = "launcher", "forks"
EVERYWHERE = "all processes"

LAYOUTS: dict[str, tuple[str, ...]] = {
    "embedded": ("--launch.kind=embedded", "--stream.kind=files"),
    "processes": ("--launch.kind=processes", "--stream.kind=files"),
    "engines": (
        *("--launch.kind=processes", "--stream.kind=files", "--engine.processes=2"),
        *("--model.lora.rank=4", "--weights.encoding=adapter"),
    ),
    "apart": ("--launch.kind=processes", "--stream.kind=files", "--launch.preprocessor=process"),
    "http": ("--launch.kind=processes", "--engine.kind=http", "--engine.servers=2"),
    "broadcast": (
        "--launch.kind=processes",
        "--engine.processes=2",
        "--weights.kind=collective",
        "--weights.encoding=delta",
    ),
    "sharded": ("--launch.kind=processes", "--stream.kind=files", "--trainer.ranks=2"),
    "ray": ("--launch.kind=ray", "--weights.kind=collective"),
    "links": (
        "--launch.kind=processes",
        "--engine.kind=http",
        "--engine.servers=1",
        "--stream.kind=redis",
        "--stream.url=redis://127.0.0.1:6379/0",
    ),
}
"""Where the parts of a run are. `ray`: a cluster of this machine only. `links`: Redis and
the engine servers are not the run's own, and it reaches them through proxies, which can cut, silence and delay."""

SMALL = (
    *("--actor.group_size=4", "--actor.rollout_timeout_s=2", "--actor.max_failure_fraction=1"),
    *("--engine.slots=16", "--engine.threads=1", "--trainer.threads=1", "--trainer.batch_size=10"),
    *("--trainer.checkpoint_every=4", "--trainer.learning_rate=1e-3", "--schedule.max_lag=4", "--evaluation.problems=0"),
    *("--launch.watchdog_s=15",),
)
"""Settings of the demo: batches that are no multiple of a group, a lag bound, frequent checkpoints."""

STEPS_PER_FAULT = 7
"""Steps of such a run, per fault: those until it is due, and those that are taken while it lasts."""

SHORT_S, LONG_S = (0.1, 3.0), (1.2, 1.6)
"""How long a process is stopped: mostly seconds; sometimes this many times the patience of the watchdog."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault in `place`: the role of a process, a link, or all processes.

    It is due `after_s` seconds after `steps` more steps since the recovery from the fault before; with `steps` None, after
    that fault's injection (the first one: after the run's start). `amount` is in [0, 1): which byte, which share.
    """

    kind: Kind
    place: str
    steps: int | None
    after_s: float
    lasts_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        when = "soon after" if self.steps is None else f"{self.steps} steps after"
        return f"{self.kind} {self.place}{lasts}, {self.after_s:.2f} s, {when} the one before"


def places(config: RunConfig, links: Sequence[str] = ()) -> dict[Kind, list[str]]:
    """Where faults of each kind can be injected into a run of `config` from outside; `links` are its proxies."""
    embedded = config.launch.kind == "embedded"
    workers = [] if embedded else [*worker_roles(config), *server_roles(config)]
    processes = [LAUNCHER, *workers, *([FORKS] if config.launch.kind == "processes" else [])]
    shared_weights = config.engine.kind == "local" and config.weights.kind == "shared" and not embedded
    found: dict[Kind, list[str]] = {
        "kill": processes,
        "stop": processes,
        "slow": workers or [LAUNCHER],
        "memory": workers or [LAUNCHER],
        "disk": [EVERYWHERE],
        "cut": list(links),
        "silence": list(links),
        "delay": list(links),
        "weights": generation_roles(config) if shared_weights else [],
    }
    return {kind: there for kind, there in found.items() if there}


def plan_faults(
    seed: int, config: RunConfig, count: int, kinds: Sequence[Kind] = KINDS, links: Sequence[str] = ()
) -> tuple[Fault, ...]:
    """The faults of the run with this seed, in order. Depends on nothing else; each kind is drawn with equal probability.

    Faults of the environment are not among them: they happen in every attempt (`environment.Troubled`). Empty if no kind
    can be injected.
    """
    there = {kind: found for kind, found in places(config, links).items() if kind in kinds}
    draw = random.Random(f"chaos/{seed}/{there}")
    return tuple(_fault(draw, there, config.launch.watchdog_s, first=not number) for number in range(count if there else 0))


def _fault(draw: random.Random, there: dict[Kind, list[str]], watchdog_s: float, *, first: bool) -> Fault:
    kind = draw.choice(list(there))
    place = draw.choice(there[kind])
    soon = draw.random() < (0.1 if first else 0.2)
    lasts_s = 0.0
    if kind == "stop" and draw.random() < 0.1:
        lasts_s = watchdog_s * draw.uniform(*LONG_S)
    elif kind not in ("kill", "weights"):
        lasts_s = draw.uniform(*SHORT_S)
    return Fault(
        kind=kind,
        place=place,
        steps=None if soon else draw.randint(1, 4),
        after_s=round(draw.uniform(0.0, 8.0 if soon else 0.3), 3),
        lasts_s=round(lasts_s, 3),
        amount=draw.random(),
    )
