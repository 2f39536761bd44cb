"""Healing: what a dead process had begun is taken back once, and counted exactly, whenever it died."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from pipelinerl import load_config
from pipelinerl.actor.admission import Admission, LocalAdmission
from pipelinerl.actor.admission_redis import RedisAdmission, make_redis_record
from pipelinerl.errors import PipelineRLError, StageDiedError
from pipelinerl.files import JsonLines, write_atomically
from pipelinerl.launch import healing as module
from pipelinerl.launch.healing import Healing
from pipelinerl.launch.hosts.host import Channels, LocalHost, LocalWorker
from pipelinerl.launch.hosts.processes import beginning_of, replaceable_roles
from pipelinerl.launch.run import make_record
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.run_lock import choose_name_in_redis
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.launch.stages import training
from pipelinerl.launch.stages.streams import PREPARED, ROLLOUTS, redis_of
from pipelinerl.metrics.totals import actor_total
from pipelinerl.redis_connection import RedisConnection
from pipelinerl.schedule import make_schedule
from pipelinerl.status.board import MmapBoard, last_statuses
from pipelinerl.status.screen import View
from pipelinerl.types import (
    ActorProgress,
    Completion,
    EngineProgress,
    Group,
    Prepared,
    Problem,
    Progress,
    Rollout,
    StageStatus,
    TrainerProgress,
    Turn,
    VersionSpan,
)
from pipelinerl.weights.shared.file import AWAY, Control, create_shared_file
from pipelinerl.weights.shared.sender import SharedWeightSender
from tests.unit.stream.streams import redis_for_tests, unreliable

K = 2


class DiedError(Exception):
    """What ends a process in these tests: as if it had been killed, nothing after it is executed."""


def group(index: int, version: int = 0, rollouts: int = K) -> Group:
    completion = Completion(
        request_id="", token_ids=(1,), logprobs=(0.0,), weight_versions=(VersionSpan(version, 0, 1),), finish_reason="stop"
    )
    attempts = tuple(
        Rollout(turns=(Turn(prompt_ids=(1,), completion=completion),), reward=1.0, id=f"g{index}.a{number}", attempt=number)
        for number in range(rollouts)
    )
    return Group(index=index, problem=Problem(id="", payload={}), rollouts=attempts, started=K, started_version=version)


class Worker:
    """A dead process."""

    machine = ""

    def __init__(self, role: str, pid: int = 0) -> None:
        self.role, self.pid, self.killed = role, pid or os.getpid(), False

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout_s: float) -> bool:
        return True

    def dump_stacks(self) -> None:
        pass

    def failure(self) -> PipelineRLError:
        return StageDiedError(f"the {self.role} process (pid {self.pid}) was killed; the end of its log:\nlast words")


class Host:
    def __init__(self, run: RunDirectory) -> None:
        self.board = MmapBoard(run.scratch)
        self.channels = Channels(create_shared_file())
        self.started: list[str] = []

    def bury(self, worker: Worker) -> None:
        worker.kill()

    def start(self, role: str) -> Worker:
        self.started.append(role)
        return Worker(role, pid=1000 + len(self.started))


class Said(View):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Run:
    """A run of two generation processes, in one process: each has its access to admission and to the stream."""

    kinds: Sequence[str] = ()
    redis_url: str | None = None

    def __init__(self, folder: Path, *settings: str, earlier: int = 0) -> None:
        flags = ["--engine.processes=2", f"--actor.group_size={K}", f"--run_dir={folder}", *self.kinds, *settings]
        self.config = load_config(None, flags)
        self.directory = RunDirectory(folder)
        self.directory.make_folders()
        self.make_record()
        plan = StartPlan(redis_url=self.redis_url)
        self.session = Session(self.config, self.directory, plan, make_schedule(self.config), 0.0)
        self.store = self.session.streams()
        self.host, self.said = Host(self.directory), Said()
        if earlier:  # groups of an earlier session, with the same indices
            with closing(self.writer(0)) as stream, self.records(0) as lines:
                for index in range(earlier):
                    lines.write(group(index, 9))
                    stream.try_write(group(index, 9))
        self.healing = Healing(self.session, cast(LocalHost, self.host), self.said, beginning_of(self.session))
        self.admissions = [self.admission(process) for process in range(2)]
        self.admissions[0].open()

    def make_record(self) -> None:
        make_record(self.directory.admission)

    def admission(self, process: int) -> Admission:
        board, schedule = self.host.board, self.session.schedule
        return LocalAdmission(self.directory.admission, schedule, board, processes=2, process=process)

    def writer(self, process: int, **options: Any) -> Any:
        return self.store.writer(ROLLOUTS, Group, **{"capacity": None, "when_full": "block", "on_drop": None, **options})

    def records(self, process: int) -> JsonLines:
        return JsonLines(self.directory.rollouts_of(process, shared=False))

    def claim(self, process: int, version: int = 0) -> int:
        index = self.admissions[process].claim(version, 0, K).group
        assert index is not None
        return index

    def hand_over(
        self, process: int, index: int, *, rollouts: int = K, version: int = 0, die: str = "", **options: Any
    ) -> None:
        """As the actor does; `die` is the last thing that the process does."""

        def on_drop(dropped: Group) -> None:
            self.admissions[process].stream_dropped(len(dropped.rollouts))

        def write() -> bool:
            with self.records(process) as lines:
                lines.write(group(index, version, rollouts))
            if die == "recorded":
                raise DiedError
            with closing(self.writer(process, on_drop=on_drop, **options)) as stream:
                stream.try_write(group(index, version, rollouts))
            if die == "written":
                raise DiedError
            return True

        try:
            self.admissions[process].hand_over(index, version, started=K, rollouts=rollouts, write=write)
        except DiedError:
            assert die

    def publish(self, stage: str, progress: Progress | None, pid: int = 0) -> None:
        self.host.board.publish(
            StageStatus(
                stage=stage,
                pid=pid or os.getpid(),
                state="working",
                detail="",
                since_s=0,
                written_s=0,
                progress=progress,
            )
        )

    def heal(self, *processes: int, now: float = 0.0) -> None:
        dead = [Worker(f"generation-{process}") for process in processes]
        try:
            self.healing.heal(cast(list[LocalWorker], dead), now)
        finally:
            assert all(worker.killed for worker in dead)

    def begin(self, now: float) -> list[Worker]:
        return cast(list[Worker], list(self.healing.begin(now)))

    def streamed(self) -> list[int]:
        return [one.index for one in self.store.waiting(ROLLOUTS, Group)]

    def recorded(self) -> list[int]:
        files = sorted(self.directory.rollouts.glob("rollouts*.jsonl"), reverse=True)
        return [msgspec.json.decode(line, type=Group).index for path in files for line in path.read_bytes().splitlines()]

    @property
    def ended(self) -> ActorProgress:
        status = self.host.board.read("ended-actors")
        assert status is not None
        assert isinstance(status.progress, ActorProgress)
        return status.progress

    def away(self, process: int) -> bool:
        with closing(Control(self.host.channels.weights)) as control:
            answer = control.read_answer(process)
        return answer is not None and answer.number == AWAY

    def close(self) -> None:
        for admission in self.admissions:
            admission.close()
        os.close(self.host.channels.weights)


class RedisRun(Run):
    """The same with the record and the streams in Redis, as on several machines."""

    kinds = ("--launch.kind=ray", "--stream.kind=redis", "--weights.kind=collective")

    def __init__(self, url: str, folder: Path, *settings: str, earlier: int = 0) -> None:
        self.redis_url = url
        super().__init__(folder, *settings, earlier=earlier)

    def make_record(self) -> None:
        choose_name_in_redis(self.directory)
        self.place = redis_of(self.config, self.directory, self.redis_url)
        with closing(RedisConnection(self.place.url, "launcher")) as connection:
            make_redis_record(connection, self.place.prefix)

    def admission(self, process: int) -> Admission:
        url, prefix, _ = self.place
        return RedisAdmission(url, prefix, self.session.schedule, processes=2, process=process, repeat_s=0.0)

    def writer(self, process: int, **options: Any) -> Any:
        writer = super().writer(process, **options)
        if hasattr(self, "admissions"):  # not in an earlier session
            admission = cast(RedisAdmission, self.admissions[process])
            writer.companion = lambda pipe, items: admission.commit_with(pipe, K * len(items))
            writer.consumer = f"writer-{process}"
        return writer

    def records(self, process: int) -> JsonLines:
        return JsonLines(self.directory.rollouts_of(process, shared=True))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_for_tests(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


MakeRun = Callable[..., Run]


@pytest.fixture(params=["local", pytest.param("redis", marks=pytest.mark.needs_redis)])
def make_run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRun]:
    """Makes a run with the record in a database or in Redis."""
    with ExitStack() as stack:
        make: MakeRun = Run
        if request.param == "redis":
            make = partial(RedisRun, request.getfixturevalue("redis_url"))
        yield lambda *settings, **options: stack.enter_context(closing(make(tmp_path / "r", *settings, **options)))


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    return make_run()


def test_groups_of_a_dead_process_are_started_again_by_whoever_is_first(run: Run) -> None:
    assert [run.claim(process) for process in (0, 1, 0, 1, 1)] == [0, 1, 2, 3, 4]
    run.hand_over(1, 3)
    run.heal(1)
    state = run.admissions[0].read()
    assert (state.in_progress, state.handed_over, state.returned) == ({0: 2 * K}, K, [1, 4])
    assert [run.claim(0, version=2), run.claim(1, version=3), run.claim(0, version=3)] == [1, 4, 5]
    assert run.admissions[0].read().in_progress == {0: 2 * K, 2: K, 3: 2 * K}
    assert run.ended.rollouts_dropped == {"lost_in_crash": 2 * K}
    assert run.away(1) == (run.config.weights.kind == "shared")
    assert not run.away(0)


def test_what_counts_as_outstanding_no_longer_holds_back_the_others(run: Run) -> None:
    """The lag bound: until they are returned, groups of the dead count; from then on, they do not."""
    run.claim(0, version=5)
    run.claim(1, version=2)
    assert run.admissions[0].read().oldest_in_progress == 2
    run.heal(1)
    assert run.admissions[0].read().oldest_in_progress == 5
    assert run.admissions[0].read().latency is None, "a group that was not finished says nothing of how long one takes"


@pytest.mark.parametrize("die", ["recorded", "written"])
def test_a_group_whose_process_died_while_it_was_handed_over_is_in_the_stream_once(run: Run, die: str) -> None:
    for process in (0, 1, 1):
        run.claim(process)
    run.hand_over(0, 0)
    run.hand_over(1, 1, rollouts=1, die=die)
    run.heal(1)
    assert run.streamed() == run.recorded() == [0, 1]
    state = run.admissions[0].read()
    assert (state.in_progress, state.handed_over, state.returned) == ({}, K + 1, [2])
    assert run.ended.rollouts_started == 2 * K
    assert run.ended.rollouts_handed_over == 1
    run.heal(1)
    assert run.streamed() == [0, 1], "the next death finds the record whole"


def test_a_partial_line_is_no_record(run: Run) -> None:
    run.claim(1)
    path = run.directory.rollouts_of(1, shared=isinstance(run, RedisRun))
    path.write_bytes(msgspec.json.encode(group(0))[:-5])
    run.heal(1)
    assert run.admissions[0].read().returned == [0]
    assert run.streamed() == []


def test_records_of_an_earlier_session_are_not_mistaken_for_those_of_this_one(make_run: MakeRun) -> None:
    run = make_run(earlier=2)
    assert [run.claim(0), run.claim(0)] == [0, 1]
    run.hand_over(0, 1, version=0, die="recorded")
    run.heal(0)
    assert run.admissions[0].read().returned == [0]
    assert run.streamed() == [0, 1, 1]


@pytest.mark.parametrize(("second", "known"), [("recorded", False), ("written", True)])
def test_two_deaths_at_once_are_healed_if_it_is_known_what_is_in_the_stream(run: Run, second: str, known: bool) -> None:
    """In Redis it always is."""
    for process in (0, 1):
        run.claim(process)
        run.hand_over(process, process, die=["written", second][process])
    if known or isinstance(run, RedisRun):
        run.heal(0, 1)
        assert run.streamed() == [0, 1]
    else:
        with pytest.raises(StageDiedError, match="2 generation processes died while they wrote a group, and 1 of these"):
            run.heal(0, 1)


def test_the_account_is_exact_though_the_last_status_is_old(run: Run) -> None:
    """Of three groups one is handed over with one rollout, since the status was published, and two are lost."""
    for _ in range(3):
        run.claim(1)
    run.publish("engine-1", EngineProgress(version=3, slots=4, tokens_generated=70, busy_s=2.0))
    run.publish("actor-1", ActorProgress(groups_started=2, rollouts_started=2 * K, rollouts_dropped={"timeout": 1}))
    run.hand_over(1, 0, rollouts=1)
    run.heal(1)
    first = run.ended
    assert (first.rollouts_started, first.rollouts_handed_over) == (3 * K, 1)
    assert first.rollouts_dropped == {"timeout": 1, "lost_in_crash": 2 * K}
    # The next process of the role, and its death.
    assert run.claim(1) == 1
    run.publish("actor-1", ActorProgress(groups_started=1, rollouts_started=K, rollouts_dropped={"error": 1}))
    run.publish("engine-1", EngineProgress(version=4, slots=4, tokens_generated=5, busy_s=1.0))
    run.heal(1)
    assert run.ended.rollouts_started == 4 * K
    assert run.ended.rollouts_handed_over == 1
    assert run.ended.rollouts_dropped == {"timeout": 1, "error": 1, "lost_in_crash": 3 * K - 1}
    engine = last_statuses(run.host.board)["ended-engines"].progress
    assert isinstance(engine, EngineProgress)
    assert (engine.tokens_generated, engine.busy_s, engine.slots) == (75, 3.0, 0)
    # The totals of the view do not count the dead twice.
    total = actor_total(last_statuses(run.host.board))
    assert total is not None
    assert total.rollouts_started == 4 * K
    assert run.healing.summary()["generation-1"]["rollouts_lost"] == 3 * K - 1


def test_what_the_stream_dropped_for_the_dead_is_counted(run: Run) -> None:
    for _ in range(2):
        run.claim(1)
    run.hand_over(1, 0)
    run.hand_over(1, 1, capacity=1, when_full="drop_oldest")
    run.heal(1)
    assert run.ended.rollouts_dropped == {"stream_full": K}
    assert run.ended.rollouts_handed_over == K
    assert run.admissions[0].read().handed_over == K


@pytest.mark.needs_redis
def test_what_the_dead_had_chosen_to_drop_is_dropped_by_the_next_process(redis_url: str, tmp_path: Path) -> None:
    """In Redis, it was taken from the stream and the group that was to replace it was not written."""
    with closing(RedisRun(redis_url, tmp_path / "r")) as run:
        for _ in range(3):
            run.claim(1)
        for index in (0, 1):
            run.hand_over(1, index)
        with closing(run.writer(1)) as stream:
            stream.deliver(stream.consumer, ">", 1)
        run.heal(1)
        assert run.claim(1) == 2
        run.hand_over(1, 2, capacity=2, when_full="drop_oldest")
        assert run.streamed() == [1, 2]
        assert run.admissions[0].read().handed_over == 2 * K
        run.heal(1)
        assert run.ended.rollouts_dropped == {"lost_in_crash": K, "stream_full": K}


@pytest.mark.needs_redis
@pytest.mark.parametrize("seed", range(8))
def test_lost_answers_of_redis_take_nothing_back_twice(redis_url: str, tmp_path: Path, seed: int) -> None:
    """Every second request is lost on its way, or its answer is."""
    with closing(RedisRun(redis_url, tmp_path / "r")) as run:
        for _ in range(4):
            run.claim(1)
        run.hand_over(1, 0)
        run.hand_over(1, 1, rollouts=1, die="recorded")
        with unreliable(seed, share=0.5):
            run.heal(1)
        assert run.streamed() == run.recorded() == [0, 1]
        state = run.admissions[0].read()
        assert (state.in_progress, state.handed_over, state.returned) == ({}, K + 1, [2, 3])
        assert run.ended.rollouts_dropped == {"lost_in_crash": 3 * K - 1}


def test_a_claim_that_was_on_its_way_to_redis_is_not_counted(redis_url: str, tmp_path: Path) -> None:
    """It arrives after the take-back, for a process that has ended. Nobody would finish its group."""
    with closing(RedisRun(redis_url, tmp_path / "r")) as run:
        dead = cast(RedisAdmission, run.admissions[1])
        commit, committed = dead._commit_script, []

        def late(keys: Any, arguments: Any) -> int:
            if not committed:
                run.heal(1)
            committed.append(commit(keys, arguments))
            assert committed == [0]
            raise DiedError

        dead._commit_script = late
        with pytest.raises(DiedError):
            dead.claim(0, 0, K)
        assert run.admissions[0].read().in_progress == {}
        assert run.claim(0) == 0


def test_a_process_is_started_again_after_a_pause_that_doubles_and_not_for_ever(run: Run) -> None:
    assert run.config.launch.restarts == 3
    now, pauses = 100.0, [0.5, 1.0, 2.0]
    for pause_s in pauses:
        run.heal(1, now=now)
        assert run.healing.pending
        assert run.begin(now + pause_s - 0.01) == []
        now += pause_s
        assert [worker.role for worker in run.begin(now)] == ["generation-1"]
        assert not run.healing.pending
    with pytest.raises(
        StageDiedError, match=r"the generation-1 process died 4 times \(launch.restarts: 3\):\n1. "
    ) as raised:
        run.heal(1, now=now)
    assert str(raised.value).count("last words") == 4
    assert run.host.started == ["generation-1"] * 3


def test_the_pause_has_a_bound(tmp_path: Path) -> None:
    with closing(Run(tmp_path / "r", "--launch.restarts=2000")) as run:
        run.healing.heal([cast(LocalWorker, Worker("generation-1"))], 0.0)
        history = run.healing._histories["generation-1"]
        history.reports *= 1500
        run.heal(1)
        assert history.due_s == module.LONGEST_PAUSE_S


def test_the_time_of_an_absence_begins_with_the_first_death(run: Run) -> None:
    """A process that dies, and again as it starts, was away once."""
    run.heal(1, now=10.0)
    run.begin(10.5)
    run.heal(1, now=13.0)
    (worker,) = run.begin(14.0)
    assert run.healing.summary()["generation-1"] == {"count": 2, "rollouts_lost": 0, "recovery_s": []}
    for stage in ("engine-1", "actor-1"):
        run.publish(stage, None, pid=worker.pid)
    run.healing.observe(last_statuses(run.host.board), 17.0)
    assert run.healing.summary()["generation-1"] == {"count": 2, "rollouts_lost": 0, "recovery_s": [7.0]}


def test_a_process_that_can_not_be_started_again_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(role: str) -> Worker:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    run.heal(1)
    monkeypatch.setattr(run.host, "start", full)
    with pytest.raises(StageDiedError, match=r"was killed[\s\S]*it can't be started again: .*Cannot allocate memory"):
        run.begin(1.0)


def test_a_server_is_absent_until_it_is_ready(tmp_path: Path) -> None:
    """It has no status: its ready file says which process it is."""
    with closing(Run(tmp_path / "r", "--engine.kind=http", "--engine.processes=1")) as run:
        run.directory.ready_file("server-0").write_bytes(b'{"pid": 1, "url": "http://127.0.0.1:1"}')
        assert run.healing.absent_servers == []
        run.healing.heal([cast(LocalWorker, Worker("server-0"))], 0.0)
        (worker,) = run.begin(0.5)
        run.healing.observe({}, 1.0)
        assert run.healing.absent_servers == ["server-0"]
        run.directory.ready_file("server-0").write_bytes(b'{"pid": %d, "url": "http://127.0.0.1:1"}' % worker.pid)
        run.healing.observe({}, 2.0)
        assert run.healing.absent_servers == []
        assert run.healing.summary()["server-0"]["recovery_s"] == [2.0]


def test_a_process_that_has_worked_for_long_is_as_good_as_new(run: Run) -> None:
    for death in range(6):
        now = 10_000.0 * death
        run.heal(1, now=now)
        (worker,) = run.begin(now + 0.5)
        for stage in ("engine-1", "actor-1"):
            run.publish(stage, None, pid=worker.pid)
        run.healing.observe(last_statuses(run.host.board), now + 4.0)
    assert run.healing.summary()["generation-1"] == {"count": 6, "rollouts_lost": 0, "recovery_s": [4.0] * 6}
    assert any("works again after 4.0 s" in line for line in run.said.lines)
    assert all("(restart 1 of 3)" in line for line in run.said.lines if "started again in" in line)


@pytest.mark.parametrize(("restarts", "watchdog_s", "expected_s"), [(3, 300.0, 330.0), (3, 20.0, 120.0), (0, 300.0, 120.0)])
def test_the_trainer_waits_for_an_engine_that_hangs_until_it_is_killed(
    restarts: int, watchdog_s: float, expected_s: float, tmp_path: Path
) -> None:
    settings = (f"--launch.restarts={restarts}", f"--launch.watchdog_s={watchdog_s}")
    with (
        closing(Run(tmp_path / "r", *settings)) as run,
        closing(training._sender(run.session, run.host.channels.weights, lambda: False)) as sender,
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


def test_only_processes_that_can_be_replaced_are_killed_because_they_are_silent(run: Run) -> None:
    workers = [Worker(role) for role in ("generation-0", "generation-1", "training")]
    roles = ["generation-0", "generation-1"]
    assert not run.healing.kill(("trainer",), workers, roles)  # type: ignore[arg-type]
    assert not run.healing.kill((), workers, roles)  # type: ignore[arg-type]
    assert not any(worker.killed for worker in workers)
    assert run.healing.kill(("engine-1", "actor-1", "trainer"), workers, roles)  # type: ignore[arg-type]
    assert [worker.killed for worker in workers] == [False, True, False]


def test_what_can_be_replaced_is_a_rule() -> None:
    def roles(*settings: str) -> list[str]:
        return replaceable_roles(load_config(None, list(settings)))

    assert roles() == ["generation"]
    assert roles("--launch.preprocessor=process") == ["generation", "preprocessing"]
    assert roles("--engine.kind=http", "--engine.servers=2") == ["server-0", "server-1", "generation"]
    assert roles("--engine.kind=vllm", "--engine.python=python") == ["server-0", "generation"]
    broadcast = ("--launch.preprocessor=process", "--weights.kind=collective")
    assert roles(*broadcast) == roles(*broadcast, "--engine.kind=http") == ["preprocessing"], "a group is formed once"
    assert roles(*RedisRun.kinds, "--engine.processes=2") == []
    assert roles("--launch.restarts=0") == []


@pytest.mark.parametrize("die", ["", "read", "written"])
def test_a_group_that_the_preprocessor_had_passed_on_is_passed_on_once(make_run: MakeRun, die: str) -> None:
    run = make_run("--launch.preprocessor=process")
    for index in range(3):
        run.claim(0)
        run.hand_over(0, index)
    with (
        closing(run.store.reader(ROLLOUTS, Group)) as reader,
        closing(run.store.writer(PREPARED, Prepared, capacity=None, when_full="block", on_drop=None)) as writer,
    ):
        for ending in ("", die):
            ((offset, one),) = reader.read(1)
            if ending == "read":
                break
            writer.try_write(Prepared(index=one.index, newest_version=0, ids=(), samples=()))
            if ending != "written":
                reader.commit(offset + 1)
    run.healing.heal(cast(list[LocalWorker], [Worker("preprocessing")]), 0.0)
    passed_on = [one.index for one in run.store.waiting(PREPARED, Prepared)]
    with closing(run.store.reader(ROLLOUTS, Group)) as again:  # as the new process does
        assert passed_on + [one.index for _, one in again.read(9)] == [0, 1, 2]
    assert module.LOST not in run.ended.rollouts_dropped
