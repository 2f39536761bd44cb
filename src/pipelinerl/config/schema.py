"""The run file's schema: typed, frozen, each field documented where it is defined.

`msgspec` checks types and ranges while decoding, and rejects unknown keys; `checks.py` rejects invalid combinations. This
package imports neither torch nor transformers, so that mistakes in a run file are reported at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section of the run file."""


class LoraConfig(Section, frozen=True):
    """Low-rank adapters. There is no dropout, since the policy that samples has none."""

    rank: Annotated[
        int, Meta(ge=1, description="r: the change of each layer's weight is scale * B A, of rank at most r.")
    ] = 16
    alpha: Annotated[
        float,
        Meta(gt=0, description="scale = alpha / rank. With alpha fixed, the best learning rate hardly depends on the rank."),
    ] = 32.0
    target_modules: Annotated[
        tuple[str, ...] | None,
        Meta(description="Names of linear layers, like `[q_proj, v_proj]`. null: all except the output head."),
    ] = None


class ModelConfig(Section, frozen=True):
    path: Annotated[
        str, Meta(description="Folder or hub id of a Hugging Face causal LM; `demo` is the small model in the package.")
    ] = "demo"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="Type of the trainer's and engine's weights. float32 is the faster one on most CPUs."),
    ] = "float32"
    trust_remote_code: Annotated[
        bool, Meta(description="Run Python code that comes with the model. Only for models whose code you have read.")
    ] = False
    head_dtype: Annotated[
        Literal["float32"] | None,
        Meta(
            description="float32: trainer and engine compute logits in float32 even if weights are bfloat16, so that their "
            "log-probabilities agree better. null: in `dtype`."
        ),
    ] = None
    lora: Annotated[
        LoraConfig | None,
        Meta(
            description="Train low-rank adapters (extra `lora`) instead of the weights; engines get merged weights. "
            "`{}`: with the defaults. null: train all weights."
        ),
    ] = None


class EnvironmentConfig(Section, frozen=True):
    kind: Annotated[
        str,
        Meta(
            description="`gcd`, `math`, `countdown`, `guess_number`, `calculator`, `reasoning_gym`, "
            "`verifiers` (environments of these packages), `function` (your reward function), `tools` (a reward function "
            "and functions that the model may call), `agent` (your program, as a client of an OpenAI-compatible API), "
            "`mixture` (several environments), `difficulty_filter` (problems selected by pass rate), or your class: "
            "`path/to/file.py:ClassName` or `package.module:ClassName`."
        ),
    ] = "gcd"
    args: Annotated[dict[str, Any], Meta(description="Keyword arguments of the environment's constructor.")] = {}


class ScheduleConfig(Section, frozen=True):
    kind: Annotated[
        Literal["pipeline", "conventional", "async"],
        Meta(
            description="`pipeline`: generate and train at the same time, with an in-flight weight update after every step. "
            "`conventional`: generate B*G samples with frozen weights, then take G steps. `async`: generate for the next G "
            "steps while training on the samples of the last round; weights change between rounds."
        ),
    ] = "pipeline"
    steps_per_round: Annotated[int, Meta(ge=1, description="G, optimizer steps per round (conventional and async).")] = 1
    max_lag: Annotated[
        int | None,
        Meta(
            description="pipeline: the largest lag, in optimizer steps, of a token that is trained on. The actor starts no "
            "group that could exceed it, so that none has to be dropped. null: no bound."
        ),
    ] = None


class ActorConfig(Section, frozen=True):
    group_size: Annotated[int, Meta(ge=1, description="K, attempts at each problem.")] = 8
    max_tokens: Annotated[int, Meta(ge=1, description="Longest completion, in tokens.")] = 256
    temperature: Annotated[float, Meta(gt=0, description="Sampling temperature of training rollouts.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus truncation. Must stay 1 in training: see `top_k`.")] = 1.0
    top_k: Annotated[
        int,
        Meta(
            ge=0,
            description="Truncation to the k most likely tokens, 0 = off. Must stay 0 in training: the trainer's ratio is "
            "over the whole distribution.",
        ),
    ] = 0
    max_open_rollouts: Annotated[
        int | None,
        Meta(
            description="pipeline: maximum number of open rollouts in a process. Rollouts that wait for a tool or a judge "
            "take no slot; a higher limit keeps the engine busy and increases lag. null: four per slot.",
        ),
    ] = None
    rollout_timeout_s: Annotated[
        float, Meta(gt=0, description="A rollout that takes longer is dropped (reason `timeout`).")
    ] = 600.0
    code_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Environment or reward code that computes for longer without yielding is interrupted "
            "(reason `timeout`).",
        ),
    ] = 20.0
    max_failure_fraction: Annotated[
        float,
        Meta(ge=0, le=1, description="The run ends if more than this share of the last `failure_window` rollouts failed."),
    ] = 0.5
    failure_window: Annotated[
        int, Meta(ge=1, description="Number of rollouts over which the share of failures is computed.")
    ] = 64


