"""`pipelinerl eval`, `try` and `push`: what a model answers, before and after training."""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, api_key_from, at_least, say, write
from pipelinerl.config.checks import mistakes
from pipelinerl.config.load import load_config, with_flags
from pipelinerl.config.schema import EngineConfig, EnvironmentConfig, RunConfig
from pipelinerl.environments.registry import find_class
from pipelinerl.errors import RunInterruptedError, UserError
from pipelinerl.run_directory import existing_run

if TYPE_CHECKING:
    from pipelinerl.experiments.evaluate.evaluate import EvaluationPlan

KEYS = (
    *("environment.kind", "environment.args", "evaluation.temperature", "actor.top_p", "actor.top_k", "actor.max_tokens"),
    *("actor.rollout_timeout_s", "model.dtype", "model.head_dtype", "model.trust_remote_code"),
    *("engine.kind", "engine.urls", "engine.api_key_env", "engine.slots", "engine.max_length", "engine.prefill_tokens"),
    *("engine.device", "engine.threads"),
)
"""The keys of the run file that an evaluation uses."""

_EPILOG = (
    "MODEL: a folder, a hub id, `demo`, or a run directory: RUN_DIR is its last checkpoint, RUN_DIR@7 the one of version 7, "
    "RUN_DIR@0 the model it started from, RUN_DIR@all every checkpoint, RUN_DIR@best the best by held-out reward. Keys of "
    "the run file are also flags "
    "(--environment.kind gcd --engine.slots 64). If the first MODEL is a run directory, their defaults are those of that "
    f"run. The keys are {', '.join(KEYS)}. To use servers of MODEL instead of a local engine: --engine.kind http "
    "--engine.urls [http://HOST:8000]."
)


def add_to(commands: Commands) -> None:
    text = "Measure models on held-out problems: mean@K, pass@k with intervals, a record of every attempt."
    flag = commands.add("eval", text, _EPILOG, run=run_eval).add_argument
    text = "a model to measure; each is a row of the table, compared with the first"
    flag("models", nargs="+", metavar="MODEL", help=text)
    flag("--problems", type=at_least(1), default=100, metavar="N", help="largest number of problems (default: 100)")
    flag("--training", action="store_true", help="use training problems instead of held-out ones, to get their pass rates")
    flag("--attempts", type=at_least(1), default=4, metavar="K", help="attempts per problem (default: 4)")
    flag("--pass-at", type=float, default=1.0, metavar="R", help="lowest reward that counts as a pass (default: 1)")
    flag("--seed", type=at_least(0), default=0, help="seed of sampling and resampling (default: 0)")
    flag("-o", "--out", type=Path, metavar="DIR", help="output folder (default: evaluations/DATE-ENVIRONMENT)")

    text = "Upload a run's model to the Hugging Face Hub, with a model card: curves, evaluation, configuration, command."
    flag = commands.add("push", text, run=run_push, keys=False).add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    flag("repo", metavar="REPO", help="the model's id on the hub, like owner/name; it is created if it does not exist")
    text = "the version of the weights, or `best` (default: the last checkpoint)"
    flag("--version", type=lambda given: given if given == "best" else at_least(1)(given), metavar="N", help=text)
    flag("--public", action="store_true", help="anyone may see a new repository (default: only its owner)")
    flag("--dry-run", action="store_true", help="print the files and the card, without uploading; needs no network")

    text = "Let the model answer one problem, and show prompt, answers and rewards. Nothing is trained or written."
    flag = commands.add("try", text, SETTINGS_HELP, run=run_try).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file (default: the built-in demo)")
    flag("--problem", type=at_least(0), default=0, metavar="N", help="which problem of the training data (default: 0)")


def run_eval(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Raises RunInterruptedError after an interrupt, once the results so far are written."""
    if not math.isfinite(options.pass_at):
        raise UserError(f"--pass-at {options.pass_at:g}: give a finite number")
    plan = _plan(options, settings)
    from pipelinerl.experiments.evaluate.evaluate import evaluate, evaluation_sections  # noqa: PLC0415 (loads torch)
    from pipelinerl.process import counted_interrupts  # noqa: PLC0415
    from pipelinerl.report import in_terminal  # noqa: PLC0415

    with counted_interrupts(raises_at=2) as interrupts:
        summary = evaluate(plan, lambda: interrupts.count > 0, say)
    tables = "".join(map(in_terminal, evaluation_sections(plan, summary)))
    status = write(f"{tables}\n{plan.out / 'summary.json'}\n")
    if summary.status == "interrupted":
        raise RunInterruptedError(f"interrupted before the evaluation was complete; the results so far are in {plan.out}")
    return status


def _plan(options: argparse.Namespace, settings: Sequence[str]) -> EvaluationPlan:
    config = with_flags(RunConfig(), settings, KEYS)
    find_class(config.environment.kind)  # mistakes in flags first: the imports take seconds
    from pipelinerl.experiments.evaluate.evaluate import EvaluationPlan  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.evaluate.models import find_targets, run_config_of  # noqa: PLC0415

    given = {setting.partition("=")[0] for setting in settings}
    of_run = run_config_of(options.models[0])
    if of_run is None and "--environment.kind" not in given:
        raise UserError(
            "the first MODEL is not a run directory: give the environment to evaluate on, --environment.kind KIND"
        )
    if of_run is not None:  # without its servers: if they still run, they have other weights by now
        names = ["slots", "max_length", "prefill_tokens", "device", "threads"]
        changes: dict[str, Any] = {"engine": EngineConfig(**{name: getattr(of_run.engine, name) for name in names})}
        if "--environment.kind" in given:  # the arguments are of another one
            changes["environment"] = EnvironmentConfig()
        config = with_flags(of_run.model_copy(update=changes), settings, KEYS)
        find_class(config.environment.kind)
    engine = config.engine
    for mistake in mistakes(RunConfig(engine=engine)):
        if mistake.startswith("engine."):
            raise UserError(f"--{mistake}")
    api_key_from(engine.api_key_env, "--engine.api_key_env")
    names = [key.partition(".")[2] for key in KEYS if key.startswith("model.") and f"--{key}" in given]
    changes = {name: getattr(config.model, name) for name in names}
    targets = [target._replace(model=target.model.model_copy(update=changes)) for target in find_targets(options.models)]
    if engine.urls and len(targets) > 1:
        raise UserError(f"--engine.urls: a server has the weights of one model; give one MODEL, not {len(targets)}")
    if engine.kind != "local" and not engine.urls:
        raise UserError("--engine.urls: give the addresses of the servers, as in --engine.urls [http://HOST:8000]")
    name = re.sub(r"\W+", "-", Path(config.environment.kind.partition(":")[0]).stem)
    return EvaluationPlan(
        targets=targets,
        config=config,
        out=options.out or Path("evaluations") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}",
        problems=options.problems,
        training=options.training,
        attempts=options.attempts,
        pass_at=options.pass_at,
        seed=options.seed,
    )


def run_push(options: argparse.Namespace, _settings: Sequence[str]) -> int:
    existing_run(options.run_dir)
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
    from pipelinerl.status.view import printable  # noqa: PLC0415 - as above

    trial = try_group(config, options.problem)
    return write(f"{printable(str(trial))}\n") or int(not trial.group.rollouts)
