"""One recording per model: every engine of the same model runs the operations that the first one recorded.

`torch.export` takes a second and more for each engine that starts, which is longer than most tests. What it records is a
function of the model's code and settings, not of its weights, so the engines of one process can share it. Nothing is taken
on trust: each engine still compares its flat forward with the model's own before it answers anything.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import fx, nn

from pipelinerl.config.schema import ModelConfig
from pipelinerl.engine import LocalEngine, flat
from pipelinerl.models.loading import load_model


@contextmanager
def shared_recordings() -> Iterator[None]:
    """Within it, models that are alike in code, settings and shapes are recorded once."""
    recorded: dict[object, tuple[Any, list[Any]]] = {}
    record = flat._export

    def export(model: nn.Module, calls: Any) -> Any:
        key = _key(model)
        if key not in recorded:
            recorded[key] = record(model, calls), list(calls.noted)
        else:
            calls.noted.extend(recorded[key][1])
        return _copy(recorded[key][0])

    with mock.patch.object(flat, "_export", export):
        yield


def record_demo() -> None:
    """Record the demo's model, for processes that are forked from this one."""
    LocalEngine(load_model(ModelConfig()), slots=1, max_length=64)


def _key(model: nn.Module) -> object:
    settings = sorted((model.config.to_dict() | {"_name_or_path": ""}).items())
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return (
        repr(settings),
        tuple((name, type(module), _settings(module)) for name, module in model.named_modules()),
        tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors),
    )


def _settings(module: nn.Module) -> tuple[object, ...]:
    """Numbers that a module holds become constants of what is recorded. Where it was loaded from does not."""
    held = vars(module).items()
    return tuple(item for item in held if isinstance(item[1], (bool, int, float, str)) and item[0] not in _ORIGIN)


_ORIGIN = ("name_or_path", "_is_hf_initialized")


def _copy(program: Any) -> Any:
    """What `FlatForward` uses of an exported program, with a graph of its own: it changes that."""
    return SimpleNamespace(
        graph_module=fx.GraphModule(nn.Module(), copy.deepcopy(program.graph_module.graph)),
        graph_signature=program.graph_signature,
        constants=program.constants,
    )
