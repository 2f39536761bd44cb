"""`pipelinerl train --watch`: the page in a process beside the run, which ends with the run."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path

from pipelinerl.child import ChildProcess
from pipelinerl.process import take_stdin
from pipelinerl.serving.server.http import listen, url_of
from pipelinerl.serving.server.options import Address

_COMMAND = "import sys; from pipelinerl.cli import main; sys.exit(main())"
_PATIENCE_S = 5.0


class Beside:
    """The page of a run that is about to begin: it listens already, so that a taken port is an error before the run."""

    def __init__(self, port: int) -> None:
        """Raises UserError if the port is taken."""
        self._listening = listen(Address("127.0.0.1", port))
        self._child: ChildProcess | None = None

    def begin(self, run_dir: Path) -> str | None:
        """Start the page's process once the run has its directory. Returns what to tell the user, once.

        The run goes on without a page if the process can't be started.
        """
        if self._child is not None:
            return None
        fd = self._listening.fileno()
        command = [sys.executable, "-c", _COMMAND, "watch", str(run_dir), "--listen-fd", str(fd)]
        log = run_dir / "logs" / "watch.log"
        try:
            self._child = ChildProcess(command, log=log, fds=[fd], watches_parent=True, patience_s=_PATIENCE_S)
        except OSError as error:
            return f"no page: its process can't be started: {error.strerror}"
        return f"watch it at {url_of(self._listening)}"

    def close(self) -> None:
        """Stop the process, which shows open pages how the run has ended."""
        self._listening.close()
        if self._child is not None:
            self._child.stop()


def serve_beside(run_dir: Path, listening: socket.socket) -> int:
    """In the page's process: serve the run until its launcher ends, at a lower priority than the run."""
    from pipelinerl.experiments.watch.server import Runs, serve  # noqa: PLC0415 - the launcher does without
    from pipelinerl.process import lower_priority  # noqa: PLC0415

    lifeline = take_stdin()
    with suppress(OSError):
        lower_priority()
    note = f"The run has ended, and the server of this page with it. `pipelinerl watch {run_dir}` shows it again."
    return serve(Runs([run_dir]), listening, lifeline_fd=lifeline, end_note=note)
