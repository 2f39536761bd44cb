"""Code that isn't ours can neither hold the thread nor end the process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time

import pytest

from pipelinerl.actor import deadline
from pipelinerl.actor.deadline import CodeAlarm, CodeDeadlineError, deadlines_work, own_code

SHORT_S = 0.03
ENOUGH_S = 0.5
"""For code that is to be left alone, on a machine that does other things too."""


def spin() -> None:
    while True:
        pass


def run(coroutine, seconds=SHORT_S):
    """Run under the deadline, then show that the loop still turns."""

    async def main():
        try:
            return await CodeAlarm(seconds).run(coroutine)
        finally:
            assert await asyncio.wait_for(asyncio.sleep(0, "turns"), 60) == "turns"

    return asyncio.run(main())


async def sleeps():
    time.sleep(60)


async def computes_later():
    for _ in range(2):
        await asyncio.sleep(0)
    spin()


async def excepts():
    try:
        spin()
    except Exception:  # noqa: BLE001 - what users write
        return "swallowed"


async def waits_for_tasks_of_its_own():
    await asyncio.gather(asyncio.create_task(computes_later()), asyncio.sleep(0))


@pytest.mark.parametrize("code", [sleeps, computes_later, excepts, waits_for_tasks_of_its_own])
def test_code_that_does_not_yield_is_interrupted(code):
    with pytest.raises(CodeDeadlineError, match="without yielding"):
        run(code())


def test_code_that_swallows_everything_gets_it_again():
    caught = []

    def code():
        while len(caught) < 3:
            try:
                spin()
            except BaseException:  # noqa: BLE001 - what users write
                caught.append(True)
        spin()

    with pytest.raises(CodeDeadlineError):
        CodeAlarm(SHORT_S).call(code)
    assert len(caught) == 3


async def waits():
    await asyncio.sleep(1.5 * ENOUGH_S)


async def computes_in_stretches():
    for _ in range(4):
        time.sleep(ENOUGH_S / 3)
        await asyncio.sleep(0)


async def times_things_out():
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)


@pytest.mark.parametrize("code", [waits, computes_in_stretches, times_things_out])
def test_the_deadline_is_for_each_stretch_of_code(code):
    run(code(), ENOUGH_S)


def test_rollouts_that_run_one_after_another_have_a_deadline_each():
    """They finish in the same pass of the event loop."""

    async def code():
        await asyncio.sleep(0)
        time.sleep(0.4 * ENOUGH_S)
        return "done"

    async def main():
        alarm = CodeAlarm(ENOUGH_S)
        return await asyncio.gather(*(alarm.run(code()) for _ in range(3)))

    assert asyncio.run(main()) == ["done"] * 3


def test_code_that_waits_is_not_interrupted_for_what_blocks_the_thread_meanwhile():
    async def main():
        waiting = asyncio.get_running_loop().create_future()
        rollout = asyncio.create_task(CodeAlarm(SHORT_S).run(asyncio.wait_for(waiting, 60)))
        await asyncio.sleep(0)
        time.sleep(4 * SHORT_S)
        waiting.set_result("done")
        return await rollout

    assert asyncio.run(main()) == "done"


def test_our_own_code_runs_to_its_end_when_a_rollout_calls_it():
    done = []

    async def code():
        with own_code():
            time.sleep(4 * SHORT_S)
            done.append(True)

    with contextlib.suppress(CodeDeadlineError):  # after `own_code` the rollout may be interrupted
        run(code())
    assert done


def test_cleanup_after_the_deadline_may_await():
    cleaned = []

    async def code():
        try:
            spin()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with pytest.raises(CodeDeadlineError):
        run(code())
    assert cleaned


@pytest.mark.parametrize("uncancels", [False, True])
@pytest.mark.parametrize("refused", [asyncio.CancelledError, BaseException])
def test_code_that_refuses_to_be_cancelled_is_closed_in_the_end(refused, uncancels, monkeypatch):
    """asyncio.run would wait for it for ever."""
    monkeypatch.setattr(deadline, "GRACE_S", 0.02)
    cancellations = []

    async def code():
        while len(cancellations) < 20:  # without a loop it could not be collected
            try:
                await asyncio.sleep(60)
            except refused:
                cancellations.append(True)
                if uncancels and len(cancellations) == 1:
                    asyncio.current_task().uncancel()

    async def main():
        task = asyncio.create_task(CodeAlarm(SHORT_S).run(code()))
        for _ in range(3 if uncancels else 1):
            await asyncio.sleep(0.03)
            task.cancel()
        if not uncancels:
            await asyncio.wait({task}, timeout=60)

    asyncio.run(main())
    assert cancellations


def test_timer_and_handler_of_others_are_restored():
    def handler(number, frame):
        raise AssertionError("not its time yet")

    before = signal.signal(signal.SIGALRM, handler)
    timer_before = signal.setitimer(signal.ITIMER_REAL, 100, 7)
    try:
        with pytest.raises(CodeDeadlineError):
            CodeAlarm(SHORT_S).call(spin)
        left_s, repeat_s = signal.getitimer(signal.ITIMER_REAL)
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 50 < left_s <= 100
        assert repeat_s == 7
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer_before)
        signal.signal(signal.SIGALRM, before)


def test_outside_the_main_thread_it_runs_without_and_says_so():
    result = []

    def thread():
        async def code():
            time.sleep(2 * SHORT_S)
            return "ran"

        result.extend([deadlines_work(), asyncio.run(CodeAlarm(SHORT_S).run(code()))])

    worker = threading.Thread(target=thread)
    worker.start()
    worker.join()
    assert result == [False, "ran"]
    assert deadlines_work()


CODE = """
def reward():
    return helper()

