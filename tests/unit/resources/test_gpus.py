"""What a run uses of a machine's GPUs if its run file does not say, and that nothing that it says is changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st

from pipelinerl.config.load import config_from_yaml, config_of_values, config_to_yaml, load_config, validate
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.launch import checks, run
from pipelinerl.launch.checks import TryoutReport, dry_run
from pipelinerl.models.folder import resolve_path
from pipelinerl.resources import gpus
from pipelinerl.resources.gpus import choose, keys_given, may_choose
from pipelinerl.resources.machine import Memory
from pipelinerl.resources.memory import MemoryCheck
from pipelinerl.resources.shape import ModelShape

ROOT = Path(__file__).parents[3]
GB = 10**9
H100, H200 = 85 * GB, 150 * GB
REAL = ["--model.path=a/model", "--trainer.batch_size=512"]


def qwen(layers: int, hidden: int, feed_forward: int, heads: int, kv_heads: int) -> ModelShape:
    """The sizes of a Qwen2.5, without its biases and norms."""
    vocabulary = 151936 if hidden < 2000 else 152064
    size, tied = 64 if hidden < 1024 else 128, hidden < 2000
    one = {"q": (heads * size, hidden), "k": (kv_heads * size, hidden), "v": (kv_heads * size, hidden)}
    one |= {"o": (hidden, heads * size), "gate": (feed_forward, hidden), "up": (feed_forward, hidden)}
    one |= {"down": (hidden, feed_forward)}
    linears = {f"layers.{layer}.{name}_proj.weight": of for layer in range(layers) for name, of in one.items()}
    linears["lm_head.weight"] = (vocabulary, hidden)
    parameters = sum(rows * columns for rows, columns in linears.values()) + (0 if tied else vocabulary * hidden)
    return ModelShape(
        parameters=parameters,
        linears=linears,
        head="lm_head.weight",
        tied=tied,
        layers=layers,
        hidden=hidden,
        query_width=heads * size,
        kv_width=2 * kv_heads * size * layers,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        max_length=32768,
    )


MODELS = {
    "0.5B": qwen(24, 896, 4864, 14, 2),
    "1.5B": qwen(28, 1536, 8960, 12, 2),
    "7B": qwen(28, 3584, 18944, 28, 4),
    "32B": qwen(64, 5120, 27648, 40, 8),
}


def chosen(model: str, count: int, memory: int = H100, *flags: str, vllm: bool = False) -> dict[str, Any]:
    config = load_config(os.devnull, [*REAL, *flags])
    return dict(choose(config, keys_given(config), [memory] * count, MODELS[model], vllm=vllm)[0])


def row(model: str, count: int, *flags: str) -> str:
    """A row of the tables in docs/gpu.md, for GPUs of 85 GB with 512 rollouts a step."""
    config = load_config(os.devnull, [*REAL, *flags])
    found, line = choose(config, keys_given(config), [H100] * count, MODELS[model], vllm=False)
    fits = "can't be trained" not in line
    values = (
        found.get("trainer.ranks", 1),
        found.get("engine.processes", 1),
        found["engine.slots"],
        f"{found['trainer.micro_batch_tokens']:,}",
        "yes" if found["trainer.gradient_checkpointing"] else "no",
    )
    name = f"{model}{' with `--model.lora {}`' if flags else ''}"
    return f"| {name} | {' | '.join(map(str, values)) if fits else 'does not fit | | | |'} |"


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("model", MODELS)
def test_the_tables_in_the_documentation(count: int, model: str) -> None:
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    table = page.partition(f"### {count} GPU")[2].partition("\n#")[0].splitlines()
    rows = [row(model, count)]
    if "does not fit" in rows[0]:
        rows.append(row(model, count, "--model.lora={}"))
    assert set(rows) <= set(table), "\n".join(rows)


def test_what_the_run_file_says_stays_and_decides_the_rest() -> None:
    assert chosen("7B", 8, H100, "--trainer.ranks=4")["engine.processes"] == 4
    assert "trainer.ranks" not in chosen("7B", 8, H100, "--trainer.ranks=4")
    assert "model.head_dtype" not in chosen("1.5B", 1, H200, "--model.dtype=float32")
    named = chosen("1.5B", 8, H200, "--engine.device=cuda:0", "--trainer.device=cuda:0")
    assert not {"engine.processes", "trainer.ranks"} & named.keys(), "they share the GPU that they name"
    assert chosen("1.5B", 8, H200, "--trainer.device=cuda:3")["engine.processes"] == 7
    away = chosen("1.5B", 4, H200, "--engine.kind=http", "--engine.urls=[http://h:1]")
    assert {key for key in away if key.startswith("engine.")} == set(), "they have their own settings"
    assert chosen("1.5B", 8, H200, "--schedule.kind=conventional", "--schedule.steps_per_round=4")["engine.slots"] == 256
    assert chosen("1.5B", 8, H200, "--trainer.batch_size=70")["engine.slots"] == 20


@settings(deadline=None, max_examples=25)
@over(
    st.sets(
        st.sampled_from(
            [
                ("engine.slots", 48),
                ("engine.processes", 2),
                ("engine.device", "cuda"),
                ("trainer.device", "cuda:0"),
                ("trainer.ranks", 2),
                ("trainer.micro_batch_tokens", 4096),
                ("trainer.gradient_checkpointing", False),
                ("model.dtype", "float32"),
                ("model.head_dtype", None),
                ("trainer.compile", True),
            ]
        )
    ),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
)
def test_a_key_that_is_set_is_never_changed(keys: set[tuple[str, Any]], count: int, vllm: bool) -> None:
    try:
        config = load_config(os.devnull, {"model.path": "a/model", **dict(keys)})
    except ConfigError:
        return
    found, _ = choose(config, keys_given(config), [H100] * count, MODELS["0.5B"], vllm=vllm)
    assert not found.keys() & {key for key, _ in keys}
    after = config_of_values(found, config)
    for key, value in keys:
        section, _, name = key.partition(".")
        assert getattr(getattr(after, section), name) == value


def test_vllm_is_chosen_where_it_can_have_gpus_of_its_own_and_do_what_the_run_file_says() -> None:
    eight = chosen("1.5B", 8, H200, vllm=True)
    assert {key: eight[key] for key in ("engine.kind", "engine.servers")} == {"engine.kind": "vllm", "engine.servers": 7}
    assert not {"engine.processes", "model.head_dtype"} & eight.keys()
    parallel = ("--engine.kind=vllm", "--engine.python=p", "--engine.vllm_args=[--tensor-parallel-size=2]")
    assert chosen("1.5B", 8, H200, *parallel)["engine.servers"] == 3, "of two GPUs each, beside the trainer"
    assert "engine.kind" not in chosen("1.5B", 1, H200, vllm=True)
    for flag in ("--engine.kind=local", "--model.head_dtype=float32", "--engine.kv_on_update=recompute"):
        assert "engine.kind" not in chosen("1.5B", 8, H200, flag, vllm=True), flag


def test_the_line_says_what_was_chosen_why_and_what_does_not_fit() -> None:
    config = load_config(os.devnull, REAL)
    line = choose(config, keys_given(config), [H100], MODELS["7B"], vllm=False)[1]
    assert line.startswith(
        "chosen for 1 GPU with 85 GB free: engine.device cuda:0, trainer.device cuda:0, model.dtype bfloat16 (with"
    )
    assert line.endswith("; all 7.6B parameters can't be trained here, low-rank adapters can: --model.lora {}")
    unknown, line = choose(config, keys_given(config), [H100] * 4, None, vllm=False)
    assert unknown["engine.processes"] == 3
    assert "engine.slots" not in unknown
    assert line.endswith("once the model has been downloaded")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], True),
        (["--engine.device=cpu"], False),
        (["--model.path=demo"], False),
        (["--launch.kind=embedded"], False),
        (["--launch.kind=ray", "--weights.kind=collective"], False),
    ],
)
def test_runs_that_stay_as_they_are(flags: list[str], expected: bool) -> None:
    config = load_config(os.devnull, [*REAL, *flags])
    assert may_choose(config, keys_given(config)) == expected


def with_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "usable_gpus", lambda: 2)
    monkeypatch.setattr("pipelinerl.resources.placement.usable_gpus", lambda: 2)
    monkeypatch.setattr(gpus, "memory_of", lambda _: Memory(H100, H100))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("pipelinerl.models.device.require_device", lambda _: None)


def test_memory_that_other_processes_use_is_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_two_gpus(monkeypatch)
    monkeypatch.setattr(gpus, "shape_of", lambda _: MODELS["1.5B"])
    config = load_config(os.devnull, REAL)
    alone, _ = gpus.with_gpus(config, 2)
    monkeypatch.setattr(gpus, "memory_of", lambda device: Memory(H100, H100 if device == "cuda:1" else 48 * GB))
    beside, lines = gpus.with_gpus(config, 2)
    assert lines[0].startswith("chosen for 2 GPUs with 48 GB free: ")
    assert (alone.trainer.gradient_checkpointing, beside.trainer.gradient_checkpointing) == (False, True)


def test_a_run_begins_with_what_was_chosen_and_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_two_gpus(monkeypatch)
    seen: list[Any] = []

    def session(config: RunConfig, *_: object, notices: list[str], **__: object) -> dict[str, Any]:
        seen.append((config, notices))
        return {}

    monkeypatch.setattr(run, "_train_session", session)
    monkeypatch.setattr(run, "check_before_the_start", lambda *_: MemoryCheck([]))
    config = load_config(os.devnull, [f"--model.path={resolve_path('demo')}", "--environment.kind=gcd"])
    run.train(config)
    run.train(config_from_yaml(config_to_yaml(seen[0][0])))  # as a resume reads it
    (first, lines), (second, nothing) = seen
    assert lines[0].startswith("chosen for 2 GPUs with 85 GB free: engine.device cuda, trainer.device cuda, model.dtype ")
    assert (first.model.dtype, first.model.head_dtype, first.engine.device) == ("bfloat16", "float32", "cuda")
    assert (second, nothing) == (first, [])
    monkeypatch.setattr(checks, "try_environment", lambda _: TryoutReport())
    report = dry_run(config)
    assert report[0] == lines[0]
    assert "  this machine, " in report[2]
    assert "training (GPU 0), generation (GPU 1)" in report[2]
    assert keys_given(config_from_yaml(config_to_yaml(config, only_given=True))) == keys_given(validate(config))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert checks.settled(config) == (config, []), "PyTorch can't use them"
