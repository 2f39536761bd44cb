"""What the engine of a process that was kept does first in the next session: it takes the weights of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from pipelinerl.config.schema import ModelConfig
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.launch.session import StartPlan
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import checksum, first_names, named_weights


def weights_of(plan: StartPlan, model: Any) -> WeightUpdate | None:
    """The weights in the plan's checkpoint, for `model`. None if they are not those of the plan's checksum."""
    if plan.checkpoint is None or plan.checksum is None:
        return None
    firsts = first_names(named_weights(model))
    owned = {firsts[name]: tensor for name, tensor in tensors_of(Path(plan.checkpoint)).items() if name in firsts}
    if not owned.keys() >= set(firsts.values()):
        return None
    tensors = {name: owned[first] for name, first in firsts.items()}
    return WeightUpdate(plan.version, plan.checksum, tensors) if checksum(tensors) == plan.checksum else None


def tensors_with_ties_of(checkpoint: Path, model: ModelConfig) -> dict[str, Tensor]:
    """All tensors of the model in its folder, a tied one under each of its names. Raises ModelLoadError."""
    return named_weights(load_model(model.model_copy(update={"path": str(checkpoint)})))


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors in its folder, by their names in the files. A tied tensor may have one of its names only."""
    files = sorted(checkpoint.glob("model*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}
