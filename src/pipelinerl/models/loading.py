"""Loads a Hugging Face causal LM and its tokenizer, with errors that tell the user what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipelinerl.config.schema import LONGEST_SLOT, ModelConfig
from pipelinerl.errors import ModelLoadError, UserError
from pipelinerl.models.folder import find_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def require_device(device: torch.device | str) -> None:
    """Raise UserError unless PyTorch can compute on `device` on this machine."""
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {str(device)!r} is unknown to PyTorch; use cpu, cuda, cuda:N or mps") from error
    instead = "use cpu"
    if wanted.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if torch.version.cuda is None and torch.version.hip is None:
            problem = f"the PyTorch installed here ({torch.__version__}) is built without CUDA"
            instead = "use cpu, or install a PyTorch with CUDA"
        elif not count:
            problem = "PyTorch finds no CUDA GPU here (nvidia-smi shows what the driver finds)"
        elif (wanted.index or 0) >= count:
            problem, instead = f"there are {count} CUDA GPUs here", f"use cuda:0 to cuda:{count - 1}"
        else:
            return
    elif wanted.type == "mps" and not torch.backends.mps.is_available():
        problem = "PyTorch finds no Apple GPU here"
    else:
        return
    raise UserError(f"device {str(device)!r} can't be used: {problem}; {instead}")


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> Any:
    """The model in `config.dtype` on `device`, in eval mode: the policy that samples has no dropout, so training has none.

    The model has no adapters; the trainer adds those of `config.lora`. Raises UnsupportedModelError if the model can't have
    the head that `config.head_dtype` asks for, UserError if the device does not exist, and ModelLoadError if the model
    can't be loaded or lacks some weights (transformers would fill them with random numbers).
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415 - takes seconds

    require_device(device)
    options = {"dtype": DTYPES[config.dtype], "trust_remote_code": config.trust_remote_code, "output_loading_info": True}
    path = find_model(config.path)
    with _quiet(), _one_line(config.path, "model"):
        try:
            model, report = AutoModelForCausalLM.from_pretrained(path, **options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            model, report = AutoModelForImageTextToText.from_pretrained(path, **options)  # and used for text alone
    if absent := sorted({*report["missing_keys"], *(str(key[0]) for key in report["mismatched_keys"])}):
        shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise ModelLoadError(
            f"model {config.path!r}: the weights do not fit its config.json: {shown} missing or of another shape; "
            "get a complete copy of the model"
        )
    if config.head_dtype == "float32":
        from pipelinerl.models.float32_head import use_float32_head  # noqa: PLC0415 - few runs have it

        use_float32_head(model)
    return model.to(device).eval()


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer. Raises ModelLoadError if it does not exist or can't be read."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and only loading needs it

    path = find_model(config.path)
    with _quiet(), _one_line(config.path, "tokenizer"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end a completion, ascending: from the generation config, the model's config and the tokenizer."""
    generation = getattr(model, "generation_config", None)
    sources = [getattr(owner, "eos_token_id", None) for owner in (generation, model.config.get_text_config(), tokenizer)]
    ids: set[int] = set()
    for source in sources:
        ids.update([] if source is None else [source] if isinstance(source, int) else source)
    return tuple(sorted(ids))


def model_max_length(model: Any) -> int | None:
    """The longest sequence of this model in tokens, from its config; None if the config does not say."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None or limit < 1 else int(limit)


def slot_length(model: Any, asked: int | None) -> int:
    """Longest prompt + completion of a slot, in tokens: `asked`, or else the model's maximum, at most `LONGEST_SLOT`."""
    return asked or min(model_max_length(model) or LONGEST_SLOT, LONGEST_SLOT)


@contextmanager
def _one_line(path: str, what: str) -> Iterator[None]:
    """Turn any exception inside into a ModelLoadError with a message of one line."""
    try:
        yield
    except Exception as error:  # config, weight and hub code raises errors of many types
        from pipelinerl.models.load_errors import explain  # noqa: PLC0415 - only for an error

        raise ModelLoadError(f"can't load the {what} of {path!r}: {explain(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress bars, warnings and loading reports of transformers inside; restore the settings afterwards."""
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
