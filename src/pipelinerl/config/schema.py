"""The run file's schema: typed, frozen, every field documented where it is defined.

`msgspec` checks types and ranges while decoding, and rejects unknown keys; `checks.py` rejects combinations that make no
sense. This package imports neither torch nor transformers, so that a mistake in a run file costs no start-up time.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section of the run file."""


class LoraConfig(Section, frozen=True):
    """Low-rank adapters. No dropout: the policy that samples has none."""

    rank: Annotated[int, Meta(ge=1, description="r: the change of each layer is scale * B A, of rank r at most.")] = 16
    alpha: Annotated[
        float,
        Meta(gt=0, description="scale = alpha / rank. With alpha fixed, the best learning rate hardly depends on the rank."),
    ] = 32.0
    target_modules: Annotated[
        tuple[str, ...] | None,
        Meta(description="Names of linear layers, like `[q_proj, v_proj]`. null: all but the output head."),
    ] = None


class ModelConfig(Section, frozen=True):
    path: Annotated[
        str, Meta(description="Folder or hub id of a Hugging Face causal LM; `demo` is the small model in the package.")
    ] = "demo"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="Type of the trainer's and engine's weights. float32 is the fast one on most CPUs."),
    ] = "float32"
    trust_remote_code: Annotated[
        bool, Meta(description="Run Python code that comes with the model. Only for models you have read.")
    ] = False
    head_dtype: Annotated[
        Literal["float32"] | None,
        Meta(
            description="float32: trainer and engine compute logits in float32 though weights are bfloat16, and agree "
            "better on log-probabilities. null: in `dtype`."
        ),
    ] = None
    lora: Annotated[
        LoraConfig | None,
        Meta(
            description="Train low-rank adapters (extra `lora`), not the weights themselves; engines get merged weights. "
            "`{}`: with the defaults. null: train all weights."
        ),
    ] = None


class EnvironmentConfig(Section, frozen=True):
    kind: Annotated[
        str,
        Meta(
            description="`gcd`, `math`, `math_words`, `countdown`, `guess_number`, `calculator`, `reasoning_gym`, "
            "`verifiers` (environments of these packages), `function` (a reward function of yours), `tools` (and functions "
            "that the model may call), `agent` (a program of yours that speaks to an OpenAI-compatible API), `mixture`, "
            "`curriculum`, or a class of yours: `path/to/file.py:ClassName` or "
            "`package.module:ClassName`."
        ),
    ] = "gcd"
    args: Annotated[dict[str, Any], Meta(description="Keyword arguments of the environment's constructor.")] = {}


class ScheduleConfig(Section, frozen=True):
    kind: Annotated[
        Literal["pipeline", "conventional", "async"],
        Meta(
            description="`pipeline`: generation and training at once, new weights in flight after every step. "
            "`conventional`: generate B*G samples with frozen weights, then G steps. `async`: generate for the next G "
            "steps while training on the last; weights change between rounds."
        ),
    ] = "pipeline"
    steps_per_round: Annotated[int, Meta(ge=1, description="G, optimizer steps per round (conventional and async).")] = 1
    max_lag: Annotated[
        int | None,
        Meta(
            description="pipeline: no token older than this many optimizer steps is trained on. The actor starts no group "
            "that could break the bound, so that nothing has to be dropped. null: no bound."
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
            description="Truncation to the k likeliest tokens, 0 = off. Must stay 0 in training: the trainer's ratio is "
            "over the whole distribution.",
        ),
    ] = 0
    max_open_rollouts: Annotated[
        int | None,
        Meta(
            description="pipeline: most rollouts that are open at once, in a process. Those that wait for a tool or a judge "
            "take no slot; more of them keep the engine busy and raise lag. null: four per slot.",
        ),
    ] = None
    rollout_timeout_s: Annotated[
        float, Meta(gt=0, description="A rollout that takes longer than this is dropped (reason `timeout`).")
    ] = 600.0
    code_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Environment or reward code that computes for longer than this without yielding is interrupted "
            "(reason `timeout`).",
        ),
    ] = 20.0
    max_failure_fraction: Annotated[
        float,
        Meta(ge=0, le=1, description="The run ends when more than this share of the last `failure_window` rollouts failed."),
    ] = 0.5
    failure_window: Annotated[int, Meta(ge=1, description="How many rollouts the failure share is taken over.")] = 64


