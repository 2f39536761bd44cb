"""The Tinker API without its SDK: losses and gradients against slow references, turns of adapters, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

pytest.importorskip("google.protobuf")
pytest.importorskip("peft")

from pipelinerl.config.schema import TrainerConfig
from pipelinerl.errors import RequestError, UserError
from pipelinerl.serving.server.endpoints import app_of
from pipelinerl.serving.server.http import ServerApp
from pipelinerl.serving.server.service import Service, load
from pipelinerl.serving.server.tinker.learner import AdapterLearner, TrainedAdapter
from pipelinerl.serving.server.tinker.losses import LOSSES, check, loss_terms
from pipelinerl.serving.server.tinker.wire import (
    AdamSettings,
    ForwardBackward,
    TrainingDatum,
    _messages,
    read_forward_backward,
)
from tests.unit.server_parts import byte_model, byte_tokenizer, options_of

KEY = "tml-key"
CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}


def datum(length: int, seed: int, **inputs: Any) -> TrainingDatum:
    """Random tokens, with targets that are not all the tokens that follow."""
    random = np.random.default_rng(seed)
    made = {
        "target_tokens": random.integers(3, 259, length),
        "logprobs": random.uniform(-6.5, -4.5, length).astype(np.float32),
        "advantages": random.normal(size=length).astype(np.float32),
        "weights": random.uniform(size=length).astype(np.float32),
        "sequence_ratio_mask": (random.uniform(size=length) < 0.6).astype(np.float32),
    }
    made["sequence_ratio_mask"][0] = 1
    return TrainingDatum(random.integers(3, 259, length).tolist(), {name: made[name] for name in inputs or made})


def request(loss: str, data: list[TrainingDatum], *, backward: bool = True, **settings: float) -> ForwardBackward:
    needed = ("target_tokens", *LOSSES[loss].inputs)
    data = [TrainingDatum(one.tokens, {name: one.inputs[name] for name in needed}) for one in data]
    return ForwardBackward("m", 1, data, loss, settings, backward)


def reference(loss: str, logprobs_N: torch.Tensor, one: TrainingDatum, settings: dict[str, float]) -> torch.Tensor:
    """The loss of a sequence as the documentation of Tinker writes it, token after token."""
    given = {name: torch.tensor(value) for name, value in one.inputs.items()}
    if loss == "cross_entropy":
        return -sum(w * p for w, p in zip(given["weights"], logprobs_N, strict=True))
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", float("inf"))
    ratio_N = (logprobs_N - given["logprobs"]).exp()
    if loss == "gspo":
        marked = given["sequence_ratio_mask"] != 0
        mean = (logprobs_N.detach() - given["logprobs"])[marked].mean()
        ratio_N = (mean + logprobs_N - logprobs_N.detach()).exp()
    total = torch.zeros(())
    for ratio, logprob, advantage in zip(ratio_N, logprobs_N, given["advantages"], strict=True):
        if loss == "importance_sampling":
            total = total - ratio * advantage
        elif loss == "dro":
            total = total - (logprob * advantage - 0.05 * ratio.log() ** 2)
        elif loss == "cispo":
            total = total - ratio.clamp(low, high).detach() * logprob * advantage
        else:
            total = total - torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
    return total


SETTINGS = {
    "ppo": CLIP,
    "cispo": CLIP,
    "dro": {"beta": 0.1},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
}


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> AdapterLearner:
    return AdapterLearner(byte_model(), tmp_path_factory.mktemp("saved"), TrainerConfig(micro_batch_tokens=24))


def moved(learner: AdapterLearner, rank: int = 4, seed: int = 0) -> TrainedAdapter:
    """An adapter whose B is not 0, so that A has gradients too."""
    trained = learner.create(rank, seed)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for _, b_Or, _ in trained.adapter.values():
            b_Or.normal_(std=0.05)
    return trained


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_documented_formula(learner: AdapterLearner, loss: str) -> None:
    """Over several micro-batches, and two requests whose gradients are added up."""
    settings = SETTINGS.get(loss, {})
    data = [datum(length, seed) for seed, length in enumerate((5, 9, 1, 7, 12))]
    trained = moved(learner)
    parts = [learner.forward_backward(trained, request(loss, part, **settings)) for part in (data[:3], data[3:])]

    plain = byte_model()
    learner.adapters.use(trained.adapter)
    merged = {name: weight.clone().requires_grad_() for name, weight in learner.adapters.weights().items()}
    total = torch.zeros(())
    for one, found in zip(data, [row for logprobs, _ in parts for row in logprobs], strict=True):
        logits = torch.func.functional_call(plain, merged, (torch.tensor([one.tokens]),), tie_weights=False).logits[0]
        logprobs_N = logits.log_softmax(-1)[torch.arange(len(one.tokens)), torch.tensor(one.inputs["target_tokens"])]
        assert found == pytest.approx(logprobs_N.detach().numpy(), abs=1e-5)
        total = total + reference(loss, logprobs_N, one, settings)
    assert sum(value for _, value in parts) == pytest.approx(total.item(), rel=1e-5)
    total.backward()
    for path, (a_rI, b_Or, scale) in trained.adapter.items():
        slope_OI = merged[f"{path}.weight"].grad
        assert slope_OI is not None
        assert slope_OI.abs().max() > 0
        torch.testing.assert_close(a_rI.grad, scale * b_Or.T @ slope_OI, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(b_Or.grad, scale * slope_OI @ a_rI.T, rtol=1e-3, atol=1e-4)


def test_forward_alone_leaves_the_gradient(learner: AdapterLearner) -> None:
    trained = moved(learner)
    _, forward = learner.forward_backward(trained, request("cross_entropy", [datum(6, 0)], backward=False))
    assert not any(matrix.grad.any() for a, b, _ in trained.adapter.values() for matrix in (a, b))
    assert learner.forward_backward(trained, request("cross_entropy", [datum(6, 0)]))[1] == pytest.approx(forward)


def test_a_step_is_torchs_adamw_of_the_adapter_alone(learner: AdapterLearner) -> None:
    first, second = moved(learner, rank=2), moved(learner, rank=3, seed=1)
    before = deepcopy(second.adapter)
    mirror = [torch.nn.Parameter(matrix.detach().clone()) for a, b, _ in first.adapter.values() for matrix in (a, b)]
    adam = torch.optim.AdamW(mirror, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    settings = AdamSettings(learning_rate=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
    for seed in range(3):
        learner.forward_backward(first, request("cross_entropy", [datum(6, seed)]))
        for own, matrix in zip(mirror, (m for a, b, _ in first.adapter.values() for m in (a, b)), strict=True):
            own.grad = matrix.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(mirror, 0.5)
        adam.step()
        assert learner.optim_step(first, settings) == pytest.approx({"grad_norm": norm.item(), "version": seed + 1})
    for own, matrix in zip(mirror, (m for a, b, _ in first.adapter.values() for m in (a, b)), strict=True):
        torch.testing.assert_close(matrix.detach(), own.detach())
    assert all(torch.equal(now[0], was[0]) for now, was in zip(second.adapter.values(), before.values(), strict=True))


def test_a_failed_part_of_a_batch_prevents_the_step(learner: AdapterLearner) -> None:
    """SDK and cookbook send the step before they look at the result."""
    trained = moved(learner)
    broken = datum(5, 0)
    broken.inputs["weights"][2] = np.inf
    learner.forward_backward(trained, request("cross_entropy", [datum(4, 1)]))
    with pytest.raises(Exception, match="the loss is"):
        learner.forward_backward(trained, request("cross_entropy", [broken]))
    with pytest.raises(RequestError, match="no step was taken, because a forward_backward before it failed: the loss is"):
        learner.optim_step(trained, AdamSettings())
    assert trained.version == 0
    learner.forward_backward(trained, request("cross_entropy", [datum(4, 1)]))
    assert learner.optim_step(trained, AdamSettings())["version"] == 1


@pytest.mark.parametrize("optimizer", [True, False])
def test_what_is_saved_goes_on_as_before(learner: AdapterLearner, optimizer: bool) -> None:
    """The next step is the same with the optimizer's state, and another one without."""
    trained, path = moved(learner), f"tinker://s:train:0/weights/at-{optimizer}"
    batches = [request("cross_entropy", [datum(6, seed)]) for seed in range(3)]
    for batch in batches[:2]:
        learner.forward_backward(trained, batch)
        learner.optim_step(trained, AdamSettings(learning_rate=0.01))
    learner.save(trained, path, optimizer=optimizer, overwrite=False, base_model="bytes")
    with pytest.raises(RequestError, match="exists: choose another name"):
        learner.save(trained, path, optimizer=optimizer, overwrite=False, base_model="bytes")
    loaded = learner.load(path, optimizer=optimizer)
    assert (loaded.version, loaded.rank) == (2, 4)
    for one in (trained, loaded):
        learner.forward_backward(one, batches[2])
        learner.optim_step(one, AdamSettings(learning_rate=0.01))
    pairs = zip(trained.adapter.values(), loaded.adapter.values(), strict=True)
    assert all(torch.equal(one[1], other[1]) for one, other in pairs) == optimizer
    assert not list(learner.folder_of(path).parent.glob(".*"))
    learner.save(trained, path, optimizer=True, overwrite=True, base_model="bytes")
    assert learner.load(path, optimizer=True).version == 3


