"""Streams: how finished work gets from the stage that makes it to the one that uses it, in order and counted.

`memory_stream` is for one process; `FileStreamWriter` and `FileStreamReader` are for several and for runs that resume,
which first `rewind` to their checkpoint.
"""

from pipelinerl.stream.files import FileStreamReader, FileStreamWriter
from pipelinerl.stream.memory import MemoryStreamReader, MemoryStreamWriter, memory_stream
from pipelinerl.stream.rewind import rewind

__all__ = [
    "FileStreamReader",
    "FileStreamWriter",
    "MemoryStreamReader",
    "MemoryStreamWriter",
    "memory_stream",
    "rewind",
]
