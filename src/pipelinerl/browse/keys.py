"""Keys from a terminal, one at a time and without echo."""

from __future__ import annotations

import os
import select
from types import TracebackType
from typing import Any, Self

from pipelinerl.errors import UserError

_SEQUENCES = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "1~": "home",
    "4~": "end",
    "5~": "pageup",
    "6~": "pagedown",
    "7~": "home",
    "8~": "end",
}
_CONTROLS = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", "\t": "tab", "\x04": "quit"}


def decode(data: bytes) -> list[str]:
    """The keys behind what a terminal sent: a character, or a name (`up`, `enter`, `escape`). Unknown ones are left out."""
    text, keys = data.decode("utf-8", "ignore"), []
    i = 0
    while i < len(text):
        if text[i] == "\x1b" and text[i + 1 : i + 2] in ("[", "O"):
            end = i + 2
            while end < len(text) and not ("@" <= text[end] <= "~"):
                end += 1
            keys.append(_SEQUENCES.get(text[i + 2 : end + 1], ""))
            i = end + 1
            continue
        keys.append("escape" if text[i] == "\x1b" else _CONTROLS.get(text[i], text[i] if text[i].isprintable() else ""))
        i += 1
    return [key for key in keys if key]


class Keyboard:
    """The terminal behind `fd`, raw while inside; given back as it was, whatever happens."""

    def __init__(self, fd: int) -> None:
        try:
            import termios  # noqa: PLC0415 (not on Windows)
        except ImportError as error:
            raise UserError("no keys can be read on this system: use --plain or --export") from error
        self._termios = termios
        self._fd = fd
        self._before: list[Any] | None = None

    def read(self, timeout_s: float) -> list[str]:
        """The keys of the next `timeout_s` seconds at most; `quit` when the terminal has gone."""
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        if not ready:
            return []
        try:
            data = os.read(self._fd, 1024)
        except OSError:
            return ["quit"]
        return decode(data) if data else ["quit"]

    def __enter__(self) -> Self:
        self._before = self._termios.tcgetattr(self._fd)
        raw = self._termios.tcgetattr(self._fd)
        raw[3] &= ~(self._termios.ICANON | self._termios.ECHO)
        raw[6][self._termios.VSUSP] = b"\0"  # whoever came back would find another screen and other keys
        self._termios.tcsetattr(self._fd, self._termios.TCSADRAIN, raw)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            self._termios.tcsetattr(self._fd, self._termios.TCSADRAIN, self._before)