@pytest.mark.parametrize(
    "path",
    [
        "tinker://s:train:0/weights/../x",
        "tinker://../weights/x",
        "tinker://s/other/x",
        "/etc/passwd",
        "tinker://s/weights/.x",
    ],
)
def test_no_path_leaves_the_folder(learner: AdapterLearner, path: str) -> None:
    with pytest.raises(RequestError, match="no path here"):
        learner.load(path, optimizer=False)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"loss": "stable_reinforce"}, "there is no loss 'stable_reinforce' here; there are cross_entropy, "),
        ({"settings": {"beta": 1.0}}, "loss_fn_config: ppo has clip_low_threshold, clip_high_threshold"),
        ({"settings": {"clip_low_threshold": float("nan")}}, "as finite numbers"),
        ({"loss": "cross_entropy"}, "it differs in advantages"),
        ({"data": []}, "there are no data"),
        ({"data": [datum(20, 0, target_tokens=1, logprobs=1, advantages=1)]}, "20 tokens; 1 to 15 are trained on"),
        ({"data": [TrainingDatum([300], datum(1, 0, target_tokens=1, logprobs=1, advantages=1).inputs)]}, "from 0 to 258"),
    ],
)
def test_a_request_that_cant_be_computed_is_refused_before_it_is_queued(changes: dict[str, Any], error: str) -> None:
    good = {"loss": "ppo", "data": [datum(5, 0, target_tokens=1, logprobs=1, advantages=1)], "settings": {}}
    made = ForwardBackward(model_id="m", seq_id=1, backward=True, **good | changes)
    with pytest.raises(RequestError, match=error):
        check(made, 259, 16)


