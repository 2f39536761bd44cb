"""Checks for combinations of settings that are invalid or could never finish. Each error names the key and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipelinerl.config import correction
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.types import MAX_RECEIVERS

_DEVICE = re.compile(r"cpu|mps|cuda(:\d+)?")


def check(config: RunConfig) -> None:
    """Raise ConfigError for the first invalid combination of settings."""
    for checks in (
        _model,
        _schedule,
        _stream,
        _sampling,
        _groups,
        _lengths,
        _trainer,
        correction.problems,
        _evaluation,
        _hardware,
        _engines,
        _processes,
    ):
        for problem in checks(config):
            raise ConfigError(problem)


def groups_needed(config: RunConfig) -> int:
    """Number of groups that the trainer needs for its next step: those of one step, or of a whole round."""
    rounds = 1 if config.schedule.kind == "pipeline" else config.schedule.steps_per_round
    return -(-config.trainer.batch_size * rounds // config.actor.group_size)


def _model(config: RunConfig) -> Iterator[str]:
    if config.model.head_dtype is not None and config.engine.kind == "vllm":
        yield (
            "model.head_dtype: vLLM computes its output head in model.dtype, and the trainer should do the same; set it "
            "to null, or engine.kind to local or http"
        )
    targets = config.model.lora.target_modules if config.model.lora is not None else None
    if targets is not None and (not targets or not all(targets)):
        yield (
            f"model.lora.target_modules: {list(targets)} names no layers to train; name linear layers, like "
            "[q_proj, v_proj], or set it to null for all"
        )


def _schedule(config: RunConfig) -> Iterator[str]:
    kind, max_lag, steps = config.schedule.kind, config.schedule.max_lag, config.schedule.steps_per_round
    if kind == "pipeline" and steps > 1:
        yield (
            f"schedule.steps_per_round: {steps} applies to rounds, and `pipeline` has none; remove it, or set schedule.kind "
            "to conventional or async"
        )
    if kind != "pipeline" and max_lag is not None:
        yield (
            f"schedule.max_lag: only `pipeline` bounds lag this way; with `{kind}` set it to null and choose "
            "schedule.steps_per_round"
        )
    if max_lag is not None and max_lag < 0:
        yield f"schedule.max_lag: {max_lag} is below 0; set it to 0 or more optimizer steps, or to null for no bound"
    most_open = config.actor.max_open_rollouts
    if most_open is not None and most_open < 1:
        yield f"actor.max_open_rollouts: {most_open} is below 1; set it to null for four per slot"
    samples, group = config.trainer.batch_size * steps, config.actor.group_size
    if kind != "pipeline" and samples % group:
        yield (
            f"trainer.batch_size: a round of `{kind}` is batch_size * steps_per_round = {samples} rollouts, which is not a "
            f"whole number of groups of actor.group_size {group}; make it a multiple of {group}"
        )
    if kind == "pipeline" and max_lag == 0 and samples % group:
        yield (
            f"trainer.batch_size: with schedule.max_lag 0 the rest of a group is too old for the next step and dropped, "
            f"and {samples} rollouts are not a whole number of groups of actor.group_size {group}; make it a multiple of "
            f"{group}, or set schedule.max_lag to 1 or more"
        )
    threshold = config.trainer.ess_threshold
    if kind != "pipeline" and steps > 1 and threshold > 0:
        yield (
            f"trainer.ess_threshold: within a round of `{kind}` no fresher data can come, so the trainer would wait "
            "forever; set it to 0, or schedule.steps_per_round to 1"
        )


def _stream(config: RunConfig) -> Iterator[str]:
    kind, stream, needed = config.schedule.kind, config.stream, groups_needed(config)
    if stream.kind == "memory" and config.launch.kind == "processes":
        yield "stream.kind: a `memory` stream can't cross processes; set it to files, or launch.kind to embedded"
    if stream.url is not None:
        if stream.kind != "redis":
            yield f"stream.url: `{stream.kind}` streams need no server; remove it, or set stream.kind to redis"
        if not stream.url.startswith(("redis://", "rediss://", "unix://")):
            yield "stream.url: a Redis server is redis://HOST:PORT/DB, rediss://... (encrypted) or unix:///PATH"
    if stream.capacity is not None and stream.capacity < needed:
        unit = "a step" if kind == "pipeline" else "a round"
        yield (
            f"stream.capacity: {unit} takes {needed} groups, but the stream holds only {stream.capacity}, so that the "
            f"trainer and the actor would wait for each other forever; set it to {needed} or more, or to null"
        )
    if stream.when_full == "drop_oldest" and kind != "pipeline":
        yield (
            f"stream.when_full: `drop_oldest` would drop groups of a round of `{kind}`, which needs all of its groups; "
            "set it to block"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    actor = config.actor
    why = "truncates the distribution that rollouts are sampled from, but the trainer's ratio is over the whole distribution"
    if actor.top_p < 1:
        yield f"actor.top_p: {actor.top_p} {why}; set it to 1 for training"
    if actor.top_k > 0:
        yield f"actor.top_k: {actor.top_k} {why}; set it to 0 (off) for training"


def _groups(config: RunConfig) -> Iterator[str]:
    if config.actor.group_size == 1:
        yield (
            f"actor.group_size: with one attempt at a problem the baseline `{config.preprocess.advantage}` "
            "(preprocess.advantage) leaves no signal; set it to 2 or more"
        )


def _lengths(config: RunConfig) -> Iterator[str]:
    longest, max_tokens = config.engine.max_length, config.actor.max_tokens
    if longest is None:
        return
    if longest < 2:
        yield f"engine.max_length: {longest} has no room for a prompt and a completion; set it to 2 or more, or to null"
    elif max_tokens >= longest:
        yield (
            f"actor.max_tokens: a completion of {max_tokens} tokens leaves no room for a prompt in engine.max_length "
            f"{longest}; set actor.max_tokens below {longest}, or engine.max_length above {max_tokens}"
        )


def _trainer(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.kl_coefficient > 0 and config.preprocess.zero_advantage == "skip":
        yield (
            "preprocess.zero_advantage: with trainer.kl_coefficient above 0, samples of zero advantage have a gradient too, "
            "which `skip` would lose; set it to keep (or to drop, to leave such samples out)"
        )
    if trainer.ess_threshold >= 1:
        yield (
            "trainer.ess_threshold: rounding errors keep the effective sample size slightly below 1, so that no step would "
            "be taken; set it below 1, e.g. to 0.5"
        )
    if not all(0 <= beta < 1 for beta in trainer.betas):
        yield f"trainer.betas: {list(trainer.betas)} must both be at least 0 and below 1; usual values are [0.9, 0.95]"


def _evaluation(config: RunConfig) -> Iterator[str]:
    if config.evaluation.every and not config.evaluation.problems:
        yield "evaluation.every: there are no problems to evaluate with; set evaluation.problems, or evaluation.every to 0"


def _hardware(config: RunConfig) -> Iterator[str]:
    if config.engine.processes > MAX_RECEIVERS:
        yield f"engine.processes: {config.engine.processes} processes can't get weights; set it to {MAX_RECEIVERS} or fewer"
    if config.engine.processes > 1 and config.launch.kind == "embedded":
        yield (
            f"engine.processes: the embedded launcher runs everything in one process, not {config.engine.processes} for "
            "generation; set it to 1, or launch.kind to processes"
        )
    for section, part in (("engine", config.engine), ("trainer", config.trainer)):
        if not _DEVICE.fullmatch(part.device):
            yield f"{section}.device: {part.device!r} is not a device; set it to cpu, cuda, cuda:N or mps"
        if part.threads is not None and part.threads < 1:
            yield f"{section}.threads: {part.threads} is below 1; set it to 1 or more, or to null"


def _engines(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if engine.kind == "local":
        named = {"urls": engine.urls, "api_key_env": engine.api_key_env, "servers": engine.servers > 1}
        for name in (name for name, value in named.items() if value):
            yield f"engine.{name}: the `local` engine has no servers; remove it, or set engine.kind to http or vllm"
    elif engine.processes > 1:
        yield (
            f"engine.processes: one generation process drives all `{engine.kind}` servers, not {engine.processes}; set it "
            "to 1, and engine.servers (or engine.urls) to have more engines"
        )
    if engine.kind != "vllm" and engine.python is not None:
        yield f"engine.python: this key is for vLLM, and engine.kind is {engine.kind}; remove it, or set engine.kind to vllm"
    if engine.kind == "vllm":
        if not engine.urls and engine.python is None:
            yield (
                "engine.python: to start vLLM, give the interpreter that has it installed (/path/to/its/bin/python); or set "
                "engine.urls to servers that run already"
            )
        if engine.kv_on_update == "recompute":
            yield "engine.kv_on_update: vLLM servers always keep the KV cache at an update; set it to keep"
    yield from _urls(config)


def _urls(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if engine.urls and engine.servers > 1:
        yield (
            f"engine.servers: with engine.urls the run can't start {engine.servers} servers of its own; set it to 1, or "
            "engine.urls to []"
        )
    if engine.api_key_env is not None and not engine.urls:
        yield "engine.api_key_env: servers that the run starts itself need no key; remove it, or set engine.urls"
    if engine.weights_dir is not None and not engine.urls:
        yield "engine.weights_dir: servers that the run starts itself use shared memory; remove it, or set engine.urls"
    elif engine.weights_dir is not None and config.weights.kind == "collective":
        yield "engine.weights_dir: with weights.kind collective no file is written; remove one of the two"
    for url in engine.urls:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            yield f"engine.urls: {url!r} is not a server's address; write http://HOST:PORT"
    if len({url.rstrip("/") for url in engine.urls}) < len(engine.urls):
        yield "engine.urls: a server is named twice; name each once"


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
