"""Hostile files and strangers at ports: each is read, served or refused in one line; nothing runs and nothing explodes."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

import pytest

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.models.loading import load_model
from tests.security.mutations import false_safetensors, mutated_bytes, nested
from tests.unit.group_parts import receipt
from tests.unit.server_parts import byte_model
from tests.unit.weights.test_collective import KEY, Rig, Tied, rig, taken  # noqa: F401 - `rig` is a fixture

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
        pytest.param(nested(100_000), marks=pytest.mark.slow),
        pytest.param("{" * 50_000, marks=pytest.mark.slow),
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


def noise(rng: Random) -> bytes:
    """Random bytes, false lengths of messages, and parts of the protocol."""
    text = rng.randbytes(rng.randint(0, 200))
    return rng.choice(
        (
            text,
            struct.pack("!i", rng.choice((-1, -2, 0, 1, 255, 257, 2**31 - 1))) + text,
            struct.pack("!iQ", -1, rng.choice((0, 1, 2**40, 2**64 - 1))) + text,
            struct.pack("!i", 11 + len(text)) + b"#CHALLENGE#" + text,
            struct.pack("!i", 9) + b"#WELCOME#" + text,
            b"GET / HTTP/1.1\r\n\r\n",
        )
    )


def pester(port: int, rng: Random) -> None:
    """Connect, say something, and leave in one of several ways."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for _ in range(rng.randint(0, 3)):
            connection.sendall(noise(rng))
        if rng.random() < 0.3:
            connection.recv(100)
        if rng.random() < 0.3:  # a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize(("seed", "count"), [(0, 300), pytest.param(1, 3000, marks=pytest.mark.exhaustive)])
def test_the_store_of_a_weight_broadcast(seed: int, count: int, rig: Rig) -> None:  # noqa: F811
    """Some strangers stay connected and silent. The receiver then joins, and gets exactly the weights."""
    rng = Random(seed)
    sender = rig.sender(join_timeout_s=60.0, timeout_s=60.0)
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", sender.port), timeout=10))
        for _ in range(count):
            pester(sender.port, rng)
        receiver = rig.receiver(sender)
        weights = Tied().state_dict()
        checksum = sender.send(1, weights)
        for _ in range(20):  # in the middle of an update, too
            pester(sender.port, rng)
        update = taken(receiver)
        assert update.checksum == checksum
        receiver.acknowledge(receipt(1, checksum))
