"""Checks for combinations of settings that are invalid or could never finish. Each error names the key and the fix.

They are not validators of the schema: run directories stay readable when a rule is added, and changed copies are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from pipelinerl.config import correction
from pipelinerl.config.schema import EngineConfig, RunConfig


def mistakes(config: RunConfig) -> Iterator[str]:
    """Every invalid combination of settings, as `key: what is wrong; how to fix it`."""
    yield from engine_mistakes(config.engine)
    for checks in (_schedule, _stream, _weights, _sampling, _filter, _trainer, correction.mistakes, _engines, _ranks):
        yield from checks(config)
    yield from _processes(config)
    yield from _machines(config)


def engine_mistakes(engine: EngineConfig) -> Iterator[str]:
    """Those within the section `engine`."""
    yield from _vllm(engine)
    if engine.kind == "local":
        named = {"urls": engine.urls, "api_key_env": engine.api_key_env, "servers": engine.servers > 1}
        for name in (name for name, value in named.items() if value):
            yield f"engine.{name}: the `local` engine has no servers; remove it, or set engine.kind to http or vllm"
    elif engine.processes > 1:
        yield (
            f"engine.processes: one generation process drives all `{engine.kind}` servers, not {engine.processes}; set it "
            "to 1, and engine.servers (or engine.urls) to have more engines"
        )
    if engine.urls and engine.servers > 1:
        yield (
            f"engine.servers: with engine.urls the run can't start {engine.servers} servers of its own; set it to 1, or "
            "engine.urls to []"
        )
    if engine.api_key_env is not None and not engine.urls:
        yield "engine.api_key_env: servers that the run starts itself need no key; remove it, or set engine.urls"
    if engine.weights_dir is not None and not engine.urls:
        yield "engine.weights_dir: servers that the run starts itself use shared memory; remove it, or set engine.urls"
    for url in engine.urls:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            yield f"engine.urls: {url!r} is not a server's address; write http://HOST:PORT"
    if len({url.rstrip("/") for url in engine.urls}) < len(engine.urls):
        yield "engine.urls: a server is named twice; name each once"


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


def _vllm(engine: EngineConfig) -> Iterator[str]:
    for name in ("python", "vllm_args") if engine.kind != "vllm" else ():
        if getattr(engine, name):
            yield f"engine.{name}: this is for vLLM, and engine.kind is {engine.kind}; remove it, or set engine.kind to vllm"
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
    kind, max_lag, steps = config.schedule.kind, config.schedule.max_lag, config.schedule.steps_per_round
    samples, group = config.trainer.batch_size * steps, config.actor.group_size
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
    if stream.url is not None and stream.kind != "redis":
        yield f"stream.url: `{stream.kind}` streams need no server; remove it, or set stream.kind to redis"
    if stream.kind == "redis" and stream.url is None:
        yield "stream.kind: which Redis? Set stream.url, like redis://HOST:PORT/DB, or stream.kind to files"
    if stream.url is not None and not stream.url.startswith(("redis://", "rediss://", "unix://")):
        yield "stream.url: a Redis server is redis://HOST:PORT/DB, rediss://... (encrypted) or unix:///PATH"
    if stream.kind == "memory" and config.launch.kind != "embedded":
        yield "stream.kind: a `memory` stream works within one process only; set it to files, or launch.kind to embedded"
    if stream.capacity is not None and stream.capacity < needed:
        unit = "a step" if kind == "pipeline" else "a round"
        yield (
            f"stream.capacity: {unit} takes {needed} groups, but the stream holds only {stream.capacity}, so the "
            f"trainer and the actor would wait for each other forever; set it to {needed} or more, or to null"
        )
    if stream.when_full == "drop_oldest" and kind != "pipeline":
        yield (f"stream.when_full: `drop_oldest` would drop groups that a round of `{kind}` needs; set it to block")


def _weights(config: RunConfig) -> Iterator[str]:
    if config.weights.encoding == "delta" and config.weights.kind == "shared":
        yield (
            "weights.encoding: `delta` sends fewer bytes, but `shared` weights are not sent: all are copied within this "
            "machine; set weights.kind to collective, or weights.encoding to full"
        )


def _filter(config: RunConfig) -> Iterator[str]:
    if config.actor.online_filter is None:
        return
    if config.engine.processes > 1 or config.launch.kind == "ray":
        yield (
            "actor.online_filter: a generation process must know all groups, but several would know only their own; set "
            "engine.processes to 1 and launch.kind to processes, or actor.online_filter to null"
        )
    if config.stream.when_full == "drop_oldest":
        yield "actor.online_filter: skipped problems would replace groups in the stream; set stream.when_full to block"


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
    if config.evaluation.sets and not config.evaluation.problems:
        yield "evaluation.sets: evaluation.problems says how many problems of each set are evaluated; set it"
    if wrong := [name for name in config.evaluation.sets if not name or "/" in name]:
        yield f"evaluation.sets: {wrong[0]!r} is no name for a set; use letters, digits, - and _"


def _engines(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if config.model.head_dtype is not None and engine.kind == "vllm":
        yield (
            "model.head_dtype: vLLM computes its output head in model.dtype, and the trainer should do the same; set it "
            "to null, or engine.kind to local or http"
        )
    if config.weights.kind == "collective" and (workers := vllm_workers(engine)) > 1:
        yield f"weights.kind: a broadcast reaches one worker, and engine.vllm_args asks for {workers}; set it to shared"
    if engine.weights_dir is not None and config.weights.kind == "collective":
        yield "engine.weights_dir: with weights.kind collective no file is written; remove one of the two"
    if engine.processes > 1 and config.launch.kind == "embedded":
        yield (
            f"engine.processes: the embedded launcher runs everything in one process, not {engine.processes} for "
            "generation; set it to 1, or launch.kind to processes"
        )


def _ranks(config: RunConfig) -> Iterator[str]:
    """Settings that a trainer of several ranks can't have, and what compiled layers can't."""
    trainer, ranks = config.trainer, config.trainer.ranks
    if trainer.compile and (ranks > 1 or trainer.gradient_checkpointing):
        yield "trainer.compile: not with several ranks or gradient_checkpointing; set it to false"
    if ranks == 1:
        return
    on_gpu = trainer.device.startswith("cuda")
    if trainer.backend == "nccl" and not on_gpu:
        yield "trainer.backend: nccl needs GPUs; set it to auto, or trainer.device to cuda"
    if trainer.backend == "gloo" and on_gpu:
        yield "trainer.backend: gloo trains on CPUs only; set it to auto, or trainer.device to cpu"
    if config.launch.kind == "embedded":
        yield (
            f"trainer.ranks: launch.kind embedded can't start {ranks} training processes; set it to 1, or launch.kind to "
            "processes"
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


def _machines(config: RunConfig) -> Iterator[str]:
    """Settings that need processes on one machine, while `ray` has them on several, and the reverse."""
    launch = config.launch
    if (config.engine.tls_certificate is None) != (config.engine.tls_key is None):
        yield "engine.tls_key: engine.tls_certificate and engine.tls_key belong together; set both, or none"
    if launch.kind != "ray":
        if config.engine.tls_certificate is not None:
            yield "engine.tls_certificate: servers are on this machine only; remove it, or set launch.kind to ray"
        set_here = {"ray_address": launch.ray_address, "ray_without_token": launch.ray_without_token, "place": launch.place}
        for key, value in set_here.items():
            if value:
                yield f"launch.{key}: `{launch.kind}` uses this machine only; remove it, or set launch.kind to ray"
        return
    if config.weights.kind != "collective":
        yield f"weights.kind: `{config.weights.kind}` does not reach other machines; set it to collective"
    for key, device in (("engine.device", config.engine.device), ("trainer.device", config.trainer.device)):
        if ":" in device:
            yield f"{key}: with launch.kind ray each process sees only its own GPU; write cuda instead of {device}"