def helper():
    while True:
        pass
"""


def test_code_that_holds_the_thread_is_named():
    scope = {}
    exec(compile(CODE, "/home/somebody/task.py", "exec"), scope)  # noqa: S102 - code of a user's file
    with pytest.raises(CodeDeadlineError, match=r"^the code ran for 0.3 s without yielding, in reward \(task.py, line 3\)$"):
        CodeAlarm(0.3).call(scope["reward"])


def interruptions(*, worked: bool) -> list[float]:
    """How long each of some attempts ran that are stuck, of which none has succeeded, or one has."""
    ran_s = []

    async def code():
        await asyncio.sleep(0)
        began_s = time.monotonic()
        try:
            time.sleep(60)
        finally:
            ran_s.append(time.monotonic() - began_s)

    async def main():
        alarm = CodeAlarm(ENOUGH_S)
        alarm.worked = worked
        return await asyncio.gather(*(alarm.run(code()) for _ in range(deadline.PATIENCE + 2)), return_exceptions=True)

    assert {type(outcome) for outcome in asyncio.run(main())} == {CodeDeadlineError}
    return ran_s


def test_code_that_is_stuck_every_time_soon_costs_little(monkeypatch):
    """The engine waits for each attempt: a run whose reward never returns must end before its watchdog does."""
    monkeypatch.setattr(deadline, "TICK_S", 0.01)
    *patient, fifth, sixth = interruptions(worked=False)
    assert min(patient) >= ENOUGH_S > max(fifth, sixth)
    assert min(interruptions(worked=True)) >= ENOUGH_S


def test_code_that_swallows_the_error_leaves_the_others_their_time(monkeypatch):
    monkeypatch.setattr(deadline, "TICK_S", 0.01)
    alarm = CodeAlarm(ENOUGH_S)

    def swallow():
        for _ in range(2 * deadline.PATIENCE):
            with contextlib.suppress(CodeDeadlineError):
                time.sleep(60)

    alarm.call(swallow)
    began_s = time.monotonic()
    with pytest.raises(CodeDeadlineError):
        alarm.call(lambda: time.sleep(60))
    assert time.monotonic() - began_s >= ENOUGH_S


def test_problems_that_take_too_long_do_not_end_the_others():
    """The first prompts of a run may be of the long problems, before any rollout has ended: the other rollouts go on."""
    ended = []

    async def code(number):
        if number % 4 == 0:
            time.sleep(60)
        await asyncio.sleep(0)
        ended.append(number)

    async def main():
        alarm = CodeAlarm(SHORT_S)
        attempts = [alarm.run(code(number)) for number in range(1, 4 * deadline.PATIENCE + 5)]
        return await asyncio.gather(*attempts, return_exceptions=True)

    outcomes = asyncio.run(main())
    assert ended == [number for number in range(1, len(outcomes) + 1) if number % 4]
