"""Resolves `model.path` to the model's folder, or to its id on the Hugging Face hub (see `hub`). Does not import torch."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils._validators import validate_repo_id

from pipelinerl.config.schema import PACKAGED_MODELS
from pipelinerl.errors import INVALID_DATA, ModelLoadError

HUB_TIMEOUT_S = 10.0
"""Timeout of the request that checks whether a model exists. Downloads are bounded by the watchdog only."""
_WEIGHTS = (".safetensors", ".bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def resolve_path(path: str) -> str:
    """Resolve `model.path`: `demo` and `demo-tools` are in this package, a folder is itself, anything else is a hub id.

    Raises ModelLoadError for a path that is neither a folder nor a valid hub id, for an adapter, and for a quantized model.
    Does not contact the hub: see `find_model`.
    """
    if path in PACKAGED_MODELS:
        return str(importlib.resources.files("pipelinerl") / "assets" / PACKAGED_MODELS[path])
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        if (adapter := folder / "adapter_config.json").is_file():
            raise ModelLoadError(adapter_refusal(path, _read(adapter).get("base_model_name_or_path")))
        refuse_quantized(path, _read(folder / "config.json"))
        if not (folder / "config.json").is_file():
            saved = max(folder.glob("checkpoints/step_*/config.json"), default=Path())
            like = f", such as {saved.parent}" if saved.name else ""
            raise ModelLoadError(f"model.path {path!r} has no config.json: give a folder written by save_pretrained{like}")
        return str(folder)
    if path and folder.exists():
        raise ModelLoadError(f"model.path {path!r} is a file: give the folder that holds config.json and the weights")
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
    hub_id = resolve_path(path)
    if Path(hub_id).is_dir():
        return hub_id
    not_found = f"model.path {hub_id!r} is not a folder here ({Path(hub_id).absolute()}) and"
    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        info = api.model_info(hub_id, timeout=HUB_TIMEOUT_S)
        if info.gated:
            api.auth_check(hub_id)
    except GatedRepoError as error:
        raise ModelLoadError(
            f"model.path {hub_id!r} is gated: accept its terms at {constants.ENDPOINT}/{hub_id}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{not_found} the Hugging Face hub has no such model that you can access: check model.path; for a private model "
            "log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except Exception as error:  # the hub's client lets errors of its HTTP library through
        if (folder := downloaded(hub_id)) is not None:
            return folder
        why = "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else " ".join(str(error).split())[:200]
        raise ModelLoadError(
            f"{not_found} the Hugging Face hub can't be reached ({why}); give a folder, or download the model first"
        ) from error
    files = [Path(file.rfilename).name for file in info.siblings or []]
    if "adapter_config.json" in files and "config.json" not in files:
        raise ModelLoadError(adapter_refusal(hub_id))
    refuse_quantized(hub_id, info.config or {})
    if "config.json" not in files or not any(name.endswith(_WEIGHTS) for name in files):
        raise ModelLoadError(
            f"model.path {hub_id!r} is on the Hugging Face hub without weights that transformers can load (config.json and "
            "model.safetensors): give another model"
        )
    if not any(name in files for name in _TOKENIZERS):
        raise ModelLoadError(f"model.path {hub_id!r} is on the Hugging Face hub without a tokenizer: give another model")
    return hub_id


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none, or it can't be read: that is an error of loading."""
    with suppress(OSError, *INVALID_DATA):
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    return {}


def can_be_an_id(path: str) -> bool:
    """Whether `path` has the form of an id: `name` or `owner/name`."""
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def downloaded(hub_id: str) -> str | None:
    """The folder of an earlier download of the model, or None."""
    config = try_to_load_from_cache(hub_id, "config.json")
    return str(Path(config).parent) if isinstance(config, str) else None


# ---- What is wrong with a model that can't be loaded or trained, and what an error of transformers means to its user


_KNOWN_ERRORS = {
    "trust_remote_code": "it comes with Python code of its own; read that code, then set model.trust_remote_code to true",
    "Unrecognized configuration class": (
        "it is not a causal language model; give one that AutoModelForCausalLM or AutoModelForImageTextToText can load"
    ),
    "does not recognize this architecture": (
        "this version of transformers does not know its architecture (model_type); upgrade transformers"
    ),
    "Couldn't instantiate the backend tokenizer": "it has no tokenizer (tokenizer.json); copy it from the original model",
}
"""Parts of transformers' error messages, and the message that the user gets instead."""

_DEQUANTIZED = ("mxfp4",)
"""Methods whose weights transformers itself turns into bfloat16."""


def explain(error: Exception) -> str:
    """One line that says what to do."""
    text = " ".join(str(error).split())
    meanings = (meaning for part, meaning in _KNOWN_ERRORS.items() if part in text)
    return next(meanings, text.split(". ")[0][:300] or type(error).__name__)


def adapter_refusal(path: str, base: object = None) -> str:
    """The error for an adapter that is given as a model."""
    of = f" of {base!r}" if base else ""
    return (
        f"model.path {path!r} has an adapter{of}: merge it into its model (merge_and_unload, then save_pretrained) and "
        "give the result, or give the model without it"
    )


def refuse_quantized(path: str, config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError if `config`, as in config.json, belongs to a quantized model."""
    for part in (config, config.get("text_config")):
        settings = part.get("quantization_config") if isinstance(part, Mapping) else None
        method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else None
        if method not in (None, *_DEQUANTIZED):
            raise ModelLoadError(
                f"model.path {path!r} is quantized ({method}): quantized weights can't be trained; give the unquantized "
                "model"
            )
