"""The browser in a terminal: a loop of keys, time and drawing."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live

from pipelinerl.browse.browser import Browser
from pipelinerl.browse.keys import Keyboard

WAIT_S = 0.5
"""How long the screen stays as it is when no key is pressed; then the run is looked at again."""


def browse(browser: Browser, console: Console, fd: int) -> None:
    """Until the user has seen enough. The terminal is given back as it was, whatever happens."""
    with Keyboard(fd) as keyboard, Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while not browser.done:
            browser.tick()
            live.update(browser.view(console), refresh=True)
            for key in keyboard.read(0.0 if browser.busy else WAIT_S):
                browser.press(key)
