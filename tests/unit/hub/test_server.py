"""The hub and its connections: each group once, nothing lost with a worker, and nobody waits for anybody."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import ReplacedError, RunDirectoryError, StageDiedError, StreamError
from pipelinerl.hub import server as module
from pipelinerl.hub import wire
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.client import Claims, HubClient, HubReader, RecordLines, dial
from pipelinerl.hub.hub import ROLLOUTS_FILE, Direct
from pipelinerl.hub.server import HubServer, WorkerKind
from pipelinerl.hub.stream import FileStream
from pipelinerl.interfaces import Admitted, Verdict
from pipelinerl.schedule import AsyncSchedule, ConventionalSchedule, PipelineSchedule, Schedule
from pipelinerl.types import Group
from tests.limits import small_files
from tests.unit.group_parts import receipt
from tests.unit.hub.hub_parts import Asking, K, Place, Worker, group, trainer_status
from tests.unit.record_parts import status

ROOT = Path(__file__).parents[3]
TRAINER = WorkerKind(reads="groups", follows=True)
MANY = PipelineSchedule(1_000_000)  # allows everything


class Served(Place):
    """A hub that serves workers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.server = HubServer(self.hub)
        self.workers = ExitStack()

    def connect(self, kind: WorkerKind | int, make: Callable[[socket.socket], Any] = Worker) -> Any:
        kind = WorkerKind(process=kind) if isinstance(kind, int) else kind
        return self.workers.enter_context(closing(make(self.server.connect(kind))))


@contextmanager
def served(*arguments: Any, **options: Any) -> Iterator[Served]:
    place = Served(*arguments, **options)
    with place.server, place.workers:
        yield place


def claimed(claims: Claims, worker: Worker, version: int = 0, *, room: int = 0) -> Admitted:
    """As soon as the answer is there."""
    if (first := claims.claim(version, K, room=room)).group is not None:
        return first
    worker.settled()
    return claims.claim(version, K, room=room)


# ------------------------------------------------------------------------------------------------ one session


def test_nobody_starts_before_the_first_evaluation_is_over_and_all_learn_of_it(tmp_path: Path) -> None:
    with served(tmp_path, MANY, 2, opened=False) as place:
        one, other = place.connect(0), place.connect(1)
        first, second = Claims(one, MANY), Claims(other, MANY)
        assert claimed(second, other) == (None, Verdict(False, "the evaluation before training", ("actor",)))
        assert not second.opened
        first.open()
        one.settled()
        other.settled()
        assert second.opened
        assert claimed(second, other).group == 0


def test_a_process_learns_why_nothing_is_granted_and_when_the_reason_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DENY_EVERY_S", 0.0)
    schedule = ConventionalSchedule(K, 1)
    with served(tmp_path, schedule, 1, capacity=1) as place:
        worker = place.connect(0)
        claims = Claims(worker, schedule)
        assert claims.claim(0, K).verdict.waiting_for == "the answer of the launcher"
        assert claimed(claims, worker).group == 0
        assert "to finish its round" in claimed(claims, worker).verdict.waiting_for
        claims.hand_over(group(0))
        worker.settled()
        assert "the stream is full (1 groups)" in claimed(claims, worker).verdict.waiting_for


def test_groups_at_hand_count_with_the_weights_of_the_engine(tmp_path: Path) -> None:
    with served(tmp_path, MANY) as place:
        worker = place.connect(0)
        claims = Claims(worker, MANY)
        assert claimed(claims, worker, room=3 * K).group == 0
        worker.settled()
        assert place.state.in_progress == {0: 3 * K}
        assert claims.claim(2, K, room=2 * K).group == 1
        worker.settled()
        assert place.state.in_progress == {0: 2 * K, 2: K}, "group 1 was taken before the hub knew of the weights"
        assert claims.claim(2, K, room=K).group == 2


