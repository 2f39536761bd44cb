"""The rollout browser, with three screens: all groups, one group's attempts side by side, one rollout token by token.

`Browser` is independent of the terminal: `press` handles a key, `tick` does background work, `view` draws the screen.
"""

from __future__ import annotations

import os
import re
import select
import time
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pipelinerl.errors import UserError
from pipelinerl.experiments.browse import draw
from pipelinerl.experiments.browse.draw import MODES, ColourBy
from pipelinerl.experiments.browse.pages import RolloutPages
from pipelinerl.experiments.browse.query import HELP, Query, TrainedBy, parse
from pipelinerl.experiments.browse.records import Attempts, Browsed, Damaged
from pipelinerl.experiments.browse.tokens import one_line

SEARCH_S = 0.1
"""Time limit for the search in one tick, so that the screen stays responsive."""
HEADER_LINES = 3
FOOTER_LINES = 2

_KEYS = {
    "groups": "arrows move · enter opens · / searches · n N next, previous · : goes to a group · end follows · q quits",
    "group": "left right attempt · up down scroll · enter opens · n N next, previous hit · escape back · q quits",
    "rollout": "up down scroll · left right attempt · c colours by version, logprob, gap · n N hits · escape back · q quits",
}
_STEPS = {"up": -1, "down": 1, "k": -1, "j": 1}
_PLACE = re.compile(r"g?(\d{1,18})(?:\.a(\d{1,9}))?")
Screen = Literal["groups", "group", "rollout"]
_OPENS: dict[Screen, Screen] = {"groups": "group", "group": "rollout", "rollout": "rollout"}
_CLOSES: dict[Screen, Screen] = {"groups": "groups", "group": "groups", "rollout": "group"}


