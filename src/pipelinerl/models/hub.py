"""Models on the Hugging Face hub: whether one can be loaded from there, and where an earlier download is."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils._validators import validate_repo_id

from pipelinerl.errors import ModelLoadError
from pipelinerl.models.load_errors import adapter_refusal, refuse_quantized

HUB_TIMEOUT_S = 10.0
"""Timeout of the request that checks whether a model exists. Downloads are bounded by the watchdog only."""
_WEIGHTS = (".safetensors", ".bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


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


def find_on_the_hub(hub_id: str) -> str:
    """The id itself if the model exists, has weights and a tokenizer, and is accessible.

    If the hub can't be reached, the folder of an earlier download. Raises ModelLoadError.
    """
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
        if isinstance(error, OfflineModeIsEnabled):
            why = "the Hugging Face hub can't be reached: HF_HUB_OFFLINE is set, and the model was not downloaded before"
        elif isinstance(error, HfHubHTTPError):
            why = f"the Hugging Face hub answered: {' '.join(str(error).split())[:200]}"
        else:
            why = "the Hugging Face hub can't be reached"
        raise ModelLoadError(f"{not_found} {why}; give a folder, or download the model first") from error
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
