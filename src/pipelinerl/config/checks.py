"""Checks for combinations of settings that are invalid or could never finish. Each error names the key and the fix.

They are not validators of the schema: run directories stay readable when a rule is added, and changed copies are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from pipelinerl.config import correction
from pipelinerl.config.keys import spell
from pipelinerl.config.schema import EngineConfig, RunConfig


class Need(NamedTuple):
    """`key` keeps its default unless the setting `other` has one of the `values`: else, what `why` says."""

    key: str
    other: str
    values: tuple[str, ...]
    why: str


_SEVERAL, _RAY, _SERVERS = ("processes", "ray"), ("ray",), ("http", "vllm")
NEEDS = (
    Need("schedule.steps_per_round", "schedule.kind", ("conventional", "async"), "`pipeline` has no rounds"),
    Need("schedule.max_lag", "schedule.kind", ("pipeline",), "in rounds, schedule.steps_per_round bounds the lag"),
    Need("stream.url", "stream.kind", ("redis",), "the other streams need no server"),
    Need("stream.when_full", "schedule.kind", ("pipeline",), "`drop_oldest` would drop groups that a round needs"),
    Need("weights.encoding", "weights.kind", ("collective",), "`shared` weights are not sent, but copied on this machine"),
    Need("engine.urls", "engine.kind", _SERVERS, "the `local` engine has no servers"),
    Need("engine.servers", "engine.kind", _SERVERS, "the `local` engine has no servers"),
    Need("engine.api_key_env", "engine.kind", _SERVERS, "the `local` engine has no servers"),
    Need("engine.python", "engine.kind", ("vllm",), "this is for vLLM"),
    Need("engine.vllm_args", "engine.kind", ("vllm",), "this is for vLLM"),
    Need("engine.processes", "engine.kind", ("local",), "one process drives all servers (engine.servers, engine.urls)"),
    Need("engine.processes", "launch.kind", _SEVERAL, "`embedded` is one process"),
    Need("trainer.ranks", "launch.kind", _SEVERAL, "`embedded` is one process"),
    Need("engine.kind", "launch.kind", _SEVERAL, "servers are processes, and `embedded` is one"),
    Need("weights.kind", "launch.kind", _SEVERAL, "`embedded` is one process, with nobody to send weights to"),
    Need("launch.preprocessor", "launch.kind", _SEVERAL, "`embedded` is one process"),
    Need("engine.tls_certificate", "launch.kind", _RAY, "servers are on this machine only"),
    Need("launch.ray_address", "launch.kind", _RAY, "the run is on this machine only"),
    Need("launch.ray_without_token", "launch.kind", _RAY, "the run is on this machine only"),
    Need("launch.place", "launch.kind", _RAY, "the run is on this machine only"),
)


def mistakes(config: RunConfig) -> Iterator[str]:
    """Every invalid combination of settings, as `key: what is wrong; how to fix it`."""
    yield from _unmet(config, NEEDS)
    yield from _engine(config.engine)
    for checks in (_schedule, _stream, _sampling, _trainer, correction.mistakes, _processes, _machines):
        yield from checks(config)


def engine_mistakes(engine: EngineConfig) -> Iterator[str]:
    """Those within the section `engine`."""
    yield from _unmet(RunConfig(engine=engine), [need for need in NEEDS if need.other == "engine.kind"])
    yield from _engine(engine)


def _unmet(config: RunConfig, needs: Sequence[Need]) -> Iterator[str]:
    for key, other, values, why in needs:
        value, default = _value(config, key)
        if value != default and _value(config, other)[0] not in values:
            yield f"{key}: {why}; set it to {spell(default)}, or {other} to {' or '.join(values)}"


def _value(config: RunConfig, key: str) -> tuple[Any, Any]:
    """The value of a key in a section, and its default."""
    section, _, name = key.partition(".")
    values = getattr(config, section)
    return getattr(values, name), type(values).model_fields[name].default


VLLM_OWN = {
    "--model": ", and set model.path",
    "--dtype": ", and set model.dtype",
    "--max-model-len": ", and set engine.max_length",
    "--max-num-seqs": ", and set engine.slots",
    "--ssl-certfile": ", and set engine.tls_certificate",
    "--ssl-keyfile": ", and set engine.tls_key",
    **dict.fromkeys(("--data-parallel-size", "-dp"), ", and set engine.servers"),
    **dict.fromkeys(("--host", "--port", "--served-model-name", "--api-key", "--middleware", "--config"), ""),
    **dict.fromkeys(("--enable-scale-out", "--logprobs-mode", "--generation-config", "--weight-transfer-config"), ""),
    "--enable-prefix-caching": "",
}
"""Options that would replace the run's own, and what to do instead, if that is possible."""


