"""Writes TensorBoard events with TensorBoard's own writer, without torch. Needs the extra `tensorboard`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipelinerl.errors import MissingDependencyError
from pipelinerl.files import JsonLines, Lines
from pipelinerl.metrics.sinks import JsonlSink, Record

try:
    from tensorboard.summary import Writer
except ImportError as error:
    raise MissingDependencyError(
        "metrics.tensorboard is on, but TensorBoard is not installed: pip install 'pipelinerl[tensorboard]'"
    ) from error


class TensorboardSink(JsonlSink):
    """Also writes one chart for each number of a record, over the weights' version. Flushed with every record."""

    def __init__(self, run_dir: Path, lines: Callable[[Path], Lines] = JsonLines) -> None:
        super().__init__(run_dir, lines)
        self._writer = Writer(str(run_dir / "tensorboard"))

    def write(self, record: Record) -> None:
        super().write(record)
        for name, value in record.numbers().items():
            if name != "version":
                self._writer.add_scalar(name, value, record.version)
        self._writer.flush()

    def close(self) -> None:
        super().close()
        self._writer.close()
