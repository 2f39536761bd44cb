"""Files of tensors: the bytes that safetensors writes, and what its format can't have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelinerl.models.state import TYPES, write_safetensors


def of_all_types() -> dict[str, Tensor]:
    found = {}
    for i, dtype in enumerate(TYPES):
        name = str(dtype).removeprefix("torch.")
        found |= {f"{i % 3}.{name}": torch.arange(5).to(dtype), f"{i % 2}.{name}.one": torch.ones(()).to(dtype)}
    return {"none": torch.empty(0, 4), **found}


def test_the_file_is_the_one_of_safetensors_for_every_type_that_it_has(tmp_path: Path) -> None:
    tensors = of_all_types()
    write_safetensors(tensors, tmp_path / "own", {"format": "pt"})
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "own").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert load_file(tmp_path / "own").keys() == tensors.keys()
    assert (tmp_path / "own").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_a_type_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x is of type torch\.complex128"):
        write_safetensors({"x": torch.ones(1, dtype=torch.complex128)}, tmp_path / "file")
    assert not list(tmp_path.iterdir())
