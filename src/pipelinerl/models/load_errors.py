"""What is wrong with a model that can't be loaded or trained, and what an error of transformers means to its user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipelinerl.errors import ModelLoadError

_KNOWN_ERRORS = {
    ("trust_remote_code",): (
        "it comes with Python code of its own; read that code, then set model.trust_remote_code to true"
    ),
    ("Unrecognized configuration class", "for this kind of AutoModel"): (
        "it is not a causal language model; give one that AutoModelForCausalLM or AutoModelForImageTextToText can load"
    ),
    ("connect to", "offline", "Offline", "LocalEntryNotFound"): (
        "it is not a folder here and the Hugging Face hub can't be reached; give a folder, or download the model first"
    ),
    ("is not a local folder and is not a valid model identifier", "404"): (
        "it is neither a folder here nor a model on the Hugging Face hub (private ones need a login); check model.path"
    ),
    ("does not recognize this architecture",): (
        "this version of transformers does not know its architecture (model_type); upgrade transformers"
    ),
    ("Couldn't instantiate the backend tokenizer",): (
        "it has no tokenizer (tokenizer.json); copy it from the original model"
    ),
}
"""Parts of transformers' error messages, and the message that the user gets instead."""
_DAMAGED = re.compile(r"Safetensor|[Nn]o (such )?file|EOFError|zip archive|Unpickling|not a valid JSON")
"""What errors about missing and damaged files have in their type or text."""


_DEQUANTIZED = ("mxfp4",)
"""Methods whose weights transformers itself turns into bfloat16."""


def explain(error: Exception) -> str:
    """One line that says what to do."""
    text = " ".join(str(error).split())
    for marks, meaning in _KNOWN_ERRORS.items():
        if any(mark in f"{type(error).__name__}: {text}" for mark in marks):
            return meaning
    kind = type(error).__name__
    advice = " (get a complete copy of the model)" if _DAMAGED.search(f"{kind}: {text}") else ""
    return (text.split(". ")[0][:300] or kind) + advice


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
