"""`pipelinerl init`, `config`, `train`, `serve` and `doctor`: a project, its run, a server of its model, and the machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import closing
from importlib import resources
from pathlib import Path

from pipelinerl.cli.parser import PORTS, SETTINGS_HELP, Commands, api_key_from, at_least, write
from pipelinerl.config.keys import json_schema, render
from pipelinerl.config.load import load_config, with_flags
from pipelinerl.config.schema import EngineConfig, ModelConfig, RunConfig
from pipelinerl.errors import UserError
from pipelinerl.extras import require
from pipelinerl.files import SHARED_MEMORY

TEMPLATES = {
    "function": "problems in a file and a reward function",
    "class": "a class that makes its own problems",
    "tools": "a function that the model may call",
    "agent": "a program that uses an OpenAI-compatible API",
    "chat": "a data set of the hub and a chat model",
    "reasoning-gym": "a task of that package, by name",
}
"""Folders in `assets/templates`, and what each is an example of."""
SERVE_KEYS = (
    *("model.dtype", "model.head_dtype", "model.trust_remote_code", "engine.slots", "engine.max_length"),
    *("engine.prefill_tokens", "engine.kv_on_update", "engine.device", "engine.threads"),
)
"""The keys of the run file that a server uses."""
SERVE_SLOTS = 32


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

    text = "Train a model. Without a run file: the built-in demo."
    flag = commands.add("train", text, SETTINGS_HELP, run=run_train).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    flag("--resume", type=Path, metavar="RUN_DIR", help="continue a run from its last checkpoint")
    text = "check the settings, the memory, and the environment (with an empty answer and a word), without training"
    flag("--dry-run", action="store_true", help=text)
    flag("--watch", action="store_true", help="also show the run in a browser, until it ends (see `pipelinerl watch`)")
    text = "port of that page, 0: any free port (default: 7117)"
    flag("--watch-port", type=PORTS, metavar="PORT", help=text)

    text = "Serve a model over HTTP: OpenAI's API, and in-flight weight updates (extra `serve`)."
    keys = ", ".join(f"--{key}" for key in SERVE_KEYS)
    epilog = f"These keys of the run file are also flags: {keys} (engine.slots is {SERVE_SLOTS} here)."
    flag = commands.add("serve", text, epilog, run=run_serve).add_argument
    flag("model", metavar="MODEL", help="folder or hub id of a Hugging Face causal LM, or `demo`")
    flag("--served-name", metavar="NAME", help="the model's name for clients (default: MODEL)")
    flag("--host", metavar="HOST", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    flag("--port", type=PORTS, metavar="PORT", default=8000, help="port to listen on, 0: any free port (default: 8000)")
    flag("--api-key-env", metavar="NAME", help="environment variable with the API key that clients must send")
    text = f"directory that weight updates may be read from; may be repeated (default: {SHARED_MEMORY})"
    flag("--weights-dir", type=Path, action="append", metavar="DIR", help=text)
    flag("--max-queue", type=at_least(0), default=256, metavar="N", help="requests that may wait for a slot (default: 256)")
    text = "serve the Tinker API instead: clients train LoRA adapters; DIR keeps what they save (extra `tinker`)"
    flag("--train", type=Path, metavar="DIR", help=text)
    flag("--ready-file", type=Path, metavar="FILE", help='file to write once the server listens: {"url": ..., "pid": ...}')
    text = "seconds that open requests have to finish when the server is stopped (default: 30)"
    flag("--drain-s", type=at_least(0, float), default=30.0, metavar="S", help=text)

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
    return write(json_schema() if options.schema else render(config))


def run_train(options: argparse.Namespace, settings: Sequence[str]) -> int:
    run_file: Path | None = options.run_file
    if options.resume is not None and run_file is not None:
        raise UserError(f"--resume takes the configuration from {options.resume / 'config.yaml'}; leave out {run_file}")
    if options.watch_port is not None and not options.watch:
        raise UserError("--watch-port needs --watch")
    if options.resume is None:
        config = load_config(run_file, settings)
    else:
        from pipelinerl.launch.resume import resumed_config  # noqa: PLC0415 - few commands resume

        config = resumed_config(options.resume, settings)
    if options.dry_run:
        from pipelinerl.launch.checks import dry_run  # noqa: PLC0415 - as below

        return write("\n".join(dry_run(config)) + "\n")
    from pipelinerl.launch.run import train  # noqa: PLC0415 - it is not needed for --help

    if not options.watch:
        train(config, resume=options.resume)
        return 0
    require("serve", "pipelinerl train --watch")
    from pipelinerl.cli.watch import PORT  # noqa: PLC0415 - few runs have a page
    from pipelinerl.experiments.watch.server import Beside  # noqa: PLC0415 - needs the extra `serve`

    with closing(Beside(PORT if options.watch_port is None else options.watch_port)) as page:
        train(config, resume=options.resume, began=page.begin)
    return 0


def run_serve(options: argparse.Namespace, settings: Sequence[str]) -> int:
    require(*(("serve", "pipelinerl serve") if options.train is None else ("tinker", "pipelinerl serve --train")))
    from pipelinerl.serving.server.run import ServeOptions, serve  # noqa: PLC0415 - only here

    base = RunConfig(model=ModelConfig(path=options.model), engine=EngineConfig(slots=SERVE_SLOTS))
    config = with_flags(base, settings, SERVE_KEYS)
    return serve(
        ServeOptions(
            model=config.model,
            engine=config.engine,
            name=options.served_name or options.model,
            listen=(options.host, options.port),
            api_key=api_key_from(options.api_key_env or ("TINKER_API_KEY" if options.train is not None else None)),
            max_queue=options.max_queue,
            weight_directories=tuple(options.weights_dir or [SHARED_MEMORY]),
            drain_s=options.drain_s,
            ready_file=options.ready_file,
            train=options.train,
        )
    )


def run_doctor(options: argparse.Namespace, _settings: Sequence[str]) -> int:
    """Returns exit status 1 if something is wrong."""
    from pipelinerl.experiments.doctor import WRONG, examine, shown  # noqa: PLC0415 (loads torch)

    found = examine(options.vllm_python)
    return write(shown(found)) or int(any(finding.level == WRONG for finding in found))