def test_settings_without_a_default_have_to_be_given() -> None:
    with pytest.raises(RequestError, match="give dro beta as finite numbers"):
        check(request("dro", [datum(4, 0)]), 259, 64)
    with pytest.raises(RequestError, match="give gspo clip_low_threshold and clip_high_threshold"):
        check(request("gspo", [datum(4, 0)]), 259, 16)
    check(request("gspo", [datum(4, 0)], **CLIP), 259, 16)
    ones = torch.ones(2)
    terms = loss_terms("importance_sampling", {}, ones.log(), {"logprobs": ones, "advantages": ones}, torch.tensor([0, 1]))
    assert terms.tolist() == pytest.approx([-np.exp(-1)] * 2)


# ---- the endpoints


def encoded(
    model_id: str, seq_id: int, loss: str, data: list[TrainingDatum], *, forward_only: bool = False, config: Any = ()
) -> bytes:
    kinds = {"f": 1, "i": 2}
    made = [
        {
            "model_input": [{"encoded_text": {"tokens": np.array(one.tokens, np.int32).tobytes()}}],
            "loss_fn_inputs": [
                {
                    "key": name,
                    "value": {"dense": value.tobytes(), "dtype": kinds[value.dtype.kind], "shape": list(value.shape)},
                }
                for name, value in one.inputs.items()
            ],
        }
        for one in data
    ]
    fields = {"model_id": model_id, "seq_id": seq_id, "loss": loss, "data": made, "forward": forward_only, "config": config}
    return bytes(_messages()["Request"](**fields).SerializeToString())


class TinkerClient(httpx2.AsyncClient):
    """What the SDK does: posts, then waits for the promise."""

    async def ask(self, path: str, body: Any) -> Any:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = await self.post(f"/api/v1/{path}", **content)
        return answer.json() | {"status": answer.status_code}

    async def result(self, path: str, body: Any) -> Any:
        promise = await self.ask(path, body)
        assert promise["status"] == 200, promise
        while (
            answer := await self.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
        ).status_code == 408:
            pass
        if answer.headers["content-type"] == "application/x-protobuf":
            kind = "SampleResponse" if path == "asample" else "ForwardBackwardOutput"
            return _messages()[kind].FromString(answer.content)
        return answer.json()

    async def model(self, session: str, number: int = 0, rank: int = 4) -> str:
        lora = {"rank": rank, "seed": number}
        body = {"session_id": session, "model_seq_id": number, "base_model": "bytes", "lora_config": lora}
        return str((await self.result("create_model", body))["model_id"])

    async def sample(self, sampler: str, number: int, **more: Any) -> Any:
        params = {"max_tokens": 8, "stop": []} | more.pop("params", {})
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [70, 71, 72]}]}
        body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": params} | more
        return await self.result("asample", body)


