"""`pipelinerl eval`."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipelinerl.cli.parser import Commands, api_key_from, keyed_values, refuse_settings, write
from pipelinerl.config.schema import EngineConfig, EnvironmentConfig, RunConfig
from pipelinerl.environments.registry import find_class
from pipelinerl.errors import RunInterruptedError, UserError

if TYPE_CHECKING:
    from pipelinerl.experiments.evaluate.evaluate import EvaluationPlan
    from pipelinerl.experiments.evaluate.models import Target

_EPILOG = (
    "MODEL: a folder, a hub id, `demo`, or a run directory: RUN_DIR is its last checkpoint, RUN_DIR@7 that of version 7, "
    "RUN_DIR@0 the model it started from, RUN_DIR@all every checkpoint. If the first MODEL is of a run, its settings are "
    "the defaults."
)


def add_to(commands: Commands) -> None:
    text = "Measure models on held-out problems: mean@K, pass@k with intervals, a record of every attempt."
    parser = commands.add("eval", text, epilog=_EPILOG)
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="several models become rows of one table and are compared with the first"
    )
    _add_question_flags(parser)
    _add_sampling_flags(parser)
    _add_engine_flags(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: evaluations/DATE-ENVIRONMENT)")
    parser.add_argument("--overwrite", action="store_true", help="replace the evaluation that is in DIR")
    parser.set_defaults(run=run)


def _add_question_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", metavar="KIND", help="environment, like environment.kind in a run file")
    parser.add_argument(
        "--env-arg", action="append", default=[], metavar="KEY=VALUE", help="value of environment.args; may be repeated"
    )
    parser.add_argument("--problems", type=int, default=100, metavar="N", help="largest number of problems (default: 100)")
    parser.add_argument(
        "--training",
        action="store_true",
        help="use training problems instead of held-out ones, to get their pass rates",
    )
    parser.add_argument("--attempts", type=int, default=4, metavar="K", help="attempts per problem (default: 4)")
    parser.add_argument(
        "--pass-at", type=float, default=1.0, metavar="R", help="lowest reward that counts as a pass (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and resampling (default: 0)")


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, metavar="T", help="0: greedy (default: 1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus truncation (default: 1, off)")
    parser.add_argument("--top-k", type=int, default=0, help="truncation to the k most likely tokens (default: 0, off)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest completion, in tokens (default: 256)")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, metavar="H", help="sequences in progress at once (default: 64)")
    parser.add_argument("--max-length", type=int, help="longest prompt + completion, in tokens (default: the model's)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="type of the weights (default: float32)")
    parser.add_argument("--device", help="torch device (default: cpu)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    parser.add_argument(
        "--engine-url",
        action="append",
        metavar="URL",
        help="server of MODEL to use instead of a local engine; may be repeated",
    )
    parser.add_argument(
        "--engine-kind", choices=["http", "vllm"], default="http", help="the server's protocol (default: http)"
    )
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the server's API key")


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Raises RunInterruptedError after an interrupt, once the results so far are written."""
    refuse_settings("pipelinerl eval", settings)
    _check(options)
    arguments = keyed_values("--env-arg", options.env_arg)
    if options.env is not None:
        find_class(options.env)
    plan = _plan(options, arguments)
    from pipelinerl.experiments.evaluate.evaluate import evaluate  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.evaluate.results import evaluation_table  # noqa: PLC0415
    from pipelinerl.launch.hosts.interrupts import counted_interrupts  # noqa: PLC0415

    with counted_interrupts(raising=True) as interrupts:
        summary = evaluate(plan, lambda: interrupts.count > 0, _say)
    status = write(f"{evaluation_table(summary)}\n{plan.out / 'summary.json'}\n")
    if summary.status == "interrupted":
        raise RunInterruptedError(f"stopped before the evaluation was complete; the results so far are in {plan.out}")
    return status


