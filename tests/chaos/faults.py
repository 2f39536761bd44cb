"""Injects faults into a real run from outside: by signals, limits, proxies, and writing into what its processes share.

Nothing in a run knows of this: its processes are found in /proc, by their command lines. Linux only.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from pipelinerl.weights.layout import mapped
from tests.chaos.plan import FORKS, Fault

SLOW_S, STOPPED_S = 0.5, 0.4
"""A slow process is stopped for this part of every period."""
OFFER_S, OFFER_TRIALS = 0.1, 20
"""How long an engine is stopped, until weights are published and wait for it, and how often this is tried."""


def processes_of(run_dir: Path) -> dict[str, int]:
    """Process ids by role of all processes that run for this run directory, except the launcher.

    Each leads a process group, and what it has started later may have the same log. `FORKS` is the parent of one.
    """
    found: dict[str, int] = {}
    for pid in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):  # it has ended, or is somebody else's
            log = Path(os.readlink(f"/proc/{pid}/fd/1"))
            if log.parent == run_dir / "logs":
                found.setdefault(log.stem, os.getpgid(pid))
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                ours = b"pipelinerl.process.forked" in Path(f"/proc/{parent}/cmdline").read_bytes()
                if ours and Path(os.readlink(f"/proc/{parent}/fd/1")).parent != run_dir / "logs":
                    found[FORKS] = os.getpgid(parent)
    return found


Undo = Callable[[], None]


class NotInjectedError(Exception):
    """The place of a fault is not there now: the process has ended."""


def inject(fault: Fault, pids: Mapping[str, int], links: Mapping[str, Proxy]) -> Undo:
    """Inject it into a run with these processes and connections. Returns what ends it. Raises NotInjectedError."""
    if fault.kind in ("cut", "silence", "delay"):
        return links[fault.place].disturb(fault)
    if fault.kind == "disk":
        return _limit(list(pids.values()), resource.RLIMIT_FSIZE, int(fault.amount**4 * 1e6))
    if (pid := pids.get(fault.place)) is None:
        raise NotInjectedError(f"there is no process {fault.place}")
    try:
        match fault.kind:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
                return partial(_continue, pid)
            case "slow":
                return _slow(pid)
            case "memory":
                return _limit([pid], resource.RLIMIT_AS, _address_space(pid) + int(fault.amount**2 * 100e6))
            case "weights":
                _damage_weights(pid, fault.amount)
    except ProcessLookupError as error:
        raise NotInjectedError(f"the process {fault.place} has just ended") from error
    return lambda: None


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _slow(pid: int) -> Undo:
    ended = threading.Event()

    def stop_and_continue() -> None:
        with suppress(ProcessLookupError):
            while not ended.wait(SLOW_S - STOPPED_S):
                os.kill(pid, signal.SIGSTOP)
                ended.wait(STOPPED_S)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_continue, name="slow")
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


def _limit(pids: list[int], what: int, limit: int) -> Undo:
    """Lower a soft limit of these processes; only new growth is refused."""
    before: dict[int, tuple[int, int]] = {}
    for pid in pids:
        with suppress(ProcessLookupError):
            before[pid] = resource.prlimit(pid, what)
            resource.prlimit(pid, what, (limit, before[pid][1]))
    if not before:
        raise NotInjectedError("no process runs")

    def restore() -> None:
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, what, limits)

    return restore


def _address_space(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * mmap.PAGESIZE


def _damage_weights(pid: int, amount: float) -> None:
    """Flip a byte of weights that are published and not taken yet, while the engine that shall take them is stopped."""
    fds = [
        entry for entry in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(entry).startswith("/memfd:pipelinerl-weights")
    ]
    if not fds:
        raise NotInjectedError("the process has no weights in shared memory")
    with open(fds[0], "r+b") as file:
        for _ in range(OFFER_TRIALS):
            os.kill(pid, signal.SIGSTOP)
            try:
                tensor = max(mapped(file.fileno()).values(), key=lambda tensor: tensor.nbytes)
                before = tensor.clone()
                time.sleep(OFFER_S)
                if not torch.equal(before, tensor):  # only what all engines have taken is overwritten
                    time.sleep(OFFER_S)  # it may still be written
                    bytes_U8 = tensor.view(-1).view(torch.uint8)
                    bytes_U8[int(0.9 * amount * len(bytes_U8))] ^= 0x40
                    return
            finally:
                _continue(pid)
            time.sleep(OFFER_S)
    raise NotInjectedError("no weights waited for this engine")


class Proxy:
    """Passes TCP connections on to `address`, unless it is told to cut, silence or delay them. Close it at the end."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._cut = False
        self._delay_s = 0.0
        self._passes = threading.Event()
        self._passes.set()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def disturb(self, fault: Fault) -> Undo:
        if fault.kind == "cut":
            self._cut = True
            self._close_all()
        elif fault.kind == "silence":
            self._passes.clear()
        else:
            self._delay_s = 0.05 + 0.5 * fault.amount
        return self.heal

    def heal(self) -> None:
        self._cut, self._delay_s = False, 0.0
        self._passes.set()

    def close(self) -> None:
        self._listener.close()
        self._passes.set()
        self._close_all()

    def _close_all(self) -> None:
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                if self._cut:
                    client.close()
                    continue
                try:
                    server = socket.create_connection(self.address, timeout=5.0)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                with self._lock:
                    self._open |= {client, server}
                left = [2]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink, left), name="proxy", daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._delay_s:
                    time.sleep(self._delay_s)
                self._passes.wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        with self._lock:
            left[0] -= 1
            if not left[0]:
                for connection in (source, sink):
                    self._open.discard(connection)
                    connection.close()
