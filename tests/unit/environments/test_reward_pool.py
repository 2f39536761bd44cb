"""Functions in processes of their own: what each of them can do wrong costs one call, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from pipelinerl.environments.user.pool import FunctionPool, Limits
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from tests.integration.runs import alive, until

FUNCTIONS = """
import ctypes, itertools, os, subprocess, sys, time

calls = 0

def act(what, *arguments):
    global calls
    calls += 1
    if what == "count":
        return calls
    if what == "sleep":
        time.sleep(arguments[0])
        return arguments[0]
    if what == "sum":  # holds the interpreter: no signal handler of Python's would ever run
        sum(itertools.repeat(0))
    if what == "segfault":
        ctypes.string_at(0)
    if what == "_exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(3)
    if what == "memory":
        return len(bytearray(1 << 30))
    if what == "key":
        return {}[what]
    if what == "print":
        print("hello")
        os.write(1, b"world")
        return input() if arguments else None
    if what == "fork":
        return os.fork() and 1
    if what == "child":
        return subprocess.Popen(["sleep", "60"]).pid
    if what == "forge":
        for fd in range(3, 20):
            try:
                os.write(fd, b'{"number": 1000000}\\n')
            except OSError:
                pass
        time.sleep(60)
    return what if arguments == () else eval(arguments[0], {})