@asynccontextmanager
async def serving(folder: Path, **changes: Any) -> AsyncIterator[tuple[TinkerClient, str]]:
    """A client with a session."""
    options = options_of(folder, api_key=KEY, **changes)
    loaded = load(options, byte_model(), byte_tokenizer(), flatten=False)
    trainer = AdapterLearner(byte_model(), folder / "saved", TrainerConfig())
    service = Service(replace(loaded, learner=trainer), options)
    app = ServerApp(KEY)
    app.app = app_of(service)
    try:
        transport, headers = httpx2.ASGITransport(app), {"X-API-Key": KEY}
        async with TinkerClient(transport=transport, base_url="http://localhost", timeout=30, headers=headers) as client:
            yield client, (await client.ask("create_session", {"sdk_version": "0"}))["session_id"]
    finally:
        assert service.engine.close()


async def trained_once(client: TinkerClient, model: str, seed: int, number: int = 1) -> None:
    """A large step."""
    body = encoded(model, number, "cross_entropy", [datum(8, seed, target_tokens=1, weights=1)])
    await client.result("forward_backward", body)
    adam = {"learning_rate": 0.05}
    await client.result("optim_step", {"model_id": model, "seq_id": number + 1, "adam_params": adam})


def drawn(response: Any) -> list[tuple[list[int], list[float]]]:
    return [
        (np.frombuffer(one.tokens, np.int32).tolist(), np.frombuffer(one.logprobs, np.float32).tolist())
        for one in response.sequences
    ]


async def scored(client: TinkerClient, model: str, number: int, tokens: list[int]) -> list[float]:
    """The log-probabilities that the learner gives to sampled tokens after the prompt."""
    whole = [70, 71, 72, *tokens]
    targets = {"target_tokens": np.array(whole[1:]), "weights": np.ones(len(whole) - 1, np.float32)}
    body = encoded(model, number, "cross_entropy", [TrainingDatum(whole[:-1], targets)], forward_only=True)
    output = await client.result("forward_backward", body)
    return np.frombuffer(output.loss_fn_outputs[0].fields[0].value.data, np.float32)[2:].tolist()


async def test_two_adapters_at_once_are_sampled_from_with_their_own_weights(tmp_path: Path) -> None:
    """Requests come interleaved; each has the log-probabilities of its adapter, and the version that it was pinned to."""
    async with serving(tmp_path, max_queue=64) as (client, session):
        models = [await client.model(session, number, rank=2 + number) for number in range(2)]
        for seed, model in enumerate(models):
            await trained_once(client, model, seed)
        saves = [{"model_id": model, "seq_id": 3, "sampling_session_seq_id": n} for n, model in enumerate(models)]
        samplers = [(await client.result("save_weights_for_sampler", one))["sampling_session_id"] for one in saves]
        await trained_once(client, models[0], 7, number=4)  # after the snapshot
        base = await client.ask(
            "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 9, "base_model": "bytes"}
        )
        samplers.append(base["sampling_session_id"])
        asked = [(n, sampler) for n in range(4) for sampler in samplers]
        answers = await asyncio.gather(*(client.sample(sampler, n, num_samples=2) for n, sampler in asked))
        for (n, sampler), answer in zip(asked, answers, strict=True):
            for index, (tokens, logprobs) in enumerate(drawn(answer)):
                weights = (await client.get(f"/api/v1/sequences/{sampler}:{n}:{index}")).json()["weights"]
                which = samplers.index(sampler)
                name, version = ("bytes", 0) if which == 2 else (models[which], 1)
                assert weights == [{"weights": name, "version": version, "start": 0, "end": 8}]
                if which == 1:
                    assert logprobs == pytest.approx(await scored(client, models[1], 10 + 2 * n + index, tokens), abs=1e-4)
        by_sampler = {sampler: drawn(answers[asked.index((0, sampler))]) for sampler in samplers}
        assert len({str(one) for one in by_sampler.values()}) == 3


