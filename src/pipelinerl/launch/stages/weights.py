"""How weights get from the trainer to the engines, over one file descriptor that the launcher opens for both ends.

shared                         ─▶ generation processes
collective, engine.kind local  ─▶ generation processes
collective, http and vllm      ─▶ engine servers; the generation process tells them when to apply what they received

Each process imports its own end of its own transport: a shared file here, a broadcast in `broadcast`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import WeightReceiver, WeightSender
from pipelinerl.launch.session import Session


def make_channel(config: RunConfig) -> int:
    """The file descriptor of a shared file, or of the socket at which a broadcast's sender listens. The caller closes it.

    Does not import torch. Raises UserError if there are too many engine servers, or one has no route to it.
    """
    if config.weights.kind == "collective":
        from pipelinerl.launch.stages.broadcast import listen_for  # noqa: PLC0415 - see above

        return listen_for(config)
    from pipelinerl.weights.shared.file import create_shared_file  # noqa: PLC0415 - see above

    return create_shared_file()


def make_sender(session: Session, fd: int, give_up: Callable[[], bool]) -> WeightSender:
    """The trainer's end. The caller still closes `fd`."""
    if session.config.weights.kind == "collective":
        from pipelinerl.launch.stages.broadcast import broadcast_sender  # noqa: PLC0415 - see above

        return broadcast_sender(session, fd, give_up)
    from pipelinerl.weights.shared.sender import SharedWeightSender  # noqa: PLC0415 - see above

    return SharedWeightSender(fd, session.config.engine.processes, give_up=give_up)


def make_receiver(session: Session, fd: int, index: int, engine: str) -> WeightReceiver:
    """The receiving end, for generation process number `index`. The caller still closes `fd`."""
    if session.config.weights.kind == "collective":
        from pipelinerl.launch.stages.broadcast import broadcast_receiver  # noqa: PLC0415 - see above

        return broadcast_receiver(session, fd, index, engine)
    from pipelinerl.weights.shared.receiver import SharedWeightReceiver  # noqa: PLC0415 - see above

    return SharedWeightReceiver(fd, index)


def remove_weights_of(pid: int) -> None:
    """Remove the weight files for engine servers that a killed generation process left behind."""
    for left in Path("/dev/shm").glob(f"pipelinerl-weights-{pid}-*"):  # noqa: S108 - see `serving.client.weights_file`
        shutil.rmtree(left, ignore_errors=True)
