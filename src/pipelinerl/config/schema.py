"""The run file's schema: typed, frozen, each key documented where it is defined.

Pydantic checks types and ranges and rejects unknown keys; `checks.py` rejects combinations that make no sense. This package
imports neither torch nor transformers, so that mistakes in a run file are reported at once.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

from pydantic import BaseModel, Field, JsonValue, Strict

from pipelinerl.types import MAX_RECEIVERS

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Names = Annotated[tuple[str, ...], Strict(False)]
"""`Strict(False)`: a list becomes a tuple. Its items are still checked strictly."""
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]+)?)$", examples=["cpu", "cuda", "cuda:N"])]
UserFunction = Annotated[str, Field(pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$", examples=["path/to/file.py:function"])]


def is_function(value: str) -> bool:
    """Whether this value of a key that takes a `UserFunction` or a name is the former."""
    return ":" in value


PrefixPolicy = Literal["keep", "version", "off"]
TokenCorrection = Literal["none", "truncate", "mask", "band", "tv"]
SequenceCorrection = Literal["none", "truncate", "geo_truncate", "geo_mask"]


class Section(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True):
    """Base of every section of the run file."""


class LoraConfig(Section, frozen=True):
    """Low-rank adapters. There is no dropout, since the policy that samples has none."""

    rank: Count = 16
    """r: the change of each layer's weight is scale * B A, of rank at most r."""
    alpha: Positive = 32.0
    """scale = alpha / rank. With alpha fixed, the best learning rate hardly depends on the rank."""
    target_modules: Annotated[Names, Field(min_length=1)] | None = None
    """Names of linear layers, like `[q_proj, v_proj]`. null: all except the output head."""


PACKAGED_MODELS = {"demo": "demo_base", "demo-tools": "demo_tools"}
"""The models in the package: folders in `assets` by name."""


