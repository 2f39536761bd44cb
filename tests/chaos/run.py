"""One run with the faults of a seed: started as a real command, hurt, resumed until it reaches its goal, then checked."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from pipelinerl.channel import free_port
from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.extras import require
from pipelinerl.process.child import ChildProcess
from pipelinerl.run_directory import ORPHAN_PATIENCE_S, RunDirectory
from tests.chaos.faults import NotInjectedError, Proxy, Undo, inject, processes_of
from tests.chaos.invariants import check
from tests.chaos.plan import FORKS, KINDS, LAUNCHER, LAYOUTS, SMALL, STEPS_PER_FAULT, Fault, Kind, plan_faults
from tests.redis_server import redis_for_tests

COMMAND = "import sys; from pipelinerl.cli import main; sys.exit(main())"
LOOK_EVERY_S = 0.02
HANG_S = 135.0
"""Beyond the watchdog's patience: longer than a start and a stop together, once no fault lasts any more."""
LATENT_S = 3.0
"""A damaged buffer may be read as late as this."""
START_S = 120.0
MOST_SESSIONS = 60


Effect = Literal["went on", "restarted", "ended", "not injected"]


class Injected(msgspec.Struct, kw_only=True):
    """What a fault did.

    `effect`: the run went on, with the process replaced (`restarted`), or the session ended with `said`. `noticed_s`: until
    the session ended. `recovered_s`: until a step was taken, by the run or by the session that resumed it. Both count from
    the injection; None: not observed, as another fault came first.
    """

    fault: Fault
    effect: Effect = "went on"
    at_step: int = 0
    noticed_s: float | None = None
    recovered_s: float | None = None
    said: str = ""


class Result(msgspec.Struct, kw_only=True):
    """One run. `violations` are empty if it reached its goal in time and all invariants hold."""

    layout: str
    seed: int
    faults: list[Injected]
    troubled: dict[str, int]
    sessions: int
    steps: int
    wall_s: float
    violations: list[str]
    command: str
    run_dir: str


def line_of(result: Result) -> str:
    """What happened to one run, in one line, with a line for each violation."""
    injected = [one for one in result.faults if one.effect != "not injected"]
    kinds = Counter(one.fault.kind for one in injected)
    ended = [one for one in injected if one.effect == "ended"]
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    parts = [
        f"{result.layout} seed {result.seed}: {len(injected)} faults ({listed})",
        f"{result.sessions} sessions",
        f"{result.steps} steps in {result.wall_s:.0f} s",
    ]
    if noticed := [one.noticed_s for one in ended if one.noticed_s is not None]:
        parts.append(f"ended within {median(noticed):.1f} s (longest {max(noticed):.1f})")
    if recovered := [one.recovered_s for one in injected if one.recovered_s is not None]:
        parts.append(f"next step within {median(recovered):.1f} s (longest {max(recovered):.1f})")
    outcome = "whole" if not result.violations else "BROKEN"
    return "\n".join([f"{', '.join(parts)}: {outcome}", *(f"  {line}" for line in result.violations)])


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run. `count`: faults per run. `replay`: also repeat the training."""

    out: Path
    count: int
    kinds: Sequence[Kind] = KINDS
    replay: bool = False

    def command(self, layout: str, seed: int) -> str:
        """What runs this seed again."""
        faults = "" if tuple(self.kinds) == KINDS else f" --faults {' '.join(self.kinds)}"
        command = f"python -m tests.chaos --layouts {layout} --seed {seed} --count {self.count}{faults}"
        return command + " --replay" * self.replay

    def flags(self, layout: str, run_dir: Path) -> list[str]:
        steps = f"--trainer.steps={STEPS_PER_FAULT * (self.count + 1)}"
        own = ("--metrics.view=none", "--metrics.plot=false", f"--run_dir={run_dir}")
        return [*SMALL, steps, *LAYOUTS[layout], *own]


class _StopError(Exception):
    """The run can't go on: the message is a violation."""


def run_chaos(request: Request, layout: str, seed: int, stop: Callable[[], bool]) -> Result:
    """Run one seed. Raises UserError if the settings make no sense."""
    run_dir = request.out.absolute() / f"{layout}-{seed}"
    if run_dir.exists():
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True)
    began_s = time.monotonic()
    with ExitStack() as stack:
        around = stack.enter_context(_surroundings(layout, request, run_dir))
        flags = [*request.flags(layout, run_dir / "run"), *around.settings]
        if "environment" in request.kinds:
            flags += _troubled(load_config(None, flags), seed)
        config = load_config(None, flags)
        faults = plan_faults(seed, config, request.count, request.kinds, sorted(around.links))
        chaos = _Chaos(request, config, run_dir / "run", flags, faults, around, stop)
        violations = chaos()
    result = Result(
        layout=layout,
        seed=seed,
        faults=chaos.injected,
        troubled=chaos.troubled(),
        sessions=chaos.sessions,
        steps=chaos.taken,
        wall_s=round(time.monotonic() - began_s, 1),
        violations=violations,
        command=request.command(layout, seed),
        run_dir=str(run_dir),
    )
    if not violations:
        shutil.rmtree(run_dir)
    return result


