"""Streams: ordered, counted queues between stages.

`memory_stream` works within one process. `FileStreamWriter` and `FileStreamReader` work between processes and survive them;
a resumed run first calls `rewind` to return to its checkpoint. Streams over Redis are in `pipelinerl.stream.redis`.
"""

from pipelinerl.stream.files import FileStreamReader, FileStreamWriter, rewind, waiting_items
from pipelinerl.stream.memory import MemoryStreamReader, MemoryStreamWriter, memory_stream

__all__ = [
    "FileStreamReader",
    "FileStreamWriter",
    "MemoryStreamReader",
    "MemoryStreamWriter",
    "memory_stream",
    "rewind",
    "waiting_items",
]