@pytest.mark.parametrize("schedule", [PipelineSchedule(8), ConventionalSchedule(8, 1)], ids=lambda schedule: schedule.name)
def test_weights_are_taken_at_once_or_when_the_round_is_over(schedule: Schedule, tmp_path: Path) -> None:
    with served(tmp_path, schedule, 2) as place:
        one, other = place.connect(0), place.connect(1, Asking)
        claims = Claims(one, schedule)
        other.ask(1)
        other.settled()
        assert claims.may_take(1) == (schedule.name == "pipeline")
        one.settled()
        assert claims.may_take(1) == (schedule.name == "pipeline")
        other.hand_over(0)
        other.settled()
        one.settled()
        assert claims.may_take(1)
        assert place.state.newest_version == 1


def test_a_stream_that_drops_tells_the_process_whose_group_it_was_for(tmp_path: Path) -> None:
    with served(tmp_path, MANY, capacity=2, drops=True) as place:
        worker = place.connect(0)
        claims = Claims(worker, MANY)
        for rollouts in (1, 2, 3, 4):
            index = claimed(claims, worker).group
            assert index is not None
            claims.hand_over(group(index, rollouts=rollouts))
        claims.settle()
        assert (claims.take_dropped(), claims.take_dropped()) == (1 + 2, 0)
        assert place.streamed() == [2, 3]
        assert place.recorded() == [0, 1, 2, 3]
        assert place.state.handed_over == 3 + 4
        assert place.state.parts[0].replaced == 3


def test_a_process_without_a_launcher_is_told_so() -> None:
    launcher, end = socket.socketpair()
    launcher.close()
    with closing(Worker(end)) as worker:
        worker.publish(status("actor"))
        with pytest.raises(ReplacedError, match="the launcher has ended this session of the run"):
            worker.sync()


def test_over_a_network_only_who_has_the_key_is_heard_and_times_are_by_the_launchers_clock(tmp_path: Path) -> None:
    with served(tmp_path) as place, closing(place.server.listen("127.0.0.1", "key", {"training": TRAINER})) as listener:
        refused = r"the training process has no connection with the launcher at 127\.0\.0\.1:"
        with pytest.raises(StageDiedError, match=refused):
            dial(listener.address, "another", "training", "m1")
        with socket.create_connection(listener.address) as stranger:
            stranger.sendall(b"\x00" * 64)
        with closing(dial(listener.address, "key", "training", "m1")) as worker:
            far_s = time.monotonic() + 1e6
            worker.publish(msgspec.structs.replace(status("trainer"), since_s=far_s - 5, written_s=far_s))
            assert worker.sync(30)
        found = place.server.read("trainer")
        assert found is not None
        assert found.machine == "m1"
        assert 4.9 < found.written_s - found.since_s < 5.1
        assert abs(found.written_s - time.monotonic()) < 60
        assert place.server.failure is None
    with pytest.raises(StageDiedError, match=refused):
        dial(listener.address, "key", "training", "m1")


# ------------------------------------------------------------------------------- peers that do not do their part


def held_bytes(place: Served) -> int:
    """What the hub keeps for workers that do not read."""
    with place.server._lock:
        return sum(len(part) for connection in place.server._connections for part in connection.wire._backlog)


def test_a_peer_that_stops_reading_holds_nobody_up_and_is_kept_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each status the latest, and of the stream what it has asked for."""
    monkeypatch.setattr(module, "DENY_EVERY_S", 0.0)
    with served(tmp_path, ConventionalSchedule(100 * K, 1), 2) as place:
        deaf, denied, other = place.connect(TRAINER), place.connect(1, Asking), place.connect(0, Asking)
        reader = HubReader[Group](deaf, Group, ahead=3)
        other.ask(100)
        other.settled()
        for index in range(10):
            other.hand_over(index, text="x" * 100_000)
        denied.ask(1000)
        for number in range(400):
            other.publish(status(f"stage-{number % 2}", detail=f"{number} " + "x" * 50_000))
            other.publish(trainer_status(number))
            if number % 20 == 0:
                other.settled()
        other.settled()
        assert held_bytes(place) < 3 * 110_000 + 3 * 60_000 + 100_000
        deaf.settled()
        deaf.settled()
        assert [deaf.read(f"stage-{n}").detail.split()[0] for n in range(2)] == ["398", "399"]
        assert [one.index for _, one in reader.read(9)] == [0, 1, 2]


SENDER = """
import socket, sys
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.client import Claims, HubClient
from pipelinerl.schedule import PipelineSchedule
from tests.unit.hub.hub_parts import group
hub = HubClient(socket.socket(fileno=int(sys.argv[1])))
claims = Claims(hub, PipelineSchedule(1_000_000))
while True:
    hub._wire.wait(1.0)
    while (index := claims.claim(0, 4, room=8).group) is not None:
        claims.hand_over(group(index, text="x" * 300_000))