def _troubled(config: RunConfig, seed: int) -> list[str]:
    inner = msgspec.json.encode({"kind": config.environment.kind, "args": config.environment.args}).decode()
    kind = f"{Path(__file__).with_name('environment.py')}:Troubled"
    return [f"--environment.kind={kind}", f"--environment.args={{inner: {inner}, chaos_seed: {seed}}}"]


class _Surroundings(NamedTuple):
    """What a run needs that is not its own: proxies by name, settings, and what to do before a resume.

    Servers may hold weights of steps that were lost: then a resumed run asks to have them restarted.
    """

    links: Mapping[str, Proxy] = {}
    settings: Sequence[str] = ()
    before_resume: Sequence[Callable[[], None]] = ()


@contextmanager
def _surroundings(layout: str, request: Request, run_dir: Path) -> Iterator[_Surroundings]:
    """For the layout `ray` a cluster; for `links` a Redis and two engine servers, each behind a proxy."""
    with ExitStack() as stack:
        if layout == "ray":
            yield _Surroundings(settings=[f"--launch.ray_address={stack.enter_context(_cluster(run_dir))}"])
        elif layout == "links":
            port = free_port("127.0.0.1")
            stack.enter_context(redis_for_tests(run_dir / "redis", "--port", str(port)))
            proxy = stack.enter_context(closing(Proxy(("127.0.0.1", port))))
            config = load_config(None, request.flags(layout, run_dir / "run"))
            servers = [stack.enter_context(closing(_Server(run_dir, number, config))) for number in range(2)]
            urls = ",".join(f"http://127.0.0.1:{server.proxy.port}" for server in servers)
            links = {"redis": proxy, **{server.name: server.proxy for server in servers}}
            settings = [f"--stream.url=redis://127.0.0.1:{proxy.port}/0", f"--engine.urls=[{urls}]"]
            yield _Surroundings(links, settings, tuple(server.restart for server in servers))
        else:
            yield _Surroundings()


class _Server:
    """An engine server that is not the run's own, behind a proxy."""

    def __init__(self, folder: Path, number: int, config: RunConfig) -> None:
        """Start it. Raises UserError."""
        self.name = f"server-{number}"
        self._ready, self._log = folder / f"{self.name}.json", folder / f"{self.name}.log"
        keys = [f"--engine.{key}={getattr(config.engine, key)}" for key in ("slots", "threads")]
        self._arguments = ["serve", config.model.path, "--port", "0", "--ready-file", str(self._ready), *keys]
        self._process: ChildProcess | None = None
        self.proxy = Proxy(("127.0.0.1", 0))
        self.restart()

    def restart(self) -> None:
        if self._process is not None:
            self._process.stop()
        self._ready.unlink(missing_ok=True)
        self._process = _command(self._arguments, self._log)
        if not self._process.wait_until(self._ready.exists, START_S):
            raise UserError(f"an engine server did not start; see {self._log}")
        url: str = msgspec.json.decode(self._ready.read_bytes())["url"]
        self.proxy.address = ("127.0.0.1", int(url.rpartition(":")[2]))

    def close(self) -> None:
        self.proxy.close()
        if self._process is not None:
            self._process.stop()


@contextmanager
def _cluster(run_dir: Path) -> Iterator[str]:
    """A Ray cluster of this machine, and its address. Raises UserError."""
    require("ray", "the layout ray")
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # a short path: Ray makes sockets there
        flags = ["--head", "--block", "--port", address.partition(":")[2], "--node-ip-address", "127.0.0.1"]
        flags += ["--num-cpus", "2", "--include-dashboard", "false", "--object-store-memory", "80000000"]
        flags += ["--temp-dir", folder]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *flags, "--disable-usage-stats"]
        log = run_dir / "ray.log"
        with ChildProcess(command, log=log, patience_s=20.0) as cluster:
            if not cluster.wait_until(lambda: b"Ray runtime started" in log.read_bytes(), START_S):
                raise UserError(f"the Ray cluster did not start; see {log}")
            yield address