def _check(options: argparse.Namespace) -> None:
    """Raises UserError."""
    for flag, value, least in (
        ("--problems", options.problems, 1),
        ("--attempts", options.attempts, 1),
        ("--seed", options.seed, 0),
        ("--top-k", options.top_k, 0),
        ("--max-tokens", options.max_tokens, 1),
        ("--slots", options.slots, 1),
        ("--max-length", options.max_length, 2),
        ("--threads", options.threads, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"{flag} {value}: give a whole number of at least {least}")
    if options.temperature is not None and not (0 <= options.temperature < math.inf):
        raise UserError(f"--temperature {options.temperature:g}: give a number of at least 0")
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p:g}: give a number above 0, and at most 1")
    if not math.isfinite(options.pass_at):
        raise UserError(f"--pass-at {options.pass_at:g}: give a finite number")


def _plan(options: argparse.Namespace, arguments: dict[str, Any]) -> EvaluationPlan:
    from pipelinerl.experiments.evaluate.evaluate import LEVEL, RESAMPLES, EvaluationPlan  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.evaluate.models import find_targets, run_config_of  # noqa: PLC0415
    from pipelinerl.experiments.evaluate.results import EvaluationSettings  # noqa: PLC0415

    of_run = run_config_of(options.models[0])
    config = of_run or RunConfig()
    environment = _environment(options.env, arguments, of_run)
    targets = [_with_flags(target, options) for target in find_targets(options.models)]
    if options.engine_url and len(targets) > 1:
        raise UserError(f"--engine-url: a server has the weights of one model; give one MODEL, not {len(targets)}")
    return EvaluationPlan(
        targets=targets,
        settings=EvaluationSettings(
            environment=environment.kind,
            environment_args=environment.args,
            environment_seed=config.seed,
            problems=options.problems,
            training_problems=options.training,
            attempts=options.attempts,
            temperature=config.evaluation.temperature if options.temperature is None else options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            max_tokens=options.max_tokens or config.actor.max_tokens,
            pass_at=options.pass_at,
            seed=options.seed,
            resamples=RESAMPLES,
            level=LEVEL,
        ),
        engine=_engine(options, config.engine),
        api_key=api_key_from(options.api_key_env),
        rollout_timeout_s=config.actor.rollout_timeout_s,
        code_timeout_s=config.actor.code_timeout_s,
        out=options.out or Path("evaluations") / f"{time.strftime('%Y%m%d-%H%M%S')}-{_short(environment.kind)}",
        overwrite=options.overwrite,
    )


def _environment(kind: str | None, arguments: dict[str, Any], of_run: RunConfig | None) -> EnvironmentConfig:
    if kind is not None:
        return EnvironmentConfig(kind=kind, args=arguments)
    if of_run is None:
        raise UserError("the first MODEL is not a run directory: give the environment to evaluate on, --env KIND")
    find_class(of_run.environment.kind)
    return EnvironmentConfig(kind=of_run.environment.kind, args=of_run.environment.args | arguments)


def _with_flags(target: Target, options: argparse.Namespace) -> Target:
    model = target.model
    return target._replace(
        model=msgspec.structs.replace(
            model,
            dtype=options.dtype or model.dtype,
            trust_remote_code=options.trust_remote_code or model.trust_remote_code,
        )
    )


def _engine(options: argparse.Namespace, of_run: EngineConfig) -> EngineConfig:
    """Servers come only from --engine-url: those of the run, if they still run, have other weights by now."""
    return EngineConfig(
        kind=options.engine_kind if options.engine_url else "local",
        urls=tuple(options.engine_url or ()),
        slots=options.slots or of_run.slots,
        max_length=options.max_length or of_run.max_length,
        prefill_tokens=of_run.prefill_tokens,
        device=options.device or of_run.device,
        threads=options.threads or of_run.threads,
    )


def _short(kind: str) -> str:
    return re.sub(r"\W+", "-", Path(kind.partition(":")[0]).stem)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
