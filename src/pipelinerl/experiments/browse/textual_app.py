"""The rollout browser: all groups, one group's attempts side by side, one rollout token by token. Needs the extra `browse`.

Recorded text is untrusted: widgets get it only as rich `Text`, which is not parsed as markup, and after `printable`.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from enum import IntEnum
from functools import partial
from typing import ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Footer, Input, Static
from textual.worker import Worker, WorkerState

from pipelinerl.errors import PipelineRLError, RunDirectoryError, UserError
from pipelinerl.experiments.browse.groups import HELP, Query, attempts_table, groups_table, parse
from pipelinerl.experiments.browse.records import Attempts, Browsed, Damaged, one_line
from pipelinerl.experiments.browse.tokens import MODES, ColourBy, TokenText, colouring_of, rollout_facts, rollout_text
from pipelinerl.types import Rollout

POLL_S = 0.5
"""How often the files are checked for more."""
SEARCH_S = 0.1
"""Time limit for a part of a search, so that the screen stays responsive."""
_COMPUTING = "loading weights and computing"
_PLACE = re.compile(r"g?(\d{1,18})(?:\.a(\d{1,9}))?")

_Page = tuple[Text, object, Callable[[], RenderableType]]
"""What a screen shows: fixed lines, a key, and a body that scrolls. It is drawn again only if lines or key change."""


class Level(IntEnum):
    GROUPS = 0
    GROUP = 1
    ROLLOUT = 2


class RolloutBrowser(App[BaseException]):
    """Browses `rollouts`. `texts` loads the tokenizer; `gaps` computes the gaps of a rollout's tokens in nats.

    Both are slow and run in a thread when a screen first needs them. A PipelineRLError raised by `gaps` is shown on the
    screen; any other error ends the app, and `run` returns it. `find`: a query to start with; raises UserError if invalid.
    """

    AUTO_FOCUS = None
    CSS = """
    #title { height: 1; text-style: bold; text-wrap: nowrap; text-overflow: ellipsis; }
    #head { text-wrap: nowrap; text-overflow: ellipsis; }
    """
    BINDINGS: ClassVar = [
        Binding("enter", "go_in", "Open"),
        Binding("escape", "go_out(False)", "Back"),
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown,space", "page(1)", "Page down", show=False),
        Binding("home,g", "move(-1_000_000_000)", "Top", show=False),
        Binding("end,G", "end", "End, follow", key_display="end"),
        Binding("left", "attempt(-1)", "Attempt", key_display="← →"),
        Binding("right", "attempt(1)", show=False),
        Binding("c", "colour", "Colours"),
        Binding("slash", "ask('/')", "Search", key_display="/"),
        Binding("n", "next(1)", "Next, previous", key_display="n N"),
        Binding("N", "next(-1)", show=False),
        Binding("colon", "ask(':')", "Go to", key_display=":"),
        Binding("q", "go_out(True)", "Quit"),
        Binding("ctrl+c,ctrl+d", "quit", "Quit", show=False),
    ]

    def __init__(
        self,
        rollouts: Browsed,
        name: str,
        texts: Callable[[], TokenText],
        gaps: Callable[[Rollout], Sequence[float]],
        find: str | None = None,
    ) -> None:
        super().__init__()
        self.level = Level.GROUPS
        self.place = self.attempt = 0
        self.colour: ColourBy = "version"
        self._rollouts = rollouts
        self._run_name = name
        self._load_texts = texts
        self._compute_gaps = gaps
        self._query = None if find is None else parse(find)
        self._search: Worker[None] | None = None
        self._search_note = self._asked = ""
        self._more = True
        self._follow = self._working = False
        self._texts: TokenText | None = None
        self._gaps: tuple[object, Sequence[float] | str] = (None, "")  # of the last rollout for which they were computed
        self._drawn: object = None
        self._title_line, self._head, self._body = Static(id="title"), Static(id="head"), Static()
        self._pane = VerticalScroll(self._body, can_focus=False)
        self._entry = Input()

    def compose(self) -> ComposeResult:
        self._entry.display = False
        yield from (self._title_line, self._head, self._pane, self._entry, Footer())

    def on_mount(self) -> None:
        self.theme = "ansi-dark"  # the terminal's own colours
        self._read()
        if self._query is not None:
            self._search = self._seek(self._query, 0, 1)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if event.state is WorkerState.ERROR:
            self.exit(event.worker.error)

    # Reading, searching and loading

    @property
    def busy(self) -> bool:
        """Whether something is being read, searched or loaded."""
        return self._more or self._working or self._searching

    def look(self) -> None:
        """Read a part of what is new, and draw it. Raises RunDirectoryError if a file can't be read."""
        before = len(self._rollouts)
        self._more = self._rollouts.look()
        if self._follow and self.level == Level.GROUPS and len(self._rollouts) > before:
            self.place = len(self._rollouts) - 1
        self.draw()

    @work(exit_on_error=False)
    async def _read(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0 if self._more else POLL_S)

    @work(exit_on_error=False, exclusive=True, group="search")
    async def _seek(self, query: Query, place: int, direction: int) -> None:
        """Show the first match from `place` on. Waits for groups that are still being read."""
        until_s = time.monotonic() + SEARCH_S
        try:
            while 0 <= place < len(self._rollouts) or (place >= 0 and self._more):
                if place >= len(self._rollouts) or time.monotonic() > until_s:
                    self._search_note = f"searching for {query.text}: at {place} (escape stops) · "
                    self.draw()
                    await asyncio.sleep(0.01)
                    until_s = time.monotonic() + SEARCH_S
                elif (hits := self._hits(query, place)) is not None:
                    self._show(place, hits[0 if direction > 0 else -1] if hits else 0)
                    return
                else:
                    place += direction
        finally:
            self._search_note = ""
        self._say(f"{one_line(query.text)!r} is not found {'further down' if direction > 0 else 'further up'}")

    def _start(self, job: Callable[[], None]) -> None:
        """Run a slow job in a thread unless one is running, and draw again."""
        if not self._working:
            self._working = True
            self._work(job)

    @work(exit_on_error=False)
    async def _work(self, job: Callable[[], None]) -> None:
        # Libraries print progress, and some need the stream's file descriptor: textual's replacement has none.
        with open(os.devnull, "w", encoding="utf-8") as null, redirect_stdout(null), redirect_stderr(null):
            await asyncio.to_thread(job)
        self._working = False
        self.draw()

    def _get_texts(self) -> None:
        self._texts = self._load_texts()

    def _get_gaps(self, of: object, rollout: Rollout) -> None:
        try:
            self._gaps = (of, self._compute_gaps(rollout))
        except PipelineRLError as error:
            self._gaps = (of, one_line(str(error)))

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Whether the level has the action: its key is then shown at the bottom."""
        least = {"attempt": Level.GROUP, "colour": Level.ROLLOUT}.get(action, Level.GROUPS)
        return self.level >= least and not (action == "go_in" and self.level == Level.ROLLOUT)

    def action_move(self, step: int) -> None:
        """Select another group, or scroll."""
        if self.level == Level.GROUPS:
            self._show(max(0, min(len(self._rollouts) - 1, self.place + step)))
        else:
            self._pane.scroll_relative(y=step, animate=False)

    def action_page(self, pages: int) -> None:
        self.action_move(pages * self._rows)

    def action_end(self) -> None:
        self.action_move(1_000_000_000)
        self._follow = self.level == Level.GROUPS

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-1)

    def on_mouse_scroll_down(self) -> None:
        self.action_move(1)

    def action_go_in(self) -> None:
        self._enter(Level(self.level + 1))

    def action_go_out(self, quits: bool) -> None:
        if self._entry.display:
            self._close_entry()
        elif self._search is not None and self._searching:
            self._search.cancel()
        elif self.level != Level.GROUPS:
            self._enter(Level(self.level - 1))
        elif quits:
            self.exit()

    def action_attempt(self, step: int) -> None:
        group = self._group(self.place)
        last = len(group.rollouts) - 1 if isinstance(group, Attempts) else 0
        self._show(self.place, max(0, min(last, self.attempt + step)))

    def action_colour(self) -> None:
        self.colour = MODES[(MODES.index(self.colour) + 1) % len(MODES)]
        self.draw()

    def action_next(self, direction: int) -> None:
        if self._query is None:
            self._say("no search yet: press / to search")
            return
        hits = (self._hits(self._query, self.place) or []) if self.level != Level.GROUPS else []
        others = [i for i in hits if (i - self.attempt) * direction > 0]
        if others:
            self._show(self.place, others[0 if direction > 0 else -1])
        else:
            self._search = self._seek(self._query, self.place + direction, direction)

    def action_ask(self, what: str) -> None:
        self._asked = what
        self._entry.value = ""
        self._entry.border_title = HELP if what == "/" else "a group's number, or a rollout's id like g12.a3"
        self._entry.display = True
        self._entry.focus()
        self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._close_entry()
        try:
            (self._find if self._asked == "/" else self._go_to)(event.value.strip())
        except UserError as error:
            self._say(str(error))

    def _close_entry(self) -> None:
        self._entry.display = False
        self.set_focus(None)
        self.draw()

    def _find(self, text: str) -> None:
        self._query = parse(text)
        self._search = self._seek(self._query, self.place, 1)

    def _go_to(self, text: str) -> None:
        match = _PLACE.fullmatch(text)
        if match is None:
            raise UserError(f"{one_line(text)!r} is not a group: give its number (12), or a rollout's id (g12.a3)")
        place = self._rollouts.place_of(int(match[1]))
        if place is None:
            raise UserError(f"group {match[1]} is not among the {len(self._rollouts)} read so far")
        self._show(place)
        group = self._group(place)
        if match[2] is not None and isinstance(group, Attempts):
            found = [i for i, rollout in enumerate(group.rollouts) if rollout.attempt == int(match[2])]
            if not found:
                raise UserError(f"group {match[1]} has no attempt {match[2]}: it was dropped, or never started")
            self.level = Level.ROLLOUT
            self._show(place, found[0])

    # State

    @property
    def _searching(self) -> bool:
        return self._search is not None and not self._search.is_finished

    @property
    def _rows(self) -> int:
        """The number of groups, or lines, that fit on the screen."""
        return max(1, self.size.height - (6 if self._entry.display else 3))

    def _show(self, place: int, attempt: int = 0) -> None:
        self.place, self.attempt, self._follow = place, attempt, False
        self._enter(self.level)

    def _enter(self, level: Level) -> None:
        """Show a level from its top. A group without rollouts is only in the list."""
        group = self._group(self.place) if len(self._rollouts) else None
        before, self.level = self.level, level if isinstance(group, Attempts) and group.rollouts else Level.GROUPS
        self._pane.scroll_home(animate=False)
        if self.level != before:
            self.refresh_bindings()
        self.draw()

    def _say(self, text: str) -> None:
        self.notify(text, severity="warning", markup=False)

    def _group(self, place: int) -> Attempts | Damaged:
        try:
            return self._rollouts.summary(place)
        except RunDirectoryError as error:
            self.exit(error)
            return Damaged(place + 1, "it can't be read")

    def _hits(self, query: Query, place: int) -> list[int] | None:
        group = self._group(place)
        return None if isinstance(group, Damaged) else query.matches(group, partial(self._rollouts.trained, place))

    # Drawing

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        """Draw what changed. Exits with the error if a file can't be read any more."""
        share = [f"{self._rollouts.share:.0%} read"] if self._rollouts.share < 1 else []
        title = " · ".join([self._run_name, *self._rollouts.facts, *share])
        self._title_line.update(Text(one_line(self._search_note + title)), layout=False)
        try:
            head, key, body = (self._groups_page, self._group_page, self._rollout_page)[self.level]()
        except RunDirectoryError as error:
            self.exit(error)
            return
        if (head, key) != self._drawn:
            self._drawn = (head, key)
            self._head.display = bool(head)
            self._head.update(head)
            self._body.update(body())

    def _groups_page(self) -> _Page:
        if not len(self._rollouts):
            return Text("reading" if self._more else "no group is finished yet", "dim"), None, Text
        first = max(0, min(self.place - self._rows // 2, len(self._rollouts) - self._rows))
        places = range(first, min(len(self._rollouts), first + self._rows))
        table = groups_table(self._rollouts, places, self.place)
        return Text(), object(), lambda: table

    def _group_page(self) -> _Page:
        group = self._group(self.place)
        if isinstance(group, Damaged):
            return Text(str(group), "red"), None, Text
        trained = {rollout.id: self._rollouts.trained(self.place, rollout.id) for rollout in group.rollouts}
        width = self.size.width - self._pane.scrollbar_size_vertical
        body = partial(attempts_table, group, trained.get, self.attempt, width)
        return Text(one_line(group.title)), (group, trained, self.attempt, width), body

    def _rollout_page(self) -> _Page:
        group = self._rollouts.group(self.place)
        if isinstance(group, Damaged):
            return Text(str(group), "red"), None, Text
        rollout = group.rollouts[self.attempt]
        of = (self.place, rollout.id)
        head = rollout_facts(rollout, self._rollouts.trained(*of), self._rollouts.left_out(*of)).append("\n")
        if self._texts is None:
            self._start(self._get_texts)
            return head.append("loading the tokenizer", "dim"), None, Text
        try:
            colouring = colouring_of(rollout, self.colour, self._gaps[1] if self._gaps[0] == of else _COMPUTING)
        except ValueError as error:
            return head.append(f"line {self.place + 1} is damaged: {error}", "red"), None, Text
        if colouring == _COMPUTING:
            self._start(partial(self._get_gaps, of, rollout))
        if isinstance(colouring, str):
            head.append(f"by {self.colour}: {colouring}", "yellow")
            styles = [""] * sum(len(turn.completion.token_ids) for turn in rollout.turns)
        else:
            head.append(f"by {self.colour}: ", "dim").append_text(colouring.legend_text())
            styles = colouring.styles
        return head, (of, styles), partial(rollout_text, rollout, self._texts, styles)