"""


@pytest.mark.slow
def test_of_a_process_that_is_killed_while_it_sends_what_was_complete_counts(tmp_path: Path) -> None:
    random = Random(0)
    with served(tmp_path, MANY, stream=FileStream(tmp_path / "streams", tmp_path / ROLLOUTS_FILE)) as place:
        for _ in range(3):
            before = len(place.recorded())
            with place.server.connect(WorkerKind(process=0)) as end:
                command = [sys.executable, "-c", SENDER, str(end.fileno())]
                process = subprocess.Popen(command, pass_fds=[end.fileno()], cwd=ROOT)
            while not place.records.exists() or place.records.read_bytes().count(b"\n") < before + random.randint(1, 9):
                assert process.poll() is None
            process.kill()
            process.wait()
            place.server.wait_ended(WorkerKind(process=0))
            recorded = place.recorded()
            assert place.state.claims == {}
            assert place.state.in_progress == {}
            assert sorted([*recorded, *place.state.returned]) == [*range(place.state.next_index)]
            assert place.state.handed_over == K * len(recorded)
        returned, following = list(place.state.returned), place.state.next_index
        worker = place.connect(0, Asking)
        worker.ask(len(returned) + 1)
        worker.settled()
        assert worker.granted == [*returned, following]
    with closing(FileStream(tmp_path / "streams", tmp_path / ROLLOUTS_FILE)) as stream:
        assert [msgspec.json.decode(json, type=Group).index for _, json in stream.read(10**6)] == place.recorded()


def test_a_reader_that_dies_loses_nothing_that_it_had_not_taken(tmp_path: Path) -> None:
    with served(tmp_path, MANY) as place:
        writer, trainer = place.connect(0, Asking), place.connect(TRAINER)
        writer.ask(6)
        writer.settled()
        for index in range(6):
            writer.hand_over(index, rollouts=1 + index % 2)
        writer.settled()
        reader = HubReader[Group](trainer, Group, ahead=3)
        trainer.settled()
        assert [one.index for _, one in reader.read(2)] == [0, 1]
        trainer.settled()
        assert place.hub.waiting == 2, "groups 2 to 4 are on their way, and group 5 waits"
        trainer.close()
        place.server.wait_ended(TRAINER)
        assert place.hub.waiting == 1 + 2 + 1 + 2


# ------------------------------------------------------------------------------------------------- failures


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    with served(tmp_path, MANY) as place:
        worker = place.connect(0, Asking)
        worker.ask(2)
        worker.settled()
        with small_files(0):
            worker.hand_over(0)
            worker.settled()
        failure = place.server.failure
        assert isinstance(failure, RunDirectoryError)
        assert re.fullmatch(rf"can't write to {re.escape(str(place.records))}: .*and resume", str(failure))
        worker.hand_over(1)
        worker.publish(status("actor", detail="goes on"))
        worker.settled()
        assert (place.recorded(), place.server.failure) == ([], failure), "the first error is the cause"
        assert list(place.server.stages()) == ["actor"], "the launcher still sees what workers do"


def test_no_checkpoint_follows_records_that_could_not_be_written(tmp_path: Path) -> None:
    with served(tmp_path, MANY) as place:
        trainer = place.connect(TRAINER, Worker)
        lines = RecordLines(trainer, tmp_path, tmp_path / "metrics.jsonl")
        lines.write({"version": 1})
        trainer.require_sync()
        with small_files(0):
            lines.write({"version": 2})
            trainer.settled()
        lines.write({"version": 3})  # there is room again, and a line is missing
        with pytest.raises(RunDirectoryError, match="could not be written"):
            trainer.require_sync()
        assert (tmp_path / "metrics.jsonl").read_text() == '{"version":1}\n'


def test_a_run_of_many_evaluations_has_few_open_files(tmp_path: Path) -> None:
    with served(tmp_path, MANY) as place:
        worker = place.connect(0, Worker)
        begin = len(os.listdir("/proc/self/fd"))
        files = [tmp_path / f"rollouts/evaluation-v{number}.jsonl" for number in range(100)]
        opened = [RecordLines(worker, tmp_path, file) for file in files]
        for number in range(2):
            for lines in opened:
                lines.write(number)
        worker.settled()
        assert [file.read_text() for file in files] == ["0\n1\n"] * 100
        assert len(os.listdir("/proc/self/fd")) - begin < 32


@pytest.mark.parametrize("where", ["append", "read", "return_to", "commit"])
@pytest.mark.parametrize("error", [StreamError("it can't; make room"), RuntimeError("a bug")], ids=["ours", "a bug"])
def test_an_error_of_the_stream_ends_the_run_wherever_it_happens(where: str, error: Exception, tmp_path: Path) -> None:
    stream = FileStream()
    setattr(stream, where, Mock(side_effect=error))
    with served(tmp_path, MANY, stream=stream) as place:
        worker, trainer = place.connect(0, Asking), place.connect(TRAINER)
        worker.ask(1)
        worker.settled()
        worker.hand_over(0)
        worker.settled()
        HubReader[Group](trainer, Group).commit(0)
        trainer.settled()
        trainer.close()
        place.server.wait_ended(TRAINER)
        worker.publish(status("actor", detail="goes on"))
        worker.settled()
        assert list(place.server.stages()) == ["actor"]
        failure = place.server.failure
    if isinstance(error, StreamError):
        assert failure is error
    else:
        assert isinstance(failure, StageDiedError)
        assert str(failure) == "the hub failed: RuntimeError: a bug"
        assert "Traceback" in failure.__notes__[0]


# --------------------------------------------------------------------------------------- equality of the carriers


def counts(state: AdmissionState) -> list[Any]:
    names = (
        "claims next_index newest_version most_in_progress handed_over settled in_progress latency first_version returned"
    )
    return [getattr(state, name) for name in names.split()]


class Both:
    """Two generation processes twice: each calls the hub directly, and has a connection with another hub."""

    def __init__(self, embedded: Place, apart: Served) -> None:
        self.embedded, self.apart = embedded, apart
        self.directs = [Direct(embedded.hub, process) for process in range(2)]
        self.workers = [apart.connect(process, Asking) for process in range(2)]
        self.held: list[list[int]] = [[], []]
        self.versions = [0, 0]
        self.trained = self.offered = 0

    def claim(self, process: int) -> None:
        worker, version = self.workers[process], self.versions[process]
        index, before = self.directs[process].claim(version, K).group, len(worker.granted)
        worker.ask(before + 1, version)
        worker.settled()
        assert worker.granted[before:] == ([] if index is None else [index])
        self.held[process] += worker.granted[before:]
        worker.ask(len(worker.granted), version)  # it does not wait for a group

    def hand_over(self, process: int, number: int) -> None:
        index, rollouts = self.held[process].pop(number % len(self.held[process])), number % (K + 1)
        self.directs[process].hand_over(group(index, self.versions[process], rollouts))
        self.workers[process].hand_over(index, self.versions[process], rollouts=rollouts)

    def train(self) -> None:
        self.trained, self.offered = self.trained + 2 * K, self.offered + 1
        for place in (self.embedded.board, self.apart.server):
            place.publish(trainer_status(self.offered, self.trained))

    def take_weights(self, process: int) -> None:
        worker, taken = self.workers[process], list[int]()
        worker.handle(wire.MayTake, lambda message: taken.append(message.version))
        allowed = self.directs[process].may_take(self.offered)
        worker.send(wire.MayTake(self.offered))
        worker.settled()
        assert taken == [self.offered] * allowed
        if allowed:
            self.versions[process] = self.offered
        else:
            worker.send(wire.MayTake(-1))

    def die(self, process: int, number: int) -> None:
        """Perhaps within a message, or with words of another protocol."""
        last_words = (b"\0\0\1\0half of a message"[: number % 9], b"GET / HTTP/1.1\r\n\r\n")
        self.workers[process]._wire._socket.sendall(last_words[number % 2])
        self.workers[process]._wire.close()
        self.apart.server.wait_ended(WorkerKind(process=process))
        self.embedded.state.lose(process)
        self.workers[process], self.held[process] = self.apart.connect(process, Asking), []

    def compare(self) -> None:
        for worker in self.workers:
            worker.settled()
        assert counts(self.apart.state) == counts(self.embedded.state)
        assert self.apart.server.failure is None


@settings(max_examples=30)
@given(
    kind=st.sampled_from([PipelineSchedule(K, 1, stock=2 * K), ConventionalSchedule(2 * K, 2), AsyncSchedule(2 * K, 1)]),
    seed=st.integers(0, 1 << 30),
)
def test_a_connection_decides_as_the_hub_in_the_same_process_does(kind: Schedule, seed: int) -> None:
    """For two processes in any history, also if they die."""
    random = Random(seed)
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        embedded = Place(folders[0], kind, 2)
        both = Both(embedded, stack.enter_context(served(folders[1], kind, 2)))
        for _ in range(60):
            process, number = random.randrange(2), random.randrange(100)
            match random.choice(("claim", "claim", "claim", "hand over", "hand over", "train", "weights", "die")):
                case "claim":
                    both.claim(process)
                case "hand over" if both.held[process]:
                    both.hand_over(process, number)
                case "train" if embedded.state.handed_over >= 2 * K:
                    both.train()
                case "weights" if both.offered > both.versions[process] and kind.publishes(both.offered):
                    both.take_weights(process)
                case "die" if number < 30:
                    both.die(process, number)
            both.compare()
        assert embedded.recorded() == both.apart.recorded()
        embedded.hub.close()


# ------------------------------------------------------------------------------------------ several processes


def play(connected: socket.socket, schedule: Schedule, shared: dict[str, Any], number: int) -> list[tuple[int, int]]:
    """A generation process, to the end: claims and hands over as fast as it can, and takes weights when it may.

    Returns each group that it has started, with the version of its weights.
    """
    random, started, open_groups, version = Random(number), list[tuple[int, int]](), list[tuple[int, int]](), 0
    with closing(HubClient(connected)) as hub:
        claims = Claims(hub, schedule)
        while not shared["ending"].is_set():
            if shared["offered"] > version and claims.may_take(shared["offered"]):
                version = shared[number] = shared["offered"]
            if len(open_groups) < 3 and (index := claims.claim(version, K, room=K).group) is not None:
                started.append((index, version))
                open_groups.append((index, version))
            elif open_groups:
                claims.hand_over(group(*open_groups.pop(random.randrange(len(open_groups)))))
            else:
                hub._wire.wait(0.001)
    return started


@pytest.mark.parametrize(
    ("schedule", "steps", "most_lag"),
    [(ConventionalSchedule(2 * K, 3), 30, 2), (AsyncSchedule(2 * K, 3), 30, 5), (PipelineSchedule(K, 1), 60, 1)],
    ids=lambda case: getattr(case, "name", ""),
)
def test_contention_keeps_rounds_and_the_lag_bound(schedule: Any, steps: int, most_lag: int, tmp_path: Path) -> None:
    """Three processes, and a trainer. Before it offers weights, all have taken those before."""
    batch, lags, waiting = schedule.batch_size, list[int](), list[int]()
    shared: dict[Any, Any] = {"offered": 0, "ending": threading.Event(), 0: 0, 1: 0, 2: 0}
    with served(tmp_path, schedule, 3) as place, ThreadPoolExecutor(3) as pool:
        place.server.publish(trainer_status())
        contenders = [
            pool.submit(play, place.server.connect(WorkerKind(process=number)), schedule, shared, number)
            for number in range(3)
        ]
        trainer = place.connect(TRAINER)
        reader = HubReader[Group](trainer, Group)
        try:
            for version in range(steps):
                while len(waiting) < batch:
                    trainer._wire.wait(0.01)
                    waiting += [one.started_version for _, one in reader.read(99) for _ in one.rollouts]
                    assert not any(one.done() for one in contenders)
                    assert place.server.failure is None
                lags += [version - started for started in waiting[:batch]]
                del waiting[:batch]
                if schedule.publishes(version + 1):
                    while any(shared[number] < shared["offered"] for number in range(3)):
                        assert not any(one.done() for one in contenders)
                        time.sleep(0.001)
                    shared["offered"] = version + 1
                trainer.publish(trainer_status(version + 1, (version + 1) * batch))
            trainer.publish(trainer_status(steps, steps * batch, goal_reached=True))
            trainer.settled()
        finally:
            shared["ending"].set()
        found = [one.result() for one in contenders]
    started = [one for of_one in found for one in of_one]
    assert len({index for index, _ in started}) == len(started), "each index once"
    assert sum(map(bool, found)) >= 2, "not everything came from one process"
    assert max(lags) <= most_lag
    if schedule.name == "conventional":
        versions = Counter(version for _, version in started)
        assert [versions[version] for version in range(0, 30, 3)] == [6] * 10, "exactly a round"
        assert lags == [version % 3 for version in range(30) for _ in range(batch)]
    elif schedule.name == "async":
        assert {version for _, version in started} <= set(range(0, 31, 3)), "rounds are never mixed"
    else:
        assert len({version for _, version in started}) > 20


def test_weights_are_offered_to_the_engines_that_have_asked_and_their_answers_get_to_the_trainer(tmp_path: Path) -> None:
    """Also if the trainer comes later, and an engine's process is replaced."""
    offer = wire.Offer(number=1, version=3, checksum="c")
    with served(tmp_path, processes=3) as place:
        engines = [place.connect(process, Offered) for process in range(3)]
        for engine in engines[:2]:
            engine.send(wire.EngineAnswer(wire.ASKS, engine=7))
            engine.settled()
        trainer = place.connect(TRAINER, Offered)
        trainer.settled()
        assert trainer.offers == [wire.EngineAnswer(wire.ASKS, engine=process) for process in range(2)]
        trainer.send(offer)
        trainer.send(wire.Meeting("h", 5, 1))
        trainer.settled()
        for engine in engines:
            engine.settled()
        assert [engine.offers for engine in engines] == [[offer], [offer, wire.Meeting("h", 5, 1)], []]
        answer = wire.EngineAnswer(1, receipt(3, "c"))
        engines[0].send(answer)
        engines[0].settled()
        engines[0].close()
        place.server.wait_ended(WorkerKind(process=0))
        second = place.connect(0, Offered)
        trainer.send(msgspec.structs.replace(offer, number=2))
        trainer.settled()
        second.settled()
        assert trainer.offers[2:] == [answer, wire.EngineAnswer(wire.DEAD)]
        assert not second.offers, "it has not asked"


class Offered(Worker):
    """A worker by what arrives of weights: offers for a generation process, answers for the trainer."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.offers = list[Any]()
        for kind in (wire.Offer, wire.Meeting, wire.EngineAnswer):
            self.handle(kind, self.offers.append)
