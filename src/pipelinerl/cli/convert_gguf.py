"""`pipelinerl convert-gguf`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import Commands, refuse_settings, write


def add_to(commands: Commands) -> None:
    text = "Convert a GGUF file to a Hugging Face model folder (extra `pipelinerl[gguf]`)."
    parser = commands.add("convert-gguf", text)
    parser.add_argument(
        "source", metavar="FILE_OR_PACKAGE", help="a .gguf file, or a wheel or installed package that contains one"
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="the new model folder")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl convert-gguf", settings)
    from pipelinerl.models.gguf import convert_gguf  # noqa: PLC0415 (loads torch and transformers)

    model = convert_gguf(options.source, options.out_dir)
    template = "with a chat template" if model.chat_template else "without a chat template"
    return write(
        f"{model.path}: {model.architecture}, {model.parameters / 1e6:.1f}M parameters, {model.layers} layers, "
        f"vocabulary of {model.vocab_size}, {template}, ends on token {', '.join(map(str, model.eos_token_ids))}\n"
        f"train it with: pipelinerl train RUN.yaml --model.path {model.path}\n"
    )
