"""An update that reports success and changes nothing is caught by what the engine computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipelinerl.engine import LocalEngine
from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.types import UpdateReceipt
from tests.integration.runs import run, summary

UpdateWeights = Callable[[LocalEngine, WeightUpdate], UpdateReceipt]


@pytest.mark.parametrize("cheat", ["nothing", "all but the head"])
def test_an_update_without_effect_ends_the_run(cheat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update_weights: UpdateWeights = LocalEngine.update_weights

    def lie(self: LocalEngine, update: WeightUpdate) -> UpdateReceipt:
        kept = {name: tensor.clone() for name, tensor in self._weights.items()}
        receipt = update_weights(self, update)
        if update.version >= 2:
            stale = kept if cheat == "nothing" else {name: kept[name] for name in kept if "lm_head" in name}
            with torch.no_grad():
                for name, tensor in stale.items():
                    self._weights[name].copy_(tensor)
        return receipt

    monkeypatch.setattr(LocalEngine, "update_weights", lie)
    with pytest.raises(WeightUpdateError, match=r"acknowledged weights of version [2-4], but does not compute with them"):
        run(tmp_path / "r", trainer__steps=20, trainer__learning_rate=0.01)
    assert summary(tmp_path / "r")["optimizer_steps"] <= 5, "at once, or nearly"