async def test_new_weights_reach_sequences_in_progress_and_each_token_has_its_version(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, session):
        model = await client.model(session)
        number = iter(range(1, 1000))

        async def publish() -> str:
            wanted = {"model_id": model, "seq_id": next(number), "sampling_session_seq_id": next(number), "kind": "inflight"}
            return str((await client.result("save_weights_for_sampler", wanted))["sampling_session_id"])

        sampler = await publish()
        sampling = asyncio.create_task(client.sample(sampler, 0, params={"max_tokens": 90}))
        while not sampling.done():
            await trained_once(client, model, 3, 1000 + 2 * next(number))
            await publish()
        ((tokens, _),) = drawn(await sampling)
        weights = (await client.get(f"/api/v1/sequences/{sampler}:0:0")).json()["weights"]
        assert [one["start"] for one in weights][1:] == [one["end"] for one in weights][:-1]
        assert weights[-1]["end"] == len(tokens) == 90
        versions = [one["version"] for one in weights]
        assert versions == sorted(set(versions))
        assert len(versions) > 1
        again = await client.sample(sampler, 1)  # the same session goes on with the newest weights
        assert (await client.get(f"/api/v1/sequences/{sampler}:1:0")).json()["weights"][0]["version"] >= versions[-1]
        assert len(drawn(again)[0][0]) == 8


async def test_stops_prompt_logprobs_and_seeds(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, session):
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "bytes"}
        sampler = (await client.ask("create_sampling_session", body))["sampling_session_id"]
        free = await client.sample(sampler, 0, params={"seed": 5, "max_tokens": 12}, num_samples=2, prompt_logprobs=True)
        assert drawn(free)[0] != drawn(free)[1]
        of_prompt = np.frombuffer(free.prompt_logprobs, np.float32)
        logits = byte_model()(torch.tensor([[70, 71, 72]])).logits[0].log_softmax(-1)
        assert np.isnan(of_prompt[0])
        assert of_prompt[1:] == pytest.approx(logits[[0, 1], [71, 72]].detach().numpy(), abs=1e-4)
        tokens = drawn(free)[0][0]
        by_id = await client.sample(sampler, 1, params={"seed": 5, "max_tokens": 12, "stop": [tokens[4]]})
        assert drawn(by_id)[0][0] == tokens[: tokens.index(tokens[4]) + 1]
        assert (by_id.sequences[0].stop_reason, free.sequences[0].stop_reason) == (0, 1)
        text = byte_tokenizer().decode([next(token for token in tokens if token < 90)])
        by_text = await client.sample(sampler, 2, params={"seed": 5, "max_tokens": 12, "stop": text})
        assert drawn(by_text)[0][0] == tokens[: [byte_tokenizer().decode([t]) for t in tokens].index(text) + 1]


async def test_what_the_server_does_not_do_is_one_clear_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, session):
        model = await client.model(session)

        async def refused(path: str, body: Any, status: int, error: str) -> None:
            answer = await client.ask(path, body)
            assert (answer["status"], error in answer["error"]["message"]) == (status, True), answer

        body = {"session_id": session, "model_seq_id": 1, "base_model": "other", "lora_config": {"rank": 4}}
        await refused("create_model", body, 400, "there is no base model 'other' here; this server has 'bytes'")
        body |= {"base_model": "bytes", "optimizer_config": {"type": "dimuon"}}
        await refused("create_model", body, 400, "dimuon")
        await refused("create_model", body | {"optimizer_config": {}, "lora_config": {"rank": 0}}, 400, "$.lora_config.rank")
        await refused("forward_backward", b"\xff\xff", 400, "no ForwardBackwardRequest")
        await refused(
            "forward_backward", encoded("gone:train:0", 1, "ppo", []), 404, "there is no session of 'gone:train:0'"
        )
        await refused("forward_backward", encoded(model, 1, "stable_reinforce", []), 400, "there is no loss")
        await refused("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"beta1": 1.0}}, 400, "beta1")
        await refused("retrieve_future", {"request_id": f"{model}:77"}, 404, "there is no request")
        await refused("save_weights", {"model_id": model, "seq_id": 1, "path": "../x"}, 400, "no path here")
        body = {"session_id": session, "model_seq_id": 1, "path": "tinker://a/weights/b", "optimizer": False}
        await refused("load_weights", body, 400, "nothing is saved as tinker://a/weights/b")
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "bytes"}
        sampler = (await client.ask("create_sampling_session", body))["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [70] * 96}]}
        body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {}}
        await refused("asample", body, 400, "leaves no room")
        await refused("asample", body | {"topk_sample_logprobs": 2}, 400, "topk_sample_logprobs")
        await refused("asample", body | {"record_stability_info": True}, 400, "there is no stable_reinforce here")
        await refused("asample", body | {"prompt": {"chunks": [{"type": "image", "data": ""}]}}, 400, "prompt")
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [70]}]}
        await refused("asample", body | {"num_samples": 13}, 400, "num_samples: 1 to 12")
        await refused("asample", body | {"sampling_params": {"top_k": -2}}, 400, "top_k")
        wrong = await client.result("asample", body | {"sampling_params": {"max_tokens": 500}})
        assert wrong["category"] == "user"
        assert "can't fit" in wrong["error"]
        assert (await client.post("/api/v1/telemetry", json={})).json() == {"status": "accepted"}
        client.headers["X-API-Key"] = "tml-other"
        assert (await client.post("/api/v1/create_session", json={})).status_code == 401