class EngineConfig(Section, frozen=True):
    kind: Annotated[
        Literal["local", "http", "vllm"],
        Meta(
            description="`local`: the embedded slot engine. `http`: engine servers (`pipelinerl serve`), in separate "
            "processes or on other machines. `vllm`: vLLM servers. All are updated in flight."
        ),
    ] = "local"
    processes: Annotated[
        int,
        Meta(
            ge=1,
            description="Generation processes, each with an actor and an engine of `slots` slots and `threads` threads. "
            "With more than one, `conventional` uses all cores while it generates. `http` and `vllm` need exactly one: "
            "set `servers` instead.",
        ),
    ] = 1
    servers: Annotated[
        int, Meta(ge=1, description="http and vllm: number of servers that the run starts here, if `urls` is empty.")
    ] = 1
    urls: Annotated[
        tuple[str, ...],
        Meta(
            description="http and vllm: servers that already run, like `[http://10.0.0.5:8000]`. They have their own slots, "
            "lengths and devices, and keep running after the run."
        ),
    ] = ()
    api_key_env: Annotated[
        str | None, Meta(description="Name of the environment variable that holds the API key of the servers in `urls`.")
    ] = None
    weights_dir: Annotated[
        str | None,
        Meta(
            description="Directory through which the servers in `urls` get weights; its path must be the same here and "
            "there. null: shared memory, for servers on this machine."
        ),
    ] = None
    python: Annotated[
        str | None,
        Meta(description="vllm: to start servers, the interpreter that has vLLM installed, like `/opt/vllm/bin/python`."),
    ] = None
    slots: Annotated[
        int, Meta(ge=1, description="H, sequences in progress at once (per process, or per server started here).")
    ] = 64
    max_length: Annotated[
        int | None,
        Meta(description="Longest prompt + completion of a slot, in tokens. null: the model's maximum, at most 2048."),
    ] = None
    kv_on_update: Annotated[
        Literal["keep", "recompute"],
        Meta(description="The KV cache at a weight update: keep the old entries, or recompute them."),
    ] = "keep"
    prefill_tokens: Annotated[
        int, Meta(ge=1, description="Maximum prompt tokens in one engine step; longer prompts are split into chunks.")
    ] = 2048
    device: Annotated[str, Meta(description="torch device of the engine, e.g. `cpu` or `cuda:0`.")] = "cpu"
    threads: Annotated[
        int | None,
        Meta(
            description="CPU threads of an engine. null: half the cores, or 1 each for several processes or servers; "
            "`conventional`: all."
        ),
    ] = None


class StreamConfig(Section, frozen=True):
    kind: Annotated[
        Literal["files", "memory", "redis"],
        Meta(
            description="`files`: append-only files in the run directory. `memory`: within one process only. `redis`: a "
            "Redis server (extra `redis`)."
        ),
    ] = "files"
    url: Annotated[
        str | None,
        Meta(
            description="redis: the server, like `redis://10.0.0.5:6379/0`. null: the run starts its own server, which "
            "keeps its data in the run directory and stops with the run."
        ),
    ] = None
    capacity: Annotated[
        int | None,
        Meta(
            description="Maximum number of groups in the stream. null: enough for two optimizer steps, or a round, and the "
            "pipeline starts no group while enough rollouts for two steps are finished."
        ),
    ] = None
    when_full: Annotated[
        Literal["block", "drop_oldest"],
        Meta(description="If the stream is full: make the actor wait, or drop the oldest group for the new one (counted)."),
    ] = "block"


class WeightsConfig(Section, frozen=True):
    kind: Annotated[
        Literal["shared", "collective"],
        Meta(
            description="Weight transfer from the trainer to engines. `shared`: shared memory, then to servers as a file. "
            "`collective`: broadcast by torch.distributed, directly to servers; nccl if all ends have a GPU, else gloo."
        ),
    ] = "shared"


