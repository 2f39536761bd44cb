"""`pipelinerl init`, `config` and `doctor`: what a project consists of, and the machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, write
from pipelinerl.config.load import load_config
from pipelinerl.errors import UserError

TEMPLATES = {
    "function": "problems in a file and a reward function",
    "class": "a class that makes its own problems",
    "tools": "a function that the model may call",
    "agent": "a program that uses an OpenAI-compatible API",
    "chat": "a data set of the hub and a chat model",
    "reasoning-gym": "a task of that package, by name",
}
"""Folders in `assets/templates`, and what each is an example of."""


def add_to(commands: Commands) -> None:
    text = "Write an example project that can be run at once: a task and its run file."
    flag = commands.add("init", text, run=run_init, keys=False).add_argument
    flag("folder", type=Path, metavar="DIR", help="the project's folder; existing files are never overwritten")
    text = "; ".join(f"{name}: {what}" for name, what in TEMPLATES.items())
    flag("--template", choices=TEMPLATES, default="function", metavar="NAME", help=f"{text} (default: function)")

    text = "Print the resolved configuration, with the documentation of every key."
    flag = commands.add("config", text, SETTINGS_HELP, run=run_config).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file (none: the default of every key)")
    flag("--schema", action="store_true", help="print the JSON schema of run files instead, for editors")

    text = "Look at this machine and installation: cores, memory, GPUs, packages, Redis, vLLM; say what is wrong."
    flag = commands.add("doctor", text, run=run_doctor, keys=False).add_argument
    text = "also look at the Python interpreter of vLLM, as in engine.python"
    flag("--vllm-python", type=Path, metavar="PYTHON", help=text)


def run_init(options: argparse.Namespace, _settings: Sequence[str]) -> int:
    """Write the example files. Raises UserError, without writing any, if one exists already or the folder can't be made."""
    folder: Path = options.folder
    source = resources.files("pipelinerl") / "assets" / "templates" / options.template
    names = sorted(file.name for file in source.iterdir() if file.is_file())
    there = [name for name in names if (folder / name).exists()]
    if there:
        raise UserError(f"{folder} already has {', '.join(there)}; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            with open(folder / name, "xb") as file:
                file.write((source / name).read_bytes())
    except OSError as error:
        raise UserError(f"can't write the project into {folder}: {error.strerror or error}") from error
    return write(f"{folder} has {', '.join(names)}\nrun it with: cd {folder} && pipelinerl train run.yaml\n")


def run_config(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load_config(options.run_file or os.devnull, settings)  # an empty run file has the defaults
    from pipelinerl.config.help import json_schema, render  # noqa: PLC0415 - as above

    return write(json_schema() if options.schema else render(config))


def run_doctor(options: argparse.Namespace, _settings: Sequence[str]) -> int:
    """Returns exit status 1 if something is wrong."""
    from pipelinerl.experiments.doctor import WRONG, examine, shown  # noqa: PLC0415 (loads torch)

    found = examine(options.vllm_python)
    return write(shown(found)) or int(any(finding.level == WRONG for finding in found))
