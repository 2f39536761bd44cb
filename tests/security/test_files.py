"""Hostile files: run files, records and weights. Each is read, or refused in one line; nothing runs and nothing explodes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.models.loading import load_model
from tests.security.mutations import false_safetensors, mutated_bytes, nested
from tests.unit.server_parts import byte_model

RUN_FILE = b"""
model: {path: demo}
environment: {kind: gcd, args: {}}
trainer: {steps: 3, learning_rate: 1e-3, batch_size: 16}
schedule: {kind: pipeline, max_lag: 4}
engine: {slots: 8, kv_on_update: keep}
"""
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12)]
)
"""Nine to the twelfth texts, in a file of one kilobyte."""


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        f"environment: {{kind: gcd, args: {{{', '.join(BOMB.splitlines())}}}}}",
        "environment: {kind: gcd, args: &a {self: *a}}",
        "trainer: &a [*a]",
        nested(100_000),
        "{" * 50_000,
        "!!python/object/apply:os.system ['touch ran']",
        "environment: {kind: !!python/name:os.system '', args: {}}",
        "trainer: {steps: " + "9" * 10_000 + "}",
        "trainer: {steps: 0x" + "f" * 10_000 + "}",
        "trainer: {steps: 1e999}",
        'trainer: {"\\u0000": 1}',
        "? [a, b]\n: c",
        "\ufeff\ufffe: 1",
    ],
    ids=range(14),
)
def test_run_files_that_are_bombs_or_code(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as refused:
        load_config(path)
    assert len(str(refused.value)) < 2000
    assert "\n" not in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(("seed", "count"), [(0, 200), pytest.param(1, 3000, marks=pytest.mark.exhaustive)])
def test_mutated_run_files(seed: int, count: int, tmp_path: Path) -> None:
    rng = Random(seed)
    path = tmp_path / "run.yaml"
    for _ in range(count):
        path.write_bytes(mutated_bytes(RUN_FILE, rng))
        refused = ""
        try:
            load_config(path)
        except UserError as error:
            refused = str(error)
        _, *others = refused.split("\n")  # several mistakes have a line each
        assert all(line.strip().startswith((f"{path}:", "... and ")) for line in others), refused


@pytest.mark.parametrize(("seed", "count"), [(0, 30), pytest.param(1, 300, marks=pytest.mark.exhaustive)])
def test_models_with_false_headers(seed: int, count: int, tmp_path: Path) -> None:
    rng = Random(seed)
    byte_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for _ in range(count):
        path.write_bytes(false_safetensors(whole, rng))
        with suppress(PipelineRLError):
            load_model(ModelConfig(path=str(tmp_path)), "cpu")
    path.write_bytes(whole)
    load_model(ModelConfig(path=str(tmp_path)), "cpu")
