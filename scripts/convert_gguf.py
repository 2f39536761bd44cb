"""Converts a GGUF file to a Hugging Face folder that training and all commands can load. Needs the extra `gguf`.

    python scripts/convert_gguf.py FILE_OR_PACKAGE OUT_DIR

FILE_OR_PACKAGE is a `.gguf` file, or a wheel or an installed package that contains one.

transformers reads the tensors, the config and the vocabulary. This module finds the file (some packages on PyPI contain
one), repairs what transformers does not take over from a GGUF (how text is split before BPE, the chat template, which
tokens end a turn), and checks the result by loading it again. Weights become float32. The precision lost by quantization
is not restored: the result is the model that llama.cpp would run, not the model that was quantized.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import ModelLoadError, PipelineRLError, UserError
from pipelinerl.extras import require
from pipelinerl.models.loading import load_model, load_tokenizer, stop_token_ids
from pipelinerl.models.state import checksum, named_weights

_MAGIC = b"GGUF"
# A GGUF names the rule by which text is split before BPE. These two rules split off single digits, then split as GPT-2
# does. transformers uses GPT-2's rule for every name that it does not know.
_SPLITS_DIGITS = ("smollm", "starcoder")
_SPLITS_AS_GPT2 = ("gpt-2", "gpt2")


@dataclass(frozen=True)
class ConvertedModel:
    """Properties of the model written to `path`."""

    path: Path
    architecture: str
    parameters: int
    layers: int
    vocab_size: int
    chat_template: bool
    eos_token_ids: tuple[int, ...]


def convert_gguf(source: str, out_dir: Path) -> ConvertedModel:
    """Convert a GGUF model to a Hugging Face folder (safetensors, float32). The folder is created atomically.

    `source` is a `.gguf` file, a wheel (`.whl`) that contains one, or the name of an installed package that contains one
    (it is not imported). Raises UserError if `out_dir` is not empty or can't be written, MissingDependencyError
    without the extra `gguf`, ModelLoadError for a source that can't be found or converted correctly.
    """
    require("gguf", "converting GGUF files")
    out_dir = Path(os.path.abspath(out_dir))
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError(f"{out_dir} already exists and is not an empty folder; choose another or remove it")
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
            staged = Path(scratch) / "model"
            with _gguf_file(source, Path(scratch)) as file, redirect_stderr(StringIO()):  # three progress bars
                model, tokenizer = _load(file)
                model.save_pretrained(staged)
                tokenizer.save_pretrained(staged)
            for written in staged.iterdir():  # safetensors makes its file readable by its owner only
                shutil.copymode(staged / "config.json", written)
            facts = _verified(staged, out_dir, model, tokenizer)
            os.replace(staged, out_dir)
    except OSError as error:
        raise UserError(f"can't write {out_dir}: {error}") from error
    return facts


@contextmanager
def _gguf_file(source: str, scratch: Path) -> Iterator[Path]:
    """The one GGUF file that `source` names. A file in a wheel is unpacked into `scratch`, and deleted on exit."""
    path = Path(source).expanduser()
    if path.is_dir():
        raise ModelLoadError(f"{source} is a folder; give the .gguf file in it")
    if path.suffix == ".whl" and path.is_file():
        unpacked = scratch / "source.gguf"
        _unpack_gguf(path, unpacked)
        yield _require_gguf(unpacked, source)
        unpacked.unlink()
    elif path.is_file():
        yield _require_gguf(path, source)
    elif path.suffix in (".gguf", ".whl") or os.sep in source:
        raise ModelLoadError(f"there is no file {source}")
    else:
        yield _require_gguf(_file_of_package(source), source)


def _unpack_gguf(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = _single([name for name in archive.namelist() if name.endswith(".gguf")], str(wheel))
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
    return Path(str(_single([file for file in files if file.suffix == ".gguf"], f"the package {name}").locate()))


def _single(found: list[Any], where: str) -> Any:
    if len(found) != 1:
        listed = f": {', '.join(map(str, found))}; unpack it and give one of them" if found else ""
        raise ModelLoadError(f"{where} has {len(found) or 'no'} .gguf files, one is needed{listed}")
    return found[0]


def _require_gguf(file: Path, source: str) -> Path:
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
    except OSError as error:
        raise ModelLoadError(f"can't read {file}: {error.strerror}") from error
    if magic != _MAGIC:
        raise ModelLoadError(f"{source} is not a GGUF file (it does not start with {_MAGIC.decode()})")
    return file


def _load(file: Path) -> tuple[Any, Any]:
    """The model, in float32 and without quantization settings, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 (takes seconds)

    metadata = _metadata(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, device_map="cpu", output_loading_info=True
        )
    except Exception as error:  # transformers raises errors of many types for a bad file
        raise ModelLoadError(f"transformers can't convert {file.name}: {' '.join(str(error).split())}") from error
    missing = sorted({*report["missing_keys"], *(str(key[0]) for key in report["mismatched_keys"])})
    if missing:  # transformers would fill them with random numbers
        raise ModelLoadError(f"{file.name} lacks {len(missing)} tensors of a {loaded.config.model_type}: {missing[0]}, ...")
    model = _without_quantizer(loaded, file.name)
    _repair_split(tokenizer, metadata, file.name)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    tokenizer.model_max_length = model.config.max_position_embeddings
    _set_stop_tokens(model, metadata)
    return model, tokenizer


