"""One session of a run: what the launcher tells its processes, and what they report at their end, both in files."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial

import msgspec

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ReplacedError
from pipelinerl.files import write_atomically
from pipelinerl.process import PeakMemory
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import Schedule, make_schedule
from pipelinerl.types import GroupLedger


class KeptGroup(msgspec.Struct, frozen=True):
    """A group that is still in a stream, with the number of its rollouts `left` to train on."""

    index: int
    left: int


class StartPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session starts. The defaults are a new run.

    checkpoint, version       the checkpoint to load, and the version of its weights
    checksum                  of these weights, if they were published
    taken                     indices of groups that must not be started again: the trainer is done with them, or they are
                              still in a stream
    kept                      the groups still in a stream, in the order in which the trainer will read them
    settled                   number of rollouts that the trainer has trained on or dropped
    evaluated                 version of the last evaluation
    elapsed_s                 the time at which the records continue
    rollouts_bytes            size of `rollouts.jsonl` before the session
    trained_bytes             size of `trained.jsonl` before the session
    inputs                    checksums of the files that the environment is made of (see `checks.inputs_of`)
    predicted_memory_bytes    expected peak of each process; empty if it is not known
    weights_key               what the members of a weight broadcast prove to have; a new one for each session
    servers_key               what clients of the run's engine servers must send
    ranks_key                 the same for the ranks of a sharded trainer
    hub_key                   the same for workers on other machines
    id                        of the session
    run, epoch                the run's id, and the number of this session: one epoch has one set of weights for a version
    """

    checkpoint: str | None = None
    version: int = 0
    checksum: str | None = None
    taken: GroupLedger = msgspec.field(default_factory=GroupLedger)
    kept: tuple[KeptGroup, ...] = ()
    settled: int = 0
    evaluated: int = 0
    elapsed_s: float = 0.0
    rollouts_bytes: int = 0
    trained_bytes: int = 0
    inputs: dict[str, str] = {}
    predicted_memory_bytes: dict[str, int] = {}
    weights_key: str = msgspec.field(default_factory=partial(secrets.token_hex, 16))
    servers_key: str = msgspec.field(default_factory=partial(secrets.token_hex, 16))
    ranks_key: str = msgspec.field(default_factory=partial(secrets.token_hex, 16))
    hub_key: str = msgspec.field(default_factory=partial(secrets.token_hex, 16))
    id: str = msgspec.field(default_factory=partial(secrets.token_hex, 8))
    run: str = msgspec.field(default_factory=partial(secrets.token_hex, 8))
    epoch: int = 1


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a process gets on its command line. Contains no secrets.

    session           `StartPlan.id` of its session
    records_from_s    `Session.records_from_s` by the clock of its machine
    threads           CPU threads that it may use
    yields            it has a lower priority, since the trainer computes on the same cores
    machine, address  of a run on several machines: the machine's name, and where other machines reach it
    hub, hub_at       its connection with the hub: the file descriptor that it inherits, or where the hub listens
    weights           the file in memory by which weights get to the engines of this machine
    """

    session: str = ""
    records_from_s: float = 0.0
    threads: int = 1
    yields: bool = False
    machine: str = ""
    address: str = "127.0.0.1"
    hub: int = -1
    hub_at: tuple[str, int] | None = None
    weights: int = -1


@dataclass(frozen=True)
class Session:
    """One session of a run.

    Times in the records count from `records_from_s` (by `time.monotonic`), so that those of a resumed run continue. `here`:
    what a process of the session got from its host.
    """

    config: RunConfig
    run: RunDirectory
    plan: StartPlan
    schedule: Schedule
    records_from_s: float
    here: WorkerSpec = field(default_factory=WorkerSpec)


def write_session(session: Session) -> None:
    """Write what the processes of the session read. Both files have secrets. Raises OSError."""
    write_atomically(session.run.settings, session.config.model_dump_json().encode(), mode=0o600)
    write_atomically(session.run.plan, msgspec.json.encode(session.plan), mode=0o600)


def read_session(run: RunDirectory, here: WorkerSpec) -> Session:
    """The session that the launcher wrote for its workers. Raises ReplacedError if it is a later one than `here` says."""
    config = RunConfig.model_validate_json(run.settings.read_bytes())
    plan = msgspec.json.decode(run.plan.read_bytes(), type=StartPlan)
    if here.session not in ("", plan.id):
        raise ReplacedError(f"a later session of {run.root} has begun before this process did: it does not start")
    return Session(config, run, plan, make_schedule(config), here.records_from_s, here)


class WorkerReport(msgspec.Struct, frozen=True):
    """How a worker ended. It writes this itself, unless it `died`: was killed, or ended without a report of an error.

    `kind` is the class of its error in `errors`, "" if there was none.
    """

    peak: PeakMemory | None = None
    kind: str = ""
    message: str = ""
    traceback: str = ""
    died: bool = False
