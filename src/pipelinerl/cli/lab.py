"""`pipelinerl sweep` and `replay`, and `pipelinerl lab`: comparisons, studies and predictions that few runs need."""

from __future__ import annotations

import argparse
import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, at_least, keyed_values, say, write
from pipelinerl.config.load import load_config
from pipelinerl.errors import ReplayDifferenceError, UserError
from pipelinerl.run_directory import existing_run

CALIBRATION = Path("calibration.json")
_STUDY = (
    "kv-cache: measure the KL divergence of sampling with weights that change during generation from on-policy sampling, "
    "with stale and with recomputed KV entries, and compare it with the divergence at conventional lags. The run "
    "must have saved consecutive checkpoints: pipelinerl train --trainer.checkpoint_every 1 --trainer.keep_checkpoints N, "
    "where N is the number of steps. Keys of the run file are also flags (--engine.device cpu)."
)

_SWEEP = (
    "Every key of the run file is also a flag, and may have several values: --trainer.learning_rate 1e-4,3e-4 "
    "--actor.group_size 8,16 makes four settings. Commas in [lists], {mappings} and quoted text separate nothing."
)
_REPLAY = (
    "Without settings, training is repeated and the checksum of every published version is compared with the run's; exit "
    "status 1 if one differs. With other settings of the training side (--trainer.loss ppo --correction.token tv), the same "
    "batches are trained on with them, and gradient norms, ESS and clipped shares are compared with the run's."
)


def add_to(commands: Commands) -> None:
    text = (
        "Train with several settings and seeds, one run after another, and rank the settings. Without a run file: the demo."
    )
    flag = commands.add("sweep", text, _SWEEP, run=run_sweep).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    text = "runs of each setting, each with a different seed (default: 1)"
    flag("--seeds", type=at_least(1), default=1, metavar="K", help=text)
    flag("--dry-run", action="store_true", help="check every setting, as `train --dry-run` does, without training")
    flag("-o", "--out", type=Path, metavar="DIR", help="a new folder, or one to continue (default: runs/sweep-DATE)")

    text = "Repeat a run from its records and compare: training to the bit, generation within a tolerance."
    flag = commands.add("replay", text, _REPLAY, run=run_replay).add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    text = "repeat only the first K optimizer steps; 0: do not train (default: all)"
    flag("--steps", type=at_least(0), metavar="K", help=text)
    text = "also repeat the generation of N groups, and compare the log-probs of their tokens (default: 0)"
    flag("--verify", type=at_least(0), default=0, metavar="N", help=text)
    text = "largest difference of log-probs to accept (default: 1e-4 for float32 weights, 0.3 for bfloat16)"
    flag("--tolerance", type=at_least(0, float), metavar="X", help=text)
    flag("--seed", type=at_least(0), default=0, help="seed of the choice of groups (default: 0)")
    flag("-o", "--out", type=Path, metavar="DIR", help="a new folder for the results, the metrics and the last weights")

    text = (
        "Comparisons and predictions of runs: compare, study, plan, calibrate, simulate. "
        "`pipelinerl lab NAME --help` has the flags of each."
    )
    commands.add("lab", text, run=run_lab)
    _add_laboratory(commands)


def _add_laboratory(commands: Commands) -> None:
    text = "Compare schedules on this machine, each at its best settings. Without a run file: the demo."
    flag = commands.add("lab compare", text, SETTINGS_HELP, run=run_compare).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    flag("--schedules", metavar="LIST", help="e.g. pipeline,conventional:1,conventional:4,async:2 (G after the colon)")
    flag(
        "--seeds", type=at_least(1), metavar="K", help="repetitions, each with a different seed (default: 2; with --quick 1)"
    )
    flag("--quick", action="store_true", help="fewer schedules, seeds, steps and settings; takes a few minutes")
    flag("--no-tune", action="store_true", help="use only the run file's settings, without tuning")
    flag("--target", type=float, metavar="R", help="the reward to reach (default: chosen from the runs)")
    text = (
        "number of held-out problems that copies of a run's weights answer after it, to find when it reached the target "
        "(default: 512; with --quick 256); 0: compare rates only"
    )
    flag("--held-out", type=at_least(0), metavar="N", help=text)
    text = "optimizer steps between copies of the weights (default: a sixteenth of all steps)"
    flag("--evaluate-every", type=at_least(1), metavar="E", help=text)
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

    text = "Throughput against lag of PipelineRL and conventional RL in the paper's case study, from its formulas."
    commands.add("lab plan", text, run=run_plan, keys=False)

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


def run_lab(_options: argparse.Namespace, _settings: Sequence[str]) -> int:
    raise UserError("name a command: lab compare, study, plan, calibrate or simulate")


