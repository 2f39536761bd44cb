"""`pipelinerl lab`: comparisons and studies of schedules, predictions of runs, and tools that few runs need."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.cli.parser import (
    SETTINGS_HELP,
    Commands,
    at_least,
    config_of_run,
    keyed_values,
    refuse_settings,
    say,
    write,
)
from pipelinerl.config.load import load_config
from pipelinerl.errors import UserError

CALIBRATION = Path("calibration.json")
_STUDY = (
    "kv-cache: measure the KL divergence of sampling with weights that change during generation from on-policy sampling, "
    "with stale and with recomputed KV entries, and compare it with that of conventional lags. The run must have saved "
    "consecutive checkpoints: pipelinerl train --trainer.checkpoint_every 1 --trainer.keep_checkpoints N, where N is the "
    "number of steps. Keys of the run file are also flags (--engine.device cpu)."
)


def add_to(commands: Commands) -> None:
    text = (
        "Comparisons and predictions of runs: compare, study, plan, calibrate, simulate; export. "
        "`pipelinerl lab NAME --help` has the flags of each."
    )
    commands.add("lab", text, run=run_lab)
    _add_comparisons(commands)
    _add_predictions(commands)
    _add_tools(commands)


def _add_comparisons(commands: Commands) -> None:
    text = "Compare schedules on this machine, each at its best settings. Without a run file: the demo."
    flag = commands.add("lab compare", text, SETTINGS_HELP, run=run_compare).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    flag("others", nargs="*", type=Path, help=argparse.SUPPRESS)
    flag("--schedules", metavar="LIST", help="e.g. pipeline,conventional:1,conventional:4,async:2 (G after the colon)")
    flag("--seeds", type=int, metavar="K", help="repetitions, each with a different seed (default: 2; with --quick 1)")
    flag("--quick", action="store_true", help="fewer schedules, seeds, steps and settings; takes a few minutes")
    flag("--no-tune", action="store_true", help="use only the run file's settings, without tuning")
    flag("--target", "--target-reward", type=float, metavar="R", help="the reward to reach (default: chosen from the runs)")
    text = (
        "number of held-out problems that copies of a run's weights answer after it, to find when it reached the target "
        "(default: 512; with --quick 256); 0: use training rewards, which depend on each schedule's lag"
    )
    flag("--held-out", type=int, metavar="N", help=text)
    text = "optimizer steps between copies of the weights (default: a sixteenth of all steps)"
    flag("--evaluate-every", type=int, metavar="E", help=text)
    text = "value of environment.args for held-out problems only, e.g. to remove a delay; may be repeated"
    flag("--held-out-arg", action="append", default=[], metavar="KEY=VALUE", help=text)
    flag("-o", "--out", type=Path, metavar="DIR", help="a new folder, or one to continue (default: runs/compare-DATE)")

    flag = commands.add("lab study", "Run a study on the checkpoints of a run.", _STUDY, run=run_study).add_argument
    flag("what", choices=["kv-cache"], help="the study")
    flag("run_dir", type=Path, metavar="RUN_DIR", help="a run with consecutive checkpoints")
    text = "g_max, number of steps from version C to the policy (default: 16)"
    flag("--lag", type=at_least(1), default=16, metavar="G", help=text)
    text = "versions C to start from, or early, middle, late (default: early,middle,late)"
    flag("--from", dest="starts", default="early,middle,late", metavar="C,...", help=text)
    flag("--problems", type=at_least(1), default=64, metavar="N", help="the latest problems of the run (default: 64)")
    flag("--attempts", type=at_least(1), default=4, metavar="K", help="attempts per problem (default: 4)")
    text = "longest completion, in tokens (default: the 90th percentile of the run's)"
    flag("--max-tokens", type=at_least(1), metavar="L", help=text)
    flag("--seed", type=at_least(0), default=0, help="seed of sampling and resampling (default: 0)")
    flag("-o", "--out", type=Path, metavar="DIR", help="output folder (default: RUN_DIR/study)")


def _add_predictions(commands: Commands) -> None:
    text = "Throughput against lag of PipelineRL and conventional RL in the paper's case study, from its formulas."
    commands.add("lab plan", text, run=run_plan)

    text = (
        "Measure how long the steps of a run (default: the demo) take on this machine, for `pipelinerl "
        "lab simulate`. Takes under a minute for the demo."
    )
    flag = commands.add("lab calibrate", text, SETTINGS_HELP, run=run_calibrate).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    flag("-o", "--out", type=Path, default=CALIBRATION, metavar="FILE", help=f"output file (default: {CALIBRATION})")
    text = "optimizer steps of the measured run (default: 96); fewer cost less time and make predictions less accurate"
    flag("--steps", type=at_least(2), default=96, metavar="N", help=text)

    text = (
        "Predict a run (default: the demo) by discrete-event simulation, from the calibration of a machine. With --compare: "
        "simulate a past run, and compare with what it measured."
    )
    flag = commands.add("lab simulate", text, SETTINGS_HELP, run=run_simulate).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    text = f"the file that `pipelinerl lab calibrate` wrote (default: {CALIBRATION})"
    flag("--calibration", type=Path, default=CALIBRATION, metavar="FILE", help=text)
    text = "simulate this run, and show its measurements next to the prediction"
    flag("--compare", type=Path, metavar="RUN_DIR", help=text)
    flag("--json", type=Path, metavar="FILE", help="write the whole prediction as JSON")


def _add_tools(commands: Commands) -> None:
    text = "Write what a run recorded to one tar file, without secrets: to replay, browse or evaluate it elsewhere."
    flag = commands.add("lab export", text, run=run_export).add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    flag("out", type=Path, metavar="OUT.tar", help="the new file")
    flag(
        "--no-weights", action="store_true", help="leave out checkpoints and copies of weights; a replay computes them again"
    )
    flag("--no-model", action="store_true", help="leave out the folder of the initial model")


def run_lab(_options: argparse.Namespace, _settings: Sequence[str]) -> int:
    raise UserError("name a command: lab compare, study, plan, calibrate, simulate or export")


def run_compare(options: argparse.Namespace, settings: Sequence[str]) -> int:
    target: float | None = options.target
    if target is not None and not math.isfinite(target):
        raise UserError(f"--target: {target} is not a reward")
    if options.others or (options.run_file is not None and options.run_file.is_dir()):
        named = " ".join(map(str, [options.run_file, *options.others]))
        raise UserError(f"compare trains, with several schedules, from one run file; for runs: `pipelinerl report {named}`")
    from pipelinerl.launch.checks import settled  # noqa: PLC0415 - not needed for --help

    config, chosen = settled(load_config(options.run_file, settings))
    for line in chosen:
        say(line)
    out: Path = options.out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
    from pipelinerl.experiments.compare.compare import compare  # noqa: PLC0415 (and others)
    from pipelinerl.experiments.compare.held_out import answer_held_out, check_held_out  # noqa: PLC0415
    from pipelinerl.experiments.compare.settings import make_request  # noqa: PLC0415
    from pipelinerl.experiments.runs import train_in_child  # noqa: PLC0415
    from pipelinerl.resources.hardware import this_machine  # noqa: PLC0415

    request = make_request(
        config,
        this_machine(),
        schedules=options.schedules,
        seeds=options.seeds,
        quick=options.quick,
        tune=not options.no_tune,
        held_out=options.held_out,
        evaluate_every=options.evaluate_every,
        held_out_args=keyed_values("--held-out-arg", options.held_out_arg),
    )
    check_held_out(request)
    print(f"results and runs: {out} (to continue after an interruption: the same command with --out {out})", flush=True)
    contents = compare(
        request, out, train=train_in_child, evaluate=answer_held_out, target=target, say=lambda text: print(text, flush=True)
    )
    return write(_result_text(contents, out))


def _result_text(contents: dict[str, Any], out: Path) -> str:
    lines = [f"target: a {contents['reward']} reward of {contents['target_reward']}"]
    for key in ("ratio_time_to_reward", "ratio_samples_per_s"):
        ratio = contents[key]
        if ratio and ratio["median"] is not None:
            spread = f"{ratio['min']:.2f} to {ratio['max']:.2f}"
            lines.append(f"{key}: {ratio['median']:.2f} ({spread}) against {ratio['baseline']}; above 1, pipeline is faster")
        else:
            lines.append(f"{key}: - (see the report)")
    return "\n".join([*lines, f"{out / 'report.html'}", ""])


def run_study(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load_config(config_of_run(options.run_dir), settings)
    from pipelinerl.experiments.study.kv_cache import study_kv_cache  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.study.page import make_folder, study_table, write_study  # noqa: PLC0415 (matplotlib)

    out = options.out or options.run_dir / "study"
    make_folder(out)
    study = study_kv_cache(
        options.run_dir,
        config,
        lag=options.lag,
        starts=[name.strip() for name in options.starts.split(",") if name.strip()],
        problems=options.problems,
        attempts=options.attempts,
        max_tokens=options.max_tokens,
        seed=options.seed,
        on_progress=say,
    )
    numbers, picture = write_study(study, out)
    return write(f"{study_table(study)}\n{numbers}\n{picture}\n")


def run_plan(_options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl lab plan", settings)
    from pipelinerl.experiments.planner.paper import plan_text  # noqa: PLC0415 (loads numpy)

    return write(plan_text())


def run_calibrate(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load_config(options.run_file, settings)
    from pipelinerl.experiments.planner.calibrate import calibrate  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.planner.calibration import calibration_text, write_calibration  # noqa: PLC0415 (as above)

    calibration = calibrate(config, report=lambda text: say(f"{text} ..."), steps=options.steps)
    write_calibration(options.out, calibration)
    return write(calibration_text(calibration) + f"written to {options.out}\n")


def run_simulate(options: argparse.Namespace, settings: Sequence[str]) -> int:
    compared = options.compare if options.run_file is None else None
    config = load_config(config_of_run(compared) if compared else options.run_file, settings)
    from pipelinerl.experiments.planner.calibration import read_calibration  # noqa: PLC0415 (loads numpy)
    from pipelinerl.experiments.planner.scenario import (  # noqa: PLC0415 (as above)
        calibrated_workload,
        doubts,
        read_measured,
        read_workload,
        run_scenario,
    )
    from pipelinerl.experiments.planner.simulate import comparison_text, prediction_text, simulate  # noqa: PLC0415 (as above)
    from pipelinerl.report import write_file  # noqa: PLC0415 (as above)

    calibration = read_calibration(options.calibration)
    if options.compare:
        measured = read_measured(options.compare, config)
        scenario = run_scenario(config, calibration, read_workload(options.compare, config), steps=measured.steps)
        source = f"each group's own, from {options.compare}"
    else:
        measured = None
        scenario = run_scenario(config, calibration, calibrated_workload(calibration, config))
        source = "of the untrained model, from the calibration"
    try:
        prediction = simulate(scenario)
    except ValueError as error:
        raise UserError(f"this run would never end: {error}") from error
    doubtful = doubts(config, calibration)
    if options.json:
        found = {"prediction": prediction, "measured": measured, "lengths": source, "doubts": doubtful}
        write_file(options.json, msgspec.json.encode(found) + b"\n")
    text = comparison_text(prediction, measured, str(options.compare)) if measured else prediction_text(prediction)
    notes = [f"lengths: {source}", *(f"doubtful: {doubt}" for doubt in doubtful)]
    return write(text + "".join(f"{note}\n" for note in notes))


def run_export(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl lab export", settings)
    config_of_run(options.run_dir)
    from pipelinerl.experiments.replay.export import export_run  # noqa: PLC0415 (loads torch)

    done = export_run(options.run_dir, options.out, weights=not options.no_weights, model=not options.no_model)
    for notice in done.notices:
        say(notice)
    return write(f"{options.out}: {done.files} files, {done.size / 1e6:.1f} MB\n")
