"""The demo with TRL's GRPO and with this package: samples/s and reward over time, on the same machine in one session.

python3 -m venv .venv-trl
.venv-trl/bin/pip install -c constraints.txt torch trl==1.16.0 msgspec xxhash pyyaml rich matplotlib
.venv/bin/python -m benchmarks.trl            # about 40 minutes; writes results/trl/

Both start from the same weights and get the same problems in the same order: 16 attempts at each of 16 problems per step,
all tokens at temperature 1, at most 240 per answer, scored by the same function; the demo's settings of AdamW, 140 steps,
float32. They run alternately, each in its own process with the whole machine. Time is measured from the end of loading.

TRL's settings: it trains on samples of the current weights, so that its loss and ours have the same gradient (`dapo`, a
mean over tokens; advantages not divided by their deviation; no KL). Defaults that cost time on a CPU are off: bf16,
gradient checkpointing. It has two threads. Short runs choose the size of its forward passes, and between `generate` and
transformers' continuous batching for sampling; the results contain all trials. vLLM is not tried: its CPU build needs
another torch. This package uses the demo's run file, with one thread for each process; whole runs choose the number of
generation processes, which `pipelinerl lab compare` tries too, their slots, and the trainer's micro batches.

Held-out rewards are those of checkpoints that both write every 20 steps, measured after the runs by the same code.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks import common
from pipelinerl.config.load import load_config
from pipelinerl.engine import LocalEngine
from pipelinerl.environments.tasks import gcd
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.report.curves import png_of
from pipelinerl.report.series import read_run
from pipelinerl.types import GenerationRequest, SamplingParams

ROOT = common.RESULTS.parent.parent
MODEL = ROOT / "src" / "pipelinerl" / "assets" / "demo_base"
DEMO = load_config(None)
BATCH, ATTEMPTS, LONGEST = DEMO.trainer.batch_size, DEMO.actor.group_size, DEMO.actor.max_tokens
CANDIDATES = (
    {"rows": 256, "continuous_batching": False},
    {"rows": 64, "continuous_batching": False},
    {"rows": 32, "continuous_batching": False},
    {"rows": 256, "continuous_batching": True},
)
OUR_CANDIDATES: tuple[dict[str, int], ...] = (
    {"engine.processes": 1},
    {"engine.processes": 2},
    {"engine.processes": 2, "engine.slots": 64},
    {"engine.processes": 2, "trainer.micro_batch_tokens": 4096},
)
OUR_TRIAL_STEPS = DEMO.trainer.steps
"""Whole runs, as in `pipelinerl lab compare`: the more the model has learned, the less there is to train."""
Curve = list[tuple[float, float]]


# ---- TRL, in its own process


def run_trl(folder: Path, *, seed: int, steps: int, threads: int, rows: int, continuous_batching: bool, every: int) -> None:
    """Train with TRL. Writes `folder/steps.jsonl` (step, time_s, reward, length) and a checkpoint every `every` steps."""
    import trl  # noqa: PLC0415 - installed only in this process's environment
    from datasets import Dataset  # noqa: PLC0415 - as above
    from transformers import TrainerCallback  # noqa: PLC0415 - as above

    torch.set_num_threads(threads)
    problems = [gcd.problem_at(index, seed, held_out=False) for index in range(steps * BATCH // ATTEMPTS)]
    dataset = Dataset.from_list([{"prompt": gcd.prompt_text(problem), **vars(problem)} for problem in problems])

    def reward(completions: Sequence[str], **columns: Sequence[int]) -> list[float]:
        rows = zip(*(columns[name] for name in ("a", "b", "answer", "steps")), strict=True)
        return [gcd.score(gcd.GcdProblem(*row), text) for row, text in zip(rows, completions, strict=True)]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            self.begin_s = time.perf_counter()

        def on_log(self, _args: object, state: Any, _control: object, logs: Mapping[str, float], **__: object) -> None:
            if "reward" not in logs:
                return
            time_s, length = time.perf_counter() - self.begin_s, logs["completions/mean_length"]
            record = {"step": state.global_step, "time_s": time_s, "reward": logs["reward"], "length": length}
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")

    settings = DEMO.trainer
    config = trl.GRPOConfig(
        output_dir=str(folder / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=BATCH // rows,
        num_generations=ATTEMPTS,
        max_completion_length=LONGEST,
        temperature=1.0,
        use_transformers_continuous_batching=continuous_batching,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="polynomial",  # power 1: linear, down to a tenth like ours
        lr_scheduler_kwargs={"lr_end": settings.learning_rate / 10, "power": 1.0},
        warmup_steps=settings.warmup_steps,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="none",
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        seed=seed,
        logging_steps=1,
        save_strategy="steps",
        save_steps=every,
        save_only_model=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(model=str(MODEL), reward_funcs=reward, args=config, train_dataset=dataset, callbacks=[Clock()])
    trainer.train()


def start_trl(python: Path, folder: Path, **settings: object) -> dict[str, Any]:
    """Train in a separate process, with the packages of `python` and this package from source."""
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": str(settings["threads"])}
    command = [str(python), "-m", "benchmarks.trl", "--worker", json.dumps({"folder": str(folder), **settings})]

    def work() -> None:
        folder.mkdir(parents=True)
        with (folder / "log.txt").open("w") as log:
            to_log: Any = {"stdout": log, "stderr": subprocess.STDOUT}
            ended = subprocess.run(command, cwd=ROOT, env=os.environ | paths, check=False, **to_log)
        if ended.returncode:
            raise SystemExit(f"TRL failed; see {folder / 'log.txt'}:\n{(folder / 'log.txt').read_text()[-2000:]}")

    once(folder, work)
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    times = {step["step"]: step["time_s"] for step in steps}
    return {
        "samples_per_s": len(steps) * BATCH / steps[-1]["time_s"],
        "samples_per_s_later": (len(steps) - 2) * BATCH / (steps[-1]["time_s"] - steps[1]["time_s"]),
        "training": [(step["time_s"], step["reward"]) for step in steps],
        "length_mean": sum(step["length"] for step in steps) / len(steps),
        "checkpoints": {
            step: (times[step], folder / "checkpoints" / f"checkpoint-{step}")
            for step in sorted(int(path.name.partition("-")[2]) for path in (folder / "checkpoints").glob("checkpoint-*"))
        },
    }


# ---- this package


def start_ours(folder: Path, *, seed: int, steps: int, every: int, settings: Mapping[str, object]) -> dict[str, Any]:
    """The demo's run file with `settings`, in separate processes. Writes checkpoints instead of evaluating, as for TRL."""
    flags = {"seed": seed, "trainer.steps": steps, "trainer.checkpoint_every": every, "trainer.keep_checkpoints": 10_000}
    flags |= {"evaluation.problems": 0, "run_dir": folder, "metrics.view": "none", **settings}
    code = "import sys; from pipelinerl.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "train", *(str(part) for key in flags for part in (f"--{key}", flags[key]))]
    once(folder, lambda: subprocess.run(command, check=True, cwd=ROOT))
    records = read_run(folder)
    begin_s, steps_done = records.begin_s, records.steps
    times = {step.version: step.time_s - begin_s for step in steps_done}
    fill, last = steps_done[len(steps_done) // 3 - 1].version, steps_done[-1].version
    return {
        "samples_per_s": sum(step.samples for step in steps_done) / times[last],
        "samples_per_s_later": sum(step.samples for step in steps_done if step.version > fill) / (times[last] - times[fill]),
        "training": [(step.time_s - begin_s, step.reward_mean) for step in steps_done],
        "length_mean": sum(step.completion_length_mean for step in steps_done) / len(steps_done),
        "checkpoints": {
            step: (times[step], folder / "checkpoints" / f"step_{step:08d}") for step in range(every, steps + 1, every)
        },
    }


def once(folder: Path, work: Callable[[], object]) -> None:
    """Have `work` fill the folder, unless it did so in an earlier call that was interrupted later."""
    finished = folder.with_suffix(".finished")
    if not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        work()
        finished.touch()


def try_settings(
    candidates: Sequence[Mapping[str, Any]], start: Callable[[int, Mapping[str, Any]], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Samples/s with each of the candidate settings, without the first steps. `start(number, settings)` makes a run."""
    trials = []
    for number, settings in enumerate(candidates):
        trials.append({**settings, "samples_per_s": start(number, settings)["samples_per_s_later"]})
        print(trials[-1], flush=True)
    return trials


def fastest(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings with the most samples/s."""
    best = max(trials, key=lambda trial: trial["samples_per_s"])
    return {key: value for key, value in best.items() if key != "samples_per_s"}


# ---- results of both


def held_out_reward(checkpoint: Path, problems: int) -> float:
    """Mean reward of one answer to each of the demo's held-out problems, sampled at temperature 1."""
    tokenizer = load_tokenizer(DEMO.model)
    model = common.fresh_model(str(checkpoint))
    engine = LocalEngine(model, slots=128, max_length=DEMO.engine.max_length)
    asked = [gcd.problem_at(index, seed=0, held_out=True) for index in range(problems)]
    sampling = SamplingParams(max_tokens=LONGEST, stop_token_ids=(int(tokenizer.eos_token_id),))
    requests = [
        GenerationRequest(id=str(number), prompt_ids=tuple(tokenizer.encode(gcd.prompt_text(problem))), sampling=sampling)
        for number, problem in enumerate(asked)
    ]
    answers = {answer.request_id: answer.token_ids for answer in engine.generate(requests)}
    texts = [tokenizer.decode(answers[str(number)], skip_special_tokens=True) for number in range(len(asked))]
    return sum(map(gcd.score, asked, texts)) / len(asked)


def seconds_to(curve: Curve, reward: float) -> float | None:
    """The first time at which a curve is at least `reward`."""
    return next((time_s for time_s, value in curve if value >= reward), None)


def smoothed(curve: Curve, width: int = 5) -> Curve:
    """The mean of the last `width` rewards, starting when there are that many."""
    values = [value for _, value in curve]
    return [(curve[i][0], sum(values[i + 1 - width : i + 1]) / width) for i in range(width - 1, len(curve))]


def draw(records: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    for axes, key, name in zip(
        figure.subplots(1, 2),
        ("training", "held_out"),
        ("training batches, mean of 5 steps", "held-out problems"),
        strict=True,
    ):
        for record in records:
            curve = smoothed(record[key]) if key == "training" else record[key]
            ours = record["system"] == "pipelinerl"
            label = record["system"] if record["repetition"] == 0 else "_"
            axes.plot(
                *zip(*curve, strict=True), "-" if key == "training" else "o-", color=f"C{0 if ours else 1}", label=label
            )
        axes.set(xlabel="seconds", ylabel=f"reward, {name}", xscale="symlog", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(edgecolor="none")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    parser.add_argument("--steps", type=int, default=DEMO.trainer.steps)
    parser.add_argument("--trial-steps", type=int, default=6, help="steps of a trial of TRL's settings, 3 or more (6)")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints (20)")
    parser.add_argument("--problems", type=int, default=512, help="held-out problems (512)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.9, help="reward to reach (0.9)")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "trl")
    parser.add_argument("--runs", type=Path, help="where runs are kept, so that the same command can continue")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        settings = json.loads(options.worker)
        run_trl(Path(settings.pop("folder")), **settings)
        return
    machine_before, threads = common.machine(), len(os.sched_getaffinity(0))
    python, steps, every = options.trl_python, options.steps, options.every
    runs = options.runs or Path(tempfile.mkdtemp(prefix="trl-"))

    def try_trl(number: int, candidate: Mapping[str, Any]) -> Mapping[str, Any]:
        folder = runs / f"trial-{number}"
        return start_trl(python, folder, seed=0, steps=options.trial_steps, threads=threads, every=10**6, **candidate)

    def try_ours(number: int, candidate: Mapping[str, Any]) -> Mapping[str, Any]:
        folder = runs / f"our-trial-{number}"
        return start_ours(folder, seed=0, steps=OUR_TRIAL_STEPS, every=OUR_TRIAL_STEPS, settings=candidate)

    trials, our_trials = try_settings(CANDIDATES, try_trl), try_settings(OUR_CANDIDATES, try_ours)
    best, ours = fastest(trials), fastest(our_trials)
    records: list[common.Record] = []
    for seed in range(options.repetitions):
        for system in ("pipelinerl", "trl"):
            folder = runs / f"{system}-{seed}"
            if system == "trl":
                found = start_trl(python, folder, seed=seed, steps=steps, threads=threads, every=every, **best)
            else:
                found = start_ours(folder, seed=seed, steps=steps, every=every, settings=ours)
            records.append({"system": system, "repetition": seed, **found, "load_average": os.getloadavg()[0]})
            print(f"{system}, seed {seed}: {found['samples_per_s']:.0f} samples/s", flush=True)
    start = held_out_reward(MODEL, options.problems)
    for record in records:
        checkpoints = record.pop("checkpoints").values()
        record["held_out"] = [(0.0, start), *((at, held_out_reward(path, options.problems)) for at, path in checkpoints)]
    table = []
    for record in records:
        row = {key: record[key] for key in ("system", "repetition", "samples_per_s", "length_mean")}
        row[f"s to training reward {options.target}"] = seconds_to(smoothed(record["training"]), options.target)
        row[f"s to held-out reward {options.target}"] = seconds_to(record["held_out"], options.target)
        table.append(row | {"held-out at the end": record["held_out"][-1][1], "wall_s": record["training"][-1][0]})
    settings = {
        "steps": steps,
        "B": BATCH,
        "K": ATTEMPTS,
        "trl_threads": threads,
        "trl_settings": best,
        "trl_trials": trials,
        "our_settings": ours,
        "our_trials": our_trials,
    }
    settings |= {"trl": version_of(python, "trl"), "trl_torch": version_of(python, "torch")}
    settings |= {
        "trl_transformers": version_of(python, "transformers"),
        "pipelinerl": importlib.metadata.version("pipelinerl"),
    }
    common.write_results(
        "trl-demo", settings=settings, machine_before=machine_before, records=records, table=table, directory=options.out
    )
    (options.out / "trl-demo.png").write_bytes(png_of(draw(records)))
    shutil.rmtree(runs)


def version_of(python: Path, package: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