class EngineConfig(Section, frozen=True):
    kind: Annotated[
        Literal["local", "http", "vllm"],
        Meta(
            description="`local`: the embedded slot engine. `http`: engine servers (`pipelinerl serve`), in processes of "
            "their own or on other machines. `vllm`: vLLM servers. Their weights are updated in flight all the same."
        ),
    ] = "local"
    processes: Annotated[
        int,
        Meta(
            ge=1,
            description="Generation processes, each with an actor and an engine of `slots` slots, `threads` threads. More "
            "than one lets `conventional` use every core in its generation phase. With `http` and `vllm` there is one, and "
            "`servers` do the work.",
        ),
    ] = 1
    servers: Annotated[
        int, Meta(ge=1, description="http and vllm: how many servers the run starts here, if `urls` names none.")
    ] = 1
    urls: Annotated[
        tuple[str, ...],
        Meta(
            description="http and vllm: servers that run already, like `[http://10.0.0.5:8000]`. They have slots, lengths "
            "and devices of their own, and are not ended."
        ),
    ] = ()
    api_key_env: Annotated[
        str | None, Meta(description="Name of the environment variable that holds the key of the servers in `urls`.")
    ] = None
    weights_dir: Annotated[
        str | None,
        Meta(
            description="Directory through which weights reach the servers in `urls`: the same path here and there. null: "
            "shared memory, for servers on this machine."
        ),
    ] = None
    python: Annotated[
        str | None,
        Meta(description="vllm: the interpreter that vLLM is installed for, like `/opt/vllm/bin/python`; to start servers."),
    ] = None
    slots: Annotated[
        int, Meta(ge=1, description="H, sequences in progress at once (of each process, or of each server started here).")
    ] = 64
    max_length: Annotated[
        int | None,
        Meta(description="Longest prompt + completion a slot holds. null: the model's maximum, at most 2048."),
    ] = None
    kv_on_update: Annotated[
        Literal["keep", "recompute"],
        Meta(description="What happens to the KV cache at a weight update: keep the old entries, or recompute them."),
    ] = "keep"
    prefill_tokens: Annotated[
        int, Meta(ge=1, description="Most prompt tokens processed in one engine step; longer prompts come in chunks.")
    ] = 2048
    device: Annotated[str, Meta(description="torch device of the engine, e.g. `cpu` or `cuda:0`.")] = "cpu"
    threads: Annotated[
        int | None,
        Meta(
            description="CPU threads of an engine. null: half the cores, or 1 of several processes or servers; "
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
            description="redis: the server, like `redis://10.0.0.5:6379/0`. null: the run starts one of its own, which "
            "keeps its data in the run directory and ends with the run."
        ),
    ] = None
    capacity: Annotated[
        int | None,
        Meta(
            description="Most groups waiting in the stream. null: two optimizer steps' worth, or a round, and the pipeline "
            "starts no group while two steps' worth of rollouts are finished."
        ),
    ] = None
    when_full: Annotated[
        Literal["block", "drop_oldest"],
        Meta(description="A full stream makes the actor wait, or replaces the oldest group with fresh data (counted)."),
    ] = "block"


class WeightsConfig(Section, frozen=True):
    kind: Annotated[
        Literal["shared", "collective"],
        Meta(
            description="How weights get from the trainer to engines. `shared`: shared memory, then to servers as a file. "
            "`collective`: broadcast by torch.distributed, straight into servers; nccl if every end has a GPU, else gloo."
        ),
    ] = "shared"


class PreprocessConfig(Section, frozen=True):
    advantage: Annotated[
        Literal["group_mean", "leave_one_out"],
        Meta(description="Baseline v of a rollout: mean reward of its group (the paper), or of the others in it."),
    ] = "group_mean"
    normalize_std: Annotated[bool, Meta(description="Divide advantages by the group's standard deviation (GRPO).")] = False
    zero_advantage: Annotated[
        Literal["skip", "keep", "drop"],
        Meta(
            description="Samples whose advantage is 0 have no gradient. `skip`: they count among the B of a step but cost "
            "no forward pass (not possible with a KL penalty or `correction.drift`). `keep`: compute them all the same. "
            "`drop`: leave them out, so that a step has B others."
        ),
    ] = "skip"
    overlong: Annotated[
        Literal["keep", "drop"],
        Meta(description="Completions cut at their token limit: train on them, or drop them (counted by length)."),
    ] = "keep"


Positive = Annotated[float, Meta(gt=0)]
TokenCorrection = Literal["none", "truncate", "mask", "band", "tv"]
SequenceCorrection = Literal["none", "truncate", "geo_mask"]


class CorrectionConfig(Section, frozen=True):
    """What becomes of tokens that another policy sampled. r = pi / mu: trained policy over the one that sampled."""

    token: Annotated[
        TokenCorrection | None,
        Meta(
            description="By token. `truncate`: importance weights are at most token_high (reinforce, decoupled). `mask`: no "
            "gradient where r > token_high. `band`: none where r is outside token_low to token_high. `tv`: none where A > 0 "
            "and pi - mu > token_high, or A < 0 and mu - pi > token_low. null: truncate at 5 for reinforce (the paper's "
            "clamp) and decoupled, none for the losses that bound the ratio themselves."
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
            description="By rollout. `truncate`: all its tokens have the weight min(sequence_high, product of r), not their "
            "own (reinforce, decoupled). `geo_mask`: no gradient from a rollout where the geometric mean of r is outside "
            "sequence_low to sequence_high."
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
            ge=0, description="Weight of the penalty (log r)^2 on every sampled token, masked ones included; 1e-3 is usual."
        ),
    ] = 0.0


