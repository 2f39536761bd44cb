"""Our backend inside vLLM, without vLLM: which files it takes, and that it refuses before it touches the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import checksum
from pipelinerl.remote.weights_file import write_safetensors
from pipelinerl.vllm.messages import REFUSED, InitInfo
from pipelinerl.vllm.plugin import FileTransfer, refresh_heads


class Untouchable(nn.Module):
    """A model that must not be loaded into."""

    def load_weights(self, _weights: Any) -> set[str]:
        raise AssertionError("the model was touched")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(4)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def transfer(tmp_path: Path, checkpoint: Path) -> FileTransfer:
    weights = tmp_path / "weights"
    weights.mkdir()
    backend = FileTransfer()
    backend.model = Untouchable()
    backend.model_config = SimpleNamespace(model=str(checkpoint))
    backend.init_transfer_engine(InitInfo(str(weights)))
    return backend


def good() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.ones(2, 3), "b.weight": torch.arange(4.0), "alias.weight": torch.ones(2, 3)}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    path.unlink(missing_ok=True)
    write_safetensors(path, tensors)
    return {"path": str(path), "version": 2, "checksum": checksum(tensors)}


class Taken(FileTransfer):
    """Keeps what it would load."""

    def receive_weights(self, update_info: Any) -> None:
        self.taken = dict(update_info)


def test_a_good_file_is_loaded_whole(tmp_path: Path, transfer: FileTransfer) -> None:
    taken = Taken()
    taken.__dict__.update(transfer.__dict__)
    taken.start_weight_update()
    taken.update_weights(write(tmp_path / "weights" / "v2.safetensors", good()))
    assert taken.taken.keys() == good().keys()
    assert all(torch.equal(tensor, good()[name]) for name, tensor in taken.taken.items())


def refusal(transfer: FileTransfer, info: dict[str, Any]) -> str:
    with pytest.raises(WeightUpdateError) as caught:
        transfer.update_weights(info)
    assert str(caught.value).startswith(REFUSED)
    return str(caught.value)


def test_what_is_not_the_announced_weights_is_refused_before_the_model_is_touched(
    tmp_path: Path, transfer: FileTransfer
) -> None:
    path = tmp_path / "weights" / "v2.safetensors"
    info = write(path, good())
    assert "has checksum" in refusal(transfer, info | {"checksum": "0" * 32})
    assert "Expected `int`" in refusal(transfer, info | {"version": "2"})
    assert "unknown field" in refusal(transfer, info | {"weights": []})

    missing = {name: tensor for name, tensor in good().items() if name != "b.weight"}
    assert "1 weights are missing" in refusal(transfer, write(path, missing))
    assert "1 of another shape, among them b.weight" in refusal(transfer, write(path, good() | {"b.weight": torch.ones(5)}))

    path.write_bytes(path.read_bytes()[:-4])
    assert "can't be read" in refusal(transfer, info)
    path.unlink()
    assert "can't be read" in refusal(transfer, info)


def test_files_come_from_below_the_named_directory_alone(tmp_path: Path, transfer: FileTransfer) -> None:
    info = write(tmp_path / "outside.safetensors", good())
    link = tmp_path / "weights" / "link.safetensors"
    link.symlink_to(tmp_path / "outside.safetensors")
    for path in (info["path"], str(tmp_path / "weights" / ".." / "outside.safetensors"), str(link)):
        assert "is not below" in refusal(transfer, info | {"path": path})

    fresh = FileTransfer()
    assert "no directory" in refusal(fresh, info)
    with pytest.raises(WeightUpdateError, match="is not a directory"):
        fresh.init_transfer_engine(InitInfo(str(tmp_path / "nowhere")))


class ParallelLMHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.refreshed = 0
        self.quant_method = SimpleNamespace(process_weights_after_loading=self.refresh)

    def refresh(self, module: nn.Module) -> None:
        assert module is self
        self.refreshed += 1


def test_heads_prepare_their_weights_again() -> None:
    head = type("OurHead", (ParallelLMHead,), {})()
    refresh_heads(nn.ModuleDict({"embed": nn.Linear(2, 2), "lm_head": head}))
    assert head.refreshed == 1
    head.quant_method = None
    with pytest.raises(WeightUpdateError, match="lm_head"):
        refresh_heads(nn.ModuleDict({"lm_head": head}))