class ModelConfig(Section, frozen=True):
    path: str = "demo"
    """Folder or hub id of a Hugging Face causal LM, or one of the package's: `demo`, or `demo-tools`, which calls a tool."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trainer's and engine's weights. float32 is the faster one on most CPUs."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""
    head_dtype: Literal["float32"] | None = None
    """float32: trainer and engine compute logits in float32 even if weights are bfloat16, so that their log-probabilities
    agree better. null: in `dtype`.
    """
    lora: LoraConfig | None = None
    """Train low-rank adapters (extra `lora`) instead of the weights (see `weights.encoding`). `{}`: with the defaults.
    null: train all weights.
    """


class EnvironmentConfig(Section, frozen=True):
    kind: str = "gcd"
    """`gcd`, `math`, `reasoning_gym`, `verifiers` (environments of these packages), `function` (your reward
    function), `tools` (a reward function and functions that the model may call), `agent` (your program, a client of OpenAI's
    or Anthropic's API), `mixture` (several environments), or your class: `path/to/file.py:ClassName` or
    `package.module:ClassName`.
    """
    args: dict[str, JsonValue] = {}
    """Keyword arguments of the environment's constructor."""


class ScheduleConfig(Section, frozen=True):
    kind: Literal["pipeline", "conventional", "async"] = "pipeline"
    """`pipeline`: generate and train at the same time, with an in-flight weight update after every step. `conventional`:
    generate B*G samples with frozen weights, then take G steps. `async`: generate for the next G steps while training on the
    samples of the last round; weights change between rounds.
    """
    steps_per_round: Count = 1
    """G, optimizer steps per round (conventional and async)."""
    max_lag: Natural | None = None
    """pipeline: the largest lag, in optimizer steps, of a token that is trained on. The actor starts no group that could
    exceed it, so that none has to be dropped. null: no bound.
    """


class OnlineFilterConfig(Section, frozen=True):
    """Generate a problem whose latest n groups had equal rewards with probability max(keep ** n, at_least)."""

    keep: PositiveShare = 0.5
    """The factor for each group in a row with equal rewards. A group with different rewards resets the probability to 1."""
    at_least: Annotated[float, Field(ge=0.01, le=1)] = 0.1
    """Lowest probability: a skipped problem comes back, as the model changes."""


class ActorConfig(Section, frozen=True):
    group_size: Count = 8
    """K, attempts at each problem."""
    max_tokens: Count = 256
    """Longest completion, in tokens."""
    temperature: Positive = 1.0
    """Sampling temperature of training rollouts."""
    top_p: PositiveShare = 1.0
    """Nucleus truncation. Must stay 1 in training: see `top_k`."""
    top_k: Natural = 0
    """Truncation to the k most likely tokens, 0 = off. Must stay 0 in training: the trainer's ratio is over the whole
    distribution.
    """
    max_open_rollouts: Count | None = None
    """pipeline: maximum number of open rollouts in a process. Rollouts that wait for a tool or a judge take no slot; a
    higher limit keeps the engine busy and increases lag. null: four per slot.
    """
    online_filter: OnlineFilterConfig | None = None
    """Online difficulty filter (GRESO): skip problems whose latest groups taught nothing. `{}`: the defaults. null: off."""
    rollout_timeout_s: Positive = 600.0
    """A rollout that takes longer is dropped (reason `timeout`)."""
    max_failure_fraction: Share = 0.5
    """The run ends if more than this share of the last `failure_window` rollouts failed."""
    failure_window: Count = 64
    """Number of rollouts over which the share of failures is computed."""


LONGEST_SLOT = 2048
"""Longest slot in tokens, unless `engine.max_length` asks for more: KV memory grows with it."""


class EngineConfig(Section, frozen=True):
    kind: Literal["local", "http", "vllm"] = "local"
    """`local`: the embedded slot engine. `http`: engine servers (`pipelinerl serve`), in separate processes or on other
    machines. `vllm`: vLLM servers. All are updated in flight.
    """
    processes: Annotated[int, Field(ge=1, le=MAX_RECEIVERS)] = 1
    """Generation processes, each with an actor and an engine of `slots` slots and `threads` threads. With more than one,
    `conventional` uses all cores while it generates. `http` and `vllm` need exactly one: set `servers` instead.
    """
    servers: Count = 1
    """http and vllm: number of servers that the run starts here, if `urls` is empty."""
    urls: Names = ()
    """http and vllm: servers that already run, like `[http://10.0.0.5:8000]`. They have their own slots, lengths and
    devices, and keep running after the run.
    """
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key of the servers in `urls`."""
    weights_dir: str | None = None
    """Directory through which the servers in `urls` get weights; its path must be the same here and there. null: shared
    memory, for servers on this machine.
    """
    tls_certificate: str | None = None
    """ray: PEM file of the machine's certificate, on every machine with a server; the servers then speak HTTPS."""
    tls_key: str | None = None
    """ray: PEM file of the key of `tls_certificate`."""
    python: str | None = None
    """vllm: to start servers, the interpreter that has vLLM installed, like `/opt/vllm/bin/python`."""
    vllm_args: Names = ()
    """vllm: more arguments of the servers that the run starts, like `[--tensor-parallel-size=2, --quantization=fp8]`."""
    slots: Count = 64
    """H, sequences in progress at once (per process, or per server started here)."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt + completion of a slot, in tokens. null: the model's maximum, at most 2048."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """The KV cache at a weight update: keep the old entries, or recompute them."""
    prefix: PrefixPolicy = "keep"
    """The beginning of a prompt that the KV cache holds already, such as the turns before, or the prompt of another attempt:
    keep: read it if its entries are of the weights with which the group began, or later ones; version: only if they are of
    the newest weights; off: compute it again.
    """
    prefill_tokens: Count = 2048
    """Maximum prompt tokens in one engine step; longer prompts are split into chunks."""
    decoding: Literal["auto", "packed", "static"] = "auto"
    """`static`: decode steps of fixed shapes, as CUDA graphs. `auto`: on CUDA, if the type and the model allow them."""
    device: Device = "cpu"
    """torch device of the engine. `cuda`: a GPU of its own for each process. `cuda:0`: this one, which others may share."""
    threads: Count | None = None
    """CPU threads of an engine. null: half the cores, or 1 each for several processes or servers; `conventional`: all."""

    @property
    def vllm_options(self) -> dict[str, str]:
        """The options in `vllm_args` with their values, in all ways of vLLM: `--a-b=1`, `--a_b 1`, `--a.key 1`, `--no-a`."""
        found = {}
        for argument, after in zip(self.vllm_args, [*self.vllm_args[1:], ""], strict=False):
            option, joined, value = argument.partition("=")
            if option.startswith("-"):
                found[option.partition(".")[0].replace("_", "-").replace("--no-", "--")] = value if joined else after
        return found

    @property
    def vllm_workers(self) -> int:
        """On how many GPUs each vLLM server that the run starts computes."""
        sizes = map(self.vllm_options.get, ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"))
        return prod(int(size) for size in sizes if size and size.isdecimal())


class StreamConfig(Section, frozen=True):
    kind: Literal["files", "memory", "redis"] = "files"
    """`files`: an SQLite database in the run directory. `memory`: within one process only. `redis`: a Redis server of yours
    (extra `redis`).
    """
    url: str | None = None
    """redis: the server, like `redis://10.0.0.5:6379/0`."""
    capacity: Count | None = None
    """Number of groups that wait in the stream when it is full. null: no limit, because the schedule limits what is
    generated ahead (with `drop_oldest`: enough groups for two optimizer steps).
    """
    when_full: Literal["block", "drop_oldest"] = "block"
    """If the stream is full: start no more groups, or drop the oldest group for each new one (counted)."""


class WeightsConfig(Section, frozen=True):
    kind: Literal["shared", "collective"] = "shared"
    """Weight transfer from the trainer to engines. `shared`: shared memory, then to servers as a file. `collective`:
    broadcast by torch.distributed, directly to servers; nccl if all ends have a GPU, else gloo.
    """
    encoding: Literal["full", "delta", "adapter"] = "full"
    """What an update sends; engines have exactly the same weights after it. `full`: all weights. `delta` (collective): only
    the bits that differ from the last one, or all weights if that is not more; saves most with bfloat16 and learning rates
    up to 1e-5, and costs a second copy of the weights in the trainer. `adapter` (model.lora): only the adapter. Engines
    merge it, to the same bits on the same kind of device, and keep a second copy of the layers that have adapters.
    """


class PreprocessConfig(Section, frozen=True):
    advantage: Literal["group_mean", "leave_one_out", "none"] | UserFunction = "group_mean"
    """Baseline v of a rollout: mean reward of its group (the paper), or of the group's other rollouts. `none`: advantages
    are 0, for a run that learns from `trainer.kl_coefficient` alone. A function gets a `Group` and returns one number for
    each rollout, or one for each of its sampled tokens.
    """
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation (GRPO)."""
    zero_advantage: Literal["skip", "keep", "drop"] = "skip"
    """Samples whose advantage is 0 have no gradient. `skip`: they count towards the B of a step but cost no forward pass
    (not possible with a KL term or `correction.drift`). `keep`: compute them anyway. `drop`: leave them out, so that a
    step has B other samples (DAPO's dynamic sampling; `generated_per_trained` in the summary says what it costs).
    """
    observation_weight: NotNegative = 0.0
    """Weight of the cross-entropy of what the model reads between its turns, such as results of tools. 0: context only."""
    overlong: Literal["keep", "drop"] = "keep"
    """Completions that reached their token limit: train on them, or drop them (counted by length)."""


class CorrectionConfig(Section, frozen=True):
    """Correction for tokens sampled by another policy. r = pi / mu: trained policy over behaviour policy."""

    token: TokenCorrection | None = None
    """Per token. `truncate`: importance weights are at most token_high (reinforce, decoupled). `mask`: no gradient if r >
    token_high. `band`: none if r is outside token_low to token_high. `tv`: none if A > 0 and pi - mu > token_high, or A < 0
    and mu - pi > token_low. null: truncate at 5 for reinforce (the paper's clamp) and decoupled, none for the losses that
    bound the ratio themselves.
    """
    token_low: Positive | None = None
    """Lower threshold of `token`. null: its default (band 0.5, tv 0.2)."""
    token_high: Positive | None = None
    """Upper threshold of `token`. null: its default (truncate 5, mask 2, band 5, tv 0.2)."""
    sequence: SequenceCorrection = "none"
    """Per rollout. `truncate`: all its tokens have the weight min(sequence_high, product of r) instead of their own
    (reinforce, decoupled). `geo_truncate`: the same with the geometric mean of r, which hardly corrects
    staleness. `geo_mask`: no gradient from a rollout if the geometric mean of r is outside sequence_low to sequence_high.
    """
    sequence_low: Positive | None = None
    """Lower threshold of `sequence`. null: its default (geo_mask 0.9)."""
    sequence_high: Positive | None = None
    """Upper threshold of `sequence`. null: its default (truncate 5, geo_truncate 2, geo_mask 1.1)."""
    drift: NotNegative = 0.0
    """Weight of the penalty (log r)^2 on all sampled tokens, including masked ones; 1e-3 is usual."""


class WarmStartConfig(Section, frozen=True):
    """Steps of supervised training on given answers, before the first weights are published as version 0.

    The optimizer's state begins again after it.
    """

    data: str
    """File of JSON lines: `{"prompt": ..., "completion": ...}`, or `{"messages": [...]}`, whose assistant's messages are
    trained on.
    """
    steps: Count = 20
    """Optimizer steps."""
    batch_size: Count = 32
    """Examples per step."""
    learning_rate: Positive = 1e-5
    """Learning rate of these steps."""


class TrainerConfig(Section, frozen=True):
    steps: Count = 100
    """Optimizer steps to take."""
    warm_start: WarmStartConfig | None = None
    """Supervised training before the first step, like `{data: chats.jsonl, steps: 20}`. null: none."""
    batch_size: Count = 64
    """B, rollouts per optimizer step. A group may be split between two steps: its advantages are computed before."""
    loss: Literal["reinforce", "ppo", "gspo", "cispo", "decoupled"] | UserFunction = "reinforce"
    """The objective; stale tokens are treated as `correction` says. `reinforce`: importance-weighted REINFORCE; with the
    default correction, the method of the PipelineRL paper. `ppo`: PPO-clip; with group advantages, this is GRPO. `gspo`:
    sequence-level ratios. `cispo`: weight clipped on both sides. `decoupled`: PPO-clip around a proximal policy between the
    behaviour policy and the trained one (A-3PO). A function gets `LossInputs` and returns one term per token.
    """
    clip_low: NotNegative | None = None
    """The ratio is clipped below at 1 - clip_low (ppo, gspo, cispo, decoupled). null: the loss's own default, 0.2; for gspo
    3e-4.
    """
    clip_high: NotNegative | None = None
    """The ratio is clipped above at 1 + clip_high (ppo, gspo, cispo, decoupled). null: the loss's own default, 0.2; for gspo
    4e-4.
    """
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """ppo and decoupled: upper limit of the ratio for negative advantages; a token above it has no gradient. null: no limit.
    """
    loss_normalization: Literal["sequences", "tokens"] = "tokens"
    """Divide the summed loss by the step's number of rollouts, or of sampled tokens."""
    kl_coefficient: NotNegative = 0.0
    """Weight of the KL term to the initial model, or to the `teacher`. Above 0 it costs a forward pass and a copy of the
    model; with LoRA only the former.
    """
    teacher: str | None = None
    """The reference model of the KL term, with the vocabulary of the trained model: a folder, such as a checkpoint, a
    hub id, or the URL of `pipelinerl serve` or vLLM. null: the initial model.
    """
    teacher_key_env: str | None = None
    """Environment variable with the API key of the server of `teacher`."""
    kl_estimator: Literal["k3", "k1"] = "k3"
    """`k3`: a penalty in the loss; its expected gradient is the gradient of KL(reference || pi). `k1`: log pi - log
    reference is subtracted from each token's advantage, which gives the gradient of KL(pi || reference).
    """
    learning_rate: Positive = 1e-6
    """Peak learning rate of AdamW."""
    ess_lr: Literal["off", "sqrt"] = "off"
    """`sqrt`: a step's learning rate is multiplied by the square root of its batch's effective sample size (metric `ess`),
    which is 1 on-policy and falls with staleness (VCPO).
    """
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after warm-up: constant, or a decay to 10%."""
    warmup_steps: Natural = 0
    """Steps of linear warm-up."""
    betas: Annotated[tuple[ShareBelowOne, ShareBelowOne], Strict(False)] = (0.9, 0.95)
    """AdamW's beta1 and beta2."""
    weight_decay: NotNegative = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this global norm."""
    micro_batch_tokens: Count = 8192
    """Token budget of one packed forward/backward; does not change the step's result."""
    head_chunk: Natural | Literal["auto"] = "auto"
    """Compute the logits of this many tokens at a time, and again in the backward pass: less memory for more computation.
    `auto`: 128 (GPU: 1024) for micro-batches with more than 2^28 logits, else all at once. 0: always all at once.
    """
    gradient_cosine: bool = False
    """Record the cosine of each step's gradient and the previous one's: the metric `gradient_cosine`. It costs two copies of
    the gradients.
    """
    ess_threshold: ShareBelowOne = 0.0
    """If a batch's normalised effective sample size is below this, no step is taken: the batch and all stale rollouts are
    dropped (counted) and the trainer waits for on-policy data. 0: off.
    """
    checkpoint_every: Natural = 50
    """Optimizer steps between checkpoints, where a run goes on that lost a process; 0: only at the end and when stopped."""
    keep_checkpoints: Count = 2
    """How many of the latest checkpoints to keep, besides the best one by held-out reward, `RUN_DIR@best`."""
    weights_every: Natural = 0
    """Optimizer steps between copies of the weights in `weights/`, for `pipelinerl eval RUN_DIR@all`, and with 1 for
    `pipelinerl replay --verify` without training. None is removed; each takes as much disk as the model. 0: none.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    compile: bool = False
    """Compile the model's layers (`torch.compile`): faster steps after a longer start. Needs g++, on a GPU Triton."""
    device: Device = "cpu"
    """torch device of the trainer, as `engine.device`."""
    threads: Count | None = None
    """CPU threads of the trainer (of each rank). null: half the cores, or the cores that engines leave; `conventional`: all;
    shared by the ranks.
    """
    ranks: Count = 1
    """Processes that train together, each with a share of the weights, gradients, optimizer state and samples (FSDP). On
    GPUs, rank k computes on the k-th from `device` on.
    """
    reshard_after_forward: bool = True
    """ranks above 1: free each layer's gathered weights after its forward pass and gather them again for the backward pass.
    false: faster, but needs memory for all weights.
    """

    @property
    def teacher_is_server(self) -> bool:
        return bool(self.teacher and self.teacher.startswith(("http://", "https://")))

    @property
    def loads_reference(self) -> bool:
        """Whether a process of the run computes with a reference model."""
        return self.kl_coefficient > 0 and not self.teacher_is_server

    def reference(self, model: ModelConfig) -> ModelConfig:
        """The reference model of the KL term of a run with this model."""
        return model.model_copy(update={"path": self.teacher or model.path, "lora": None})

    def rank_device(self, rank: int) -> str:
        """Where a rank computes: GPUs are counted from the configured one on."""
        kind, _, first = self.device.partition(":")
        return f"{kind}:{int(first or 0) + rank}" if kind == "cuda" else kind


class EvaluationConfig(Section, frozen=True):
    problems: Natural = 0
    """Held-out problems, each attempted once before and once after training; 0: no evaluation."""
    temperature: NotNegative = 1.0
    """Sampling temperature of evaluations; 0 = greedy."""
    every: Natural = 0
    """Optimizer steps between evaluations during training, which use the engine's current weights; 0: only before and after
    training.
    """
    sets: dict[str, dict[str, JsonValue]] = {}
    """Further sets of held-out problems, as many each, by name: arguments that replace those of the environment, as in
    `{hard: {held_out: hard.jsonl}}`. Their rewards are metrics of each evaluation, `hard/reward`.
    """
    share: PositiveShare = 0.25
    """Share of the slots that an evaluation may take during training."""


class MetricsConfig(Section, frozen=True):
    view: Literal["auto", "live", "plain", "none"] = "auto"
    """The view in the terminal; `auto`: live in a terminal, plain lines otherwise."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...], Strict(False)] = ()
    """Also send curves, evaluations and samples to these trackers, like `[wandb]` (extras of the same names)."""
    callback: str | None = None
    """A function, `path/to/file.py:function` or `package.module:function`, that is called with every record of a step or an
    evaluation, in a process of its own. An error in it never ends the run.
    """
    plot: bool = True
    """Draw `curves.png` into the run directory at the end."""


class LaunchConfig(Section, frozen=True):
    kind: Literal["processes", "embedded", "ray"] = "processes"
    """`processes`: generation and training in separate processes. `embedded`: all in one process, deterministic, for
    debugging, teaching and tests. `ray`: separate processes on the machines of a Ray cluster (extra `ray`).
    """
    ray_address: str | None = None
    """ray: the cluster, like `10.0.0.5:6379`. null: the environment variable RAY_ADDRESS, or the cluster of this machine."""
    ray_without_token: bool = False
    """ray: accept a cluster of several machines without token authentication, where any client of its ports can run code."""
    place: dict[str, str] = {}
    """ray: machines (name or address) for some processes, like `{training: 10.0.0.5, server-0: 10.0.0.6}`. The others are
    placed where there is room.
    """
    preprocessor: Literal["with_trainer", "process"] = "with_trainer"
    """Where rollouts are prepared, and scored by the reference model of a KL term: in the trainer's process, or in a
    separate process in parallel.
    """
    restarts: Natural = 3
    """How often a process that dies is started again, until it has worked for ten minutes. Where that can't be done: how
    often the run goes on from its latest checkpoint, until there is a newer one (docs/running.md). 0: never.
    """
    watchdog_s: Positive = 180.0
    """If no stage makes progress for this long, the run prints which stage waits on which and exits with status 3."""
    startup_timeout_s: Positive = 600.0
    """Longest time for all processes to become ready."""


class RunConfig(Section, frozen=True):
    """The configuration of a run. Every field has a default; the demo has its own run file."""

    run_dir: str | None = None
    """The run directory. null: `runs/<date>-<environment>-<schedule>`."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of problems, sampling and all other randomness."""
    model: ModelConfig = ModelConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    actor: ActorConfig = ActorConfig()
    engine: EngineConfig = EngineConfig()
    stream: StreamConfig = StreamConfig()
    weights: WeightsConfig = WeightsConfig()
    preprocess: PreprocessConfig = PreprocessConfig()
    trainer: TrainerConfig = TrainerConfig()
    correction: CorrectionConfig = CorrectionConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def groups_needed(self) -> int:
        """Number of groups that the trainer needs for its next step: those of one step, or of a whole round."""
        rounds = 1 if self.schedule.kind == "pipeline" else self.schedule.steps_per_round
        return -(-self.trainer.batch_size * rounds // self.actor.group_size)
