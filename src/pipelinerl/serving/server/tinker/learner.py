"""Trains the adapters of clients: one frozen model, one adapter in use at a time, each with its own optimizer and version.

    forward_backward ──▶ gradients are added up ──▶ optim_step ──▶ version + 1, gradients 0

What a client saves as `tinker://RUN/weights/NAME`, or `sampler_weights`, is a folder RUN/weights/NAME:

    adapter/               the adapter in peft's layout
    optimizer.safetensors  moments and step counts (not for samplers)
    state.json             `SavedState`

A folder is written under a hidden name, synced to disk, and renamed, so that a folder with a name is whole.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pipelinerl.checkpoint import HIDDEN, STATE_FILE, Checkpoint, CheckpointState, install
from pipelinerl.config.schema import LoraConfig, TrainerConfig
from pipelinerl.errors import INVALID_DATA, CheckpointError, RequestError, TrainingDivergedError
from pipelinerl.models.adapters import Adapter
from pipelinerl.models.lora import LoraModel
from pipelinerl.models.packed import PackedRow
from pipelinerl.serving.server.tinker.losses import loss_terms
from pipelinerl.serving.server.tinker.wire import AdamSettings, Array, ForwardBackward, TrainingDatum
from pipelinerl.trainer.micro_batch import pack_shared, padded_bins
from pipelinerl.trainer.optimizer import Optimizer
from pipelinerl.trainer.saving import removed_on_failure, sync_tree
from pipelinerl.trainer.step import Learner
from pipelinerl.types import Segment

ALPHA = 32.0
"""Of all adapters, as in Tinker: B A is multiplied by alpha / rank."""
_PATH = re.compile(r"tinker://(\w[\w:-]*)/(weights|sampler_weights)/(\w[\w.-]{0,127})", re.ASCII)


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved besides tensors. `version`: optimizer steps behind the adapter. The last two are the client's."""

    base_model: str
    rank: int
    version: int
    optimizer: bool
    saved_s: float
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


@dataclass(eq=False)
class TrainedAdapter:
    """A client's model. `version`: its optimizer steps. `failed`: why gradients that the client asked for are missing."""

    adapter: Adapter
    rank: int
    optimizer: Optimizer
    version: int = 0
    failed: str | None = None


