"""What the tests of the sharded trainer share: scenarios, and a process that computes all of them with 0, 2 and 3 ranks.

python -m tests.integration.sharded_parts FOLDER [exhaustive]

Importing torch and transformers takes longer than a scenario. So one process imports them, and forks all others. It never
computes itself: a process in which autograd has run can't be forked.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import peft  # noqa: F401 - before processes are forked
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pipelinerl.checkpoint import CheckpointState, load_checkpoint
from pipelinerl.config.schema import CorrectionConfig, LoraConfig, ModelConfig, TrainerConfig
from pipelinerl.models.loading import load_model
from pipelinerl.models.lora import LoraModel
from pipelinerl.models.state import checksum
from pipelinerl.trainer import logprobs
from pipelinerl.trainer.logprobs import FrozenModelScorer
from pipelinerl.trainer.saving import rng_state, write_checkpoint
from pipelinerl.trainer.sharding import ranks
from pipelinerl.trainer.sharding.learner import ShardedLearner, ShardedPolicy
from pipelinerl.trainer.step import Learner, StepResult
from pipelinerl.types import Segment, TrainingSample

KEY = "key of a test"
STEPS = 3
SAVED_AT = 2
RESUMED = ["default", "untied", "lora", "bfloat16"]
VOCABULARY = 517


class Scenario(msgspec.Struct, frozen=True):
    """Changes to the defaults of a run file. `untied`: the model's head has weights of its own.

    `by_token`: tokens have advantages of their own, and some of the context is supervised. `warm`: steps on given tokens
    alone come first.
    """

    trainer: dict[str, Any] = {}  # copied for each instance
    model: dict[str, Any] = {}
    correction: dict[str, Any] = {}
    untied: bool = False
    by_token: bool = False
    warm: bool = False
    samples: int = 13
    prompt: int = 0
    """Tokens that the samples of a group of four begin with."""
    logits_at_once: int | None = None
    """Limit of logits in memory, above which `head_chunk: auto` has an effect; null: the real one."""


LORA = {"lora": LoraConfig(rank=3)}
KL = {"kl_coefficient": 0.1}
APART = {"micro_batch_tokens": 1}
"""One sample in a place: in bfloat16, results depend on the packing."""
SCENARIOS = {
    "default": Scenario(),
    "untied": Scenario(untied=True),
    "no_resharding": Scenario({"reshard_after_forward": False}, untied=True),
    "gspo": Scenario({"loss": "gspo"}),
    "kl": Scenario(KL),
    "kl_lora": Scenario(KL | {"loss": "gspo"}, model=LORA),
    "kl_bfloat16": Scenario(
        KL | APART | {"loss": "decoupled"},
        model={"dtype": "bfloat16", "head_dtype": "float32"},
        untied=True,
        samples=7,
    ),
    "token_mask": Scenario(correction={"token": "mask"}),
    "sequence_geo_mask": Scenario(correction={"sequence": "geo_mask"}),
    "drift": Scenario(correction={"drift": 1e-2}),
    "by_token": Scenario({"gradient_cosine": True}, by_token=True),
    "by_token_kl": Scenario(KL | {"kl_estimator": "k1", "head_chunk": 7}, by_token=True, untied=True),
    "by_token_lora": Scenario({"head_chunk": 7}, model=LORA, by_token=True),
    "warm": Scenario(KL | {"kl_estimator": "k1"}, warm=True),
    "sequences": Scenario({"loss_normalization": "sequences", "ess_lr": "sqrt", "weight_decay": 0.1}),
    "checkpointing": Scenario({"gradient_checkpointing": True}, untied=True),
    "lora": Scenario(model=LORA),
    "bfloat16": Scenario(APART, model={"dtype": "bfloat16", "head_dtype": "float32"}, samples=7),
    "lora_bfloat16": Scenario(APART, model=LORA | {"dtype": "bfloat16"}, samples=7),
    "in_chunks": Scenario({"head_chunk": 7, "loss": "ppo", "micro_batch_tokens": 60}, untied=True),
    "in_chunks_kl_untied": Scenario(KL | {"head_chunk": 7}, untied=True),
    "in_chunks_lora": Scenario({"head_chunk": 7, "loss": "cispo"}, model=LORA, untied=True),
    "some_in_chunks": Scenario(KL | {"loss": "gspo"}, untied=True, logits_at_once=20_000),
    "shared_prompts": Scenario(prompt=30, by_token=True, untied=True),
    "shared_prompts_kl_lora": Scenario(KL | {"head_chunk": 7}, model=LORA, prompt=30),
    "one_sample": Scenario(samples=1),
    "no_gradient": Scenario(samples=0),
    "refused": Scenario({"ess_threshold": 0.99}),
}


def write_models(root: Path) -> None:
    """Tiny models with sizes that no number of ranks divides. `reference`: for KL penalties."""
    for seed, name in ((1, "tied"), (1, "untied"), (2, "reference")):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=66,
            intermediate_size=101,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=256,
            tie_word_embeddings=name != "untied",
        )
        model: Any = LlamaForCausalLM(config)
        model.save_pretrained(root / name)


def configs(root: Path, scenario: Scenario, device: str = "cpu") -> tuple[TrainerConfig, ModelConfig, CorrectionConfig]:
    base = {"steps": STEPS, "learning_rate": 3e-5, "micro_batch_tokens": 100, "max_grad_norm": 0.05, "device": device}
    trainer = TrainerConfig(**(base | scenario.trainer))
    model = ModelConfig(path=str(root / ("untied" if scenario.untied else "tied")), **scenario.model)
    return trainer, model, CorrectionConfig(**scenario.correction)


@contextmanager
def limit_of(scenario: Scenario) -> Iterator[None]:
    """Of two places that are computed at the same time, only one may have more logits than this."""
    before = logprobs.LOGITS_AT_ONCE
    logprobs.LOGITS_AT_ONCE = scenario.logits_at_once or before
    try:
        yield
    finally:
        logprobs.LOGITS_AT_ONCE = before


def of_reference(root: Path, config: ModelConfig) -> ModelConfig:
    return config.model_copy(update={"path": str(root / "reference")})


def batch(scenario: Scenario, version: int, reference: FrozenModelScorer | None) -> list[TrainingSample]:
    """The samples of the step from `version`: of one or two turns, with lags, some without a gradient, unlike in length."""
    draw = random.Random(100 + version)
    found = []
    for number in range(max(1, scenario.samples)):
        segments, sampled = [], 0
        for _ in range(draw.choice([1, 1, 2])):
            length = draw.randrange(4, 40)
            start = draw.randrange(1, length)
            prompt = tuple((t + number // 4) % VOCABULARY for t in range(scenario.prompt))
            ids = prompt + tuple(draw.randrange(VOCABULARY) for _ in range(length))
            given = ((1, start),) if scenario.by_token and start > 2 else ()
            ranges = [tuple((len(prompt) + a, len(prompt) + b) for a, b in of) for of in (((start, length),), given)]
            segments.append(Segment(token_ids=ids, sampled=ranges[0], supervised=ranges[1]))
            sampled += length - start
        logprobs = tuple(-6.2 + draw.uniform(-1, 1) for _ in range(sampled))
        advantage: float | tuple[float, ...] = 0.0 if not scenario.samples or number == 5 else draw.uniform(-1, 1)
        if scenario.by_token and number % 2:
            advantage = tuple(draw.uniform(-1, 1) for _ in range(sampled))
        sample = TrainingSample(
            id=str(number),
            group_index=number,
            segments=tuple(segments),
            behaviour_logprobs=logprobs,
            versions=tuple(draw.randrange(version + 1) for _ in range(sampled)),
            advantage=advantage,
            reward=0.0,
            supervised_weight=0.2,
        )
        found.append(sample)
    if reference is None:
        return found
    scores = iter(reference.score([segment for sample in found for segment in sample.segments]))
    return [replace(s, reference_logprobs=tuple(lp for _ in s.segments for lp in next(scores))) for s in found]


def segments_of(scenario: Scenario, version: int) -> list[Segment]:
    return [segment for sample in batch(scenario, version, None) for segment in sample.segments]


class Outcome(msgspec.Struct, frozen=True):
    """What a scenario led to: a record for each step, and the checksum of all weights at the end."""

    steps: list[dict[str, Any]]
    checksum: str


def train(
    learner: Learner,
    scenario: Scenario,
    folder: Path,
    checkpoint: Path | None = None,
    reference: FrozenModelScorer | None = None,
) -> None:
    """Take all steps, from a checkpoint if one is given. Writes the outcome, the weights and a checkpoint to `folder`."""
    results: list[StepResult] = []
    version = 0
    if checkpoint is not None:
        learner.load_optimizer(load_checkpoint(checkpoint))
        version = SAVED_AT
    if scenario.warm:
        for number in range(2):
            none: dict[str, Any] = {"behaviour_logprobs": (), "versions": (), "advantage": 0.0, "reward": 0.0}
            given = [replace(one, sampled=(), supervised=one.sampled) for one in segments_of(scenario, number)]
            given = given[: 1 + 4 * number]  # fewer than ranks, and more
            samples = [TrainingSample(id="", group_index=0, segments=(one,), **none) for one in given]
            learner.step(samples, 0, rate=1e-4)
        learner.reset_optimizer()
    while version < STEPS:
        results.append(learner.step(batch(scenario, version, reference), version))
        version += 1
        if version == SAVED_AT and scenario in map(SCENARIOS.get, RESUMED):
            write_checkpoint(
                folder / "checkpoints",
                CheckpointState(version=version, rng=rng_state()),
                model=learner,
                tokenizer=SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer.json").write_text("{}")),
                optimizer=learner.save_optimizer,
            )()
    weights = {name: tensor.clone() for name, tensor in learner.weights().items()}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "weights.safetensors")
    wanted = ("loss", "grad_norm", "learning_rate", "tokens_trained", "tokens_context", "gradient_cosine")
    steps = [
        {name: getattr(result, name) for name in wanted if getattr(result, name) is not None}
        | (msgspec.to_builtins(result.metrics) if result.metrics else {})
        for result in results
    ]
    (folder / "outcome.json").write_bytes(msgspec.json.encode(Outcome(steps, checksum(learner.weights()))))


def train_alone(root: Path, name: str, folder: Path, checkpoint: Path | None = None, device: str = "cpu") -> None:
    """The scenario in this process, as without ranks."""
    folder.mkdir(parents=True)
    trainer, config, correction = configs(root, SCENARIOS[name], device)
    lora = None
    if config.lora is None:
        model = load_model(config.model_copy(update={"path": str(checkpoint)}) if checkpoint else config, device)
    else:
        lora = LoraModel(load_model(config, device), config.lora, seed=0)
        model = lora.model
        if checkpoint is not None:
            lora.load_adapter(checkpoint)
    reference = None
    if trainer.kl_coefficient:
        reference = FrozenModelScorer(
            lora.model if lora else load_model(of_reference(root, config), device),
            temperature=0.9,
            micro_batch_tokens=trainer.micro_batch_tokens,
            lora=lora,
            head_chunk=trainer.head_chunk,
        )
    learner = Learner(model, trainer, temperature=0.9, correction=correction, lora=lora)
    train(learner, SCENARIOS[name], folder, checkpoint, reference)


def train_as_rank(
    root: Path, name: str, folder: Path, team: ranks.Team, checkpoint: Path | None = None, *, device: str = "cpu"
) -> None:
    """The scenario as one rank of `team`. Rank 0 writes to `folder`."""
    trainer, config, correction = configs(root, SCENARIOS[name], device)
    whole = checkpoint if checkpoint is not None and config.lora is None else None
    policy = ShardedPolicy(
        config.model_copy(update={"path": str(whole)}) if whole else config,
        trainer,
        team,
        adapter=checkpoint if config.lora else None,
    )
    options: Any = {"temperature": 0.9, "correction": correction}
    reference = of_reference(root, config) if trainer.kl_coefficient else None
    learner = ShardedLearner(policy, trainer, reference=reference, **options)
    if team.rank == 0:
        folder.mkdir(parents=True)
        train(learner, SCENARIOS[name], folder, checkpoint)
        team.call("end")
    else:
        learner.follow()


def checkpoint_of(root: Path, who: str, name: str) -> Path:
    return root / who / name / "checkpoints" / f"step_{SAVED_AT:08d}"


def _train_alone(root: Path, who: str, names: Sequence[str], saver: str = "") -> None:
    for name in names:
        with limit_of(SCENARIOS[name]):
            train_alone(root, name, root / who / name, checkpoint_of(root, saver, name) if saver else None)


def _as_rank(root: Path, rank: int, size: int, listener: socket.socket) -> None:
    """All scenarios as one rank of `size`, then on from the checkpoints of one process."""
    meeting = listener if rank == 0 else listener.getsockname()[:2]
    with ranks.join(TrainerConfig(ranks=size), rank, meeting, KEY, start_s=120.0, stall_s=60.0) as team:
        for name, scenario in SCENARIOS.items():
            with limit_of(scenario):
                train_as_rank(root, name, root / f"by{size}" / name, team)
        for name in RESUMED:
            checkpoint = checkpoint_of(root, "alone", name)
            train_as_rank(root, name, root / f"by{size}_from_alone" / name, team, checkpoint)


def _fork(*jobs: Callable[[], None]) -> None:
    """Do each job in a process of its own, all at the same time. Exits if one fails; the others end by their own bounds."""
    children = []
    for job in jobs:
        if not (child := os.fork()):
            status = 1
            try:
                torch.set_num_threads(1)  # replaces the forked thread pool, before several threads need it
                job()
                status = 0
            except BaseException:  # noqa: BLE001 - this process must not return
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    if sum(os.waitpid(child, 0)[1] for child in children):
        sys.exit(1)


def main(root: Path, *, exhaustive: bool) -> None:
    sizes = (3, 2) if exhaustive else (2,)
    names = list(SCENARIOS)
    _fork(partial(write_models, root))
    _fork(*(partial(_train_alone, root, "alone", names[start::2]) for start in range(2)))
    for size in sizes:
        listener = socket.create_server(("127.0.0.1", 0))
        _fork(*(partial(_as_rank, root, rank, size, listener) for rank in range(size)))
    _fork(*(partial(_train_alone, root, f"alone_from_by{size}", RESUMED, f"by{size}") for size in sizes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), exhaustive=sys.argv[2:] == ["exhaustive"])
