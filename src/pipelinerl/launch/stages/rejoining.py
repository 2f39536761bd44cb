"""What the engine of a process that was kept does first in the next session: it takes the weights of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from pipelinerl.interfaces import WeightUpdate
from pipelinerl.launch.session import StartPlan
from pipelinerl.models.state import checksum, first_names, named_weights


def weights_of(plan: StartPlan, model: Any) -> WeightUpdate | None:
    """The weights in the plan's checkpoint, for `model`. None if they are not those of the plan's checksum."""
    if plan.checkpoint is None or plan.checksum is None:
        return None
    firsts, owned = first_names(named_weights(model)), {}
    for path in sorted(Path(plan.checkpoint).glob("model*.safetensors")):
        owned.update({firsts[name]: tensor for name, tensor in load_file(path).items() if name in firsts})
    if not owned.keys() >= set(firsts.values()):
        return None
    tensors = {name: owned[first] for name, first in firsts.items()}
    return WeightUpdate(plan.version, plan.checksum, tensors) if checksum(tensors) == plan.checksum else None