def _without_quantizer(loaded: Any, name: str) -> Any:
    """A model of the same config and tensors, without the loader's quantizer, which would be saved too."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 (takes seconds)

    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        model.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise ModelLoadError(f"{name} could not be made a plain {config.model_type}: {text}") from error
    model.tie_weights()
    if {parameter.dtype for parameter in model.parameters()} != {torch.float32}:
        raise ModelLoadError(f"{name} has tensors that were not converted to float32")
    return model.eval()


def _metadata(file: Path) -> dict[str, Any]:
    """The values of the file's header that transformers does not take over reliably."""
    from gguf import GGUFReader  # noqa: PLC0415 (optional dependency)

    wanted = re.compile(r"tokenizer\.(chat_template|ggml\.(model|pre|eos_token_id|eot_token_id))")
    try:
        fields = GGUFReader(str(file)).fields
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"the header of {file.name} can't be read ({error}); get a complete copy") from error
    return {key: field.contents() for key, field in fields.items() if wanted.fullmatch(key)}


def _repair_split(tokenizer: Any, metadata: dict[str, Any], name: str) -> None:
    """Make the tokenizer split text as the model was trained with; a wrong split gives other tokens."""
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
            f"{name} splits text by a rule that is not supported ({rule or 'the file does not name it'}), so its "
            "tokenizer would be wrong; use the model's own Hugging Face folder"
        )


def _set_stop_tokens(model: Any, metadata: dict[str, Any]) -> None:
    """Set the tokens that end a completion: the end of text and, if the GGUF names one, the end of turn."""
    ends = [metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata]
    ids = list(dict.fromkeys(int(end) for end in ends))
    if ids:
        model.config.eos_token_id = model.generation_config.eos_token_id = ids if len(ids) > 1 else ids[0]


def _verified(staged: Path, out_dir: Path, model: Any, tokenizer: Any) -> ConvertedModel:
    """Load the saved model as a run does and compare it with the converted one. Raises ModelLoadError if they differ."""
    reloaded = load_model(ModelConfig(path=str(staged)))
    reloaded_tokenizer = load_tokenizer(ModelConfig(path=str(staged)))
    sample = "x\n\n1. The 1234 apples'  56 pips!"
    if checksum(named_weights(reloaded)) != checksum(named_weights(model)):
        raise ModelLoadError(f"the weights saved for {out_dir} differ from the converted weights")
    if reloaded_tokenizer.encode(sample) != tokenizer.encode(sample):
        raise ModelLoadError(f"the tokenizer saved for {out_dir} encodes text differently from the one converted")
    if reloaded_tokenizer.chat_template != tokenizer.chat_template:
        raise ModelLoadError(f"the chat template saved for {out_dir} is not the one converted")
    return ConvertedModel(
        path=out_dir,
        architecture=type(reloaded).__name__,
        parameters=sum(parameter.numel() for parameter in reloaded.parameters()),
        layers=reloaded.config.num_hidden_layers,
        vocab_size=reloaded.config.vocab_size,
        chat_template=bool(reloaded_tokenizer.chat_template),
        eos_token_ids=stop_token_ids(reloaded, reloaded_tokenizer),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", metavar="FILE_OR_PACKAGE", help="a .gguf file, or a wheel or package that contains one")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="the new model folder")
    options = parser.parse_args()
    try:
        model = convert_gguf(options.source, options.out_dir)
    except PipelineRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    template = "with a chat template" if model.chat_template else "without a chat template"
    print(
        f"{model.path}: {model.architecture}, {model.parameters / 1e6:.1f}M parameters, {model.layers} layers, "
        f"vocabulary of {model.vocab_size}, {template}, ends on token {', '.join(map(str, model.eos_token_ids))}\n"
        f"train it with: pipelinerl train RUN.yaml --model.path {model.path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
