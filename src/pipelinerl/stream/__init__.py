"""Streams: ordered, counted queues between stages.

memory    within one process
files     between the processes of a machine, which it survives; a resumed run first calls `FileStore.rewind`
redis     between machines, over a Redis server
"""

import sys


def checked_capacity(capacity: int | None) -> int:
    """The capacity of a stream in items. None is the largest number."""
    if capacity is not None and capacity < 1:
        raise ValueError(f"a stream's capacity is at least 1: {capacity}")
    return sys.maxsize if capacity is None else capacity
