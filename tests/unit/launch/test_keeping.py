"""A process that is kept for another session: what it obeys, and the weights that its engine takes from the checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipelinerl.launch.session import StartPlan
from pipelinerl.launch.stages.rejoining import weights_of
from pipelinerl.models.state import checksum, load_weights, named_weights
from pipelinerl.parent_pipe import Turns
from tests.parity.models import make_model


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("name", ["llama", "llama-untied"])
def test_the_weights_of_a_checkpoint_are_those_that_were_published(name: str, shard: str, tmp_path: Path) -> None:
    saved, model = make_model(name, 1), make_model(name, 2)
    published = checksum(named_weights(saved))
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("model*.safetensors"))) > 1) is (shard == "20KB")
    update = weights_of(StartPlan(checkpoint=str(tmp_path), version=7, checksum=published), model)
    assert update is not None
    assert (update.version, update.checksum) == (7, published)
    load_weights(model, update.tensors)
    assert checksum(named_weights(model)) == published


def test_weights_that_were_not_published_are_not_taken(tmp_path: Path) -> None:
    """They were not, or are others, or do not fit the model: the engine waits for those of the trainer."""
    saved = make_model("llama", 1)
    saved.save_pretrained(tmp_path)
    published = checksum(named_weights(saved))
    plan = StartPlan(checkpoint=str(tmp_path), version=7, checksum=published)
    assert weights_of(plan, make_model("llama-untied")) is None
    assert weights_of(StartPlan(checkpoint=str(tmp_path), version=7), saved) is None
    assert weights_of(StartPlan(), saved) is None
    with torch.no_grad():
        saved.lm_head.weight[0, 0] += 1
    saved.save_pretrained(tmp_path)
    assert weights_of(plan, saved) is None


@pytest.fixture
def turns() -> Iterator[Turns]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    turns = Turns()
    turns.listen()
    yield turns
    for number, handler in before.items():
        signal.signal(number, handler)


def tell(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_a_process_waits_for_another_session_until_it_is_told(turns: Turns) -> None:
    reports: list[bool] = []

    def ready() -> None:
        reports.append(turns.over())
        threading.Timer(0.05, tell, [signal.SIGUSR2]).start()

    for sessions in range(3):
        assert not turns.over()
        tell(signal.SIGUSR2)
        assert turns.over()
        assert turns.another(ready)
        assert reports == [False] * (sessions + 1)
    assert not turns.another(ready), "the run is over"
    assert len(reports) == 3


@pytest.mark.parametrize("while_it_waits", [False, True])
def test_a_process_that_is_told_to_stop_takes_no_further_part(turns: Turns, while_it_waits: bool) -> None:
    tell(signal.SIGUSR2)
    if not while_it_waits:
        tell(signal.SIGTERM)
    assert not turns.another(lambda: tell(signal.SIGTERM))
    assert turns.over()
