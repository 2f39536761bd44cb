"""The chaos suite: its checks find what they should in records that were changed, and short runs with faults hold."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import __main__ as chaos_main
from tests.chaos import faults
from tests.chaos.__main__ import main
from tests.chaos.faults import Proxy
from tests.chaos.invariants import check
from tests.chaos.plan import LAYOUTS, Fault, Kind
from tests.chaos.results import Injected, Result
from tests.integration.runs import resume, run, until

HALF, GOAL, GROUP = 3, 6, 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two sessions."""
    run_dir = tmp_path_factory.mktemp("chaos") / "r"
    run(run_dir, trainer__steps=HALF, trainer__batch_size=10, engine__slots=32)
    resume(run_dir, trainer__steps=GOAL)
    return run_dir


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "r")


Lines = list[Any]


def change(run_dir: Path, name: str, edit: Callable[[Lines], object]) -> None:
    path = run_dir / name
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_summary(run_dir: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = run_dir / "summary.json"
    contents = json.loads(path.read_text())
    edit(contents)
    path.write_text(json.dumps(contents))


GROUPS, TRAINED, METRICS = "rollouts/rollouts.jsonl", "rollouts/trained.jsonl", "metrics.jsonl"


def first_completion(lines: Lines) -> dict[str, Any]:
    """Of the first group, which the first step trained on."""
    found: dict[str, Any] = lines[0]["rollouts"][0]["turns"][0]["completion"]
    return found


def lose_a_group(lines: Lines, index: int | None = None) -> None:
    """A group was handed over that nothing was trained on, and that does not wait: of the lowest index that is free."""
    indices = {line["index"] for line in lines}
    index = index or next(index for index in range(len(lines) + 1) if index not in indices)
    lost = json.loads(json.dumps(lines[0]).replace("g0.a", f"g{index}.a"))
    lines.append({**lost, "index": index})


CHANGES: dict[str, tuple[str, str, Callable[[Lines], object]]] = {
    "a step is not in the metrics": ("steps: metrics.jsonl", METRICS, lambda lines: lines.pop(2)),
    "time runs backwards": ("steps: step 4 ended", METRICS, lambda lines: lines[3].update(time_s=0.0)),
    "a step has fewer rollouts than a batch": (
        "steps: step 2 has 10 rollouts",
        METRICS,
        lambda lines: lines[1].update(samples=9),
    ),
    "a step is not recorded": ("lacks steps", TRAINED, lambda lines: lines.pop(2)),
    "a batch lacks a rollout": ("has 9 rollouts, not 10", TRAINED, lambda lines: lines[0]["samples"].pop()),
    "a rollout is trained on twice": (
        "once: ",
        TRAINED,
        lambda lines: lines[-1]["samples"].__setitem__(0, lines[0]["samples"][0]),
    ),
    "a group is handed over twice": (
        "was handed over 2 times in session 1",
        GROUPS,
        lambda lines: lines.insert(1, lines[0]),
    ),
    "a rollout is trained on and dropped": (
        "once: ",
        TRAINED,
        lambda lines: lines[-1].update(dropped_ids={"stale": [lines[0]["samples"][0]["id"]]}),
    ),
    "a token was changed": (
        "samples: step 1: tokens or versions",
        GROUPS,
        lambda lines: first_completion(lines)["token_ids"].__setitem__(0, 0),
    ),
    "a log-prob was changed": (
        "samples: step 1: log-probs",
        GROUPS,
        lambda lines: first_completion(lines)["logprobs"].__setitem__(0, -0.125),
    ),
    "a log-prob is none": (
        "is not a log-probability",
        GROUPS,
        lambda lines: first_completion(lines)["logprobs"].__setitem__(0, 1.5),
    ),
    "a reward was changed": ("samples: step 1: ", GROUPS, lambda lines: lines[0]["rollouts"][0].update(reward=17.0)),
    "a rollout that was trained on has no record": ("which is not in", GROUPS, lambda lines: lines.pop(0)),
    "a group is lost after it was handed over": (
        f"conservation: {GROUP} rollouts that were handed over have no end",
        GROUPS,
        lose_a_group,
    ),
    "a lag is wrong": ("versions: step 1", TRAINED, lambda lines: lines[0]["samples"][0].update(lag_max=3)),
    "a token is of the future": ("did not exist yet", TRAINED, lambda lines: lines[0]["samples"][0].update(lag_min=-1)),
    "the lag bound is lower": (
        "lag: ",
        "sessions.jsonl",
        lambda lines: [line["config"]["schedule"].update(max_lag=0) for line in lines],
    ),
    "a version has two checksums": (
        f"published: version {HALF} was published with two",
        "published.jsonl",
        lambda lines: lines[HALF].update(checksum="0" * 32),
    ),
    "a version was not published": ("published: versions [5]", "published.jsonl", lambda lines: lines.pop(-2)),
    "an attempt of a group is missing": (
        "attempts are not its rollouts and failures",
        GROUPS,
        lambda lines: lines[0].update(started=GROUP + 1),
    ),
    "a line is damaged": ("can't be read", GROUPS, lambda lines: lines.__setitem__(0, {"index": "damaged"})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_check_finds_a_change(name: str, copied: Path) -> None:
    expected, file, edit = CHANGES[name]
    change(copied, file, edit)
    found = check(copied)
    assert any(expected in line for line in found), found


SUMMARIES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "the run failed": ("steps: the run is failed", lambda summary: summary.update(status="failed")),
    "fewer are queued": ("are queued", lambda summary: summary.update(rollouts_queued=summary["rollouts_queued"] + 1)),
    "its own count is wrong": ("the summary says", lambda summary: summary.update(conservation_error={"missing": 1})),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_summary_is_checked_against_the_records(name: str, copied: Path) -> None:
    expected, edit = SUMMARIES[name]
    change_summary(copied, edit)
    found = check(copied)
    assert any(expected in line for line in found), found


def test_a_whole_run_has_no_violation(whole: Path) -> None:
    assert check(whole) == []


@pytest.mark.parametrize("resumed_at_goal", [False, True])
def test_groups_that_are_lost_are_found_unless_the_next_session_begins_at_the_goal(
    resumed_at_goal: bool, copied: Path
) -> None:
    """Those that a killed session had in progress stay unfinished if the next one starts nothing."""
    summary = json.loads((copied / "summary.json").read_text())
    most = summary["rollouts_in_progress"] + sum(summary["rollouts_dropped"].values())
    change(copied, GROUPS, lambda lines: lose_a_group(lines, len(lines) + 2 * most))
    if resumed_at_goal:
        sizes = {f"{name}_bytes": (copied / f"rollouts/{name}.jsonl").stat().st_size for name in ("rollouts", "trained")}
        change(copied, "sessions.jsonl", lambda lines: lines.append({**lines[-1], "version": GOAL, **sizes}))
    found = check(copied)
    assert any("started and not handed over" in line for line in found) == (not resumed_at_goal), found


def test_weights_that_a_resume_abandoned_are_found(copied: Path) -> None:
    """With groups of the second session counted to the first, tokens are of versions after its checkpoint."""
    size = (copied / GROUPS).stat().st_size
    change(copied, "sessions.jsonl", lambda lines: lines[1].update(rollouts_bytes=size))
    found = check(copied)
    assert found
    assert all(line.startswith("past: ") for line in found), found
    assert f"which the resume at version {HALF} abandoned" in found[0]
    change(copied, "sessions.jsonl", lambda lines: lines[1].update(rollouts_bytes=0))
    assert "which was handed over later" in check(copied)[0]


def test_a_proxy_passes_on_cuts_silences_and_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(100):
                    connection.sendall(data)

    threading.Thread(target=echo, daemon=True).start()
    with closing(server), closing(Proxy(server.getsockname())) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
            client.sendall(b"one")
            assert client.recv(100) == b"one"
            heal = proxy.disturb(Fault(kind="delay", place="redis", steps=1, after_s=0, lasts_s=1, amount=0.2))
            slept: list[float] = []
            with monkeypatch.context() as patch:
                patch.setattr(faults.time, "sleep", slept.append)
                client.sendall(b"two")
                assert client.recv(100) == b"two"
            assert slept == [0.05 + 0.5 * 0.2] * 2, "there and back"
            heal()
            heal = proxy.disturb(Fault(kind="silence", place="redis", steps=1, after_s=0, lasts_s=1))
            client.sendall(b"late")
            client.settimeout(0.1)
            with pytest.raises(TimeoutError):
                client.recv(100)
            heal()
            client.settimeout(10)
            assert client.recv(100) == b"late"
            heal = proxy.disturb(Fault(kind="cut", place="redis", steps=1, after_s=0, lasts_s=1))
            assert client.recv(100) == b""
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
            assert client.recv(100) == b""
        heal()
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
            client.sendall(b"three")
            assert client.recv(100) == b"three"


class Sleeper:
    """A target whose only process sleeps. As a context, it ends the process."""

    run_dir = Path("/nowhere")

    @property
    def links(self) -> dict[str, Proxy]:
        return {}

    def __enter__(self) -> Sleeper:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def pids(self) -> dict[str, int]:
        return {"training": self.process.pid} if self.process.poll() is None else {}

    def sleep(self, time_s: float) -> None: ...

    @property
    def stopped(self) -> bool:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def inject(self, kind: Kind, amount: float = 0.5) -> Callable[[], None]:
        fault = Fault(kind=kind, place="training", steps=1, after_s=0, lasts_s=1, amount=amount)
        return faults.inject(fault, self)


def test_signals_reach_the_process() -> None:
    with Sleeper() as sleeper:
        for kind in ("stop", "slow"):
            undo = sleeper.inject(kind)
            until(lambda: sleeper.stopped)
            undo()
            until(lambda: not sleeper.stopped)
        sleeper.inject("kill")
        assert sleeper.process.wait() == -signal.SIGKILL
        with pytest.raises(faults.NotInjectedError, match="there is no process training"):
            sleeper.inject("kill")


@pytest.mark.parametrize(("kind", "limit"), [("disk", resource.RLIMIT_FSIZE), ("memory", resource.RLIMIT_AS)])
def test_limits_are_set_and_restored(kind: Kind, limit: int) -> None:
    with Sleeper() as sleeper:
        before = resource.prlimit(sleeper.process.pid, limit)
        undo = sleeper.inject(kind)
        soft, hard = resource.prlimit(sleeper.process.pid, limit)
        assert 0 < soft < 10e9
        assert hard == before[1]
        undo()
        assert resource.prlimit(sleeper.process.pid, limit) == before


def test_what_is_not_there_is_not_hurt() -> None:
    with Sleeper() as sleeper, pytest.raises(faults.NotInjectedError, match="no weights in shared memory"):
        sleeper.inject("weights")


# ---- the command


def test_a_broken_run_ends_with_what_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(request: chaos_main.Request, layout: str, seed: int, stop: object) -> Result:
        fault = Fault(kind="kill", place="training-rank-1", steps=2, after_s=0.1)
        return Result(
            layout=layout,
            seed=seed,
            faults=[Injected(fault=fault, effect="ended", noticed_s=1.0, recovered_s=9.0, said="error: it died")],
            troubled={},
            sessions=2,
            steps=20,
            wall_s=12.0,
            violations=["once: g1.a0 was trained on or dropped 2 times"] if seed == 4 else [],
            command=request.command(layout, seed),
            run_dir="",
        )

    monkeypatch.setattr(chaos_main, "run_chaos", broken)
    arguments = ["--layouts", "sharded", "--seed", "3", "--runs", "2", "--faults", "stop,kill", "--trainer.seed=1"]
    assert main(["--out", str(tmp_path / "out"), *arguments]) == 2, "a setting that does not exist"
    assert main(["--out", str(tmp_path / "out"), *arguments[:-1], "--trainer.steps=20"]) == 1
    shown = capsys.readouterr()
    assert "sharded seed 3: 1 faults (1 kill)" in shown.err
    assert "BROKEN\n  once: g1.a0 was trained" in shown.err
    again = "python -m tests.chaos --layouts sharded --seed 4 --count 8 --faults stop,kill --trainer.steps=20"
    assert f"1 of 2 runs broke an invariant; to run the first again: {again}" in shown.err
    assert "| kill | training rank | 2 | 0 | 0 | 2 | 1.0, 1.0 | 9.0, 9.0 |" in shown.out
    assert len(json.loads((tmp_path / "out" / "chaos.json").read_text())) == 2


@pytest.mark.parametrize("flag", ["--layouts", "--faults"])
def test_unknown_names_are_one_clear_error(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out"), flag, "earthquake"]) == 2
    assert f"error: {flag} earthquake: it is one of" in capsys.readouterr().err


# ---- real runs


def chaos(out: Path, layout: str, seed: int, count: int, *more: str) -> list[dict[str, Any]]:
    """Run one seed; it must be whole. Returns what each fault did."""
    arguments = ["--layouts", layout, "--seed", str(seed), "--count", str(count), "--out", str(out), *more]
    assert main(arguments) == 0, (out / "chaos.json").read_text()
    (result,) = json.loads((out / "chaos.json").read_text())
    assert result["violations"] == []
    assert not list(out.glob(f"{layout}-*")), "a whole run leaves nothing"
    faults: list[dict[str, Any]] = result["faults"]
    return faults


@pytest.mark.slow
def test_a_run_that_is_killed_is_whole(tmp_path: Path) -> None:
    (fault,) = chaos(tmp_path, "embedded", 0, 1, "--faults", "kill,environment")
    assert fault["effect"] == "ended"
    assert "SIGKILL" in fault["said"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "seed"), [("engines", 9), ("http", 34)])
def test_a_run_whose_processes_are_started_again_is_whole(layout: str, seed: int, tmp_path: Path) -> None:
    """In these seeds only generation processes and engine servers are killed."""
    assert [fault["effect"] for fault in chaos(tmp_path, layout, seed, 2, "--faults", "kill")] == ["restarted"] * 2


REDIS, RAY = pytest.mark.needs_redis, pytest.mark.needs_ray
NEEDS = {"links": [REDIS], "ray": [RAY]}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", [pytest.param(name, marks=NEEDS.get(name, [])) for name in [*LAYOUTS][1:]])
@pytest.mark.parametrize("seed", [1, 2])
def test_runs_with_every_fault_are_whole(layout: str, seed: int, tmp_path: Path) -> None:
    chaos(tmp_path, layout, seed, 6, "--replay")
