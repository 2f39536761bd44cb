"""Resolves `model.path` to the model's folder, or to its id on the Hugging Face hub (see `hub`). Does not import torch."""

from __future__ import annotations

import importlib.resources
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.schema import PACKAGED_MODELS
from pipelinerl.errors import INVALID_DATA, ModelLoadError


def resolve_path(path: str) -> str:
    """Resolve `model.path`: `demo` and `demo-tools` are in this package, a folder is itself, anything else is a hub id.

    Raises ModelLoadError for a path that is neither a folder nor a valid hub id, for an adapter, and for a quantized model.
    Does not contact the hub: see `find_model`.
    """
    if path in PACKAGED_MODELS:
        folder = Path(str(importlib.resources.files("pipelinerl"))) / "assets" / PACKAGED_MODELS[path]
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"the model {path} is missing from this installation ({folder}); install the package again")
        return str(folder)
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        adapter, config = folder / "adapter_config.json", _read(folder / "config.json")
        if adapter.is_file() or b"quantization_config" in msgspec.json.encode(config):
            from pipelinerl.models.load_errors import adapter_refusal, refuse_quantized  # noqa: PLC0415 - few models

            if adapter.is_file():
                raise ModelLoadError(adapter_refusal(path, _read(adapter).get("base_model_name_or_path")))
            refuse_quantized(path, config)
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"model.path {path!r} has no config.json: give a folder written by save_pretrained")
        return str(folder)
    if path and folder.exists():
        raise ModelLoadError(f"model.path {path!r} is a file: give the folder that holds config.json and the weights")
    from pipelinerl.models.hub import can_be_an_id  # noqa: PLC0415 - takes a moment, and folders don't need it

    if path.startswith((".", "/", "~")) or path.count("/") > 1 or not path or not can_be_an_id(path):
        meant = f" ({os.path.abspath(folder)})" if path else ""
        raise ModelLoadError(
            f"model.path {path!r} does not exist: give a folder with a model, or a hub id like owner/name{meant}"
        )
    return path


def find_model(path: str) -> str:
    """Like `resolve_path`, but a hub id is also checked: the model exists, has weights and a tokenizer, and is accessible.

    If the hub can't be reached, returns the folder of an earlier download. Raises ModelLoadError.
    """
    found = resolve_path(path)
    if Path(found).is_dir():
        return found
    from pipelinerl.models.hub import find_on_the_hub  # noqa: PLC0415 - as above

    return find_on_the_hub(path)


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none, or it can't be read: that is an error of loading."""
    with suppress(OSError, *INVALID_DATA):
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    return {}
