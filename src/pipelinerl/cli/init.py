"""`pipelinerl init`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from pipelinerl.cli.parser import Commands, refuse_settings, write
from pipelinerl.errors import UserError

FILES = ("README.md", "problems.jsonl", "rewards.py", "run.yaml")


def add_to(commands: Commands) -> None:
    text = "Write an example project that can be run at once: problems, a reward function, a run file."
    parser = commands.add("init", text)
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the project's folder; existing files are never overwritten"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl init", settings)
    folder: Path = options.folder
    write_project(folder)
    return write(f"{folder} has {', '.join(FILES)}\nrun it with: cd {folder} && pipelinerl train run.yaml\n")


def write_project(folder: Path) -> None:
    """Write the example files. Raises UserError, without writing any, if one exists already or the folder can't be made."""
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise UserError(f"{folder} already has {', '.join(there)}; choose another folder")
    source = resources.files("pipelinerl") / "assets" / "project"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            with open(folder / name, "xb") as file:
                file.write((source / name).read_bytes())
    except OSError as error:
        raise UserError(f"can't write the project into {folder}: {error.strerror or error}") from error
