"""A trainer's process and three engines' over gloo on loopback: weights are exact, and whoever dies or stops is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.weights.collective_control import listen

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LAST, AT = 6, 2
ENDS_WITHIN_S = 120

COMMON = """
import json, os, signal, socket, sys, time
import torch
from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import checksum
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.collective import CollectiveWeightReceiver, CollectiveWeightSender
from pipelinerl.weights.collective_group import Group

def weights_of(version):
    # 32 MB: more than the sockets between two processes hold.
    big = torch.full((2000, 4000), float(version))
    return {"embed": big, "half": torch.full((9, 3), version, dtype=torch.bfloat16), "head": big,
            "scale": torch.tensor(version), "none": torch.zeros(0), "flags": torch.full((7,), version % 2, dtype=torch.bool)}

end, when, at, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
whole = Group.broadcast
broadcasts = 0

def partly(self, flat, bucket_bytes, check):
    global broadcasts
    broadcasts += 1
    if when == "middle" and broadcasts == at + 1:
        whole(self, flat[: 3 * bucket_bytes], bucket_bytes, check)
        os.kill(os.getpid(), signal.Signals[end])
    whole(self, flat, bucket_bytes, check)

Group.broadcast = partly
"""

TRAINER = (
    COMMON
    + """
sender = CollectiveWeightSender(socket.socket(fileno=int(sys.argv[5])), 3, timeout_s=30, stall_s=3, bucket_bytes=1 << 20)
versions, error = [], None
try:
    for version in range(last + 1):
        sender.send(version, weights_of(version))
        versions += [one.version for one in sender.receipts()]
    while sender.unanswered():
        time.sleep(0.01)
        versions += [one.version for one in sender.receipts()]
    versions += [one.version for one in sender.receipts()]
    sender.close()
except WeightUpdateError as caught:
    error = str(caught)  # And it ends without closing anything, as the worst of owners would.
print(json.dumps({"versions": versions, "error": error}))
"""
)

# An engine holds a copy of the weights it took last; at the end it says whether they are exactly those of one version.
ENGINE = (
    COMMON
    + """
port, index = int(sys.argv[5]), int(sys.argv[6])
receiver = CollectiveWeightReceiver("127.0.0.1", port, index, engine=f"engine-{index}", receivers=3)
held, version, error = None, -1, None
try:
    while version < last:
        if receiver.offered() is None:
            time.sleep(0.001)
            continue
        update = receiver.poll()
        assert update.version == version + 1
        assert update.tensors["embed"].data_ptr() == update.tensors["head"].data_ptr()
        held = {name: tensor.clone() for name, tensor in update.tensors.items()}
        version = update.version
        receiver.acknowledge(UpdateReceipt(engine=f"engine-{index}", version=version, checksum=checksum(held), pause_s=0.0,
            sequences_in_flight=0))
        if when == "between" and version == at:
            os.kill(os.getpid(), signal.Signals[end])
except WeightUpdateError as caught:
    error = str(caught)
exact = held is None or checksum(held) == checksum(weights_of(version))
print(json.dumps({"version": version, "exact": exact, "error": error}))
if error is None:
    receiver.close()
"""
)

Processes = list["subprocess.Popen[str]"]


class Run:
    """The four processes; whatever is left of them at the end of the test is killed."""

    def __init__(self) -> None:
        self.processes: Processes = []

    def start(self, *, who: str = "nobody", end: str = "SIGKILL", when: str = "between") -> Processes:
        """The trainer, then the engines. `who` ends itself by the signal `end`: when it has taken version 2, `between` two
        updates, or in the `middle` of the broadcast of version 2."""
        with listen() as listener:
            fd, port = listener.fileno(), listener.getsockname()[1]
            self._start("trainer", TRAINER, who, end, when, fd, pass_fds=[fd])
        for index in range(3):
            self._start(f"engine-{index}", ENGINE, who, end, when, port, index)
        return self.processes

    def _start(
        self, name: str, code: str, who: str, end: str, when: str, *others: int, pass_fds: Sequence[int] = ()
    ) -> None:
        arguments = [end, when if who == name else "never", AT, LAST, *others]
        command = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(command, pass_fds=pass_fds, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.close()


def last_words(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it printed last. It must end by itself, in good order, within the bound."""
    output, _ = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 0
    words: dict[str, Any] = json.loads(output.splitlines()[-1])
    return words


def test_three_engines_get_every_version_exactly(run: Run) -> None:
    trainer, *engines = run.start()
    for engine in engines:
        assert last_words(engine) == {"version": LAST, "exact": True, "error": None}
    words = last_words(trainer)
    assert words["error"] is None
    assert sorted(words["versions"]) == sorted(list(range(LAST + 1)) * 3)


@pytest.mark.parametrize(
    ("end", "when", "complaint"),
    [
        ("SIGKILL", "between", "engine number 0 (engine-0) is gone: its process ended without a word"),
        ("SIGKILL", "middle", "engine number 0 (engine-0) is gone: its process ended without a word"),
        ("SIGSTOP", "between", "engine number 0 (engine-0) was not heard of for 3 s"),
        ("SIGSTOP", "middle", "engine number 0 (engine-0) was not heard of for 3 s"),
    ],
)
def test_an_engine_that_dies_or_stops_is_named_and_nobody_hangs(run: Run, end: str, when: str, complaint: str) -> None:
    trainer, victim, *others = run.start(who="engine-0", end=end, when=when)
    assert complaint in last_words(trainer)["error"]
    for engine in others:
        words = last_words(engine)
        assert complaint in words["error"]
        assert words["exact"]
        assert words["version"] in ((AT,) if when == "between" else (AT - 1, AT))
    assert (victim.poll() is None) == (end == "SIGSTOP")


@pytest.mark.parametrize(
    ("end", "complaint"),
    [
        ("SIGKILL", "is gone: its process ended without a word"),
        ("SIGSTOP", "the broadcast of weights did not go on for 6 s"),
    ],
)
def test_a_trainer_that_dies_or_stops_in_the_middle_is_noticed_by_all(run: Run, end: str, complaint: str) -> None:
    _, *engines = run.start(who="trainer", end=end, when="middle")
    for engine in engines:
        words = last_words(engine)
        assert complaint in words["error"]
        assert words["exact"]
        assert words["version"] == AT - 1
