"""How weights get from the trainer to generation processes. The launcher makes what both ends need: one file descriptor."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import WeightReceiver, WeightSender
from pipelinerl.weights.collective_control import listen
from pipelinerl.weights.shared_file import create_shared_file


def make_channel(config: RunConfig) -> int:
    """A shared file, or the socket at which the sender of a collective listens. The caller closes it. Needs no torch."""
    return create_shared_file() if config.weights.kind == "shared" else listen().detach()


def make_sender(config: RunConfig, fd: int, give_up: Callable[[], bool]) -> WeightSender:
    """The trainer's end. `fd` stays the caller's."""
    processes = config.engine.processes
    if config.weights.kind == "shared":
        from pipelinerl.weights.shared import SharedWeightSender  # noqa: PLC0415 - with torch

        return SharedWeightSender(fd, processes, give_up=give_up)
    import torch  # noqa: PLC0415 - as above

    from pipelinerl.weights.collective import CollectiveWeightSender  # noqa: PLC0415 - as above

    gpus = _between_gpus(config)
    return CollectiveWeightSender(
        socket.socket(fileno=os.dup(fd)),
        processes,
        join_timeout_s=config.launch.startup_timeout_s,
        backend="nccl" if gpus else "gloo",
        device=torch.device(config.trainer.device if gpus else "cpu"),
        give_up=give_up,
    )


def make_receiver(config: RunConfig, fd: int, index: int, engine: str) -> WeightReceiver:
    """The end of generation process number `index`. `fd` stays the caller's."""
    if config.weights.kind == "shared":
        from pipelinerl.weights.shared import SharedWeightReceiver  # noqa: PLC0415 - with torch

        return SharedWeightReceiver(fd, index)
    import torch  # noqa: PLC0415 - as above

    from pipelinerl.weights.collective import CollectiveWeightReceiver  # noqa: PLC0415 - as above

    with socket.socket(fileno=os.dup(fd)) as listening:
        host, port = listening.getsockname()[:2]
    return CollectiveWeightReceiver(
        host,
        port,
        index,
        engine=engine,
        receivers=config.engine.processes,
        join_timeout_s=config.launch.startup_timeout_s,
        device=torch.device(config.engine.device if _between_gpus(config) else "cpu"),
    )


def remove_weights_of(pid: int) -> None:
    """Remove the files of weights for engine servers that a generation process has left, if it was killed."""
    for left in Path("/dev/shm").glob(f"pipelinerl-weights-{pid}-*"):  # noqa: S108 - see `remote.weights_file`
        shutil.rmtree(left, ignore_errors=True)


def _between_gpus(config: RunConfig) -> bool:
    """Whether each end computes on a GPU of its own, which is what nccl takes."""
    devices = {config.trainer.device, config.engine.device}
    alone = config.engine.kind == "local" and config.engine.processes == 1
    return alone and len(devices) == 2 and all(device.startswith("cuda:") for device in devices)
