"""How processes notice that nobody is left to work for, however that came about."""

from __future__ import annotations

import os


class Lifeline:
    """A pipe to which nothing is written. Who reads `fd` learns when the last process that has `held_fd` let go, or died."""

    def __init__(self) -> None:
        self.fd, self.held_fd = os.pipe()

    def let_go(self) -> None:
        """Close this process's hold. Twice is fine."""
        if self.held_fd >= 0:
            os.close(self.held_fd)
            self.held_fd = -1

    def close(self) -> None:
        self.let_go()
        os.close(self.fd)
