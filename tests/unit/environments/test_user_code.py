"""What functions of a user return and raise, which errors are worth another call, and where their calls run."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.environments.user.code import is_unreachable, run_to_end, score_of
from pipelinerl.environments.user.function import FunctionOptions, Functions
from pipelinerl.errors import RolloutError
from pipelinerl.types import finite
from pipelinerl.user_code import names_a_function

PAIR = (0.5, {"digits": 3, "short": np.bool_(True)})
WANTED = "a number, a dict of 'reward' and other numbers, or (reward, dict)"


def test_numbers_of_any_library_alone_or_with_metrics_are_rewards() -> None:
    values = [True, 2, np.float32(0.5), np.int64(3), np.array(1.5)]
    assert [finite(value, "r") for value in values] == [1.0, 2.0, 0.5, 3.0, 1.5]
    for value in (10**400, float("inf"), np.float64("nan")):
        with pytest.raises(RolloutError, match=r"r is (inf|nan), not a finite number"):
            finite(value, "r")
    for returned in (PAIR, [*PAIR], {"reward": 0.5, **PAIR[1]}):
        assert score_of(returned, "r") == (0.5, {"digits": 3.0, "short": 1.0})


@pytest.mark.parametrize(
    "returned",
    [(), (1.0,), [1.0], (1.0, 2.0), (1.0, {}, {}), (1.0, None), (1.0, {"reward": 1.0}), ({}, 1.0), {1.0}, None, "1", 1j],
)
def test_what_is_no_reward_is_named_with_what_one_is(returned: Any) -> None:
    with pytest.raises(RolloutError) as caught:
        score_of(returned, "r")
    kind = "None" if returned is None else f"a {type(returned).__name__}"
    assert str(caught.value) == f"the result of r is {kind}, not {WANTED}"


def test_what_names_a_function() -> None:
    assert all(map(names_a_function, ("rewards.py:ask", "a/b c/rewards.py:ask", "package.module:ask")))
    assert not any(map(names_a_function, ("question", "rewards.py", "rewards.py:", ":ask", "the question: text")))


# ---- servers that do not answer for a while

FILE = """
from pathlib import Path

CALLS = Path(__file__).with_name("calls")

def refuse(error):
    calls = len(CALLS.read_text()) if CALLS.exists() else 0
    CALLS.write_text("x" * (calls + 1))
    if calls < 2:
        raise error
    return 1.0

def judge(completion, example):
    return refuse(ConnectionRefusedError("no judge"))

async def judge_async(completion, example):
    return refuse(TimeoutError("no answer"))

def wrong(completion, example):
    return refuse(ValueError("a bad answer"))
"""


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        ("judge", 2, "", [1, 4]),
        ("judge_async", 2, "", [1, 4]),
        ("judge", 1, "ConnectionError: reward: rewards.py, line 10: ConnectionRefusedError: no judge", [1]),
        ("wrong", 2, "RuntimeError: reward: rewards.py, line 10: ValueError: a bad answer", []),
    ],
)
def test_a_function_is_called_again_while_its_server_is_unreachable_and_after_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, int, str, list[int]], isolate: bool
) -> None:
    name, retries, error, pauses = case
    made: list[float] = []
    sleep = asyncio.sleep

    async def shortly(delay_s: float, *more: Any) -> None:
        made.extend([delay_s] * (delay_s >= 1))
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", shortly)
    (tmp_path / "rewards.py").write_text(FILE)
    options = FunctionOptions.read({"data": "", "reward": "", "workers": 1, "isolate": isolate, "retries": retries})
    functions = Functions({"reward": f"{tmp_path}/rewards.py:{name}"}, options)
    try:
        outcome = str(asyncio.run(functions.call("reward", "", {})))
    except (ConnectionError, RuntimeError) as raised:
        outcome = f"{type(raised).__name__}: {raised}"
    assert (outcome, made) == (error or "1.0", pauses)
    assert len((tmp_path / "calls").read_text()) == len(pauses) + 1


def status(code: int) -> Exception:
    """As clients of HTTP raise it."""
    error = Exception(f"status {code}")
    error.status_code = code  # type: ignore[attr-defined]
    return error


def caused(error: Exception) -> Exception:
    outer = ValueError("no verdict")
    outer.__cause__ = error
    return outer


def test_what_counts_as_refuse() -> None:
    named = type("APIConnectionError", (Exception,), {})()  # as clients of APIs name it; it is no OSError
    unreachable = [ConnectionResetError(), TimeoutError(), socket.gaierror(), status(503), status(429), named]
    unreachable += [urllib.error.HTTPError("http://judge", 502, "bad gateway", {}, None), caused(ConnectionResetError())]  # type: ignore[arg-type]
    assert all(map(is_unreachable, unreachable))
    here = [ValueError(), FileNotFoundError(), status(400), caused(KeyError("a")), None, OSError("no such table")]
    assert not any(map(is_unreachable, here))


# ---- work that needs an event loop, called where one is running or not


def test_work_runs_in_this_thread_or_beside_the_running_loop_and_its_error_is_raised() -> None:
    async def where() -> threading.Thread:
        await asyncio.sleep(0)
        return threading.current_thread()

    async def fail() -> None:
        raise ValueError("mine")

    async def notebook() -> None:
        assert run_to_end(where()) is not threading.current_thread()
        with pytest.raises(ValueError, match="mine"):
            run_to_end(fail())

    assert run_to_end(where()) is threading.current_thread()  # where code that does not yield can be interrupted
    asyncio.run(notebook())
