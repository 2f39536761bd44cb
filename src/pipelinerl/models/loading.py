"""Loading a Hugging Face causal LM and its tokenizer, with errors that say what to do."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import ModelLoadError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEMO = "demo"
LONGEST_SLOT = 2048
"""Slots are no longer than this unless asked to be: KV memory grows with it."""


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> Any:
    """The model in `config.dtype` on `device`, in eval mode: the policy that samples has no dropout, so training has none.

    Raises ModelLoadError for anything that can't be loaded, and for weights that are not all there (transformers would
    fill the gaps with random numbers).
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds, and only loading needs it

    path = resolve_path(config.path)
    with _quiet(), _one_line(config.path, "model"):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[config.dtype], trust_remote_code=config.trust_remote_code, output_loading_info=True
        )
    if absent := sorted({*report["missing_keys"], *(str(key[0]) for key in report["mismatched_keys"])}):
        shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise ModelLoadError(
            f"model {config.path!r}: the weights do not fit its config.json: {shown} missing or of another shape; "
            "get a complete copy of the model"
        )
    return model.to(device).eval()


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer. Raises ModelLoadError when there is none or it can't be read."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and only loading needs it

    path = resolve_path(config.path)
    with _quiet(), _one_line(config.path, "tokenizer"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)


def resolve_path(path: str) -> str:
    """Where `model.path` points: `demo` is a folder of this package, an existing folder is itself, the rest is a hub id.

    Raises ModelLoadError for what is neither a folder nor can be a hub id.
    """
    if path == DEMO:
        folder = Path(str(importlib.resources.files("pipelinerl"))) / "assets" / "demo_base"
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"the demo model is missing from this installation ({folder}); install the package again")
        return str(folder)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"model.path {path!r} has no config.json: give a folder written by save_pretrained")
        return str(folder)
    if folder.exists():
        raise ModelLoadError(f"model.path {path!r} is a file: give the folder that holds config.json and the weights")
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or not path:
        raise ModelLoadError(f"model.path {path!r} does not exist: give a folder with a model, or a hub id like owner/name")
    return path


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion, ascending: those of the generation config, the model's config, the tokenizer."""
    generation = getattr(model, "generation_config", None)
    sources = [getattr(owner, "eos_token_id", None) for owner in (generation, model.config.get_text_config(), tokenizer)]
    ids: set[int] = set()
    for source in sources:
        ids.update([] if source is None else [source] if isinstance(source, int) else source)
    return tuple(sorted(ids))


def model_max_length(model: Any) -> int | None:
    """Most tokens a sequence of this model may have, by its config; None if the config does not say."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def slot_length(model: Any, asked: int | None) -> int:
    """Longest prompt + completion of an engine's slot: `asked`, else the model's maximum, at most `LONGEST_SLOT`."""
    return asked or min(model_max_length(model) or LONGEST_SLOT, LONGEST_SLOT)


def checkpoint_activations(model: Any) -> None:
    """Recompute each decoder layer's activations in the backward pass: memory for a third more compute.

    transformers ties this to training mode, which also turns dropout on. So only the layers' own flag is set, the modules
    inside them stay in eval mode. Raises ModelLoadError if the model does not support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: PLC0415 - as above

    if not model.supports_gradient_checkpointing:
        raise ModelLoadError(
            f"{type(model).__name__} has no gradient checkpointing: set trainer.gradient_checkpointing to false"
        )
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


@contextmanager
def _one_line(path: str, what: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into a ModelLoadError of one line."""
    try:
        yield
    except Exception as error:  # loading runs config, weight and hub code of many origins: all of it is reported
        raise ModelLoadError(f"can't load the {what} of {path!r}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "it comes with Python code of its own; read that code, then set model.trust_remote_code to true"
    if "Unrecognized configuration class" in text or "for this kind of AutoModel: AutoModelForCausalLM" in text:
        return "it is not a causal language model; give one that AutoModelForCausalLM can load"
    if "connect to" in text or "offline" in text.lower() or "LocalEntryNotFound" in type(error).__name__:
        return (
            "it is not a folder here and the Hugging Face hub can't be reached; give a folder, or download the model first"
        )
    if "is not a local folder and is not a valid model identifier" in text or "404" in text:
        return (
            "it is neither a folder here nor a model on the Hugging Face hub (private ones need a login); check model.path"
        )
    first = text.split(". ")[0]
    return (first[:300] or type(error).__name__) + " (get a complete copy of the model)"


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, warnings or loading reports of transformers while inside; as it was afterwards."""
    from transformers.utils import logging  # noqa: PLC0415 - as above

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
