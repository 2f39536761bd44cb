"""Our backend inside vLLM, without vLLM: which files it takes, and that it refuses before it touches the model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import checksum, write_safetensors
from pipelinerl.serving.vllm.messages import REFUSED
from pipelinerl.serving.vllm.plugin import TransferBackend, refresh_heads
from pipelinerl.serving.wire import ProcessGroupRequest
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
from tests.unit.serving.vllm.test_vllm_start import until
from tests.unit.weights.relay import Relay


class Backend(TransferBackend):
    """Keeps what it would load."""

    taken: Mapping[str, torch.Tensor] | None = None

    def receive_weights(self, update_info: Mapping[str, torch.Tensor]) -> None:
        self.taken = dict(update_info)


@pytest.fixture
def transfer(tmp_path: Path) -> Backend:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(4)}, folder / "model.safetensors")
    backend = Backend()
    backend.model_config = SimpleNamespace(model=str(folder))
    backend.parallel_config = SimpleNamespace(world_size=1)
    backend.device = torch.device("cpu")
    return backend


def good() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.ones(2, 3), "b.weight": torch.arange(4.0), "alias.weight": torch.ones(2, 3)}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    path.unlink(missing_ok=True)
    write_safetensors(tensors, path)
    return {"path": str(path), "version": 2, "checksum": checksum(tensors)}


def assert_taken(transfer: Backend) -> None:
    assert transfer.taken is not None
    assert transfer.taken.keys() == good().keys()
    assert all(torch.equal(tensor, good()[name]) for name, tensor in transfer.taken.items())
    transfer.taken = None


def test_a_good_file_is_loaded_whole(tmp_path: Path, transfer: Backend) -> None:
    transfer.start_weight_update()
    transfer.update_weights(write(tmp_path / "v2.safetensors", good()))
    assert_taken(transfer)


def refusal(transfer: Backend, info: dict[str, Any]) -> str:
    with pytest.raises(WeightUpdateError) as caught:
        transfer.update_weights(info)
    assert str(caught.value).startswith(REFUSED)
    assert transfer.taken is None, "the model was touched"
    return str(caught.value)


def test_what_is_not_the_announced_weights_is_refused_before_the_model_is_touched(tmp_path: Path, transfer: Backend) -> None:
    path = tmp_path / "v2.safetensors"
    info = write(path, good())
    assert "arrived damaged: checksum" in refusal(transfer, info | {"checksum": "0" * 32})
    missing = {name: tensor for name, tensor in good().items() if name != "b.weight"}
    assert "1 weights are missing" in refusal(transfer, write(path, missing))
    longer = good() | {"b.weight": torch.ones(5)}
    assert "1 have another shape, among them b.weight" in refusal(transfer, write(path, longer))
    broken = good() | {"b.weight": good()["b.weight"] * float("inf")}
    assert "1 weights are not finite, among them b.weight" in refusal(transfer, write(path, broken))


# ---------------------------------------------------------------------------------------------- by the trainer's broadcast


def join(sender: CollectiveWeightSender, **changes: Any) -> dict[str, Any]:
    group = ProcessGroupRequest(host=sender.host, port=sender.port, key="secret", index=0, timeout_s=10.0)
    return msgspec.to_builtins(group) | changes


def test_what_was_broadcast_is_loaded_whole(transfer: Backend) -> None:
    with closing(CollectiveWeightSender("127.0.0.1", "secret", 1, Relay().trainer)) as sender:
        transfer.init_transfer_engine(transfer.parse_init_info(join(sender)))
        digest = sender.send(2, good())
        group: Any = transfer._incoming._group
        assert until(lambda: group.newest() is not None, 10.0)
        transfer.start_weight_update()
        transfer.update_weights({"version": 2, "checksum": digest})
        assert_taken(transfer)
        transfer.shutdown()


def test_a_broadcast_that_can_not_be_joined_is_refused(transfer: Backend) -> None:
    assert "no broadcast was joined" in refusal(transfer, {"version": 2, "checksum": ""})
    with closing(CollectiveWeightSender("127.0.0.1", "secret", 2, Relay().trainer)) as sender:
        with pytest.raises(WeightUpdateError, match=f"^{REFUSED}.*in 0.2 s"):
            transfer.init_transfer_engine(transfer.parse_init_info(join(sender, timeout_s=0.2)))
        transfer.parallel_config = SimpleNamespace(world_size=2)
        with pytest.raises(WeightUpdateError, match=r"this vLLM has 2: set weights\.kind to shared"):
            transfer.init_transfer_engine(transfer.parse_init_info(join(sender)))


class ParallelLMHead(nn.Module):
    refreshed = 0
    quant_method: Any = None


def test_heads_prepare_their_weights_again() -> None:
    head = type("OurHead", (ParallelLMHead,), {})()
    head.quant_method = SimpleNamespace(process_weights_after_loading=lambda module: setattr(module, "refreshed", 1))
    refresh_heads(nn.ModuleDict({"embed": nn.Linear(2, 2), "lm_head": head}))
    assert head.refreshed == 1
    head.quant_method = None
    with pytest.raises(WeightUpdateError, match="lm_head"):
        refresh_heads(nn.ModuleDict({"lm_head": head}))