class PreprocessConfig(Section, frozen=True):
    advantage: Annotated[
        Literal["group_mean", "leave_one_out"],
        Meta(description="Baseline v of a rollout: mean reward of its group (the paper), or of the group's other rollouts."),
    ] = "group_mean"
    normalize_std: Annotated[bool, Meta(description="Divide advantages by the group's standard deviation (GRPO).")] = False
    zero_advantage: Annotated[
        Literal["skip", "keep", "drop"],
        Meta(
            description="Samples whose advantage is 0 have no gradient. `skip`: they count towards the B of a step but "
            "cost no forward pass (not possible with a KL penalty or `correction.drift`). `keep`: compute them anyway. "
            "`drop`: leave them out, so that a step has B other samples."
        ),
    ] = "skip"
    overlong: Annotated[
        Literal["keep", "drop"],
        Meta(description="Completions that reached their token limit: train on them, or drop them (counted by length)."),
    ] = "keep"


Positive = Annotated[float, Meta(gt=0)]
TokenCorrection = Literal["none", "truncate", "mask", "band", "tv"]
SequenceCorrection = Literal["none", "truncate", "geo_mask"]


class CorrectionConfig(Section, frozen=True):
    """Correction for tokens sampled by another policy. r = pi / mu: trained policy over behaviour policy."""

    token: Annotated[
        TokenCorrection | None,
        Meta(
            description="Per token. `truncate`: importance weights are at most token_high (reinforce, decoupled). `mask`: "
            "no gradient if r > token_high. `band`: none if r is outside token_low to token_high. `tv`: none if A > 0 and "
            "pi - mu > token_high, or A < 0 and mu - pi > token_low. null: truncate at 5 for reinforce (the paper's clamp) "
            "and decoupled, none for the losses that bound the ratio themselves."
        ),
    ] = None
    token_low: Annotated[
        Positive | None, Meta(description="Lower threshold of `token`. null: its default (band 0.5, tv 0.2).")
    ] = None
    token_high: Annotated[
        Positive | None,
        Meta(description="Upper threshold of `token`. null: its default (truncate 5, mask 2, band 5, tv 0.2)."),
    ] = None
    sequence: Annotated[
        SequenceCorrection,
        Meta(
            description="Per rollout. `truncate`: all its tokens have the weight min(sequence_high, product of r) instead "
            "of their own (reinforce, decoupled). `geo_mask`: no gradient from a rollout if the geometric mean of r is "
            "outside sequence_low to sequence_high."
        ),
    ] = "none"
    sequence_low: Annotated[
        Positive | None, Meta(description="Lower threshold of `sequence`. null: its default (geo_mask 0.9).")
    ] = None
    sequence_high: Annotated[
        Positive | None, Meta(description="Upper threshold of `sequence`. null: its default (truncate 5, geo_mask 1.1).")
    ] = None
    drift: Annotated[
        float,
        Meta(
            ge=0, description="Weight of the penalty (log r)^2 on all sampled tokens, including masked ones; 1e-3 is usual."
        ),
    ] = 0.0