def _command(arguments: Sequence[str], log: Path) -> ChildProcess:
    """`pipelinerl ARGUMENTS` as a process of its own."""
    return ChildProcess([sys.executable, "-c", COMMAND, *arguments], log=log, environment={"OMP_NUM_THREADS": "1"})


@dataclass
class _Chaos:
    """One run and its sessions."""

    request: Request
    config: RunConfig
    run_dir: Path
    flags: list[str]
    faults: Sequence[Fault]
    around: _Surroundings
    stop: Callable[[], bool]
    injected: list[Injected] = field(default_factory=list)
    sessions: int = 0
    taken: int = 0

    def __post_init__(self) -> None:
        self._run = RunDirectory(self.run_dir)
        self._log = self.run_dir.parent / "launcher.log"
        self._launcher: ChildProcess | None = None
        self._left = list(reversed(self.faults))
        self._undo: list[tuple[float, Undo]] = []  # when a fault ends, and how
        self._repairs: list[Undo] = []  # of faults that last until somebody repairs what they broke
        self._lines, self._size = 0, -1
        self._recovered_at = 0
        self._last_fault_s = self._moved_s = time.monotonic()
        self._due_s: float | None = None
        self._stepped_s: float | None = None  # the first step since the latest fault
        self._before: dict[str, int] = {}
        self._orphans: set[int] = set()  # processes of a killed launcher

    def __call__(self) -> list[str]:
        """Run to the goal. Returns the violations."""
        violations: list[str] = []
        try:
            while not self._session():
                if self.sessions >= MOST_SESSIONS:
                    raise _StopError(f"the run did not reach its goal in {MOST_SESSIONS} sessions")
            violations += self._left_behind()
            violations += check(self.run_dir)
            if self.request.replay and not violations:
                violations += self._replayed()
        except _StopError as error:
            violations.append(str(error))
        finally:
            self._heal()
            self._end_all()
        return violations

    def troubled(self) -> dict[str, int]:
        """Attempts that the environment failed, by reason, as the groups say."""
        counts: dict[str, int] = {}
        with suppress(OSError):
            for line in (self._run.rollouts / "rollouts.jsonl").read_bytes().splitlines():
                with suppress(msgspec.DecodeError):
                    for reason, count in msgspec.json.decode(line, type=_Dropped).dropped.items():
                        counts[reason] = counts.get(reason, 0) + count
        return counts

    def pids(self) -> dict[str, int]:
        found = processes_of(self.run_dir)
        if self._launcher is not None and self._launcher.running:
            found[LAUNCHER] = self._launcher.pid
        return found

    # ---- sessions

    def _session(self) -> bool:
        """One session, to its end. Returns whether the run has reached its goal."""
        said = self._log.stat().st_size if self._log.exists() else 0
        hurt = len(self.injected)  # faults from here on may end this session, as may one that still lasts
        lasting = bool(self._undo)
        arguments = self.flags if not self._started() else ["--resume", str(self.run_dir)]
        self.sessions += 1
        self._moved_s = time.monotonic()
        with _command(["train", *arguments], self._log) as launcher:
            self._launcher, self._stepped_s = launcher, None
            while launcher.running:
                self._look()
                time.sleep(LOOK_EVERY_S)
            self._count_steps()
        ended_s = time.monotonic()
        output = self._log.read_bytes()[said:].decode(errors="replace")
        if "Traceback (most recent call last)" in output.partition("error: ")[0]:  # later ones are in the excerpt of a log
            raise _StopError(f"the command printed a traceback: {output.strip().splitlines()[-1]}")
        if launcher.status == 0:
            return True
        reason = next((line for line in reversed(output.strip().splitlines()) if line.startswith("error")), "")
        reason = reason or launcher.how_it_ended()
        since = [one for one in self.injected[hurt:] if one.effect != "not injected"]
        if not since and not lasting:
            raise _StopError(f"session {self.sessions} ended although nothing was done to it: {reason}")
        for one in self._open_faults()[-1:] or since[-1:]:
            one.effect, one.said, one.recovered_s = "ended", reason, None
            one.noticed_s = round(ended_s - self._last_fault_s, 2)
        self._repair()
        for prepare in self.around.before_resume:
            prepare()
        self._orphans = set(self.pids().values())
        return False

    def _started(self) -> bool:
        return self._run.config.is_file() and self._run.plan.is_file()

    def _open_faults(self) -> list[Injected]:
        return [one for one in self.injected if one.recovered_s is None and one.effect != "not injected"]

    def _look(self) -> None:
        """End faults whose time is over, count steps, inject what is due, and look for a hang."""
        now = time.monotonic()
        for ends_s, undo in [entry for entry in self._undo if entry[0] <= now]:
            self._undo.remove((ends_s, undo))
            undo()
            self._moved_s = now
        if self._count_steps():
            self._moved_s = now
            if not self._undo:
                self._stepped_s = self._stepped_s or now
        if self._stepped_s is not None and (not self._latent or now - self._last_fault_s > LATENT_S):
            self._recover(self._stepped_s)
            self._stepped_s = None
        if self.stop():
            raise KeyboardInterrupt
        if not self._undo and now - self._moved_s > (patience_s := HANG_S + self.config.launch.watchdog_s):
            self._dump_stacks()
            raise _StopError(f"no step for {patience_s:.0f} s in session {self.sessions}: it hangs")
        if self._left and self._due(self._left[-1], now):
            self._inject(self._left.pop(), now)

    @property
    def _latent(self) -> bool:
        """Whether the latest fault may end the run although steps are taken after it."""
        return bool(self.injected) and self.injected[-1].fault.kind == "weights"

    def _recover(self, stepped_s: float) -> None:
        open_faults = self._open_faults()
        for one in open_faults[:-1]:
            one.recovered_s = one.noticed_s = None  # the later fault came before the recovery from this one
        for one in open_faults:
            one.recovered_s = round(stepped_s - self._last_fault_s, 2)
        if open_faults:
            self._recovered_at = self.taken
            one = open_faults[-1]
            after = self.pids()
            role = one.fault.place
            if one.effect == "went on" and role in self._before and role in after and after[role] != self._before[role]:
                one.effect = "restarted"

    def _due(self, fault: Fault, now: float) -> bool:
        if fault.steps is None:
            return now - self._last_fault_s >= fault.after_s
        if self._open_faults() or self.taken < self._recovered_at + fault.steps:
            self._due_s = None
            return False
        self._due_s = self._due_s or now + fault.after_s
        starts_again = fault.place in self._before and fault.place not in self.pids() and fault.place != FORKS
        return now >= self._due_s and not starts_again

    def _inject(self, fault: Fault, now: float) -> None:
        self._due_s = None
        one = Injected(fault=fault, at_step=self.taken)
        self.injected.append(one)
        self._before = self.pids()
        try:
            undo = inject(fault, self._before, self.around.links)
        except NotInjectedError as error:
            one.effect, one.said = "not injected", str(error)
            return
        if fault.kind == "kill" and self._is_replaced(fault.place):  # unless the session ends
            one.effect = "restarted"
        self._last_fault_s = self._moved_s = time.monotonic()
        self._stepped_s = None
        if fault.lasts_s:
            self._undo.append((now + fault.lasts_s, undo))
        else:
            self._repairs.append(undo)

    def _is_replaced(self, role: str) -> bool:
        """Whether the run starts this process again, which just died. It does not if it was left of an earlier session."""
        return role not in (LAUNCHER, FORKS) and self.config.launch.restarts > 0 and self._before[role] not in self._orphans

    def _repair(self) -> None:
        """Before a resume: what the error asks the user to restore."""
        while self._repairs:
            self._repairs.pop()()

    def _heal(self) -> None:
        while self._undo:
            self._undo.pop()[1]()

    def _count_steps(self) -> bool:
        """Look for new steps in the records, whichever session took them. True if there are any."""
        try:
            size = self._run.metrics.stat().st_size
        except FileNotFoundError:
            size = 0
        if size == self._size:
            return False
        lines = self._run.metrics.read_bytes().count(b"\n") if size else 0
        if lines < self._lines:  # started again from the beginning: the records moved away
            self._lines = 0
        new, self._lines, self._size = lines - self._lines, lines, size
        self.taken += new
        return new > 0

    # ---- after the run

    def _left_behind(self) -> list[str]:
        deadline_s = time.monotonic() + ORPHAN_PATIENCE_S
        while (left := processes_of(self.run_dir)) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return [f"processes are left after the run: {left}"] if left else []

    def _replayed(self) -> list[str]:
        log = self.run_dir.parent / "replay.log"
        with _command(["replay", str(self.run_dir)], log) as process:
            while process.running and not self.stop():
                time.sleep(LOOK_EVERY_S)
        lines = log.read_text().strip().splitlines()
        return [] if process.status == 0 else [f"the replay differs: {lines[-1] if lines else ''}"]

    def _dump_stacks(self) -> None:
        """Have the workers write their stacks to their logs, for whoever looks at the hang."""
        for pid in processes_of(self.run_dir).values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)

    def _end_all(self) -> None:
        """Nothing is left after a run that failed. One that did not has ended by itself."""
        for pid in processes_of(self.run_dir).values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _Dropped(msgspec.Struct):
    dropped: dict[str, int] = {}