class Browser:
    """State of the browser for one run. `pages` draws the screen of a single rollout."""

    def __init__(self, run: Browsed, title: str, pages: RolloutPages) -> None:
        self.screen: Screen = "groups"
        self.place = self.attempt = self.scroll = 0
        self.colour: ColourBy = "version"
        self.done = False
        self._run = run
        self._title = title
        self._pages = pages
        self._entry: str | None = None
        self._query: Query | None = None
        self._search: tuple[int, int] | None = None  # next place to search, and direction
        self._message = ""
        self._follow = False
        self._page = 10
        self._more = True

    # Keys

    def press(self, key: str) -> None:
        """Handle one key, named as by `decode`."""
        self._message = ""
        if key == "quit":
            self.done = True
        elif self._entry is not None:
            self._type(key)
        elif key in ("q", "escape"):
            self._back(key)
        elif key in ("/", ":"):
            self._entry = key
        elif key in ("n", "N"):
            self._next(1 if key == "n" else -1)
        elif key == "c" and self.screen == "rollout":
            self.colour = MODES[(MODES.index(self.colour) + 1) % len(MODES)]
        elif key == "enter":
            if len(self._run) and not isinstance(group := self._summary(), Damaged) and group.rollouts:
                self.screen, self.scroll = _OPENS[self.screen], 0
        else:
            self._move(key)

    def search(self, text: str) -> None:
        """Go to the first rollout from here on that matches `text`. Raises UserError if `text` is not a valid query."""
        self._query = parse(text)
        self._search = (self.place, 1)

    def _back(self, key: str) -> None:
        if self._search is not None:
            self._search = None
        elif self.screen != "groups":
            self.screen, self.scroll = _CLOSES[self.screen], 0
        elif key == "q":
            self.done = True

    def _type(self, key: str) -> None:
        entry = self._entry or ""
        if key == "enter":
            self._entry = None
            try:
                (self.search if entry[0] == "/" else self._go)(entry[1:].strip())
            except UserError as error:
                self._message = str(error)
        elif key == "escape" or (key == "backspace" and len(entry) == 1):
            self._entry = None
        elif key == "backspace":
            self._entry = entry[:-1]
        elif len(key) == 1:
            self._entry = entry + key

    def _go(self, text: str) -> None:
        match = _PLACE.fullmatch(text)
        if match is None:
            raise UserError(f"{one_line(text)!r} is not a group: give its number (12), or a rollout's id (g12.a3)")
        place = self._run.place_of(int(match[1]))
        if place is None:
            raise UserError(f"group {match[1]} is not among the {len(self._run)} read so far")
        self._show(place)
        group = self._summary()
        if match[2] is not None and not isinstance(group, Damaged):
            wanted = int(match[2])
            found = [i for i, rollout in enumerate(group.rollouts) if rollout.attempt == wanted]
            if not found:
                raise UserError(f"group {match[1]} has no attempt {wanted}: it was dropped, or never started")
            self.attempt, self.screen = found[0], "rollout"

    def _show(self, place: int, attempt: int = 0) -> None:
        self.place, self.attempt, self.scroll, self._follow = place, attempt, 0, False

    def _move(self, key: str) -> None:
        step = {"pageup": -self._page, "pagedown": self._page, " ": self._page, **_STEPS}.get(key)
        last = len(self._run) - 1
        if self.screen == "groups":
            if step is not None:
                self._show(max(0, min(last, self.place + step)))
            elif key in ("home", "end", "g", "G"):
                self._show(0 if key in ("home", "g") else max(0, last))
                self._follow = key in ("end", "G")
        elif key in ("left", "right"):
            group = self._summary()
            count = 0 if isinstance(group, Damaged) else len(group.rollouts)
            self.attempt = max(0, min(count - 1, self.attempt + (1 if key == "right" else -1)))
            self.scroll = 0
        elif step is not None:
            self.scroll = max(0, self.scroll + step)
        elif key in ("home", "end", "g", "G"):
            self.scroll = 0 if key in ("home", "g") else 1 << 60  # `view` limits it to the last line

    # Time

    @property
    def busy(self) -> bool:
        """Whether the next tick should follow immediately."""
        return self._more or self._search is not None or self._pages.asked

    def tick(self) -> None:
        """Read new lines, continue the search, and load what the last view needs."""
        before = len(self._run)
        self._more = self._run.look()
        if self._follow and self.screen == "groups" and len(self._run) > before:
            self.place = len(self._run) - 1
        self._pages.work()
        if self._search is not None and self._query is not None:
            self._seek(self._query, *self._search)

    def _next(self, direction: int) -> None:
        if self._query is None:
            self._message = "no search yet: press / to search"
            return
        group = self._summary() if len(self._run) else None
        if self.screen != "groups" and isinstance(group, Attempts):
            hits = self._query.matches(group, self._trained(self.place)) or []
            others = [i for i in hits if (i - self.attempt) * direction > 0]
            if others:
                self.attempt, self.scroll = others[0 if direction > 0 else -1], 0
                return
        self._search = (self.place + direction, direction)

    def _seek(self, query: Query, place: int, direction: int) -> None:
        """Search groups from `place` on, for at most `SEARCH_S`."""
        until_s = time.monotonic() + SEARCH_S
        while 0 <= place < len(self._run):
            group = self._run.summary(place)
            if not isinstance(group, Damaged):
                hits = query.matches(group, self._trained(place))
                if hits is not None:
                    self._search = None
                    self._show(place, hits[0 if direction > 0 else -1] if hits else 0)
                    self.screen = self.screen if hits else "groups"
                    return
            place += direction
            if time.monotonic() > until_s:
                break
        at_end = place < 0 or (place >= len(self._run) and not self._more)
        self._search = None if at_end else (place, direction)
        if at_end:
            self._message = f"{one_line(query.text)!r} is not found {'further down' if direction > 0 else 'further up'}"

    # Drawing

    def view(self, console: Console) -> RenderableType:
        """The whole screen, in the size of `console`."""
        self._page = max(1, console.height - HEADER_LINES - FOOTER_LINES)
        if not len(self._run):
            body: RenderableType = Text("no group is finished yet" if not self._more else "reading", "dim")
        elif self.screen == "groups":
            body = self._groups()
        else:
            group = self._summary()
            body = Text(str(group), "red") if isinstance(group, Damaged) else self._detail(group, console)
        return Group(self._header(), body, Text(), self._footer())

    def _summary(self) -> Attempts | Damaged:
        return self._run.summary(self.place)

    def _trained(self, place: int) -> TrainedBy:
        return partial(self._run.trained, place)

    def _header(self) -> Text:
        facts = self._run.facts
        if self._run.share < 1:
            facts.append(f"{self._run.share:.0%} read")
        return Text(one_line(f"{self._title} · {' · '.join(facts)}"), "bold", no_wrap=True, overflow="ellipsis")

    def _footer(self) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        if self._entry is not None:
            help_text = HELP if self._entry[0] == "/" else "a group's number, or a rollout's id like g12.a3"
            return line.append(f"{self._entry}▏  ", "bold").append(help_text, "dim")
        if self._search is not None and self._query is not None:
            return line.append(f"searching for {one_line(self._query.text)}: at {self._search[0]} (escape stops)", "yellow")
        return line.append(self._message or _KEYS[self.screen], "yellow" if self._message else "dim")

    def _groups(self) -> RenderableType:
        rows = self._page - 1
        first = max(0, min(self.place - rows // 2, len(self._run) - rows))
        places = range(first, min(len(self._run), first + rows))
        shown = [(self._run.summary(place), self._run.is_replaced(place), self._trained(place)) for place in places]
        return draw.groups_table(shown, self.place - first)

    def _detail(self, group: Attempts, console: Console) -> RenderableType:
        head = [Text(one_line(group.title), no_wrap=True, overflow="ellipsis")]
        if self.screen == "group":
            lines = draw.lines(draw.group_columns(group, self._trained(self.place), self.attempt, console.width), console)
        else:
            notes, lines = self._pages.page(self.place, self.attempt, self.colour, console)
            head += notes
        height = max(1, self._page - len(head) - 1)
        self.scroll = max(0, min(self.scroll, len(lines) - height))
        below = len(lines) - self.scroll - height
        shown = draw.joined(lines[self.scroll : self.scroll + height])
        return Group(*head, shown, Text(f"{below} more lines" if below > 0 else "", "dim"))


# ---- keys from a terminal, one at a time and without echo


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
    """Decode terminal input into keys: a character, or a name (`up`, `enter`, `escape`). Unknown keys are dropped."""
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
    """Context manager: reads keys from the terminal `fd` without line buffering or echo, and restores its mode on exit."""

    def __init__(self, fd: int) -> None:
        try:
            import termios  # noqa: PLC0415 (not on Windows)
        except ImportError as error:
            raise UserError("this system does not support reading keys: use --plain or --export") from error
        self._termios = termios
        self._fd = fd
        self._before: list[Any] | None = None

    def read(self, timeout_s: float) -> list[str]:
        """The keys pressed, after at most `timeout_s` seconds; `quit` if the terminal was closed."""
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
        raw[6][self._termios.VSUSP] = b"\0"  # no Ctrl-Z: screen and key mode would be wrong after it
        self._termios.tcsetattr(self._fd, self._termios.TCSADRAIN, raw)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            self._termios.tcsetattr(self._fd, self._termios.TCSADRAIN, self._before)


# ---- main loop in a terminal


WAIT_S = 0.5
"""Longest wait for a key before the files are checked again and the screen is redrawn."""


def browse(browser: Browser, console: Console, fd: int) -> None:
    """Run the browser until the user quits. The terminal's mode is always restored."""
    with Keyboard(fd) as keyboard, Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while not browser.done:
            browser.tick()
            live.update(browser.view(console), refresh=True)
            for key in keyboard.read(0.0 if browser.busy else WAIT_S):
                browser.press(key)