async def test_a_repeated_request_is_the_same_one_and_a_session_ends_with_all_that_it_had(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, session):
        model = await client.model(session)
        body = encoded(model, 1, "cross_entropy", [datum(8, 0, target_tokens=1, weights=1)])
        results = [(await client.result("forward_backward", body)).metrics[0].value for _ in range(2)]
        assert results[0] == results[1]
        step = {"model_id": model, "seq_id": 2, "adam_params": {}}
        assert [(await client.result("optim_step", step))["metrics"]["version"] for _ in range(2)] == [1, 1]
        saved = await client.result("save_weights", {"model_id": model, "seq_id": 3, "path": "kept", "ttl_seconds": 3600})
        assert (await client.ask(f"sessions/{session}/finish", {}))["status"] == 200
        assert (await client.ask("optim_step", step))["status"] == 404
        new = (await client.ask("create_session", {}))["session_id"]
        body = {"session_id": new, "model_seq_id": 0, "path": saved["path"], "optimizer": True}
        loaded = (await client.result("load_weights", body))["model_id"]
        assert loaded == f"{new}:train:0"
        info = await client.ask("get_info", {"model_id": loaded})
        assert (info["lora_rank"], info["model_data"]["model_name"]) == (4, "bytes")


async def test_only_so_many_sequences_wait(tmp_path: Path) -> None:
    """The SDK sends a refused request again."""
    async with serving(tmp_path) as (client, session):
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "bytes"}
        sampler = (await client.ask("create_sampling_session", body))["sampling_session_id"]
        waiting = asyncio.create_task(client.sample(sampler, 0, num_samples=12, params={"max_tokens": 60}))
        await asyncio.sleep(0)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [70]}]}
        body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {"max_tokens": 4}}
        while not waiting.done() and (answer := await client.ask("asample", body))["status"] == 200:
            body["seq_id"] += 1
        assert answer["status"] == 429
        assert len(drawn(await waiting)) == 12
        with contextlib.suppress(asyncio.CancelledError):
            assert (await client.ask("asample", body))["status"] == 200


def test_a_server_that_trains_needs_a_key_that_the_sdk_sends(tmp_path: Path) -> None:
    for key in (None, "other"):
        with pytest.raises(UserError, match="the key of a Tinker server begins with tml-"):
            options_of(tmp_path, api_key=key, train=tmp_path).check()
    options_of(tmp_path, api_key=KEY, train=tmp_path).check()


def test_tensors_that_are_not_one_number_for_each_token_are_refused() -> None:
    good = datum(4, 0, target_tokens=1, weights=1)
    limit = {"key": "clip_low_threshold", "value": {"number": 0.7}}
    found = read_forward_backward(encoded("m", 1, "cross_entropy", [good], config=[limit]))
    assert (found.settings, found.backward) == ({"clip_low_threshold": 0.7}, True)
    assert found.data[0].tokens == good.tokens
    assert found.data[0].inputs["weights"] == pytest.approx(good.inputs["weights"])
    with pytest.raises(RequestError, match="loss_fn_config: mode is a text"):
        read_forward_backward(encoded("m", 1, "ppo", [good], config=[{"key": "mode", "value": {"text": "fast"}}]))
    bad = TrainingDatum(good.tokens, {"weights": np.zeros((2, 2), np.float32)})
    with pytest.raises(RequestError, match=r"datum 0: weights is of shape \(2, 2\); give 4 float32 or int64"):
        read_forward_backward(encoded("m", 1, "cross_entropy", [bad]))