def vllm_options(engine: EngineConfig) -> dict[str, str]:
    """Options of `engine.vllm_args` with their values, in all ways of vLLM: `--a-b=1`, `--a_b 1`, `--a.key 1`, `--no-a`."""
    found = {}
    for argument, after in zip(engine.vllm_args, [*engine.vllm_args[1:], ""], strict=False):
        option, joined, value = argument.partition("=")
        if option.startswith("-"):
            found[option.partition(".")[0].replace("_", "-").replace("--no-", "--")] = value if joined else after
    return found


def vllm_workers(engine: EngineConfig) -> int:
    """On how many GPUs each vLLM server that the run starts computes."""
    options = vllm_options(engine)
    sizes = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
    return prod(int(options[name]) for name in sizes if options.get(name, "").isdecimal())


def _engine(engine: EngineConfig) -> Iterator[str]:
    if engine.urls and engine.servers > 1:
        yield (
            f"engine.servers: with engine.urls the run can't start {engine.servers} servers of its own; set it to 1, or "
            "engine.urls to []"
        )
    for name in ("api_key_env", "weights_dir"):
        if getattr(engine, name) is not None and not engine.urls:
            yield f"engine.{name}: servers that the run starts itself do not need it; remove it, or set engine.urls"
    for url in engine.urls:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            yield f"engine.urls: {url!r} is not a server's address; write http://HOST:PORT"
    if len({url.rstrip("/") for url in engine.urls}) < len(engine.urls):
        yield "engine.urls: a server is named twice; name each once"
    if (engine.tls_certificate is None) != (engine.tls_key is None):
        yield "engine.tls_key: engine.tls_certificate and engine.tls_key belong together; set both, or none"
    if engine.vllm_args and engine.urls:
        yield "engine.vllm_args: servers that run already have their own; remove it, or set engine.urls to []"
    for option in sorted(VLLM_OWN.keys() & vllm_options(engine).keys()):
        yield f"engine.vllm_args: the run sets {option} itself; remove it{VLLM_OWN[option]}"
    if engine.kind == "vllm" and not engine.urls and engine.python is None:
        yield (
            "engine.python: to start vLLM, give the interpreter that has it installed (/path/to/its/bin/python); or set "
            "engine.urls to servers that run already"
        )
    if engine.kind == "vllm" and engine.kv_on_update == "recompute":
        yield "engine.kv_on_update: vLLM servers always keep the KV cache at an update; set it to keep"


def _schedule(config: RunConfig) -> Iterator[str]:
    kind, steps = config.schedule.kind, config.schedule.steps_per_round
    samples, group = config.trainer.batch_size * steps, config.actor.group_size
    if kind != "pipeline" and samples % group:
        yield (
            f"trainer.batch_size: a round of `{kind}` is batch_size * steps_per_round = {samples} rollouts, which is not a "
            f"whole number of groups of actor.group_size {group}; make it a multiple of {group}"
        )
    if kind == "pipeline" and config.schedule.max_lag == 0 and samples % group:
        yield (
            f"trainer.batch_size: {samples} rollouts are not a whole number of groups of actor.group_size {group}, and with "
            f"schedule.max_lag 0 the rest of a group would be too old for the next step; make it a multiple of {group}, or "
            "set schedule.max_lag to 1 or more"
        )
    if kind != "pipeline" and steps > 1 and config.trainer.ess_threshold > 0:
        yield (
            f"trainer.ess_threshold: within a round of `{kind}` no newer data arrive, so the trainer would wait forever; "
            "set it to 0, or schedule.steps_per_round to 1"
        )


