"""An update that reports success and changes nothing is caught by what the engine computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pipelinerl.config.schema import ModelConfig, TrainerConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import checksum, load_weights, named_weights
from pipelinerl.trainer.step import Learner
from pipelinerl.trainer.trainer import ProbeCheck
from pipelinerl.types import GenerationRequest, ProbeReading, SamplingParams, UpdateReceipt
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


def test_a_stale_engine_is_told_from_a_true_one() -> None:
    model = load_model(ModelConfig(), "cpu")
    check = ProbeCheck(model, Learner(model, TrainerConfig(), temperature=1.0).logits)
    check.expect(0)
    served = load_model(ModelConfig(), "cpu")
    engine = LocalEngine(served, slots=1, max_length=32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    check.expect(1)

    def reading(version: int) -> ProbeReading:
        request = GenerationRequest(id="p", prompt_ids=check.prompt_ids, sampling=SamplingParams(max_tokens=1))
        (completion,) = engine.generate([request])
        return ProbeReading(
            engine="engine", version=version, token_id=completion.token_ids[0], logprob=completion.logprobs[0]
        )

    check.check([reading(0)])
    with pytest.raises(WeightUpdateError, match="version 0 would compute this value"):
        check.check([reading(1)])
    weights = named_weights(model)
    load_weights(served, weights)
    assert checksum(named_weights(served)) == checksum(weights)
    check.check([msgspec.structs.replace(reading(1), engine="another")])
