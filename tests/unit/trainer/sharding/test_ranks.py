"""How ranks find each other, and what becomes of the errors of their operations. That they compute is tested elsewhere."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from torch import distributed

from pipelinerl.channel import listen
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.errors import RankLostError
from pipelinerl.trainer.sharding import ranks
from pipelinerl.trainer.sharding.ranks import Team, join

KEY, LONG_S = "key", 60.0


def meet(rank: int, size: int, listener: socket.socket, key: str = KEY, start_s: float = LONG_S) -> str:
    """Why the rank does not meet the others; "" if it does."""
    meeting = listener if rank == 0 else listener.getsockname()[:2]
    try:
        with ranks._broken_operations_explained():
            ranks._meet(TrainerConfig(ranks=size), rank, meeting, key, start_s).close()
    except RankLostError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_start_are_named_and_one_with_another_key_is_no_rank() -> None:
    listener = listen()
    with ThreadPoolExecutor(2) as pool:
        rank_0, _ = (pool.submit(meet, rank, 4, listener, start_s=1.0) for rank in (0, 2))
        assert "does not have the key of this run" in meet(1, 4, listener, key="another")
    assert rank_0.result() == "rank 1, rank 3 of the trainer did not start within 1 s"


def test_a_rank_0_that_is_gone_is_reported() -> None:
    listener = listen()
    listener.close()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with pytest.raises(RankLostError, match="rank 0 of the trainer can't be reached"):
        ranks._meet(TrainerConfig(ranks=2), 1, address, KEY, 1.0)


def alone() -> AbstractContextManager[Team]:
    return join(TrainerConfig(ranks=1), 0, listen(), KEY, start_s=LONG_S, stall_s=LONG_S)


def test_the_group_listens_at_the_address_of_rank_0_only() -> None:
    """Gloo itself has no key: on the loopback address it is out of reach of other machines."""
    before = listening()
    with alone() as team:
        assert (team.rank, team.size) == (0, 1)
        found = listening() - before
    assert {address.partition(":")[0] for address in found} == {"0100007F"}
    assert not distributed.is_initialized()


def listening() -> set[str]:
    """ADDRESS:PORT, in hexadecimal, of the sockets at which this process listens."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own}


LEFT = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7. This is\nC++"


@pytest.mark.parametrize(
    ("message", "error", "expected"),
    [
        (LEFT, RankLostError, r"exchange tensors any more: Connection closed by peer \[127\.0\.0\.1\]:7$"),
        ("out of memory", RuntimeError, "^out of memory$"),
    ],
)
def test_the_error_of_an_operation_that_a_rank_has_left_is_one_line_and_others_stay(
    message: str, error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected), alone():
        raise_after_leaving(message)


def raise_after_leaving(message: str) -> None:
    distributed.destroy_process_group()
    raise RuntimeError(message)


def test_gpus_are_counted_from_the_configured_one_on() -> None:
    assert [TrainerConfig(ranks=2, device="cuda:2").rank_device(rank) for rank in (0, 1)] == ["cuda:2", "cuda:3"]
    assert TrainerConfig(ranks=2).rank_device(1) == "cpu"
