"""Builds a scenario from a run file and a machine's calibration."""

from __future__ import annotations

import numpy as np

from pipelinerl.config.schema import RunConfig
from pipelinerl.experiments.planner.calibration import Calibration
from pipelinerl.experiments.planner.simulation.scenario import Costs, Scenario, Workload
from pipelinerl.experiments.planner.simulation.workload import DrawnWorkload, Lengths
from pipelinerl.launch.hosts.resources import side_by_side
from pipelinerl.schedule import make_schedule


def calibrated_costs(calibration: Calibration, *, slots: int, group_size: int, trainers: int = 1) -> Costs:
    """Costs in seconds of engines with up to `slots` sequences, and of a trainer spread over `trainers` such machines.

    A rollout's measured overhead includes its share of its group's prefill. The part for the prompt's tokens is charged to
    the step that prefills the prompt. The rest (the fixed cost of a step with prefill, admission, environment, records) is
    charged when the rollout ends. With more trainers the costs per token and per rollout are divided by `trainers`; the
    fixed cost of a step stays.
    """
    generation, training = calibration.generation, calibration.training
    prompt_s = generation.prefill_s_per_token * generation.prompt_tokens_mean
    return Costs(
        decode_step_s=tuple(generation.utilisation().step_time(np.arange(slots + 1)).tolist()),
        prompt_s=min(prompt_s, generation.rollout_overhead_s * group_size),
        rollout_s=max(0.0, generation.rollout_overhead_s - prompt_s / group_size),
        update_pause_s=generation.update_pause_s,
        train_step_s=training.step_s,
        train_token_s=training.token_s / trainers,
        prepare_s=training.rollout_s / trainers,
    )


def calibrated_workload(
    calibration: Calibration, config: RunConfig, *, seed: int, lengths: Lengths | None = None
) -> DrawnWorkload:
    """Lengths (unless `lengths` is given) and the share of groups with a gradient as they were in the calibration."""
    return DrawnWorkload(
        lengths or calibration.length_distribution(),
        config.actor.group_size,
        seed=seed,
        used_share=calibration.training.used_share,
        prompt_tokens=calibration.generation.prompt_tokens_mean,
    )


def run_scenario(
    config: RunConfig,
    costs: Costs,
    workload: Workload,
    *,
    capacity: int,
    engines: int | None = None,
    steps: int | None = None,
) -> Scenario:
    """The run that `config` describes. `engines` and `steps` override the run file's."""
    return Scenario(
        schedule=make_schedule(config),
        engines=engines or config.engine.processes,
        slots=config.engine.slots,
        group_size=config.actor.group_size,
        batch_size=config.trainer.batch_size,
        steps=steps or config.trainer.steps,
        costs=costs,
        workload=workload,
        capacity=capacity,
        when_full=config.stream.when_full,
        max_open_rollouts=config.actor.max_open_rollouts,
    )


def doubts(config: RunConfig, calibration: Calibration) -> list[str]:
    """Reasons why this calibration may not fit this run, one sentence each."""
    found = []
    if calibration.model != config.model.path:
        found.append(f"the calibration is of model {calibration.model}, the run's is {config.model.path}")
    if calibration.slots < config.engine.slots:
        found.append(f"it was made with {calibration.slots} slots, fewer than the run's {config.engine.slots}")
    together = side_by_side(config, make_schedule(config))
    if calibration.side_by_side != together:
        made, is_now = ("at the same time", "in turn") if calibration.side_by_side else ("in turn", "at the same time")
        found.append(f"it was made with generation and training running {made}; here they run {is_now}")
    load, cores = calibration.machine.load_average, calibration.machine.cores
    if load is not None and load > cores / 2:
        found.append(f"the machine was busy when it was made (load average {load:g}, {cores} cores)")
    return found
