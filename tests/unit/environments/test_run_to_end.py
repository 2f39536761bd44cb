"""Work that needs an event loop, called where one is running or not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pipelinerl.environments.user.code import run_to_end


async def where() -> threading.Thread:
    await asyncio.sleep(0)
    return threading.current_thread()


def test_without_a_loop_it_runs_in_this_thread() -> None:
    assert run_to_end(where()) is threading.current_thread()  # where code that does not yield can be interrupted


def test_it_runs_where_a_loop_is_running() -> None:
    async def notebook() -> threading.Thread:
        return run_to_end(where())

    assert asyncio.run(notebook()) is not threading.current_thread()


def test_its_error_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("mine")

    async def notebook() -> None:
        run_to_end(fail())

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(notebook())
