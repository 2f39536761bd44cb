"""Checks for combinations of sections that are invalid or could never finish. Each error names the key and the fix.

Combinations within a section are beside its fields (`Section.mistakes`).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config import correction
from pipelinerl.config.schema import RunConfig, Section


def mistakes(config: RunConfig) -> Iterator[str]:
    """Every invalid combination of settings, as `key: what is wrong; how to fix it`."""
    for section in (value for _, value in config if isinstance(value, Section)):
        yield from section.mistakes()
    for checks in (_schedule, _stream, _sampling, _trainer, correction.mistakes, _engines, _ranks, _processes):
        yield from checks(config)


def _schedule(config: RunConfig) -> Iterator[str]:
    kind, max_lag, steps = config.schedule.kind, config.schedule.max_lag, config.schedule.steps_per_round
    samples, group = config.trainer.batch_size * steps, config.actor.group_size
    if kind != "pipeline" and samples % group:
        yield (
            f"trainer.batch_size: a round of `{kind}` is batch_size * steps_per_round = {samples} rollouts, which is not a "
            f"whole number of groups of actor.group_size {group}; make it a multiple of {group}"
        )
    if kind == "pipeline" and max_lag == 0 and samples % group:
        yield (
            f"trainer.batch_size: {samples} rollouts are not a whole number of groups of actor.group_size {group}, and with "
            f"schedule.max_lag 0 the rest of a group would be too old for the next step; make it a multiple of {group}, or "
            "set schedule.max_lag to 1 or more"
        )
    threshold = config.trainer.ess_threshold
    if kind != "pipeline" and steps > 1 and threshold > 0:
        yield (
            f"trainer.ess_threshold: within a round of `{kind}` no newer data arrive, so the trainer would wait forever; "
            "set it to 0, or schedule.steps_per_round to 1"
        )


def _stream(config: RunConfig) -> Iterator[str]:
    kind, stream, needed = config.schedule.kind, config.stream, config.groups_needed
    if stream.kind == "memory" and config.launch.kind == "processes":
        yield "stream.kind: a `memory` stream works within one process only; set it to files, or launch.kind to embedded"
    if stream.capacity is not None and stream.capacity < needed:
        unit = "a step" if kind == "pipeline" else "a round"
        yield (
            f"stream.capacity: {unit} takes {needed} groups, but the stream holds only {stream.capacity}, so the "
            f"trainer and the actor would wait for each other forever; set it to {needed} or more, or to null"
        )
    if stream.when_full == "drop_oldest" and kind != "pipeline":
        yield (f"stream.when_full: `drop_oldest` would drop groups that a round of `{kind}` needs; set it to block")


def _sampling(config: RunConfig) -> Iterator[str]:
    actor, longest = config.actor, config.engine.max_length
    why = "truncates the distribution that rollouts are sampled from, but the trainer's ratio uses the whole distribution"
    if actor.top_p < 1:
        yield f"actor.top_p: {actor.top_p} {why}; set it to 1 for training"
    if actor.top_k > 0:
        yield f"actor.top_k: {actor.top_k} {why}; set it to 0 (off) for training"
    if actor.group_size == 1:
        yield (
            f"actor.group_size: with one attempt at a problem the baseline `{config.preprocess.advantage}` "
            "(preprocess.advantage) leaves no signal; set it to 2 or more"
        )
    if longest is not None and actor.max_tokens >= longest:
        yield (
            f"actor.max_tokens: a completion of {actor.max_tokens} tokens leaves no room for a prompt in engine.max_length "
            f"{longest}; set actor.max_tokens below {longest}, or engine.max_length above {actor.max_tokens}"
        )


def _trainer(config: RunConfig) -> Iterator[str]:
    if config.trainer.kl_coefficient > 0 and config.preprocess.zero_advantage == "skip":
        yield (
            "preprocess.zero_advantage: with trainer.kl_coefficient above 0, samples of zero advantage have a gradient too, "
            "which `skip` would ignore; set it to keep (or to drop, to leave such samples out)"
        )
    if config.evaluation.every and not config.evaluation.problems:
        yield "evaluation.every: there are no problems to evaluate with; set evaluation.problems, or evaluation.every to 0"


def _engines(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if config.model.head_dtype is not None and engine.kind == "vllm":
        yield (
            "model.head_dtype: vLLM computes its output head in model.dtype, and the trainer should do the same; set it "
            "to null, or engine.kind to local or http"
        )
    if engine.weights_dir is not None and config.weights.kind == "collective":
        yield "engine.weights_dir: with weights.kind collective no file is written; remove one of the two"
    if engine.processes > 1 and config.launch.kind == "embedded":
        yield (
            f"engine.processes: the embedded launcher runs everything in one process, not {engine.processes} for "
            "generation; set it to 1, or launch.kind to processes"
        )


def _ranks(config: RunConfig) -> Iterator[str]:
    """Settings that a trainer of several ranks can't have."""
    ranks = config.trainer.ranks
    if ranks > 1 and config.launch.kind != "processes":
        yield (
            f"trainer.ranks: launch.kind {config.launch.kind} can't start {ranks} training processes; set it to 1, or "
            "launch.kind to processes"
        )


def _processes(config: RunConfig) -> Iterator[str]:
    """Settings that need several processes, while the embedded launcher has one."""
    if config.launch.kind != "embedded":
        return
    wanted = {
        "engine.kind": (config.engine.kind, "local"),
        "stream.kind": (config.stream.kind, "files"),
        "weights.kind": (config.weights.kind, "shared"),
        "launch.preprocessor": (config.launch.preprocessor, "with_trainer"),
    }
    for key, (value, fix) in wanted.items():
        if value not in (fix, "memory"):
            yield f"{key}: `{value}` needs several processes; set launch.kind to processes, or {key} to {fix}"