class TrainerConfig(Section, frozen=True):
    steps: Annotated[int, Meta(ge=1, description="Optimizer steps to take.")] = 100
    batch_size: Annotated[int, Meta(ge=1, description="B, rollouts per optimizer step.")] = 64
    loss: Annotated[
        Literal["reinforce", "ppo", "gspo", "cispo", "decoupled"],
        Meta(
            description="The objective; `correction` says what becomes of stale tokens. `reinforce`: importance-weighted "
            "REINFORCE, with the default correction the method of the PipelineRL paper. `ppo`: PPO-clip, with group "
            "advantages this is GRPO. `gspo`: sequence-level ratios. `cispo`: weight clipped on both sides. `decoupled`: "
            "PPO-clip around a proximal policy between the one that sampled and the trained one (A-3PO)."
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
            description="ppo and decoupled: for a negative advantage the ratio counts as this at most; a token beyond it "
            "has no gradient. null: no limit."
        ),
    ] = 3.0
    loss_normalization: Annotated[
        Literal["sequences", "tokens"],
        Meta(description="Divide the summed loss by the number of rollouts of the step, or of its sampled tokens."),
    ] = "tokens"
    kl_coefficient: Annotated[
        float,
        Meta(
            ge=0,
            description="Weight of the KL penalty to the initial model; above 0 costs a forward and, but for LoRA, a copy.",
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
        Literal["constant", "linear", "cosine"], Meta(description="What the rate does after warm-up, down to 10%.")
    ] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up.")] = 0
    betas: Annotated[tuple[float, float], Meta(description="AdamW's beta1 and beta2.")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's decoupled weight decay.")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="Gradients are clipped to this global norm.")] = 1.0
    micro_batch_tokens: Annotated[
        int,
        Meta(ge=1, description="Token budget of one packed forward/backward; the step does not depend on it."),
    ] = 8192
    ess_threshold: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="When a batch's normalised effective sample size is below this, no step is taken: the batch and "
            "what is stale are dropped (counted) and the trainer waits for on-policy data. 0: off.",
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
            description="Optimizer steps between copies of the weights alone, in `weights/`, all of which are kept: cheaper "
            "than checkpoints, for `pipelinerl eval RUN_DIR@all`. 0: none.",
        ),
    ] = 0
    gradient_checkpointing: Annotated[bool, Meta(description="Trade compute for activation memory.")] = False
    device: Annotated[str, Meta(description="torch device of the trainer.")] = "cpu"
    threads: Annotated[
        int | None,
        Meta(description="CPU threads of the trainer. null: half the cores, or what engines leave; `conventional`: all."),
    ] = None


class EvaluationConfig(Section, frozen=True):
    problems: Annotated[
        int, Meta(ge=0, description="Held-out problems answered once each, before and after training; 0: no evaluation.")
    ] = 0
    temperature: Annotated[float, Meta(ge=0, description="Sampling temperature of evaluations; 0 = greedy.")] = 1.0
    every: Annotated[
        int,
        Meta(
            ge=0,
            description="Optimizer steps between evaluations while training goes on, by the weights that the engine has "
            "meanwhile; 0: none but before and after.",
        ),
    ] = 0
    share: Annotated[
        float, Meta(gt=0, le=1, description="Share of the slots that an evaluation may take while training goes on.")
    ] = 0.25


class MetricsConfig(Section, frozen=True):
    view: Annotated[
        Literal["auto", "live", "plain", "none"],
        Meta(description="What the terminal shows; `auto`: live in a terminal, plain lines otherwise."),
    ] = "auto"
    tensorboard: Annotated[bool, Meta(description="Also write TensorBoard events (extra `tensorboard`).")] = False
    plot: Annotated[bool, Meta(description="Draw `curves.png` into the run directory at the end.")] = True


class LaunchConfig(Section, frozen=True):
    kind: Annotated[
        Literal["processes", "embedded"],
        Meta(
            description="`processes`: generation and training in a process each. `embedded`: all in one process, "
            "deterministic, for debugging, teaching and tests."
        ),
    ] = "processes"
    preprocessor: Annotated[
        Literal["with_trainer", "process"],
        Meta(
            description="Where rollouts are prepared, and scored by the reference model of a KL penalty: in the trainer's "
            "process, or in one of its own, at the same time."
        ),
    ] = "with_trainer"
    watchdog_s: Annotated[
        float,
        Meta(gt=0, description="When nothing has moved for this long, the run says who waits on whom and ends (status 3)."),
    ] = 180.0
    startup_timeout_s: Annotated[float, Meta(gt=0, description="Longest time for the processes to load and be ready.")] = (
        600.0
    )


class RunConfig(Section, frozen=True):
    """A whole run. Every field has a default; the defaults of the demo are in its own run file."""

    run_dir: Annotated[
        str | None, Meta(description="Where everything is written. null: `runs/<date>-<environment>-<schedule>`.")
    ] = None
    seed: Annotated[
        int, Meta(ge=0, le=2**63 - 1, description="Seed of problems, sampling and everything else that is random.")
    ] = 0
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
