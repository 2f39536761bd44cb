"""Reads the examples of a warm start: given answers, which are trained on by cross-entropy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.schema import WarmStartConfig
from pipelinerl.errors import INVALID_DATA, UserError
from pipelinerl.models.encoding import encode_prompt
from pipelinerl.preprocess.preprocessor import join_turns
from pipelinerl.types import Completion, TrainingSample, Turn, VersionSpan

Ids = tuple[int, ...]


class Example(msgspec.Struct, frozen=True):
    """A prompt with its answer, or a chat with the answers of the assistant."""

    prompt: str | list[dict[str, str]] = ""
    completion: str = ""
    messages: list[dict[str, str]] = []


def read_examples(config: WarmStartConfig, tokenizer: Any, longest: int | None = None) -> list[TrainingSample]:
    """The examples of the file, with supervised answers.

    Raises UserError, with the line, for any that can't be used, or has more than `longest` tokens.
    """
    samples = list[TrainingSample]()
    try:
        lines = Path(config.data).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"trainer.warm_start.data: can't read {config.data}: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turns = [_turn(*pair) for pair in _pairs(msgspec.json.decode(line, type=Example), tokenizer)]
            joined = join_turns(turns).segments
            if longest is not None and (length := max(len(one.token_ids) for one in joined)) > longest:
                raise ValueError(f"it has {length} tokens, and the model takes {longest}")
        except Exception as error:  # of the file, or of a template or tokenizer, which may raise anything
            what = "" if isinstance(error, (*INVALID_DATA, ValueError)) else "the model's tokenizer or template refuses it: "
            text = " ".join(str(error).split())
            raise UserError(f"trainer.warm_start.data: {config.data}, line {number}: {what}{text}") from error
        segments = [msgspec.structs.replace(one, sampled=(), supervised=one.sampled) for one in joined]
        samples.append(
            TrainingSample(
                id=f"example {number}",
                group_index=-1,
                segments=tuple(segments),
                behaviour_logprobs=(),
                versions=(),
                advantage=0.0,
                reward=0.0,
            )
        )
    if not samples:
        raise UserError(f"trainer.warm_start.data: {config.data} has no examples")
    return samples


def batches_of(samples: Sequence[TrainingSample], config: WarmStartConfig, seed: int) -> Iterator[list[TrainingSample]]:
    """The batch of each step: every example once in an epoch, in a random order."""
    draw, order = random.Random(f"warm start/{seed}"), list[TrainingSample]()
    for _ in range(config.steps):
        while len(order) < config.batch_size:
            order += draw.sample(samples, len(samples))
        yield order[: config.batch_size]
        del order[: config.batch_size]


def _pairs(example: Example, tokenizer: Any) -> Iterator[tuple[Ids, Ids]]:
    """The ids of each prompt and of its answer, which ends with the token that ends a turn. Raises ValueError."""
    end, messages = getattr(tokenizer, "eos_token_id", None), example.messages
    if isinstance(example.prompt, str) and not messages:
        if not (example.prompt and example.completion):
            raise ValueError("it needs `prompt` and `completion`, or `messages`")
        ids = tokenizer.encode(example.completion, add_special_tokens=False)
        yield encode_prompt(tokenizer, example.prompt), (*ids, *([] if end is None else [end]))
        return
    if not isinstance(example.prompt, str):
        if not example.completion:
            raise ValueError("it needs `prompt` and `completion`, or `messages`")
        messages = [*example.prompt, {"role": "assistant", "content": example.completion}]
    answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers or answers[0] == 0:
        raise ValueError("`messages` have no answer of the assistant after a message of the user")
    for at in answers:
        prompt = encode_prompt(tokenizer, messages[:at])
        whole = encode_prompt(tokenizer, messages[: at + 1], {"add_generation_prompt": False})
        if whole[: len(prompt)] != prompt:
            raise ValueError("the chat template renders an answer otherwise than it asks for it, so it can't be trained on")
        answer = whole[len(prompt) :]
        if not answer:
            raise ValueError("the chat template renders an empty answer")
        last = max((place for place, token in enumerate(answer) if token == end), default=len(answer) - 1)
        yield prompt, answer[: last + 1]


def _turn(prompt: Ids, answer: Ids) -> Turn:
    completion = Completion(
        request_id="warm start",
        token_ids=answer,
        logprobs=(0.0,) * len(answer),
        weight_versions=(VersionSpan(0, 0, len(answer)),),
        finish_reason="stop",
    )
    return Turn(prompt_ids=prompt, completion=completion)
