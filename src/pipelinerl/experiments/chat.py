"""A conversation with a model in the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from pipelinerl.actor.rollouts import sampling_of
from pipelinerl.config.schema import RunConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.environments.prompts import TextStream, encode_or_refuse, text_decoder
from pipelinerl.errors import PromptTooLongError, UserError
from pipelinerl.experiments.evaluate.models import find_targets
from pipelinerl.models.encoding import has_chat_template
from pipelinerl.models.loading import load_tokenizer, slot_length, stop_token_ids
from pipelinerl.types import GenerationRequest


class Chat:
    """Messages so far. A model without a chat template gets each text alone, and continues it."""

    def __init__(self, config: RunConfig, *, system: str = "", seed: int = 0) -> None:
        """`model.path` is what `find_targets` takes. Raises UserError."""
        targets = find_targets([config.model.path])
        if len(targets) > 1:
            raise UserError(f"{config.model.path} names {len(targets)} models; give one version")
        target = targets[0]._replace(model=config.model.model_copy(update={"path": targets[0].model.path}))
        self.name = target.name
        self._tokenizer: Any = load_tokenizer(target.model)
        model = target.load(config.engine.device)
        if config.engine.threads is not None:
            torch.set_num_threads(config.engine.threads)
        self._length = slot_length(model, config.engine.max_length)
        self._engine = LocalEngine(model, slots=1, max_length=self._length)
        self._sampling, self._seed = sampling_of(config.actor, stop_token_ids(model, self._tokenizer)), seed
        self._first = [{"role": "system", "content": system}] if system else []
        self.has_template = has_chat_template(self._tokenizer)
        if system and not self.has_template:
            raise UserError(f"{self.name} has no chat template, so it takes no system message; leave out --system")
        self.reset()

    def reset(self) -> None:
        self._messages = list(self._first)

    def answer(self, text: str) -> Iterator[str]:
        """The answer, piece by piece. If the iterator is closed, the answer ends there.

        Raises PromptTooLongError, and EnvironmentSetupError for a text that can't be encoded.
        """
        if self.has_template:
            asked = [*self._messages, {"role": "user", "content": text}]
            prompt = encode_or_refuse(self._tokenizer, asked)
        else:
            asked, prompt = [], encode_or_refuse(self._tokenizer, text)
        room = self._length - len(prompt)
        if room < 1:
            raise PromptTooLongError(f"the chat has {len(prompt)} tokens, and engine.max_length is {self._length}")
        self._seed += 1
        most = min(room, self._sampling.max_tokens)
        sampling = msgspec.structs.replace(self._sampling, max_tokens=most, seed=self._seed)
        request = GenerationRequest(id=f"chat-{self._seed}", prompt_ids=prompt, sampling=sampling, stream=True)
        self._engine.submit(request)
        answered, stream, done = "", TextStream(text_decoder(self._tokenizer)), False
        try:
            while not done:
                output = self._engine.step()
                done = bool(output.finished)
                tokens = [event.token_id for event in output.tokens]
                piece = stream.feed([token_id for token_id in tokens if token_id not in sampling.stop_token_ids])
                piece += stream.rest() if done else ""
                answered += piece
                yield piece
        finally:
            self._engine.cancel(request.id)
            self._engine.step()
            self._messages = [*asked, {"role": "assistant", "content": answered}] if self.has_template else self._messages