"""

LIMITS = Limits(timeout_s=5, memory_mb=256, workers=1)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path / "functions.py"


@pytest.fixture
def pool(file):
    return FunctionPool({"act": f"{file}:act"}, LIMITS)


def pids(pool):
    return [worker.pid for worker in pool._all if worker.running]


def play(pool, *calls):
    """The outcomes of calls, one after the other: values, or exceptions."""

    async def main():
        return [(await asyncio.gather(pool.call("act", *call), return_exceptions=True))[0] for call in calls]

    try:
        return asyncio.run(main())
    finally:
        pool.close()


DEADLY = {
    "segfault": (ChildProcessError, "act (functions.py:act): its process was killed by SIGSEGV"),
    "_exit": (ChildProcessError, "act (functions.py:act): its process ended with status 3"),
    "memory": (MemoryError, "act (functions.py:act): it needed more than 256 MB"),
    "forge": (ChildProcessError, "act (functions.py:act): it replied to call 1000000, but was asked 8"),
}


def test_a_call_that_ends_its_process_costs_that_call(pool):
    outcomes = play(pool, *([what] for deadly in DEADLY for what in ("count", deadly)))
    assert outcomes[:-1:2] == [1, 1, 1, 1]  # each time a new process
    assert [(type(error), str(error)) for error in outcomes[1::2]] == list(DEADLY.values())


def test_what_a_call_raises_or_returns_costs_no_process(pool):
    outcomes = play(
        pool,
        ["sys.exit"],
        ["key"],
        ["value", "float('nan')"],
        ["value", "object()"],
        ["value", "__import__('numpy').float32(0.5)"],
        ["value", "{'a': [1, None, 'ü\\n']}"],
        ["print"],
        ["print", "from standard input"],
        ["count"],
    )
    assert [str(outcome) for outcome in outcomes[:4]] == [
        "act: functions.py, line 21: SystemExit: 3",
        "act: functions.py, line 25: KeyError: 'key'",
        "the result of act is nan, not a finite number",
        "act returned a object, which is not JSON",
    ]
    assert [type(outcome) for outcome in outcomes[:4]] == [RuntimeError, RuntimeError, RolloutError, RolloutError]
    assert outcomes[4:7] == [0.5, {"a": [1, None, "ü\n"]}, None]
    assert "EOFError" in str(outcomes[7])
    assert outcomes[8] == 9  # the same process all along


def test_a_forked_child_that_returns_from_the_call_does_not_reply(pool):
    assert play(pool, ["fork"], ["fork"], ["sleep", 0.3], ["count"]) == [1, 1, 0.3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "where"), [(["sleep", 60], ", in line 12"), (["sum"], ", in line 15")])
def test_a_call_that_takes_too_long_is_ended_and_its_line_named(file, what, where):
    limits = Limits(timeout_s=0.5, workers=1)
    dead, after = play(FunctionPool({"act": f"{file}:act"}, limits), what, ["count"])
    assert isinstance(dead, TimeoutError)
    assert str(dead) == f"act (functions.py:act): it took longer than 0.5 s{where}; its process was ended"
    assert after == 1


@pytest.mark.slow
def test_a_call_is_made_at_once_and_its_reply_counts_if_the_loop_comes_late(file):
    pool = FunctionPool({"act": f"{file}:act"}, Limits(timeout_s=0.5, workers=1))

    async def main():
        await pool.call("act", "count")
        call = asyncio.create_task(pool.call("act", "count"))
        await asyncio.sleep(0)
        time.sleep(1.0)
        return await call

    assert asyncio.run(main()) == 2
    pool.close()


def test_calls_run_side_by_side_while_the_loop_goes_on(file):
    """Two processes meet: each waits for what only the other one does."""
    (file.parent / "meet.py").write_text(
        "import os, time\n"
        "def meet(mine, other):\n"
        "    open(mine, 'w').close()\n"
        "    while not os.path.exists(other): time.sleep(0.001)\n"
        "    return os.getpid()\n"
    )
    pool = FunctionPool({"meet": f"{file.parent}/meet.py:meet"}, Limits(timeout_s=5, workers=2))
    a, b = str(file.parent / "a"), str(file.parent / "b")

    async def main():
        calls = asyncio.gather(pool.call("meet", a, b), pool.call("meet", b, a))
        turns = 0
        while not calls.done():
            await asyncio.sleep(0.001)
            turns += 1
        more = await asyncio.gather(*(pool.call("meet", a, b) for _ in range(20)))
        return await calls, turns, more

    met, turns, more = asyncio.run(main())
    assert len(set(met)) == 2
    assert turns > 1
    assert set(more) <= set(met) == set(pids(pool))  # no more processes than there may be
    pool.close()


@pytest.mark.slow
def test_a_call_that_nobody_awaits_any_more_is_ended_and_its_place_is_free(pool):

    async def main():
        await pool.call("act", "count")
        (pid,) = pids(pool)
        call = asyncio.create_task(pool.call("act", "sleep", 60))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return pid, await pool.call("act", "count")

    pid, count = asyncio.run(main())
    assert count == 1
    until(lambda: not alive(pid), timeout_s=5.0)
    assert asyncio.run(pool.call("act", "count")) == 2  # in another loop
    (pid,) = pids(pool)
    os.kill(pid, signal.SIGKILL)  # between two calls it costs nothing
    until(lambda: not alive(pid), timeout_s=5.0)
    assert play(pool, ["count"]) == [1]


def test_processes_end_with_a_pool_that_is_closed_or_forgotten(file):
    gc.collect()
    open_files = len(os.listdir("/dev/fd"))
    pool = FunctionPool({"act": f"{file}:act"}, LIMITS)
    child = asyncio.run(pool.call("act", "child"))
    (pid,) = pids(pool)
    pool.close()
    pool.close()
    assert not alive(pid)
    until(lambda: not alive(child), timeout_s=5.0)
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(pool.call("act", "count"))

    forgotten = FunctionPool({"act": f"{file}:act"}, LIMITS)
    asyncio.run(forgotten.call("act", "count"))
    (pid,) = pids(forgotten)
    del forgotten
    gc.collect()
    assert not alive(pid)
    assert len(os.listdir("/dev/fd")) == open_files


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the limit on CPU time ends them")
def test_processes_end_when_that_of_the_pool_is_killed(file):
    """During calls, even if they never return to Python."""
    code = (
        "import asyncio\n"
        "from pipelinerl.environments.user.pool import FunctionPool, Limits\n"
        "async def main():\n"
        f"    pool = FunctionPool({{'act': '{file}:act'}}, Limits(timeout_s=60, workers=4))\n"
        "    child = await pool.call('act', 'child')\n"
        "    calls = (['sum'], ['sleep', 60], ['sum'], ['count'])\n"
        "    calls = [asyncio.create_task(pool.call('act', *call)) for call in calls]\n"
        "    await calls[-1]\n"  # one process waits for a call
        "    print(child, *(worker.pid for worker in pool._all), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = list(map(int, parent.stdout.readline().split()))
    assert len(pids) == 5
    time.sleep(0.1)  # for the calls to begin; the test holds as well if they have not
    assert all(map(alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(map(alive, pids)), timeout_s=5.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ValueError('no table')", "wrong.py can't be imported: wrong.py, line 1: ValueError: no table"),
        ("import os\nos._exit(5)", "its process ended with status 5"),
        ("import time\ntime.sleep(60)", "it took longer than 0.7 s"),
    ],
)
def test_a_file_that_fails_in_the_process_is_an_error_of_one_line(tmp_path, text, message):
    (tmp_path / "wrong.py").write_text(text)
    limits = Limits(start_timeout_s=0.7 if "sleep" in text else 30)
    (error,) = play(FunctionPool({"act": f"{tmp_path}/wrong.py:act"}, limits), ["count"])
    assert (type(error), message in str(error)) == (EnvironmentSetupError, True)


def test_a_file_may_import_its_neighbours_but_shadows_nothing(tmp_path):
    (tmp_path / "helpers.py").write_text("BONUS = 2.0")
    (tmp_path / "random.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "rewards.py").write_text(
        "import random\nfrom helpers import BONUS\ndef act(): return BONUS * (random.random() < 1)"
    )
    assert play(FunctionPool({"act": f"{tmp_path}/rewards.py:act"}, LIMITS), []) == [2.0]