def _stream(config: RunConfig) -> Iterator[str]:
    stream, needed = config.stream, config.groups_needed
    if stream.kind == "redis" and stream.url is None:
        yield "stream.kind: which Redis? Set stream.url, like redis://HOST:PORT/DB, or stream.kind to files"
    if stream.url is not None and not stream.url.startswith(("redis://", "rediss://", "unix://")):
        yield "stream.url: a Redis server is redis://HOST:PORT/DB, rediss://... (encrypted) or unix:///PATH"
    embedded = config.launch.kind == "embedded"
    if stream.kind == "redis" and embedded:
        yield "stream.kind: `redis` is for several processes; set it to files, or launch.kind to processes"
    if stream.kind == "memory" and not embedded:
        yield "stream.kind: a `memory` stream works within one process only; set it to files, or launch.kind to embedded"
    if stream.capacity is not None and stream.capacity < needed:
        unit = "a step" if config.schedule.kind == "pipeline" else "a round"
        yield (
            f"stream.capacity: {unit} takes {needed} groups, but the stream holds only {stream.capacity}, so the "
            f"trainer and the actor would wait for each other forever; set it to {needed} or more, or to null"
        )


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
    if actor.online_filter is None:
        return
    if config.engine.processes > 1 or config.launch.kind == "ray":
        yield (
            "actor.online_filter: a generation process must know all groups, but several would know only their own; set "
            "engine.processes to 1 and launch.kind to processes, or actor.online_filter to null"
        )
    if config.stream.when_full == "drop_oldest":
        yield "actor.online_filter: skipped problems would replace groups in the stream; set stream.when_full to block"


def _trainer(config: RunConfig) -> Iterator[str]:
    if config.trainer.kl_coefficient > 0 and config.preprocess.zero_advantage == "skip":
        yield (
            "preprocess.zero_advantage: with trainer.kl_coefficient above 0, samples of zero advantage have a gradient too, "
            "which `skip` would ignore; set it to keep (or to drop, to leave such samples out)"
        )
    if config.evaluation.every and not config.evaluation.problems:
        yield "evaluation.every: there are no problems to evaluate with; set evaluation.problems, or evaluation.every to 0"
    if config.evaluation.sets and not config.evaluation.problems:
        yield "evaluation.sets: evaluation.problems says how many problems of each set are evaluated; set it"
    if wrong := [name for name in config.evaluation.sets if not name or "/" in name]:
        yield f"evaluation.sets: {wrong[0]!r} is no name for a set; use letters, digits, - and _"


def _processes(config: RunConfig) -> Iterator[str]:
    """What engines and trainers that are processes of their own can't have, and what compiled layers can't."""
    engine, trainer = config.engine, config.trainer
    if config.model.head_dtype is not None and engine.kind == "vllm":
        yield (
            "model.head_dtype: vLLM computes its output head in model.dtype, and the trainer should do the same; set it "
            "to null, or engine.kind to local or http"
        )
    if config.weights.kind == "collective" and (workers := vllm_workers(engine)) > 1:
        yield f"weights.kind: a broadcast reaches one worker, and engine.vllm_args asks for {workers}; set it to shared"
    if engine.weights_dir is not None and config.weights.kind == "collective":
        yield "engine.weights_dir: with weights.kind collective no file is written; remove one of the two"
    if trainer.compile and (trainer.ranks > 1 or trainer.gradient_checkpointing):
        yield "trainer.compile: not with several ranks or gradient_checkpointing; set it to false"
    on_gpu = trainer.device.startswith("cuda")
    if trainer.ranks > 1 and trainer.backend == "nccl" and not on_gpu:
        yield "trainer.backend: nccl needs GPUs; set it to auto, or trainer.device to cuda"
    if trainer.ranks > 1 and trainer.backend == "gloo" and on_gpu:
        yield "trainer.backend: gloo trains on CPUs only; set it to auto, or trainer.device to cpu"


def _machines(config: RunConfig) -> Iterator[str]:
    """Settings that need one machine, while `ray` has several."""
    if config.launch.kind != "ray":
        return
    if config.weights.kind != "collective":
        yield f"weights.kind: `{config.weights.kind}` does not reach other machines; set it to collective"
    for key, device in (("engine.device", config.engine.device), ("trainer.device", config.trainer.device)):
        if ":" in device:
            yield f"{key}: with launch.kind ray each process sees only its own GPU; write cuda instead of {device}"