class TrainerConfig(Section, frozen=True):
    steps: Annotated[int, Meta(ge=1, description="Optimizer steps to take.")] = 100
    batch_size: Annotated[int, Meta(ge=1, description="B, rollouts per optimizer step.")] = 64
    loss: Annotated[
        Literal["reinforce", "ppo", "gspo", "cispo", "decoupled"],
        Meta(
            description="The objective; stale tokens are treated as `correction` says. `reinforce`: importance-weighted "
            "REINFORCE; with the default correction, the method of the PipelineRL paper. `ppo`: PPO-clip; with group "
            "advantages, this is GRPO. `gspo`: sequence-level ratios. `cispo`: weight clipped on both sides. `decoupled`: "
            "PPO-clip around a proximal policy between the behaviour policy and the trained one (A-3PO)."
        ),
    ] = "reinforce"
    clip_low: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="The ratio is clipped below at 1 - clip_low (ppo, gspo, cispo, decoupled). null: the loss's own "
            "default, 0.2; for gspo 3e-4."
        ),
    ] = None
    clip_high: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="The ratio is clipped above at 1 + clip_high (ppo, gspo, cispo, decoupled). null: the loss's own "
            "default, 0.2; for gspo 4e-4."
        ),
    ] = None
    dual_clip: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(
            description="ppo and decoupled: upper limit of the ratio for negative advantages; a token above it has no "
            "gradient. null: no limit."
        ),
    ] = 3.0
    loss_normalization: Annotated[
        Literal["sequences", "tokens"],
        Meta(description="Divide the summed loss by the step's number of rollouts, or of sampled tokens."),
    ] = "tokens"
    kl_coefficient: Annotated[
        float,
        Meta(
            ge=0,
            description="Weight of the KL penalty to the initial model. Above 0 it costs a forward pass and, except with "
            "LoRA, a copy of the model.",
        ),
    ] = 0.0
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW.")] = 1e-6
    ess_lr: Annotated[
        Literal["off", "sqrt"],
        Meta(
            description="`sqrt`: a step's learning rate is multiplied by the square root of its batch's effective sample "
            "size (metric `ess`), which is 1 on-policy and falls with staleness (VCPO)."
        ),
    ] = "off"
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Meta(description="The learning rate after warm-up: constant, or a decay to 10%."),
    ] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up.")] = 0
    betas: Annotated[tuple[float, float], Meta(description="AdamW's beta1 and beta2.")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's decoupled weight decay.")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="Gradients are clipped to this global norm.")] = 1.0
    micro_batch_tokens: Annotated[
        int,
        Meta(ge=1, description="Token budget of one packed forward/backward; does not change the step's result."),
    ] = 8192
    ess_threshold: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="If a batch's normalised effective sample size is below this, no step is taken: the batch and all "
            "stale rollouts are dropped (counted) and the trainer waits for on-policy data. 0: off.",
        ),
    ] = 0.0
    checkpoint_every: Annotated[
        int, Meta(ge=0, description="Optimizer steps between checkpoints; 0: only at the end and when stopped.")
    ] = 0
    keep_checkpoints: Annotated[int, Meta(ge=1, description="How many checkpoints to keep.")] = 2
    weights_every: Annotated[
        int,
        Meta(
            ge=0,
            description="Optimizer steps between copies of the weights in `weights/`, for `pipelinerl eval RUN_DIR@all`. "
            "All copies are kept; they are cheaper than checkpoints. 0: none.",
        ),
    ] = 0
    gradient_checkpointing: Annotated[
        bool, Meta(description="Recompute activations in the backward pass, to save memory.")
    ] = False
    device: Annotated[str, Meta(description="torch device of the trainer.")] = "cpu"
    threads: Annotated[
        int | None,
        Meta(
            description="CPU threads of the trainer. null: half the cores, or those that engines leave; `conventional`: all."
        ),
    ] = None


class EvaluationConfig(Section, frozen=True):
    problems: Annotated[
        int,
        Meta(ge=0, description="Held-out problems, each attempted once before and once after training; 0: no evaluation."),
    ] = 0
    temperature: Annotated[float, Meta(ge=0, description="Sampling temperature of evaluations; 0 = greedy.")] = 1.0
    every: Annotated[
        int,
        Meta(
            ge=0,
            description="Optimizer steps between evaluations during training, which use the engine's current weights; "
            "0: only before and after training.",
        ),
    ] = 0
    share: Annotated[
        float, Meta(gt=0, le=1, description="Share of the slots that an evaluation may take during training.")
    ] = 0.25


class MetricsConfig(Section, frozen=True):
    view: Annotated[
        Literal["auto", "live", "plain", "none"],
        Meta(description="The view in the terminal; `auto`: live in a terminal, plain lines otherwise."),
    ] = "auto"
    tensorboard: Annotated[bool, Meta(description="Also write TensorBoard events (extra `tensorboard`).")] = False
    plot: Annotated[bool, Meta(description="Draw `curves.png` into the run directory at the end.")] = True


class LaunchConfig(Section, frozen=True):
    kind: Annotated[
        Literal["processes", "embedded"],
        Meta(
            description="`processes`: generation and training in separate processes. `embedded`: all in one process, "
            "deterministic, for debugging, teaching and tests."
        ),
    ] = "processes"
    preprocessor: Annotated[
        Literal["with_trainer", "process"],
        Meta(
            description="Where rollouts are prepared, and scored by the reference model of a KL penalty: in the trainer's "
            "process, or in a separate process in parallel."
        ),
    ] = "with_trainer"
    watchdog_s: Annotated[
        float,
        Meta(
            gt=0,
            description="If no stage makes progress for this long, the run prints which stage waits on which and exits "
            "with status 3.",
        ),
    ] = 180.0
    startup_timeout_s: Annotated[float, Meta(gt=0, description="Longest time for all processes to become ready.")] = 600.0


class RunConfig(Section, frozen=True):
    """The configuration of a run. Every field has a default; the demo has its own run file."""

    run_dir: Annotated[str | None, Meta(description="The run directory. null: `runs/<date>-<environment>-<schedule>`.")] = (
        None
    )
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1, description="Seed of problems, sampling and all other randomness.")] = 0
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
