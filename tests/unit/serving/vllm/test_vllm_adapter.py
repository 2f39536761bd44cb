"""The client of a vLLM server, with a stand-in for the server: who answers, what it holds, and what becomes of requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from pipelinerl.errors import PromptTooLongError, RequestError, WeightUpdateError
from pipelinerl.serving.client.adapter import ServerBusyError, ServerError, ServerUnreachableError
from pipelinerl.serving.vllm import adapter
from pipelinerl.serving.vllm.adapter import ModelFacts, VllmServer
from pipelinerl.serving.vllm.messages import Choice, Choices, InvalidAnswerError, Label, generate_body
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest
from pipelinerl.types import Completion, TokenEvent, VersionSpan
from tests.unit.fake_engine_servers import request, wait_until

FACTS = ModelFacts(16, (1,))
UPDATE = WeightUpdateRequest(version=1, checksum="c0ffee", path="/weights/v1.safetensors")
ABORT, KEEP = "mode=abort&clear_cache=true", "mode=keep&clear_cache=false"
STEPS = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


class FakeVllm:
    """In the place of `HttpClient`, and of the server behind it: generates 7s, as a test says."""

    url = "http://vllm"

    def __init__(self) -> None:
        self.instance = "a"
        self.label = "default"
        self.logprobs_mode, self.backend = "processed_logprobs", "pipelinerl"
        self.paused = False
        self.sent: defaultdict[str, list[Any]] = defaultdict(list)  # by path: the bodies, or queries
        self.steps: list[str] = []  # of updates
        self.failures: dict[str, BaseException | list[BaseException]] = {}
        self.hold = asyncio.Event()
        self.hold.set()
        self.changes: dict[str, Any] = {}  # of answers

    async def ask(self, method: str, path: str, answer: Any, body: Any = None, *, timeout_s: float | None = None) -> Any:
        path, _, query = path.partition("?")
        self._note(path, query if body is None else body)
        config = {
            "instance_id": self.instance,
            "model_config": {"model": "m", "max_model_len": 64, "logprobs_mode": self.logprobs_mode},
            "scheduler_config": {"max_num_seqs": 4},
            "weight_transfer_config": {"backend": self.backend},
        }
        answers = {
            "/server_info": {"vllm_config": config},
            "/weight_info": {"weight_version": self.label},
            "/is_paused": {"is_paused": self.paused},
        }
        await asyncio.sleep(0)
        if path == "/inference/v1/generate":
            return msgspec.convert(await self._generate(body), answer)
        self.paused = {"/pause": True, "/resume": False}.get(path, self.paused)
        key = {"/update_weight_version": "new_version", "/finish_weight_update": "weight_version"}.get(path)
        self.label = body[key] if key else self.label
        return msgspec.convert(answers[path], answer) if method == "GET" else None

    async def lines(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        self._note(path, body)
        whole = (await self._generate(body))["choices"][0]
        for index, token in enumerate(whole["token_ids"]):
            last = index == len(whole["token_ids"]) - 1
            line = {"token_ids": [token], "logprobs": {"content": [whole["logprobs"]["content"][index]]}}
            line |= {key: whole[key] if last else None for key in ("finish_reason", "weight_versions")}
            yield b": a comment"
            yield b"data: " + msgspec.json.encode({"choices": [line]})
        yield b"data: [DONE]"

    async def close(self) -> None: ...

    async def _generate(self, body: Any) -> dict[str, Any]:
        await self.hold.wait()
        count = body["sampling_params"]["max_tokens"]
        choice = {
            "token_ids": [7] * count,
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.25}] * count},
            "finish_reason": "length",
            "weight_versions": [{"version": self.label, "start": 0, "end": count}],
        }
        return {"choices": [choice | self.changes]}

    def _note(self, path: str, body: Any) -> None:
        self.sent[path].append(body)
        self.steps += [path] if path in STEPS else []
        failure = self.failures.get(path)
        if isinstance(failure, list):
            failure = failure.pop(0) if failure else None
        if failure is not None:
            raise failure


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    vllm = FakeVllm()
    monkeypatch.setattr(adapter, "HttpClient", lambda url, api_key: vllm)
    return vllm


@pytest.fixture
def server(vllm: FakeVllm) -> VllmServer:
    """A client of the stand-in."""
    return VllmServer("http://vllm", facts=FACTS)


async def held(vllm: FakeVllm, server: VllmServer) -> asyncio.Future[Completion]:
    """A request that is at the stand-in, which keeps it."""
    vllm.hold.clear()
    running = asyncio.ensure_future(server.generate(request("a")))
    await wait_until(lambda: len(vllm.sent["/inference/v1/generate"]) > 0)
    return running


async def test_weights_without_a_label_are_of_version_0(vllm: FakeVllm, server: VllmServer) -> None:
    info = await server.info()
    assert vllm.label == "0"
    assert (info.version, info.checksum, info.instance, info.slots) == (0, "", "a", 4)
    assert (info.vocabulary, info.stop_token_ids, info.max_length) == (16, (1,), 64)
    vllm.instance, vllm.label = "b", "default"  # restarted
    assert (await server.info()).instance == "b"
    assert vllm.label == "0"
    vllm.instance, vllm.label = "c", "11"  # of an earlier client
    assert (await server.info()).version == 11
    assert len(vllm.sent["/update_weight_version"]) == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"paused": True}, "is paused"),
        ({"label": "step-7"}, "something else"),
        ({"logprobs_mode": "raw", "backend": "nccl"}, "--logprobs-mode .*; .*--weight-transfer-config"),
    ],
)
async def test_a_server_that_can_not_be_used_is_not(
    vllm: FakeVllm, server: VllmServer, change: dict[str, Any], why: str
) -> None:
    vllm.__dict__.update(change)
    for ask in (server.info(), server.generate(request("a")), server.update_weights(UPDATE)):
        with pytest.raises(ServerError, match=why):
            await ask
    assert len(vllm.sent["/inference/v1/generate"]) == 0
    assert len(vllm.sent["/pause"]) == 0


async def test_one_look_serves_all_requests_that_wait_for_it(vllm: FakeVllm, server: VllmServer) -> None:
    completions = await asyncio.gather(*(server.generate(request(f"r{i}", stream=i % 2 == 0)) for i in range(8)))
    assert [completion.request_id for completion in completions] == [f"r{i}" for i in range(8)]
    assert {completion.token_ids for completion in completions} == {(7,) * 5}
    assert len(vllm.sent["/server_info"]) == 1


async def test_tokens_are_reported_as_they_come(vllm: FakeVllm, server: VllmServer) -> None:
    vllm.label = "3"
    events: list[TokenEvent] = []
    done = await server.generate(request("a", stream=True), events.append)
    assert events == [TokenEvent("a", i, 7, -0.25, 3) for i in range(5)]
    assert done.weight_versions == (VersionSpan(3, 0, 5),)
    vllm.label = "4"  # as if the update had overtaken the tokens
    with pytest.raises(RequestError, match="token 0"):
        await server.generate(request("b", stream=True), events.append)


async def test_a_restart_is_seen_in_the_answer(vllm: FakeVllm, server: VllmServer) -> None:
    await server.info()
    vllm.instance, vllm.label = "b", "default"
    with pytest.raises(ServerUnreachableError, match="restarted"):
        await server.generate(request("a"))
    assert (await server.generate(request("a"))).weight_versions == (VersionSpan(0, 0, 5),)
    assert vllm.label == "0"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"finish_reason": "abort"}, ServerBusyError),  # may be asked again
        ({"finish_reason": "error"}, ServerError),
        ({"weight_versions": []}, ServerError),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 4}]}, ServerError),
        ({"weight_versions": [{"version": "v7", "start": 0, "end": 5}]}, ServerError),
        ({"logprobs": None}, ServerError),
        ({"logprobs": {"content": [{"token_id": 6, "logprob": -1.0}] * 5}}, ServerError),
        ({"logprobs": {"content": [{"token_id": 7, "logprob": -9999.0}] * 5}}, ServerError),
    ],
)
async def test_an_answer_that_lacks_or_contradicts_something_is_an_error(
    vllm: FakeVllm, server: VllmServer, changes: dict[str, Any], kind: type[ServerError]
) -> None:
    vllm.changes = changes
    with pytest.raises(ServerError, match=r"aborted request|completion that can't be used") as caught:
        await server.generate(request("a"))
    assert type(caught.value) is kind


async def test_everything_that_an_answer_says_is_in_the_completion(vllm: FakeVllm, server: VllmServer) -> None:
    """And all that a request says is sent, but the seed."""
    spans = [{"version": "7", "start": 0, "end": 3}, {"version": "12", "start": 3, "end": 5}]
    content = [{"token_id": token, "logprob": -0.5 * token, "rank": 1} for token in range(5)]
    vllm.changes = {"token_ids": list(range(5)), "logprobs": {"content": content}, "weight_versions": spans}
    asked = request("a", temperature=0.7, top_p=0.9, top_k=3, stop_token_ids=(9,))
    asked = msgspec.structs.replace(asked, reuses_from=6)
    done = await server.generate(asked)
    assert (done.token_ids, done.logprobs) == (tuple(range(5)), (0.0, -0.5, -1.0, -1.5, -2.0))
    assert done.weight_versions == (VersionSpan(7, 0, 3), VersionSpan(12, 3, 5))
    (sent,) = vllm.sent["/inference/v1/generate"]
    assert (sent["token_ids"], sent["cache_salt"]) == (asked.prompt_ids, "6")
    sampling = msgspec.structs.asdict(asked.sampling)
    assert sent["sampling_params"].items() >= {(name, sampling[name]) for name in sampling if name != "seed"}


async def test_an_update_is_taken_once(vllm: FakeVllm, server: VllmServer) -> None:
    running = await held(vllm, server)
    receipt = await server.update_weights(UPDATE)
    assert (receipt.version, receipt.checksum, receipt.sequences_in_flight) == (1, "c0ffee", 1)
    assert receipt.pause_s > 0
    assert (await server.update_weights(UPDATE)).pause_s == 0
    assert len(vllm.sent["/update_weights"]) == 1
    info = await server.info()
    assert (info.version, info.checksum) == (1, "c0ffee")
    with pytest.raises(WeightUpdateError, match="older"):
        await server.update_weights(msgspec.structs.replace(UPDATE, version=0))
    vllm.hold.set()
    await running


async def test_a_session_begins_at_any_version_and_takes_no_tokens_of_another(vllm: FakeVllm) -> None:
    vllm.label = "7@cafe.1"
    server = VllmServer("http://vllm", facts=FACTS, run="cafe", epoch=2)
    with pytest.raises(ServerError, match="of weights of another session"):
        await server.generate(request("early"))
    assert (await server.update_weights(UPDATE)).version == 1
    assert (vllm.label, vllm.sent["/pause"]) == ("1@cafe.2", [ABORT])
    assert (await server.generate(request("a"))).weight_versions == (VersionSpan(1, 0, 5),)
    with pytest.raises(WeightUpdateError, match="older"):
        await server.update_weights(msgspec.structs.replace(UPDATE, version=0))
    await server.update_weights(msgspec.structs.replace(UPDATE, version=2))
    assert (vllm.label, vllm.sent["/pause"]) == ("2@cafe.2", [ABORT, KEEP])
    vllm.label = "3@cafe.3"
    with pytest.raises(ServerError, match="of weights of another session"):
        await server.generate(request("late"))
    vllm.instance, vllm.label = "b", "default"  # restarted: it has the weights that it loads
    with pytest.raises(ServerUnreachableError, match="restarted"):
        await server.generate(request("b"))
    assert ((await server.info()).version, vllm.label) == (0, "default")
    await server.update_weights(msgspec.structs.replace(UPDATE, version=2))
    assert (vllm.label, vllm.sent["/pause"][-1]) == ("2@cafe.2", ABORT)


async def test_weights_that_are_held_are_those_of_the_next_session_only_once_it_has_sent_them(vllm: FakeVllm) -> None:
    """Also if version and checksum are the same, as after a resume that lost no step."""
    for epoch in (1, 2):
        await VllmServer("http://vllm", facts=FACTS, run="cafe", epoch=epoch).update_weights(UPDATE)
        assert vllm.label == f"1@cafe.{epoch}"
    sent = [body["update_info"] for body in vllm.sent["/update_weights"]]
    assert [(one.run, one.epoch) for one in sent] == [("cafe", 1), ("cafe", 2)]


async def test_a_server_that_may_hold_half_an_update_is_used_no_more(vllm: FakeVllm, server: VllmServer) -> None:
    """Its requests may be sent again, and a new process takes the update."""
    running = await held(vllm, server)
    vllm.failures["/update_weights"] = ServerUnreachableError("http://vllm", "gave no answer in time")
    with pytest.raises(ServerUnreachableError, match="half of version 1"):
        await server.update_weights(UPDATE)
    with pytest.raises(ServerUnreachableError, match="half of version 1"):
        await running
    assert vllm.paused
    vllm.hold.set()
    vllm.failures.clear()
    async with server._updating:  # another try
        with pytest.raises(ServerUnreachableError, match="half of version 1"):
            await server.info()
    for ask in (server.info(), server.generate(request("b")), server.update_weights(UPDATE)):
        with pytest.raises(ServerUnreachableError, match="half of version 1"):
            await ask
    with pytest.raises(ServerError, match="is paused"):
        await VllmServer("http://vllm", facts=FACTS).info()
    vllm.instance, vllm.label, vllm.paused = "b", "default", False  # restarted
    assert (await server.update_weights(UPDATE)).version == 1
    assert (await server.generate(request("c"))).weight_versions == (VersionSpan(1, 0, 5),)


# ---------------------------------------------------------------------------------------------- the steps of an update


def busy(message: str = "it broke") -> ServerBusyError:
    return ServerBusyError("http://vllm", f"answered 500: Worker failed with error '{message}', please check")


async def test_what_an_update_sends_is_what_our_backend_decodes(vllm: FakeVllm, server: VllmServer) -> None:
    await server.update_weights(UPDATE)
    assert vllm.steps == STEPS
    sent = msgspec.to_builtins(vllm.sent["/update_weights"][0]["update_info"])
    assert msgspec.convert(sent, WeightUpdateRequest) == UPDATE
    group = ProcessGroupRequest(host="10.0.0.5", port=7, key="secret", index=1, timeout_s=9.0, name="http://vllm")
    vllm.failures = {"/init_weight_transfer_engine": [busy("weights refused: no group in 9 s")]}
    with pytest.raises(WeightUpdateError, match=r"http://vllm did not join the trainer's broadcast: .*no group in 9 s"):
        await server.join_broadcast(group)
    await server.join_broadcast(group)
    sent = msgspec.to_builtins(vllm.sent["/init_weight_transfer_engine"][0])["init_info"]
    assert msgspec.convert(sent, ProcessGroupRequest) == group


@pytest.mark.parametrize(
    ("step", "message"),
    [("/pause", "it broke"), ("/start_weight_update", "it broke"), ("/update_weights", "weights refused: another checksum")],
)
async def test_what_was_refused_leaves_generation_as_it_was(
    vllm: FakeVllm, server: VllmServer, step: str, message: str
) -> None:
    vllm.failures = {step: [busy(message)]}
    with pytest.raises(WeightUpdateError, match=message):
        await server.update_weights(UPDATE)
    assert vllm.steps == [*STEPS[: STEPS.index(step) + 1], "/resume"]
    assert (await server.update_weights(UPDATE)).version == 1


@pytest.mark.parametrize(
    "failures",
    [
        {"/update_weights": busy("a layer does not fit")},
        {"/finish_weight_update": busy()},
        {"/update_weights": busy("weights refused: no"), "/resume": busy()},
        {"/pause": busy("no pause"), "/resume": busy("no resume")},
        {"/update_weights": asyncio.CancelledError()},
    ],
)
async def test_what_may_be_half_done_is_never_computed_with(
    vllm: FakeVllm, server: VllmServer, failures: dict[str, Any]
) -> None:
    vllm.failures = dict(failures)
    with pytest.raises((ServerUnreachableError, asyncio.CancelledError)):
        await server.update_weights(UPDATE)
    assert len(vllm.sent["/resume"]) in (0, 2)  # it is tried twice
    with pytest.raises(ServerError, match="half of version 1"):
        await server.generate(request("a"))


# ---------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    "label", ["default", "", "-1", "1.0", "٣", "9" * 19, "7@", "7@cafe", "7@cafe.x", "7@a b.1", "7@.1", "7\n"]
)
def test_only_numbers_and_those_of_sessions_are_versions(label: str) -> None:
    assert Label.of("0") == Label(0)
    assert [str(Label.of(text)) for text in ("12", "7@cafe.2")] == ["12", "7@cafe.2"]
    with pytest.raises(InvalidAnswerError):
        Label.of(label)
    for choices in ((), (Choice(), Choice())):
        with pytest.raises(InvalidAnswerError):
            _ = Choices(choices).only


def test_what_vllm_would_quietly_change_is_refused() -> None:
    with pytest.raises(PromptTooLongError, match=r"3 prompt tokens \+ 5 new tokens > 7"):
        generate_body(request("a"), 7)
    with pytest.raises(RequestError, match="temperature"):
        generate_body(request("a", temperature=0.001), 64)
