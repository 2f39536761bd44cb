"""Resolves `model.path` to the model's folder, or to its id on the Hugging Face hub. Does not import torch."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

from pipelinerl.errors import ModelLoadError

DEMO = "demo"
HUB_TIMEOUT_S = 10.0
"""Timeout of the request that checks whether a model exists. Downloads are bounded by the watchdog only."""
_WEIGHTS = (".safetensors", ".bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def resolve_path(path: str) -> str:
    """Resolve `model.path`: `demo` is a folder of this package, an existing folder is itself, anything else is a hub id.

    Raises ModelLoadError for a path that is neither a folder nor a valid hub id. Does not contact the hub: see
    `find_model`.
    """
    if path == DEMO:
        folder = Path(str(importlib.resources.files("pipelinerl"))) / "assets" / "demo_base"
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"the demo model is missing from this installation ({folder}); install the package again")
        return str(folder)
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"model.path {path!r} has no config.json: give a folder written by save_pretrained")
        return str(folder)
    if path and folder.exists():
        raise ModelLoadError(f"model.path {path!r} is a file: give the folder that holds config.json and the weights")
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or not path or not _can_be_an_id(path):
        raise ModelLoadError(
            f"model.path {path!r} does not exist: give a folder with a model, or a hub id like owner/name{_absolute(path)}"
        )
    return path


def find_model(path: str) -> str:
    """Like `resolve_path`, but a hub id is also checked: the model exists, has weights and a tokenizer, and is accessible.

    If the hub can't be reached, returns the folder of an earlier download. Raises ModelLoadError.
    """
    found = resolve_path(path)
    return found if Path(found).is_dir() else _on_the_hub(path)


def downloaded(hub_id: str) -> str | None:
    """The folder of an earlier download of the model, or None."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - takes a moment, and folders don't need it

    config = try_to_load_from_cache(hub_id, "config.json")
    return str(Path(config).parent) if isinstance(config, str) else None


def _on_the_hub(hub_id: str) -> str:
    from huggingface_hub import HfApi, constants  # noqa: PLC0415 - as above
    from huggingface_hub.errors import (  # noqa: PLC0415 - as above
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    not_found = f"model.path {hub_id!r} is not a folder here{_absolute(hub_id)} and"
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
        if isinstance(error, OfflineModeIsEnabled):
            why = "the Hugging Face hub can't be reached: HF_HUB_OFFLINE is set, and the model was not downloaded before"
        elif isinstance(error, HfHubHTTPError):
            why = f"the Hugging Face hub answered: {' '.join(str(error).split())[:200]}"
        else:
            why = "the Hugging Face hub can't be reached"
        raise ModelLoadError(f"{not_found} {why}; give a folder, or download the model first") from error
    files = [Path(file.rfilename).name for file in info.siblings or []]
    if "config.json" not in files or not any(name.endswith(_WEIGHTS) for name in files):
        raise ModelLoadError(
            f"model.path {hub_id!r} is on the Hugging Face hub without weights that transformers can load (config.json and "
            "model.safetensors): give another model"
        )
    if not any(name in files for name in _TOKENIZERS):
        raise ModelLoadError(f"model.path {hub_id!r} is on the Hugging Face hub without a tokenizer: give another model")
    return hub_id


def _can_be_an_id(path: str) -> bool:
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - as above
    from huggingface_hub.utils._validators import validate_repo_id  # noqa: PLC0415 - as above

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def _absolute(path: str) -> str:
    return f" ({os.path.abspath(os.path.expanduser(path))})" if path else ""
