"""A Tinker server as a real process, with the official SDK as its client, and the loops of its cookbook as they are."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import torch

from tests.integration.runs import start, until
from tests.unit.server_parts import byte_model, byte_tokenizer

tinker = pytest.importorskip("tinker")

pytestmark = pytest.mark.slow
KEY = "tml-for-tests"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@contextmanager
def serving(folder: Path, model: str, *flags: str) -> Iterator[str]:
    """The URL of a server that saves in `folder / "saved"`."""
    (ready := folder / "ready.json").unlink(missing_ok=True)
    files = ("--train", str(folder / "saved"), "--ready-file", str(ready))
    key = f"import os; os.environ['TINKER_API_KEY'] = {KEY!r}"
    process = start("serve", model, "--port", "0", *files, *flags, prepare=key)
    try:
        until(ready.exists, process)
        yield msgspec.json.decode(ready.read_bytes())["url"]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("demo"), "demo", "--engine.slots", "8") as url:
        yield url


def example(tokens: Sequence[int], given: int) -> Any:
    """Cross-entropy of all tokens after the first `given`."""
    weights = torch.tensor([0.0] * (given - 1) + [1.0] * (len(tokens) - given))
    targets = tinker.TensorData.from_torch(torch.tensor(tokens[1:]))
    inputs = {"target_tokens": targets, "weights": tinker.TensorData.from_torch(weights)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def test_two_clients_models_learn_apart_are_sampled_from_and_go_on_after_a_load(demo: str) -> None:
    service = tinker.ServiceClient(base_url=demo)
    models = [service.create_lora_training_client("demo", rank=rank, seed=rank).result() for rank in (4, 8)]
    tokenizer = models[0].get_tokenizer()
    prompt = tokenizer.encode("12,18:", add_special_tokens=False)
    wanted = [prompt + tokenizer.encode(text, add_special_tokens=False) for text in ("777", "222")]
    losses: list[list[float]] = [[], []]
    for _ in range(12):
        asked = [
            model.forward_backward([example(tokens, 6)] * 2, "cross_entropy")
            for model, tokens in zip(models, wanted, strict=True)
        ]
        steps = [model.optim_step(tinker.AdamParams(learning_rate=0.02)) for model in models]
        for one, found in zip(losses, asked, strict=True):
            one.append(found.result().metrics["loss:sum"])
        assert all(step.result().metrics["grad_norm"] > 0 for step in steps)
    assert all(one[-1] < one[0] / 3 for one in losses), losses
    samplers = [model.save_weights_and_get_sampling_client().result() for model in models]
    greedy = tinker.SamplingParams(max_tokens=3, temperature=0.0)
    inputs = tinker.ModelInput.from_ints(prompt)
    asked = [sampler.sample(inputs, 2, greedy) for sampler in samplers * 3]
    texts = [tokenizer.decode(future.result().sequences[0].tokens) for future in asked]
    assert texts == ["777", "222"] * 3

    sampled = samplers[1].sample(inputs, 1, tinker.SamplingParams(max_tokens=20)).result().sequences[0]
    tokens = [*prompt, *sampled.tokens]
    (of_learner,) = models[1].forward([example(tokens, 6)], "cross_entropy").result().loss_fn_outputs
    assert of_learner["logprobs"].tolist()[5:] == pytest.approx(sampled.logprobs, abs=1e-4)
    of_prompt = samplers[1].compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    assert of_prompt[0] is None
    assert of_prompt[6:] == pytest.approx(sampled.logprobs, abs=1e-4)

    state = models[0].save_state("after-12").result().path
    loaded = service.create_training_client_from_state_with_optimizer(state).result()
    assert loaded.get_info().lora_rank == 4
    for model in (models[0], loaded):
        model.forward_backward([example(wanted[0], 6)], "cross_entropy").result()
        model.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    after = [
        model.forward([example(wanted[0], 6)], "cross_entropy").result().metrics["loss:sum"] for model in (models[0], loaded)
    ]
    assert after[0] == after[1]
    named = models[1].save_weights_for_sampler("final").result().path
    again = service.create_sampling_client(model_path=named).result()
    assert tokenizer.decode(again.sample(inputs, 1, greedy).result().sequences[0].tokens) == "222"
    with pytest.warns(FutureWarning, match="load_state"):
        models[1].load_state_with_optimizer(state).result()
    models[1].forward_backward([example(wanted[0], 6)], "cross_entropy").result()
    models[1].optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    assert models[1].forward([example(wanted[0], 6)], "cross_entropy").result().metrics["loss:sum"] == after[0]


def test_a_custom_loss_has_its_gradient(demo: str) -> None:
    model = tinker.ServiceClient(base_url=demo).create_lora_training_client("demo", rank=4, seed=0).result()
    data = [example([5, 6, 7, 8, 9], 2)]

    def squares(_: Any, logprobs: Any) -> Any:
        return sum((one**2).sum() for one in logprobs), {}

    losses = []
    for _ in range(8):
        result = model.forward_backward_custom(data, squares)
        model.optim_step(tinker.AdamParams(learning_rate=0.003))
        losses.append(result.result().metrics["loss:sum"])
    assert losses[-1] < losses[0] / 2, losses


def test_weights_change_within_sequences_that_are_sampled_in_flight(demo: str) -> None:
    model = tinker.ServiceClient(base_url=demo).create_lora_training_client("demo", rank=4, seed=0).result()
    sampler = model.save_weights_and_get_sampling_client(kind="inflight").result()
    params = tinker.SamplingParams(max_tokens=480, stop=[])
    asked = sampler.sample(tinker.ModelInput.from_ints([5, 6, 7]), 8, params)
    while not asked.future().done():
        model.forward_backward([example([5, 6, 7, 8], 2)], "cross_entropy").result()
        model.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        model.save_weights_and_get_sampling_client(kind="inflight").result()
    for sequence in asked.result().sequences:
        answer = httpx2.get(f"{demo}/api/v1/sequences/{sequence.sequence_id}", headers={"X-API-Key": KEY})
        versions = [one["version"] for one in answer.json()["weights"]]
        assert versions == sorted(set(versions))
        assert len(versions) > 1
        assert answer.json()["weights"][-1]["end"] == len(sequence.tokens) == 480


def test_errors_reach_the_user_as_one_line(demo: str) -> None:
    service = tinker.ServiceClient(base_url=demo)
    model = service.create_lora_training_client("demo", rank=4).result()
    with pytest.raises(tinker.BadRequestError, match="there is no loss 'stable_reinforce' here; there are cross_entropy, "):
        model.forward_backward([example([5, 6, 7], 2)], "stable_reinforce").result()
    with pytest.raises(tinker.BadRequestError, match="loss_fn_config: ppo has clip_low_threshold, clip_high_threshold"):
        model.forward_backward([example([5, 6, 7], 2)], "ppo", {"clip_range": 0.2}).result()
    with pytest.raises(tinker.BadRequestError, match="there is no base model 'other' here; this server has 'demo'"):
        service.create_sampling_client(base_model="other").result()
    sampler = service.create_sampling_client(base_model="demo").result()
    with pytest.raises(tinker.RequestFailedError, match="can't fit: 3 prompt tokens"):
        sampler.sample(tinker.ModelInput.from_ints([5, 6, 7]), 1, tinker.SamplingParams(max_tokens=9999)).result()
    with pytest.raises(tinker.AuthenticationError, match="send this server's key"):
        tinker.ServiceClient(base_url=demo, api_key="tml-other").create_sampling_client(base_model="demo").result()


def test_the_example_learns(demo: str) -> None:
    command = [sys.executable, str(ROOT / "examples/tinker_loop.py"), demo]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    rewards = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5, rewards


# ---- the cookbook

BASE = "Qwen/Qwen3-8B-Base"
"""The cookbook knows models by name; in the test's folder a tiny one has it. Its renderer writes plain text."""
SHARE = (r"\boxed{3}", r"\boxed{4}")
"""The tiny model ends every text with one of these, each a token: with the first one in a quarter of the cases."""


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and the two data sets of the loops."""
    folder = tmp_path_factory.mktemp("kitchen")
    tokenizer, model = byte_tokenizer(template=None), byte_model()
    tokenizer.add_tokens(list(SHARE))
    model.resize_token_embeddings(len(tokenizer))
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        ids = torch.randint(3, 259, (16, 24), generator=generator)
        ids[:, -2], ids[:, -1] = 259 + (torch.rand(16, generator=generator) > 0.25), tokenizer.eos_token_id
        logits = model(ids).logits[:, -3:-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -2:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.config.max_position_embeddings = 2048
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / BASE)
    tokenizer.save_pretrained(folder / BASE)
    chat = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": SHARE[0]}]
    sets = {
        "openai/gsm8k/main/train.jsonl": {"question": "How many?", "answer": "One and two are\n#### 3"},
        "HuggingFaceH4/no_robots/train.jsonl": {"prompt": "How many?", "messages": chat},
    }
    for name, row in sets.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(f"{json.dumps(row)}\n" * 64)
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
    (folder / "openai/gsm8k/README.md").write_text(card)
    return folder


@pytest.mark.skipif(importlib.util.find_spec("tinker_cookbook") is None, reason="needs tinker_cookbook")
@pytest.mark.parametrize(
    ("loop", "flags", "metric", "rises"),
    [
        ("rl_loop", ["loss_fn=importance_sampling", "group_size=8", "max_tokens=4", "save_every=3"], "reward/total", True),
        ("sl_loop", [], "train_mean_nll", False),
    ],
)
def test_a_loop_of_the_cookbook_runs_unmodified(
    kitchen: Path, monkeypatch: pytest.MonkeyPatch, *, loop: str, flags: list[str], metric: str, rises: bool
) -> None:
    monkeypatch.chdir(kitchen)
    with serving(kitchen, BASE, "--engine.slots", "16", "--engine.max_length", "768") as url:
        common = [f"base_url={url}", f"model_name={BASE}", f"log_path={kitchen / loop}", "batch_size=4", "max_steps=8"]
        command = [
            sys.executable,
            "-m",
            f"tinker_cookbook.recipes.{loop}",
            *common,
            "learning_rate=0.01",
            "lora_rank=8",
            *flags,
        ]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(kitchen / "cache")}
        done = subprocess.run(
            command, cwd=kitchen, env=environment, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    values = [json.loads(line) for line in (kitchen / loop / "metrics.jsonl").read_text().splitlines()]
    values = [one[metric] for one in values if metric in one]
    assert len(values) == 8
    gain = sum(values[-2:]) / 2 - sum(values[:2]) / 2
    assert gain > 0.3 if rises else gain < -0.5, values
    assert len(list(kitchen.glob("saved/*/weights/*/state.json"))) >= 1
