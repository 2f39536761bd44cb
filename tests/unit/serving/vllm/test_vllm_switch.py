"""The steps of an update at vLLM, and what is left behind when one of them fails."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from pipelinerl.errors import WeightUpdateError
from pipelinerl.serving.client.adapter import ServerBusyError, ServerUnreachableError
from pipelinerl.serving.vllm.messages import BroadcastInfo, InitInfo, UpdateInfo
from pipelinerl.serving.vllm.switch import RESUME_TRIES, HalfUpdatedError, WeightSwitch
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest

UPDATE = WeightUpdateRequest(version=3, checksum="c0ffee", path="/weights/v3.safetensors")
STEPS = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


class FakeVllm:
    """Takes note of what it is asked; `failures` are raised, one for each time that the step is asked for."""

    url = "http://vllm"

    def __init__(self, **failures: list[BaseException]) -> None:
        self.failures = {f"/{step}": errors for step, errors in failures.items()}
        self.asked: list[str] = []
        self.bodies: dict[str, Any] = {}

    async def post(self, path: str, body: Any, answer: Any, *, timeout_s: float, params: Any = None) -> None:
        self.asked.append(path)
        self.bodies[path] = params if body is None else body
        if self.failures.get(path):
            raise self.failures[path].pop(0)


def busy(message: str = "it broke") -> ServerBusyError:
    return ServerBusyError("http://vllm", f"answered 500: Worker failed with error '{message}', please check")


def run(vllm: FakeVllm) -> list[list[str]]:
    """Run the switch; what had been asked when the weights were said to be replaced."""
    replaced: list[list[str]] = []
    switch = WeightSwitch(vllm)
    pause_s = asyncio.run(switch.run(UPDATE, lambda: replaced.append(list(vllm.asked))))
    assert pause_s >= 0
    return replaced


def test_the_weights_are_named_between_their_arrival_and_the_next_token() -> None:
    vllm = FakeVllm()
    assert run(vllm) == [STEPS[:-1]]
    assert vllm.asked == STEPS
    assert vllm.bodies["/pause"] == {"mode": "keep", "clear_cache": "false"}
    assert vllm.bodies["/finish_weight_update"] == {"weight_version": "3"}
    sent = msgspec.to_builtins(vllm.bodies["/update_weights"]["update_info"])
    assert sent == {"version": 3, "checksum": "c0ffee", "path": "/weights/v3.safetensors", "run": "", "epoch": 0}
    assert msgspec.structs.asdict(msgspec.convert(sent, UpdateInfo)) == sent  # as our backend decodes it


def test_joining_says_where_and_what_went_wrong() -> None:
    vllm = FakeVllm(init_weight_transfer_engine=[busy("weights refused: no group in 9 s")])
    switch = WeightSwitch(vllm)
    group = ProcessGroupRequest(host="10.0.0.5", port=7, key="secret", index=1, timeout_s=9.0, name="http://vllm")
    with pytest.raises(WeightUpdateError, match=r"http://vllm did not join the trainer's broadcast: .*no group in 9 s"):
        asyncio.run(switch.join_broadcast(group))
    asyncio.run(switch.join_broadcast(group))
    sent = msgspec.to_builtins(vllm.bodies["/init_weight_transfer_engine"])["init_info"]
    assert sent == {"source": "broadcast", **msgspec.to_builtins(group)}
    assert isinstance(msgspec.convert(sent, InitInfo), BroadcastInfo)


@pytest.mark.parametrize(
    ("failures", "asked"),
    [
        ({"pause": [busy()]}, ["/pause", "/resume"]),
        ({"start_weight_update": [busy()]}, ["/pause", "/start_weight_update", "/resume"]),
        ({"update_weights": [busy("weights refused: another checksum")]}, [*STEPS[:3], "/resume"]),
    ],
)
def test_what_was_refused_leaves_generation_as_it_was(failures: dict[str, list[BaseException]], asked: list[str]) -> None:
    vllm = FakeVllm(**failures)
    with pytest.raises(WeightUpdateError) as caught:
        run(vllm)
    assert not isinstance(caught.value, HalfUpdatedError)
    assert vllm.asked == asked


@pytest.mark.parametrize(
    "failures",
    [
        {"update_weights": [busy("a layer does not fit")]},
        {"update_weights": [ServerUnreachableError("http://vllm", "gave no answer in time")]},
        {"finish_weight_update": [busy()]},
        {"update_weights": [busy("weights refused: no")], "resume": [busy()] * RESUME_TRIES},
    ],
)
def test_what_may_be_half_done_is_never_computed_with(failures: dict[str, list[BaseException]]) -> None:
    vllm = FakeVllm(**failures)
    with pytest.raises(HalfUpdatedError, match="half of version 3"):
        run(vllm)
    assert vllm.asked.count("/resume") in (0, RESUME_TRIES)


def test_a_server_that_neither_pauses_nor_resumes_is_used_no_more_and_both_errors_are_named() -> None:
    vllm = FakeVllm(pause=[busy("no pause")], resume=[busy("no resume")] * RESUME_TRIES)
    with pytest.raises(HalfUpdatedError, match=r"may be paused.*no pause.*no resume.*restart it") as caught:
        run(vllm)
    assert "\n" not in str(caught.value)
    assert vllm.asked == ["/pause", *["/resume"] * RESUME_TRIES]


def test_a_cancelled_update_may_be_half_done_too() -> None:
    vllm = FakeVllm(update_weights=[asyncio.CancelledError()])
    with pytest.raises(asyncio.CancelledError) as caught:
        run(vllm)
    assert "half of version 3" in caught.value.__notes__[0]
    assert "/resume" not in vllm.asked