class AdapterLearner(Learner):
    """`model` is frozen; adapters are saved in `root`. One call at a time, except of `adapters.weights`."""

    def __init__(self, model: Any, root: Path, config: TrainerConfig) -> None:
        self.adapters = LoraModel(model, LoraConfig(), seed=0)
        super().__init__(model, config, temperature=1.0, lora=self.adapters)
        self._root, self._budget = root, config.micro_batch_tokens

    def create(self, rank: int, seed: int | None) -> TrainedAdapter:
        """A new adapter: the model computes as without it. Without a seed, it is random."""
        seed = secrets.randbits(63) if seed is None else seed % (1 << 63)
        self.adapters.use(adapter := self.adapters.new_adapter(rank, ALPHA, seed=seed))
        optimizer = Optimizer(self.model, betas=(0.9, 0.95), weight_decay=0.0)
        optimizer.zero_grad()
        return TrainedAdapter(adapter, rank, optimizer)

    def _use(self, trained: TrainedAdapter) -> None:
        self.adapters.use(trained.adapter)
        self.optimizer = trained.optimizer

    def forward_backward(self, trained: TrainedAdapter, request: ForwardBackward) -> tuple[list[Array], float]:
        """The log-probabilities of each datum's targets, and the loss. Adds its gradient, unless it is only forward.

        Raises TrainingDivergedError if the loss is not finite. After any error the gradients are 0, and the next step fails.
        """
        self._use(trained)
        try:
            with torch.set_grad_enabled(request.backward):
                return self._differentiate_data(request)
        except Exception as error:
            if request.backward:
                trained.optimizer.zero_grad()
                trained.failed = str(error)
            raise

    def _differentiate_data(self, request: ForwardBackward) -> tuple[list[Array], float]:
        segments = [_segment(datum) for datum in request.data]
        if self._forward.padded:
            bins = padded_bins([[len(segment.token_ids)] for segment in segments], self._budget)
        else:
            bins = pack_shared([[segment] for segment in segments], self._budget, 1.0)
        logprobs: dict[int, Array] = {}
        total = 0.0
        for indices in bins:
            data = [request.data[i] for i in indices]
            counts = torch.tensor([len(datum.tokens) for datum in data])
            sequence_P = torch.arange(len(data)).repeat_interleave(counts).to(self._device)
            joined = {name: np.concatenate([datum.inputs[name] for datum in data]) for name in data[0].inputs}
            given = {name: torch.tensor(values, device=self._device) for name, values in joined.items()}
            row = PackedRow.of([segments[i] for i in indices], self._device, waste=self._waste)
            row.target_ids_P = given.pop("target_tokens").long()  # they may be others than the tokens that follow
            logprobs_P, _ = self._row_logprobs(row)
            loss = loss_terms(request.loss, request.settings, logprobs_P, given, sequence_P).sum()
            total += float(loss.detach())
            if not math.isfinite(total):
                raise TrainingDivergedError(f"the loss is {total}: check the data, or lower the learning rate")
            if request.backward:
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.accumulate()
            parts = torch.split(logprobs_P.detach().float().cpu(), counts.tolist())
            logprobs |= {i: part.numpy() for i, part in zip(indices, parts, strict=True)}
        return [logprobs[i] for i in range(len(segments))], total

    def optim_step(self, trained: TrainedAdapter, settings: AdamSettings) -> Mapping[str, float]:
        """Returns metrics of the step. Raises RequestError if gradients are missing, and TrainingDivergedError."""
        if trained.failed is not None:
            failed, trained.failed = trained.failed, None
            raise RequestError(f"no step was taken, because a forward_backward before it failed: {failed}")
        self._use(trained)
        chosen = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps, "weight_decay": settings.weight_decay}
        limit = settings.grad_clip_norm if settings.grad_clip_norm > 0 else math.inf
        try:
            norm = trained.optimizer.step(learning_rate=settings.learning_rate, max_grad_norm=limit, **chosen)
        finally:
            trained.optimizer.zero_grad()
        trained.version += 1
        return {"grad_norm": norm, "version": trained.version}

    # ---- saved weights

    def save(self, trained: TrainedAdapter, path: str, *, optimizer: bool, overwrite: bool, **about: Any) -> None:
        """Write the adapter to a path. `about`: more fields of its `SavedState`.

        Raises RequestError for a path that isn't one, or exists, and CheckpointError if it can't be written.
        """
        folder = self.folder_of(path)
        if folder.exists() and not overwrite:
            raise RequestError(f"{path} exists: choose another name, or overwrite it")
        about |= {"rank": trained.rank, "version": trained.version, "optimizer": optimizer, "saved_s": time.time()}
        hidden = folder.with_name(f"{HIDDEN}{secrets.token_hex(4)}")
        self._use(trained)
        with removed_on_failure(hidden, folder):
            hidden.mkdir(parents=True)
            self.adapters.save_adapter(hidden)
            if optimizer:
                self.save_optimizer(hidden)
            (hidden / STATE_FILE).write_bytes(msgspec.json.encode(SavedState(**about)))
            sync_tree(hidden)
            install(hidden, folder)

    def load(self, path: str, *, optimizer: bool) -> TrainedAdapter:
        """An adapter with the weights at a path, and with `optimizer` also its moments.

        Raises RequestError and CheckpointError for a path without them, or of another base model.
        """
        state = self.state_of(path)
        if optimizer and not state.optimizer:
            raise RequestError(f"{path} has no optimizer state: it was saved for sampling")
        trained = self.create(state.rank, 0)
        trained.version = state.version
        self._use(trained)
        self.adapters.load_adapter(self.folder_of(path))
        if optimizer:
            self.load_optimizer(Checkpoint(self.folder_of(path), CheckpointState(version=state.version)))
        return trained

    def state_of(self, path: str) -> SavedState:
        """Raises RequestError for a path where nothing is saved, and CheckpointError if it can't be read."""
        try:
            return msgspec.json.decode((self.folder_of(path) / STATE_FILE).read_bytes(), type=SavedState)
        except FileNotFoundError as error:
            raise RequestError(f"nothing is saved as {path} in {self._root}") from error
        except (OSError, *INVALID_DATA) as error:
            raise CheckpointError(f"can't read {path}: {error}") from error

    def folder_of(self, path: str) -> Path:
        """Raises RequestError for what is no path of this server."""
        if not (found := _PATH.fullmatch(path)):
            raise RequestError(f"{path!r} is no path here: the name has up to 128 letters, digits, and _ - . (not at first)")
        return self._root.joinpath(*found.groups())


def _segment(datum: TrainingDatum) -> Segment:
    """All tokens, and after them the last target, so that each token has a successor that is trained on."""
    ids = (*datum.tokens, int(datum.inputs["target_tokens"][-1]))
    return Segment(token_ids=ids, sampled=((1, len(ids)),))
