"""Combinations of settings that are invalid or could never finish. Each error names the key and the fix.

They are not validators of the schema: run directories stay readable when a rule is added, and changed copies are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from pipelinerl.config.correction import SEQUENCE_WEIGHTS, THRESHOLDS, WEIGHTED_LOSSES, resolve
from pipelinerl.config.keys import spell
from pipelinerl.config.schema import EngineConfig, RunConfig, is_function


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
    Need("weights.encoding", "launch.kind", _SEVERAL, "`embedded` is one process, with nobody to send weights to"),
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


def mistakes(config: RunConfig) -> Iterator[str]:
    """Every invalid combination of settings, as `key: what is wrong; how to fix it`."""
    defaults = RunConfig()
    for key, other, values, why in NEEDS:
        value, default = (attrgetter(key)(one) for one in (config, defaults))
        if value != default and attrgetter(other)(config) not in values:
            yield f"{key}: {why}; set it to {spell(default)}, or {other} to {' or '.join(values)}"
    yield from _engine(config.engine)
    for rules in (_weights, _schedule, _stream, _sampling, _trainer, _credit, _correction, _processes):
        yield from rules(config)


def _engine(engine: EngineConfig) -> Iterator[str]:
    urls = engine.urls
    if urls and engine.servers > 1:
        yield "engine.servers: with engine.urls the run starts no servers of its own; set it to 1, or engine.urls to []"
    for name in ("api_key_env", "weights_dir"):
        if getattr(engine, name) is not None and not urls:
            yield f"engine.{name}: servers that the run starts itself do not need it; remove it, or set engine.urls"
    for url in urls:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            yield f"engine.urls: {url!r} is not a server's address; write http://HOST:PORT"
    if len({url.rstrip("/") for url in urls}) < len(urls):
        yield "engine.urls: a server is named twice; name each once"
    if (engine.tls_certificate is None) != (engine.tls_key is None):
        yield "engine.tls_key: engine.tls_certificate and engine.tls_key belong together; set both, or none"
    if engine.vllm_args and urls:
        yield "engine.vllm_args: servers that run already have their own; remove it, or set engine.urls to []"
    for option in sorted(VLLM_OWN.keys() & engine.vllm_options.keys()):
        yield f"engine.vllm_args: the run sets {option} itself; remove it{VLLM_OWN[option]}"
    if engine.kind == "vllm" and not urls and engine.python is None:
        yield (
            "engine.python: to start vLLM, give the interpreter that has it installed (/path/to/its/bin/python); or set "
            "engine.urls to servers that run already"
        )
    if engine.kind == "vllm" and engine.kv_on_update == "recompute":
        yield "engine.kv_on_update: vLLM servers always keep the KV cache at an update; set it to keep"


def _weights(config: RunConfig) -> Iterator[str]:
    encoding = config.weights.encoding
    if encoding == "delta" and config.weights.kind == "shared":
        yield "weights.encoding: `shared` weights are copied, not sent; set it to full, or weights.kind to collective"
    if encoding == "adapter" and (config.model.lora is None or config.engine.kind != "local"):
        yield "weights.encoding: `adapter` is for a run with model.lora and the `local` engine, which merges; set it to full"


def _schedule(config: RunConfig) -> Iterator[str]:
    kind, steps, group = config.schedule.kind, config.schedule.steps_per_round, config.actor.group_size
    samples, whole = config.trainer.batch_size * steps, f"groups of actor.group_size {group}; make it a multiple of {group}"
    if kind != "pipeline" and samples % group:
        yield f"trainer.batch_size: the {samples} rollouts of a round (batch_size * steps_per_round) are not whole {whole}"
    if kind == "pipeline" and config.schedule.max_lag == 0 and samples % group:
        yield f"trainer.batch_size: with schedule.max_lag 0 each step takes whole {whole}, or raise schedule.max_lag"
    if kind != "pipeline" and steps > 1 and config.trainer.ess_threshold > 0:
        yield (
            f"trainer.ess_threshold: within a round of `{kind}` no newer data arrive, so the trainer would wait forever; "
            "set it to 0, or schedule.steps_per_round to 1"
        )


def _stream(config: RunConfig) -> Iterator[str]:
    stream, needed, embedded = config.stream, config.groups_needed, config.launch.kind == "embedded"
    if stream.kind == "redis" and stream.url is None:
        yield "stream.kind: which Redis? Set stream.url, like redis://HOST:PORT/DB, or stream.kind to files"
    if stream.url is not None and not stream.url.startswith(("redis://", "rediss://", "unix://")):
        yield "stream.url: a Redis server is redis://HOST:PORT/DB, rediss://... (encrypted) or unix:///PATH"
    if stream.kind == "redis" and embedded:
        yield "stream.kind: `redis` is for several processes; set it to files, or launch.kind to processes"
    if stream.kind == "memory" and not embedded:
        yield "stream.kind: a `memory` stream works within one process only; set it to files, or launch.kind to embedded"
    if stream.capacity is not None and stream.capacity < needed:
        yield (
            f"stream.capacity: the trainer needs {needed} groups at once and the stream holds only {stream.capacity}, so "
            f"they would wait for each other forever; set it to {needed} or more, or to null"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    actor, longest = config.actor, config.engine.max_length
    why = "truncates the distribution that rollouts are sampled from, but the trainer's ratio uses all of it; set it to"
    if actor.top_p < 1:
        yield f"actor.top_p: {actor.top_p} {why} 1"
    if actor.top_k > 0:
        yield f"actor.top_k: {actor.top_k} {why} 0"
    if actor.group_size == 1 and config.preprocess.advantage in ("group_mean", "leave_one_out"):
        yield f"actor.group_size: with one attempt `{config.preprocess.advantage}` leaves no signal; set it to 2 or more"
    if longest is not None and actor.max_tokens >= longest:
        yield (
            f"actor.max_tokens: a completion of {actor.max_tokens} tokens leaves no room for a prompt in engine.max_length "
            f"{longest}; set actor.max_tokens below {longest}, or engine.max_length above {actor.max_tokens}"
        )
    if actor.online_filter and (config.engine.processes > 1 or config.launch.kind == "ray"):
        yield (
            "actor.online_filter: a generation process must know all groups, but several would know only their own; set "
            "engine.processes to 1 and launch.kind to processes, or actor.online_filter to null"
        )
    if actor.online_filter and config.stream.when_full == "drop_oldest":
        yield "actor.online_filter: skipped problems would replace groups in the stream; set stream.when_full to block"


def _trainer(config: RunConfig) -> Iterator[str]:
    evaluation, trainer = config.evaluation, config.trainer
    penalties = {"trainer.kl_coefficient": trainer.kl_coefficient, "correction.drift": config.correction.drift}
    for key in [key for key, weight in penalties.items() if weight > 0 and config.preprocess.zero_advantage == "skip"]:
        yield (
            f"preprocess.zero_advantage: with {key} above 0, samples of zero advantage have a gradient too, which `skip` "
            "would ignore; set it to keep (or to drop, to leave such samples out)"
        )
    if evaluation.every and not evaluation.problems:
        yield "evaluation.every: there are no problems to evaluate with; set evaluation.problems, or evaluation.every to 0"
    if evaluation.sets and not evaluation.problems:
        yield "evaluation.sets: evaluation.problems says how many problems of each set are evaluated; set it"
    if wrong := [name for name in evaluation.sets if not name or "/" in name]:
        yield f"evaluation.sets: {wrong[0]!r} is no name for a set; use letters, digits, - and _"
    if trainer.compile and (trainer.ranks > 1 or trainer.gradient_checkpointing):
        yield "trainer.compile: not with several ranks or gradient_checkpointing; set it to false"


def _credit(config: RunConfig) -> Iterator[str]:
    """Advantages, the KL term and its teacher, and losses of the user."""
    trainer = config.trainer
    preprocess = config.preprocess
    if trainer.kl_estimator != "k3" and not trainer.kl_coefficient:
        yield "trainer.kl_estimator: there is no KL term without trainer.kl_coefficient; set it above 0"
    if trainer.teacher and not trainer.kl_coefficient:
        yield "trainer.teacher: a teacher needs the KL term; set trainer.kl_coefficient above 0"
    if trainer.teacher == "":
        yield "trainer.teacher: it is empty; give a folder, a hub id or a URL, or set it to null"
    if trainer.teacher_is_server and not re.fullmatch(r"https?://[^/@\s]+/?", trainer.teacher or ""):
        yield "trainer.teacher: a server is http://HOST:PORT, without a path; its key goes into trainer.teacher_key_env"
    for key in ("clip_low", "clip_high", "dual_clip") if is_function(trainer.loss) else ():
        if getattr(trainer, key) != type(trainer).model_fields[key].default:
            yield f"trainer.{key}: a loss of your own does not get it; remove it"
    if trainer.teacher_is_server and config.actor.temperature != 1:
        yield "trainer.teacher: a server scores at temperature 1; set actor.temperature to 1"
    if trainer.teacher_key_env and not trainer.teacher_is_server:
        yield "trainer.teacher_key_env: trainer.teacher is no server; set it to null"
    if preprocess.advantage == "none" and not (trainer.kl_coefficient or preprocess.observation_weight):
        yield "preprocess.advantage: with `none` there is nothing to learn from; set trainer.kl_coefficient above 0"
    if preprocess.advantage == "none" and preprocess.zero_advantage == "drop" and not preprocess.observation_weight:
        yield "preprocess.zero_advantage: with advantage `none`, `drop` would leave out every rollout; set it to keep"
    if preprocess.normalize_std and preprocess.advantage not in ("group_mean", "leave_one_out"):
        yield f"preprocess.normalize_std: it has no effect with `{preprocess.advantage}`; set it to false"


def _correction(config: RunConfig) -> Iterator[str]:
    correction, loss, found = config.correction, config.trainer.loss, resolve(config.trainer, config.correction)
    for part in ("token", "sequence"):
        kind, low, high = (getattr(found, name) for name in (part, f"{part}_low", f"{part}_high"))
        if kind in SEQUENCE_WEIGHTS and loss not in WEIGHTED_LOSSES:
            yield (
                f"correction.{part}: `{kind}` limits the importance weight of reinforce and decoupled; `{loss}` has none: "
                "it bounds the ratio itself (trainer.clip_low, clip_high). Remove this key, or set it to a mask"
            )
        if kind in ("mask", "band", "geo_mask") and not low < 1 < high:
            yield (
                f"correction.{part}: `{kind}` from {low:g} to {high:g} masks what is exactly on-policy (ratio 1); set "
                f"{part}_low below 1 and {part}_high above 1"
            )
        for name, default in zip((f"{part}_low", f"{part}_high"), THRESHOLDS[part][kind], strict=True):
            if default is None and getattr(correction, name) is not None:
                yield f"correction.{name}: `{kind}` (correction.{part}) has no such threshold; remove it"
    if found.sequence in SEQUENCE_WEIGHTS and correction.token == "truncate":
        yield f"correction.sequence: with `{found.sequence}` there is no token weight to truncate; remove one of the two"


def _processes(config: RunConfig) -> Iterator[str]:
    """What engines and trainers that are processes of their own, or on several machines, can't have."""
    engine, weights = config.engine, config.weights.kind
    if config.model.head_dtype is not None and engine.kind == "vllm":
        yield (
            "model.head_dtype: vLLM computes its output head in model.dtype, and the trainer should do the same; set it "
            "to null, or engine.kind to local or http"
        )
    if weights == "collective" and (workers := engine.vllm_workers) > 1:
        yield f"weights.kind: a broadcast reaches one worker, and engine.vllm_args asks for {workers}; set it to shared"
    if weights == "collective" and engine.weights_dir is not None:
        yield "engine.weights_dir: with weights.kind collective no file is written; remove one of the two"
    if config.launch.kind == "ray" and weights != "collective":
        yield f"weights.kind: `{weights}` does not reach other machines; set it to collective"
    for key, device in (("engine.device", engine.device), ("trainer.device", config.trainer.device)):
        if config.launch.kind == "ray" and ":" in device:
            yield f"{key}: with launch.kind ray each process sees only its own GPU; write cuda instead of {device}"