def run_sweep(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Raises PipelineRLError if a run failed, once all others have ended."""
    from pipelinerl.experiments.sweep import make_grid  # noqa: PLC0415 (and others)

    grid = make_grid(options.run_file, settings, options.seeds)
    if options.dry_run:
        from pipelinerl.launch.checks import dry_run  # noqa: PLC0415

        return write("".join("\n".join([f"{one.label}:", *dry_run(one.config), "\n"]) for one in grid.settings))
    from pipelinerl.experiments.sweep import RESULTS_FILE, section, sweep  # noqa: PLC0415
    from pipelinerl.report import in_terminal  # noqa: PLC0415

    out = _experiment_folder(options, "sweep")
    found, failure = sweep(grid, out, say)
    best = found.settings[0]
    lines = [in_terminal(section(found))]
    if best.reward is not None:
        values = [f"--{key}={text}" for key, text in best.setting.items()]
        run_file = [] if options.run_file is None else [str(options.run_file)]
        lines.append(f"the best: {shlex.join(['pipelinerl', 'train', *run_file, *grid.fixed, *values])}\n")
    status = write("".join([*lines, f"{out / RESULTS_FILE}\n{out / 'report.html'}\n"]))
    if failure is not None:
        raise failure
    return status


def _experiment_folder(options: argparse.Namespace, kind: str) -> Path:
    out: Path = options.out or Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    say(f"runs and results: {out} (to continue after an interruption: the same command with --out {out})")
    return out


def run_replay(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Raises ReplayDifferenceError, after printing the results, if the run was not repeated."""
    existing_run(options.run_dir)
    from pipelinerl.experiments.replay.replay import difference_text, replay, result_text  # noqa: PLC0415 (loads torch)
    from pipelinerl.process import counted_interrupts  # noqa: PLC0415 - as above

    with counted_interrupts(raises_at=2) as interrupts:
        result = replay(
            options.run_dir,
            settings,
            steps=options.steps,
            verify=options.verify,
            seed=options.seed,
            tolerance=options.tolerance,
            out=options.out,
            stop=lambda: interrupts.count > 0,
            say=say,
        )
    status = write(result_text(result))
    if result.differences:
        raise ReplayDifferenceError(difference_text(result))
    return status


def run_compare(options: argparse.Namespace, settings: Sequence[str]) -> int:
    target: float | None = options.target
    if target is not None and not math.isfinite(target):
        raise UserError(f"--target: {target} is not a reward")
    if target is not None and options.held_out == 0:
        raise UserError("--target: without held-out problems (--held-out 0) no reward is measured")
    from pipelinerl.launch.checks import settled  # noqa: PLC0415 - not needed for --help

    config, chosen = settled(load_config(options.run_file, settings))
    for line in chosen:
        say(line)
    from pipelinerl.experiments.compare.compare import answer_held_out, compare, make_request  # noqa: PLC0415 (and others)
    from pipelinerl.experiments.runs import train_in_child  # noqa: PLC0415
    from pipelinerl.resources.machine import this_machine  # noqa: PLC0415

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
    out = _experiment_folder(options, "compare")
    findings = compare(request, out, train=train_in_child, answer=answer_held_out, target=target, say=say)
    return write("\n".join([*findings, f"{out / 'report.html'}", ""]))


def run_study(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load_config(existing_run(options.run_dir).config, settings)
    from pipelinerl.experiments.study import make_folder, study_kv_cache, write_study  # noqa: PLC0415 (loads torch)

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
    return write(write_study(study, out))


def run_plan(_options: argparse.Namespace, _settings: Sequence[str]) -> int:
    from pipelinerl.experiments.planner.paper import plan_text  # noqa: PLC0415 (loads numpy)

    return write(plan_text())


def run_calibrate(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load_config(options.run_file, settings)
    from pipelinerl.experiments.planner.calibration import calibrate  # noqa: PLC0415 (loads numpy)
    from pipelinerl.report import write_json  # noqa: PLC0415 (as above)

    calibration = calibrate(config, report=lambda text: say(f"{text} ..."), steps=options.steps)
    write_json(options.out, calibration)
    return write(f"{calibration}written to {options.out}\n")


def run_simulate(options: argparse.Namespace, settings: Sequence[str]) -> int:
    compared = options.compare if options.run_file is None else None
    config = load_config(existing_run(compared).config if compared else options.run_file, settings)
    from pipelinerl.experiments.planner.calibration import read_calibration  # noqa: PLC0415 (loads numpy)
    from pipelinerl.experiments.planner.scenario import read_measured, read_workload, run_scenario  # noqa: PLC0415
    from pipelinerl.experiments.planner.simulate import prediction_text, simulate  # noqa: PLC0415 (as above)
    from pipelinerl.report import write_file  # noqa: PLC0415 (as above)

    calibration = read_calibration(options.calibration)
    measured, workload, source = None, None, "of the untrained model, from the calibration"
    if options.compare:
        measured, workload = read_measured(options.compare, config), read_workload(options.compare, config)
        source = f"each group's own, from {options.compare}"
    scenario = run_scenario(config, calibration, workload, steps=int((measured or {}).get("steps") or 0))
    try:
        prediction = simulate(scenario)
    except ValueError as error:
        raise UserError(f"this run would never end: {error}") from error
    doubtful = calibration.doubts(config)
    if options.json:
        found = {"prediction": prediction, "measured": measured, "lengths": source, "doubts": doubtful}
        write_file(options.json, msgspec.json.encode(found) + b"\n")
    text = prediction_text(prediction, measured)
    notes = [f"lengths: {source}", *(f"doubtful: {doubt}" for doubt in doubtful)]
    return write(text + "".join(f"{note}\n" for note in notes))
