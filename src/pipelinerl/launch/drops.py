"""Between a stream, which is made first, and the actor, which wants to know what a full stream replaced."""

from __future__ import annotations

from collections.abc import Callable

from pipelinerl.types import Group


class DropRelay:
    """A stream's `on_drop`. `listener` is set before the first group is written."""

    def __init__(self) -> None:
        self.listener: Callable[[Group], None] | None = None

    def __call__(self, group: Group) -> None:
        if self.listener is not None:
            self.listener(group)
