"""`pipelinerl eval`."""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.cli.parser import Commands, api_key_from, at_least, say, write
from pipelinerl.config.checks import engine_mistakes
from pipelinerl.config.load import with_flags
from pipelinerl.config.schema import EngineConfig, EnvironmentConfig, RunConfig
from pipelinerl.environments.registry import find_class
from pipelinerl.errors import RunInterruptedError, UserError

if TYPE_CHECKING:
    from pipelinerl.experiments.evaluate.evaluate import EvaluationPlan

KEYS = (
    *("environment.kind", "environment.args", "evaluation.temperature", "actor.top_p", "actor.top_k", "actor.max_tokens"),
    *("actor.rollout_timeout_s", "actor.code_timeout_s", "model.dtype", "model.head_dtype", "model.trust_remote_code"),
    *("engine.kind", "engine.urls", "engine.api_key_env", "engine.slots", "engine.max_length", "engine.prefill_tokens"),
    *("engine.device", "engine.threads"),
)
"""The keys of the run file that an evaluation uses."""

_EPILOG = (
    "MODEL: a folder, a hub id, `demo`, or a run directory: RUN_DIR is its last checkpoint, RUN_DIR@7 that of version 7, "
    "RUN_DIR@0 the model it started from, RUN_DIR@all every checkpoint, RUN_DIR@best the best by held-out reward. Keys of "
    "the run file are also flags "
    "(--environment.kind gcd --engine.slots 64). If the first MODEL is a run directory, their defaults are those of that "
    f"run. The keys are {', '.join(KEYS)}. To use servers of MODEL instead of a local engine: --engine.kind http "
    "--engine.urls [http://HOST:8000]."
)


def add_to(commands: Commands) -> None:
    text = "Measure models on held-out problems: mean@K, pass@k with intervals, a record of every attempt."
    flag = commands.add("eval", text, _EPILOG, run=run).add_argument
    text = "a model to measure; each is a row of the table, compared with the first"
    flag("models", nargs="+", metavar="MODEL", help=text)
    flag("--problems", type=at_least(1), default=100, metavar="N", help="largest number of problems (default: 100)")
    flag("--training", action="store_true", help="use training problems instead of held-out ones, to get their pass rates")
    flag("--attempts", type=at_least(1), default=4, metavar="K", help="attempts per problem (default: 4)")
    flag("--pass-at", type=float, default=1.0, metavar="R", help="lowest reward that counts as a pass (default: 1)")
    flag("--seed", type=at_least(0), default=0, help="seed of sampling and resampling (default: 0)")
    flag("-o", "--out", type=Path, metavar="DIR", help="output folder (default: evaluations/DATE-ENVIRONMENT)")


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Raises RunInterruptedError after an interrupt, once the results so far are written."""
    if not math.isfinite(options.pass_at):
        raise UserError(f"--pass-at {options.pass_at:g}: give a finite number")
    plan = _plan(options, settings)
    from pipelinerl.experiments.evaluate.evaluate import evaluate  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.evaluate.results import evaluation_table  # noqa: PLC0415
    from pipelinerl.process import counted_interrupts  # noqa: PLC0415

    with counted_interrupts(raises_at=2) as interrupts:
        summary = evaluate(plan, lambda: interrupts.count > 0, say)
    status = write(f"{evaluation_table(summary)}\n{plan.out / 'summary.json'}\n")
    if summary.status == "interrupted":
        raise RunInterruptedError(f"interrupted before the evaluation was complete; the results so far are in {plan.out}")
    return status


def plan_of(words: Sequence[str]) -> EvaluationPlan:
    """The plan of `pipelinerl eval WORDS`. Raises UserError."""
    commands = Commands()
    add_to(commands)
    own, settings = commands.split(["eval", *words])
    return _plan(commands.root.parse_args(own), settings)


def _plan(options: argparse.Namespace, settings: Sequence[str]) -> EvaluationPlan:
    config = with_flags(RunConfig(), settings, KEYS)
    find_class(config.environment.kind)  # mistakes in flags first: the imports take seconds
    from pipelinerl.experiments.evaluate.evaluate import LEVEL, RESAMPLES, EvaluationPlan  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.evaluate.models import find_targets, run_config_of  # noqa: PLC0415
    from pipelinerl.experiments.evaluate.results import EvaluationSettings  # noqa: PLC0415

    given = {setting.partition("=")[0] for setting in settings}
    of_run = run_config_of(options.models[0])
    if of_run is None and "--environment.kind" not in given:
        raise UserError(
            "the first MODEL is not a run directory: give the environment to evaluate on, --environment.kind KIND"
        )
    if of_run is not None:
        config = with_flags(_without_servers(of_run, "--environment.kind" in given), settings, KEYS)
        find_class(config.environment.kind)
    engine, actor = config.engine, config.actor
    for mistake in engine_mistakes(engine):
        raise UserError(f"--{mistake}")
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
        settings=EvaluationSettings(
            environment=config.environment.kind,
            environment_args=config.environment.args,
            environment_seed=config.seed,
            problems=options.problems,
            training_problems=options.training,
            attempts=options.attempts,
            temperature=config.evaluation.temperature,
            top_p=actor.top_p,
            top_k=actor.top_k,
            max_tokens=actor.max_tokens,
            pass_at=options.pass_at,
            seed=options.seed,
            resamples=RESAMPLES,
            level=LEVEL,
        ),
        engine=engine,
        api_key=api_key_from(engine.api_key_env, "--engine.api_key_env"),
        rollout_timeout_s=actor.rollout_timeout_s,
        code_timeout_s=actor.code_timeout_s,
        out=options.out or Path("evaluations") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}",
    )


def _without_servers(config: RunConfig, other_environment: bool) -> RunConfig:
    """The run's settings without its servers: if they still run, they have other weights by now.

    `other_environment`: also without the arguments of its environment.
    """
    kept = {name: getattr(config.engine, name) for name in ("slots", "max_length", "prefill_tokens", "device", "threads")}
    changes = {"engine": EngineConfig(**kept)} | ({"environment": EnvironmentConfig()} if other_environment else {})
    return config.model_copy(update=changes)
