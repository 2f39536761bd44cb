"""Healing: what a dead process had begun is taken back once, and counted exactly, whenever it died."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from pipelinerl import load_config
from pipelinerl.errors import BroadcastEndedError, CrashLoopError, PipelineRLError, StageDiedError, WeightUpdateError
from pipelinerl.files import shared_memory, write_atomically
from pipelinerl.hub.client import HubClient
from pipelinerl.hub.server import HubServer, WorkerKind
from pipelinerl.launch.hosts.host import Outcome, make_hub, worker_kind
from pipelinerl.launch.hosts.processes import Healing, Processes, replaceable_roles
from pipelinerl.launch.run import Losses
from pipelinerl.launch.session import Session, StartPlan, WorkerSpec
from pipelinerl.launch.stages import training
from pipelinerl.metrics.statistics import actor_total
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule
from pipelinerl.status.board import MemoryBoard, last_statuses
from pipelinerl.status.view import RunView
from pipelinerl.types import ActorProgress, EngineProgress, TrainerProgress
from pipelinerl.weights.sending import SharedWeightSender
from tests.unit.hub.hub_parts import Asking, K
from tests.unit.record_parts import status


class Worker:
    """A dead process."""

    machine = ""

    def __init__(self, role: str, pid: int = 0) -> None:
        self.role, self.pid, self.killed = role, pid or os.getpid(), False

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout_s: float) -> bool:
        return True

    def failure(self) -> PipelineRLError:
        return StageDiedError(f"the {self.role} process (pid {self.pid}) was killed; the end of its log:\nlast words")


class Host:
    """As `LocalHost`, with connections in place of processes."""

    def __init__(self, session: Session) -> None:
        self.config, self.hub = session.config, make_hub(session, MemoryBoard())
        self.board = self.server = HubServer(self.hub)
        self.fd = shared_memory()
        self.started: list[str] = []
        self.ends: dict[str, Asking] = {}

    def connect(self, role: str) -> None:
        if kind := worker_kind(self.config, role):
            self.ends[role] = Asking(self.server.connect(kind))

    def ready(self) -> bool:
        return True

    def reap(self, worker: Worker) -> None:
        worker.kill()
        if kind := worker_kind(self.config, worker.role):
            self.ends[worker.role].close()
            self.server.wait_ended(kind)

    def start(self, role: str) -> Worker:
        self.started.append(role)
        self.connect(role)
        return Worker(role, pid=1000 + len(self.started))


class Said(RunView):
    def __init__(self) -> None:
        super().__init__(StringIO())
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Run:
    """A run of two generation processes: each has its connection with the hub."""

    def __init__(self, folder: Path, *settings: str) -> None:
        flags = ["--engine.processes=2", f"--actor.group_size={K}", f"--run_dir={folder}", *settings]
        self.config = load_config(None, flags)
        self.directory = RunDirectory(folder)
        self.directory.make_folders()
        self.session = Session(self.config, self.directory, StartPlan(), make_schedule(self.config), 0.0)
        self.host, self.said = Host(self.session), Said()
        self.state = self.host.hub.admission
        self.state.opened = True
        self.host.server.__enter__()
        for process in range(self.config.engine.processes):
            self.host.connect(self.role(process))
        self.healing = Healing(self.session, cast(Any, self.host), self.said)

    def role(self, process: int) -> str:
        return f"generation-{process}" if self.config.engine.processes > 1 else "generation"

    def end(self, process: int) -> Asking:
        return self.host.ends[self.role(process)]

    def claim(self, process: int, version: int = 0) -> int:
        end = self.end(process)
        end.ask(len(end.granted) + 1, version)
        end.settled()
        return end.granted[-1]

    def hand_over(self, process: int, index: int, version: int = 0, **options: Any) -> None:
        self.end(process).hand_over(index, version, **options)

    def publish(self, stage: str, progress: Any, pid: int = 0) -> None:
        self.host.board.publish(status(stage, progress=progress, pid=pid or os.getpid()))

    def heal(self, *processes: int, now: float = 0.0) -> None:
        dead = [Worker(self.role(process)) for process in processes]
        try:
            self.healing.heal(cast(Any, dead), now)
        finally:
            assert all(worker.killed for worker in dead)

    def begin(self, now: float) -> list[Worker]:
        return cast(list[Worker], list(self.healing.begin(now)))

    def die(self, *processes: int) -> None:
        """These processes die, and come back."""
        self.heal(*processes)
        assert len(self.begin(1000.0)) == len(processes)

    @property
    def ended(self) -> ActorProgress:
        """Of all processes that died."""
        found = {name: one for name, one in last_statuses(self.host.board).items() if name.startswith("ended-")}
        total = actor_total(found)
        assert total is not None
        return total

    def close(self) -> None:
        for end in self.host.ends.values():
            end.close()
        self.host.server.__exit__()
        os.close(self.host.fd)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path / "r")) as made:
        yield made


def test_two_deaths_at_once_lose_what_was_not_handed_over_whole(run: Run) -> None:
    for process in (0, 1, 0, 1):
        run.claim(process)
    run.hand_over(0, 0, rollouts=1)
    run.end(1)._wire._socket.send(b"\0\0\1\0the half of a message")
    run.die(0, 1)
    state = run.state
    assert (state.in_progress, state.handed_over, state.returned) == ({}, 1, [1, 2, 3])
    assert run.ended.rollouts_started == 4 * K
    assert run.ended.rollouts_dropped == {"timeout": K - 1, "lost_in_crash": 3 * K}
    assert [run.claim(1), run.claim(0), run.claim(1), run.claim(0)] == [1, 2, 3, 4]
    assert run.directory.recorded.read_bytes().count(b"\n") == 1


def test_the_account_is_exact_though_the_last_status_is_old(run: Run) -> None:
    """Of three groups one is handed over with one rollout, and two are lost, whatever was published."""
    for _ in range(3):
        run.claim(1)
    run.publish("engine-1", EngineProgress(version=3, slots=4, tokens_generated=70, busy_s=2.0))
    run.publish("actor-1", ActorProgress(groups_started=2, rollouts_started=2 * K, rollouts_dropped={"timeout": 1}))
    run.hand_over(1, 0, rollouts=1)
    run.die(1)
    first = run.ended
    assert (first.groups_started, first.rollouts_started, first.rollouts_handed_over) == (3, 3 * K, 1)
    assert first.rollouts_dropped == {"timeout": K - 1, "lost_in_crash": 2 * K}
    # The next process of the role, and its death.
    assert run.claim(1) == 1
    run.publish("actor-1", ActorProgress(groups_started=1, rollouts_started=K, rollouts_dropped={"error": 1}))
    run.publish("engine-1", EngineProgress(version=4, slots=4, tokens_generated=5, busy_s=1.0))
    run.heal(1)
    assert run.ended.rollouts_started == 4 * K
    assert run.ended.rollouts_handed_over == 1
    assert run.ended.rollouts_dropped == {"timeout": K - 1, "lost_in_crash": 3 * K}
    engine = last_statuses(run.host.board)["ended-engine-1"].progress
    assert isinstance(engine, EngineProgress)
    assert (engine.tokens_generated, engine.busy_s, engine.slots) == (75, 3.0, 0)
    # The totals of the view do not count the dead twice.
    total = actor_total(last_statuses(run.host.board))
    assert total is not None
    assert total.rollouts_started == 4 * K


def test_what_the_stream_dropped_for_the_dead_is_counted(tmp_path: Path) -> None:
    ring = ("--stream.capacity=1", "--stream.when_full=drop_oldest", f"--trainer.batch_size={K}")
    with closing(Run(tmp_path / "r", *ring)) as run:
        for _ in range(2):
            run.claim(1)
        run.hand_over(1, 0)
        run.hand_over(1, 1)
        run.heal(1)
        assert run.ended.rollouts_dropped == {"stream_full": K}
        assert run.ended.rollouts_handed_over == K
        assert run.state.handed_over == K


def test_a_process_is_started_again_after_a_pause_that_doubles_and_not_for_ever(run: Run) -> None:
    """After it has lived for long, its deaths count from zero again."""
    now = 100.0
    for pause_s in (0.5, 1.0, 2.0, 0.5, 1.0, 2.0):
        run.heal(1, now=now)
        assert run.healing.attempts["generation-1"].due_s == now + pause_s
        assert run.begin(now + pause_s - 0.01) == []
        now += pause_s
        (worker,) = run.begin(now)
        assert worker.role == "generation-1"
        assert run.healing.attempts["generation-1"].due_s is None
        if len(run.host.started) == 3:
            now += 10_000.0
    with pytest.raises(CrashLoopError, match=r"generation-1 process died 4 times \(launch.restarts: 3\):\n1. ") as raised:
        run.heal(1, now=now)
    assert str(raised.value).count("last words") == 4
    assert run.healing.attempts["generation-1"].restarts == 6


def test_a_process_that_can_not_be_started_again_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(role: str) -> Worker:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    run.heal(1)
    monkeypatch.setattr(run.host, "start", full)
    with pytest.raises(StageDiedError, match=r"was killed[\s\S]*it can't be started again: .*Cannot allocate memory"):
        run.begin(1.0)


@pytest.mark.parametrize(("watchdog_s", "expected_s"), [(300.0, 330.0), (20.0, 120.0)])
def test_the_trainer_waits_for_an_engine_that_hangs_until_it_is_noticed(
    watchdog_s: float, expected_s: float, tmp_path: Path
) -> None:
    with (
        closing(Run(tmp_path / "r", f"--launch.watchdog_s={watchdog_s}")) as run,
        closing(HubClient(run.host.server.connect(WorkerKind(follows=True)))) as hub,
        closing(training._sender(replace(run.session, here=WorkerSpec(weights=run.host.fd)), hub, lambda: False)) as sender,
    ):
        assert cast(SharedWeightSender, sender)._timeout_s == expected_s


def test_the_new_process_learns_what_was_evaluated(run: Run) -> None:
    run.publish("trainer", TrainerProgress(version=8, published_version=7))
    line = {"version": 5, "when": "online", "time_s": 1.0, "problems": 1, "reward_mean": 0.5}
    write_atomically(run.directory.evaluations, msgspec.json.encode(line) + b"\n")
    run.heal(0)
    run.begin(1.0)
    plan = msgspec.json.decode(run.directory.plan.read_bytes(), type=StartPlan)
    assert (plan.version, plan.evaluated) == (7, 5)
    assert plan.weights_key == run.session.plan.weights_key


def test_what_can_be_replaced_is_a_rule() -> None:
    def roles(*settings: str) -> list[str]:
        return replaceable_roles(load_config(None, list(settings)))

    assert roles() == ["generation"]
    assert roles("--launch.preprocessor=process") == ["generation", "preprocessing"]
    assert roles("--engine.kind=http", "--engine.servers=2") == ["generation"]
    broadcast = ("--launch.preprocessor=process", "--weights.kind=collective")
    assert roles(*broadcast) == roles(*broadcast, "--engine.kind=http") == ["preprocessing"], "a group is formed once"
    assert roles("--launch.kind=ray", "--weights.kind=collective", "--launch.preprocessor=process") == []
    assert roles("--launch.restarts=0") == []


# ---- sessions


def after(session: Session, version: int) -> Session:
    return replace(session, plan=StartPlan(version=version))


def ended(error: str, *, lost: bool = True) -> Outcome:
    return Outcome({}, StageDiedError(error), 1.0, lost=lost)


def test_sessions_follow_until_too_many_made_no_checkpoint(run: Run) -> None:
    losses = Losses(run.config.launch.restarts, 0.0)
    for number, pause_s in ((1, 0.5), (2, 1.0), (3, 2.0)):
        message = losses.follow(run.session, ended(f"death {number}"))
        assert message == f"death {number}; the run starts again in {pause_s:g} s (restart {number} of 3)"
    last = ended("death 4")
    assert losses.follow(run.session, last) is losses.error is None
    error = losses.counted(last).error
    assert isinstance(error, StageDiedError)
    assert str(error).splitlines()[1:] == [f"{number}. death {number}" for number in (1, 2, 3, 4)]


def test_a_new_checkpoint_begins_the_count_again(run: Run) -> None:
    losses = Losses(run.config.launch.restarts, 0.0)
    for number in range(5):
        (run.directory.checkpoints / f"step_{10 * number + 4:08d}").mkdir(parents=True)
        message = losses.follow(after(run.session, max(0, 10 * number - 6)), ended("death")) or ""
        assert "the run goes on from its latest checkpoint in 0.5 s (restart 1 of 3)" in message
    assert losses.follow(run.session, ended("a mistake", lost=False)) is losses.error is None
    assert losses.counted(ended("a mistake", lost=False)).restarts == {"run": 5}


@pytest.mark.parametrize(
    ("error", "lost"), [(BroadcastEndedError("engine 1 is gone"), True), (WeightUpdateError("damaged"), False)]
)
def test_a_lost_member_of_a_broadcast_is_a_loss_and_damaged_weights_are_an_error(
    error: PipelineRLError, lost: bool, run: Run
) -> None:
    assert Processes(run.session, cast(Any, run.host), run.said).lost(error) is lost
