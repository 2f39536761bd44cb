"""`plan --shape` and `simulate --shape`: the inputs of `scaling.py` from a run file and flags, and its answers as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.experiments.planner.analytic import LengthDistribution, parse_lengths
from pipelinerl.experiments.planner.hardware import CLUSTERS, SHAPES, Link, ModelShape
from pipelinerl.experiments.planner.plan import PAPER_ACCELERATORS, PAPER_LONGEST, Flags
from pipelinerl.experiments.planner.scaling import (
    Question,
    Rollouts,
    ScaledConventional,
    ScaledPipeline,
    Training,
    Updates,
    best_conventional,
    best_pipeline,
    bounds,
    least_ranks,
    simulated_costs,
)
from pipelinerl.experiments.planner.simulation.scenario import DrawnWorkload, Scenario, run_scenario
from pipelinerl.report import count, new_table, rendered

BATCH = 1024
MAX_LAG = 31
"""B of the paper's main run, and the lag of conventional RL at its largest stable G, 32."""
GIGA = 1e9


def shape_of(text: str) -> ModelShape:
    """A known model by name, or that of a Hugging Face `config.json` (or the folder with it). Raises UserError."""
    if text in SHAPES:
        return SHAPES[text]
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if not path.is_file():
        raise UserError(f"--shape {text}: give {', '.join(SHAPES)}, or a model's config.json")
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        heads = found["num_attention_heads"]
        experts = found.get("num_experts") or 0
        return ModelShape(
            name=path.parent.name or text,
            layers=found["num_hidden_layers"],
            hidden=found["hidden_size"],
            heads=heads,
            kv_heads=found.get("num_key_value_heads") or heads,
            head_dim=found.get("head_dim") or found["hidden_size"] // heads,
            ffn=found["moe_intermediate_size" if experts else "intermediate_size"],
            vocabulary=found["vocab_size"],
            tied=bool(found.get("tie_word_embeddings")),
            experts=experts,
            experts_per_token=found["num_experts_per_tok"] if experts else 0,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--shape {text}: not the config.json of a decoder ({type(error).__name__}: {error})") from error


def ask_cluster(config: RunConfig | None, flags: Flags) -> Question:
    """The run file gives B, K, the lag and the settings of training and updates. Raises UserError."""
    assert flags.shape is not None  # noqa: S101 - the caller has checked
    others = ("conventional", "model_params", "kv_bytes_per_token", "tau")
    if used := [name for name in others if getattr(flags, name) is not None]:
        raise UserError(f"--{used[0].replace('_', '-')} has no meaning with --shape, which computes such costs; remove it")
    name = flags.hardware or "h100"
    if name not in CLUSTERS:
        raise UserError(f"--hardware {name}: with --shape give {', '.join(CLUSTERS)}")
    cluster = CLUSTERS[name]
    if flags.network is not None:
        between: Link = replace(cluster.between, bandwidth=flags.network * GIGA)
        cluster = replace(cluster, between=between)
    training, updates = Training(), Updates()
    if config is not None:
        training = replace(
            training,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            reshard_after_forward=config.trainer.reshard_after_forward,
        )
        updates = replace(updates, encoding=config.weights.encoding, full_every=config.weights.full_every)
    if flags.mfu is not None:
        if not 0 < flags.mfu <= 1:
            raise UserError(f"--mfu {flags.mfu}: it is a share of peak FLOPs, above 0 and at most 1")
        training = replace(training, mfu=flags.mfu)
    if flags.stragglers is not None:
        training = replace(training, straggler_cv=flags.stragglers)
    longest = config.actor.max_tokens if config else PAPER_LONGEST
    lag = config.schedule.max_lag if config else None
    return Question(
        shape=shape_of(flags.shape),
        cluster=cluster,
        rollouts=Rollouts(
            lengths=parse_lengths(flags.lengths) if flags.lengths else LengthDistribution.uniform(longest),
            batch_size=flags.batch or (config.trainer.batch_size if config else BATCH),
            group_size=config.actor.group_size if config else Rollouts.group_size,
            prompt_tokens=Rollouts.prompt_tokens if flags.prompt_tokens is None else flags.prompt_tokens,
        ),
        accelerators=flags.accelerators or PAPER_ACCELERATORS,
        max_lag=flags.max_lag if flags.max_lag is not None else (MAX_LAG if lag is None else lag),
        training=training,
        updates=updates,
    )


def cluster_scenario(
    config: RunConfig, question: Question, *, devices: int, engines: int | None, ranks: int | None, steps: int | None = None
) -> Scenario:
    """The run of `config` on accelerators: `devices` for each engine, one for each rank of the trainer."""
    default = config.engine.processes if config.engine.kind == "local" else config.engine.servers
    engines, ranks = engines or default, ranks or config.trainer.ranks
    costs, stragglers = simulated_costs(question, devices=devices, engines=engines, ranks=ranks, slots=config.engine.slots)
    rollouts = question.rollouts
    workload = DrawnWorkload(
        rollouts.lengths, config.actor.group_size, seed=config.seed, prompt_tokens=rollouts.prompt_tokens
    )
    scenario = run_scenario(config, costs, workload, engines=engines, steps=steps)
    return replace(scenario, stragglers=replace(stragglers, seed=config.seed))


# ---- the answer


@dataclass(frozen=True)
class ScaledPlan:
    """The best of both methods, and for each input how much the pipeline's rate depends on it."""

    question: Question
    pipeline: ScaledPipeline
    conventional: ScaledConventional
    bounds: Mapping[str, float]

    @property
    def speed_up(self) -> float:
        return self.pipeline.rate / self.conventional.rate


def scaled_plan(question: Question) -> ScaledPlan:
    """Raises UserError, with the reason, if the model does not fit or no pipeline has so little lag."""
    pipeline, conventional = best_pipeline(question), best_conventional(question)
    if pipeline is None or conventional is None:
        raise UserError(
            f"no pipeline of {question.shape.name} on {question.accelerators} accelerators: its training state needs "
            f"at least {least_ranks(question.shape, question.cluster)} of them, and engines must fit besides, with a lag of "
            f"at most {question.max_lag}; give more --accelerators, or a larger --max-lag"
        )
    return ScaledPlan(question, pipeline, conventional, bounds(question))


def scaled_text(plan: ScaledPlan) -> str:
    question, pipeline, conventional = plan.question, plan.pipeline, plan.conventional
    rollouts, training, shape = question.rollouts, question.training, question.shape
    machine, billions = question.cluster, (shape.parameters / GIGA, shape.active_parameters / GIGA)
    facts = new_table("Inputs of this prediction", "", "")
    facts.add_row("model", f"{shape.name}, {billions[0]:.3g} B parameters, {billions[1]:.3g} B of them active")
    facts.add_row("machines", f"{machine.per_machine} x {machine.accelerator.name.upper()}")
    inside, between = (link.bandwidth / GIGA for link in (machine.inside, machine.between))
    facts.add_row("links", f"{inside:g} GB/s inside, {between:g} GB/s between; {machine.link_efficiency:.0%} of it reached")
    lengths = f"mean {rollouts.mean:.4g}, longest {rollouts.lengths.longest} tokens"
    facts.add_row("rollouts", f"B {rollouts.batch_size}; {lengths}")
    updates = question.updates.encoding
    facts.add_row("training", f"MFU {training.mfu:g}, stragglers {training.straggler_cv:g}, updates {updates}")
    title = f"{question.accelerators} accelerators, lag at most {question.max_lag}"
    table = new_table(title, "", "PipelineRL", "conventional RL")
    engines, theirs = (f"{count(side.engines, 'engine')} of {side.devices}" for side in (pipeline, conventional))
    table.add_row(
        "configuration",
        f"{engines}, H = {pipeline.slots}; {count(pipeline.ranks, 'rank')}",
        f"G = {conventional.steps_per_round}; {theirs}, then all train",
    )
    table.add_row("largest lag", f"{pipeline.max_lag}", f"{conventional.steps_per_round - 1}")
    table.add_row("rollouts/s", f"{pipeline.rate:.4g}", f"{conventional.rate:.4g}", style="bold")
    table.add_row("speed-up", f"{plan.speed_up:.2f}x", "1", style="bold")
    _add_costs(table, pipeline, conventional)
    first = [f"{name} {gain:.2f}" for name, gain in plan.bounds.items() if gain >= 0.05]
    note = (
        f"What bounds the pipeline (gain in rate over gain in the input): {', '.join(first)}.\nPredicted from data sheets.\n"
    )
    return rendered(facts, table) + note


def _add_costs(table: Table, *methods: ScaledPipeline | ScaledConventional) -> None:
    rows = {
        "optimizer step, s": [one.step.s for one in methods],
        "  computing": [one.step.compute_s for one in methods],
        "  uneven places": [one.step.idle_s for one in methods],
        "  links": [one.step.exposed_s for one in methods],
        "  stragglers": [one.step.straggler_s for one in methods],
        "weight update, s": [one.update.s for one in methods],
        "  ranks wait": [one.update.gather_s for one in methods],
        "  on its way": [one.update.send_s for one in methods],
        "  engines pause": [one.update.pause_s for one in methods],
    }
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.3g}" for value in values))


def scaled_json(plan: ScaledPlan) -> bytes:
    question = plan.question
    contents = {
        "shape": asdict(question.shape),
        "cluster": asdict(question.cluster),
        "training": asdict(question.training),
        "updates": asdict(question.updates),
        "accelerators": question.accelerators,
        "batch_size": question.rollouts.batch_size,
        "length_mean": question.rollouts.mean,
        "length_max": question.rollouts.lengths.longest,
        "max_lag": question.max_lag,
        "pipeline": asdict(plan.pipeline) | {"rate": plan.pipeline.rate},
        "conventional": asdict(plan.conventional),
        "speed_up": plan.speed_up,
        "bounds": dict(plan.bounds),
    }
    return msgspec.json.format(msgspec.json.encode(contents), indent=1)
