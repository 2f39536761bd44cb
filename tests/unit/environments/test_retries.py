"""Functions whose server is away for a while are called again; other errors are not repeated."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.environments.user.code import is_away
from pipelinerl.environments.user.function import FunctionOptions, Functions

FILE = """
from pathlib import Path
import urllib.request

CALLS = Path(__file__).with_name("calls")

def away(times, error):
    calls = len(CALLS.read_text()) if CALLS.exists() else 0
    CALLS.write_text("x" * (calls + 1))
    if calls < times:
        raise error

def judge(completion, example):
    away(2, ConnectionRefusedError("no judge"))
    return 1.0

async def judge_async(completion, example):
    away(2, TimeoutError("no answer"))
    return 1.0

def wrong(completion, example):
    away(2, ValueError("a bad answer"))
    return 1.0
"""


class Response(Exception):  # noqa: N818 - as clients of HTTP name it
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status_code = status


class APIConnectionError(Exception):
    """As a client of an API names it; it is no OSError."""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between the calls, which are not made."""
    made: list[float] = []
    sleep = asyncio.sleep

    async def shortly(delay_s: float, *more: Any) -> None:
        if delay_s >= 1:
            made.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", shortly)
    return made


def options(**settings: Any) -> FunctionOptions:
    return FunctionOptions.read({"data": "", "reward": "", "workers": 1, **settings})


def called(tmp_path: Path, name: str, *, retries: int = 2, isolate: bool = True) -> Callable[[], Any]:
    (tmp_path / "rewards.py").write_text(FILE)
    functions = Functions({"reward": f"{tmp_path}/rewards.py:{name}"}, options(isolate=isolate, retries=retries))
    return lambda: asyncio.run(functions.call("reward", "", {}))


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("name", ["judge", "judge_async"])
def test_a_reward_is_asked_again_while_its_server_is_away(
    tmp_path: Path, pauses: list[float], name: str, isolate: bool
) -> None:
    assert called(tmp_path, name, isolate=isolate)() == 1.0
    assert pauses == [1, 4]


@pytest.mark.parametrize("isolate", [True, False])
def test_after_the_last_retry_the_error_is_that_of_the_function_and_another_error_is_not_repeated(
    tmp_path: Path, pauses: list[float], isolate: bool
) -> None:
    with pytest.raises(ConnectionError, match=r"reward: rewards.py, line 11: ConnectionRefusedError: no judge"):
        called(tmp_path, "judge", retries=1, isolate=isolate)()
    assert pauses == [1]
    (tmp_path / "calls").unlink()
    with pytest.raises(RuntimeError, match="a bad answer"):
        called(tmp_path, "wrong", isolate=isolate)()
    assert (tmp_path / "calls").read_text() == "x"
    assert pauses == [1]


def caused(error: Exception) -> Exception:
    outer = ValueError("no verdict")
    outer.__cause__ = error
    return outer


def test_what_counts_as_away() -> None:
    away = [ConnectionResetError(), TimeoutError(), socket.gaierror(), Response(503), Response(429), APIConnectionError()]
    away += [urllib.error.HTTPError("http://judge", 502, "bad gateway", {}, None), caused(ConnectionResetError())]  # type: ignore[arg-type]
    assert all(map(is_away, away))
    here = [ValueError(), FileNotFoundError(), Response(400), caused(KeyError("a")), None, OSError("no such table")]
    assert not any(map(is_away, here))
