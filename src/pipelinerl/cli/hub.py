"""`pipelinerl try`, `push` and `chat`: what a model answers, before and after training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, at_least, config_of_run, refuse_settings, write
from pipelinerl.config.load import load_config, with_flags
from pipelinerl.config.schema import ModelConfig, RunConfig
from pipelinerl.errors import EnvironmentSetupError, PromptTooLongError

KEYS = (
    *("actor.temperature", "actor.top_p", "actor.top_k", "actor.max_tokens", "model.dtype", "model.trust_remote_code"),
    *("engine.max_length", "engine.device", "engine.threads"),
)
"""The keys of the run file that a chat uses."""


def add_to(commands: Commands) -> None:
    text = "Upload a run's model to the Hugging Face Hub, with a model card: curves, evaluation, configuration, command."
    flag = commands.add("push", text, run=run_push).add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    flag("repo", metavar="REPO", help="the model's id on the hub, like owner/name; it is created if it does not exist")
    flag(
        "--version", type=_version, metavar="N", help="the version of the weights, or `best` (default: the last checkpoint)"
    )
    flag("--public", action="store_true", help="anyone may see a new repository (default: only its owner)")
    flag("--dry-run", action="store_true", help="print the files and the card, without uploading; needs no network")

    text = "Chat with a model in the terminal, through the embedded engine."
    epilog = (
        "MODEL: as for `pipelinerl eval`. A model without a chat template continues each line. /reset begins anew, Ctrl-C "
        f"ends an answer, Ctrl-D the chat. These keys of the run file are also flags: {', '.join(KEYS)}."
    )
    flag = commands.add("chat", text, epilog, run=run_chat).add_argument
    flag("model", metavar="MODEL", help="a folder, a hub id, `demo`, or a run directory")
    flag("--system", default="", metavar="TEXT", help="the system message")
    flag("--seed", type=at_least(0), default=0, help="seed of sampling (default: 0)")

    text = "Let the model answer one problem, and show prompt, answers and rewards. Nothing is trained or written."
    flag = commands.add("try", text, SETTINGS_HELP, run=run_try).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file (default: the built-in demo)")
    flag("--problem", type=at_least(0), default=0, metavar="N", help="which problem of the training data (default: 0)")


def _version(text: str) -> str | float:
    return text if text == "best" else at_least(1)(text)


def run_push(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl push", settings)
    config_of_run(options.run_dir)
    from pipelinerl.experiments.publish import prepared, upload  # noqa: PLC0415 (loads torch)

    with prepared(options.run_dir, options.repo, options.version) as folder:
        if options.dry_run:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            lines = [f"{path.relative_to(folder)}  {path.stat().st_size / 1e6:.2f} MB" for path in files]
            return write("\n".join([*lines, "", (folder / "README.md").read_text(encoding="utf-8")]))
        return write(f"{upload(folder, options.repo, private=not options.public)}\n")


def run_try(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load_config(options.run_file, settings)
    from pipelinerl.experiments.trial import try_group  # noqa: PLC0415 (loads torch)
    from pipelinerl.status.screen import printable  # noqa: PLC0415 - as above

    trial = try_group(config, options.problem)
    return write(f"{printable(str(trial))}\n") or int(not trial.group.rollouts)


def run_chat(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = with_flags(RunConfig(model=ModelConfig(path=options.model)), settings, KEYS)
    from pipelinerl.experiments.chat import Chat  # noqa: PLC0415 (loads torch)
    from pipelinerl.status.screen import printable  # noqa: PLC0415 - as above

    chat = Chat(config, system=options.system, seed=options.seed)
    asking = sys.stdin.isatty()
    if asking:
        write(f"{chat.name}{'' if chat.has_template else ' (it has no chat template: each line is continued)'}\n")
    while True:
        try:
            line = input("> " if asking else "")
        except (EOFError, KeyboardInterrupt):
            return write("\n") if asking else 0
        if line == "/reset":
            chat.reset()
        elif line:
            try:
                for piece in chat.answer(line):
                    if status := write(printable(piece)):
                        return status
            except KeyboardInterrupt:
                pass
            except PromptTooLongError as error:
                write(f"{error}; /reset begins a new chat")
            except EnvironmentSetupError as error:
                write(str(error))
            write("\n")
