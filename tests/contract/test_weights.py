"""What the contract asks with the server's model: log-probabilities, and weight updates in flight; see `conftest`.

The server holds version v, the weights of a model folder. It gets v + 1, perturbed weights, while it generates, and then
v + 2, the folder's weights again. Afterwards it can't be used for a run that starts at version 0.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import WeightUpdateError
from pipelinerl.files import SHARED_MEMORY
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import checksum, first_names, load_weights, named_weights, write_safetensors
from pipelinerl.serving.wire import WeightUpdateRequest
from pipelinerl.types import Completion, GenerationRequest, UpdateReceipt, versions_from_spans
from tests.contract.conftest import Subject, first_event, setting

TOLERANCE = 1e-3
"""Largest allowed difference of log-probs from the reference model."""
PERTURBATION = 0.05
"""Scale of the noise, relative to each tensor's mean absolute value: much more than rounding errors."""
COMPARED = 4
"""Number of completions that are compared with the reference model, at one forward each."""


async def test_weights_change_in_flight(subject: Subject) -> None:
    model = setting("MODEL")
    if model is None:
        pytest.skip("needs PIPELINERL_ENGINE_MODEL")
    with closing(Reference(model, Path(setting("WEIGHTS") or SHARED_MEMORY))) as reference:
        for temperature in (1.0, 0.7):
            await reference.compare_fresh(subject, 0, temperature)
        switched = await _updates_in_flight(subject, reference)
        await _bad_updates_change_nothing(subject, reference)
        again = reference.write(subject.info.version + 2, 2)
        for _ in range(2):  # as after a lost answer
            _assert_receipt(await subject.server.update_weights(again), again)
        await reference.compare_fresh(subject, 2, 1.0)
    if not switched:
        pytest.skip("no request was in progress when the weights changed: too fast to tell")


async def _updates_in_flight(subject: Subject, reference: Reference) -> int:
    """No request is aborted, and every token was sampled with the weights of its version. Returns how many have two."""
    base, length = subject.info.version, min(subject.info.max_length - 8, 192)
    saved = reference.write(base + 1, 1)
    wanted = [
        subject.request(subject.prompt(100 + number), max_tokens=length, stream=True, seed=number)
        for number in range(min(2 * subject.info.slots, 32))
    ]
    begun = asyncio.Event()
    tasks = [asyncio.create_task(subject.complete(request, lambda _: begun.set())) for request in wanted]
    await first_event(begun, tasks, timeout_s=5.0)
    _assert_receipt(await subject.server.update_weights(saved), saved)
    switched = []
    for request, completion in zip(wanted, await asyncio.gather(*tasks), strict=True):
        versions = versions_from_spans(completion.weight_versions, length)
        assert completion.finish_reason == "length", "the update ended a request"
        assert set(versions) <= {base, base + 1}
        assert versions == sorted(versions)
        if len(set(versions)) == 2:
            switched.append((request, completion))
    assert (await subject.server.info()).version == base + 1
    reference.compare_switched(switched[:COMPARED], base)
    await reference.compare_fresh(subject, 1, 1.0)
    return len(switched)


async def _bad_updates_change_nothing(subject: Subject, reference: Reference) -> None:
    good = reference.write(subject.info.version + 2, 2)
    old, damaged, absent = {"version": subject.info.version}, {"checksum": "0" * 32}, {"path": f"{good.path}.absent"}
    for change in (old, damaged, absent):
        with suppress(WeightUpdateError):
            receipt = await subject.server.update_weights(msgspec.structs.replace(good, **change))
            assert receipt.error is not None, f"it accepts {change}"
    await reference.compare_fresh(subject, 1, 1.0)


def _assert_receipt(receipt: UpdateReceipt, saved: WeightUpdateRequest) -> None:
    assert (receipt.error, receipt.version, receipt.checksum) == (None, saved.version, saved.checksum)
    assert receipt.pause_s >= 0


class Reference:
    """The Hugging Face model in float32, and three sets of weights: original, perturbed, original.

    `model`: the folder (or `demo`) whose weights the server holds. `directory`: for weight files.
    """

    def __init__(self, model: str, directory: Path) -> None:
        self._model = load_model(ModelConfig(path=model))
        self._directory = tempfile.TemporaryDirectory(prefix="pipelinerl-weights-", dir=directory)
        self._weights = named_weights(self._model)
        original = _copied(self._weights)
        self._sets = [original, _perturbed(original), original]  # indexed by version - v
        self._loaded = 0

    def close(self) -> None:
        """Remove the files."""
        self._directory.cleanup()

    async def compare_fresh(self, subject: Subject, index: int, temperature: float) -> None:
        """New requests are sampled with the weights of set `index`."""
        version = subject.info.version + index
        for number in range(COMPARED):
            request = subject.request(
                subject.prompt(200 + number, 3 + 2 * number),
                max_tokens=min(24, subject.info.max_length - 16),
                temperature=temperature,
                seed=number,
            )
            done = await subject.complete(request)
            assert set(versions_from_spans(done.weight_versions, len(done.token_ids))) == {version}
            expected = self._logprobs(request, done, [index] * (len(request.prompt_ids) + len(done.token_ids) - 1))
            assert _difference(done, expected) <= TOLERANCE

    def compare_switched(self, switched: Sequence[tuple[GenerationRequest, Completion]], base: int) -> None:
        """Log-probs around the switch are those with KV entries from before it kept, or with them recomputed."""
        kept = recomputed = 0.0
        for request, done in switched:
            sampled = [version - base for version in versions_from_spans(done.weight_versions, len(done.token_ids))]
            prompt = [version - base for version in _prompt_versions(request, done)]
            kept = max(kept, _difference(done, self._logprobs(request, done, [*prompt[:-1], *sampled])))
            count = len(request.prompt_ids) + len(done.token_ids) - 1
            old, new = (self._logprobs(request, done, [index] * count) for index in (0, 1))
            recomputed = max(recomputed, _difference(done, torch.where(torch.tensor(sampled) == 0, old, new)))
        assert min(kept, recomputed) <= TOLERANCE

    @torch.no_grad()
    def _logprobs(self, request: GenerationRequest, done: Completion, weights_by_position: Sequence[int]) -> Tensor:
        """Log-probs [completion tokens] of the Hugging Face model, with weights `weights_by_position[i]` at position i.

        Each run of positions with the same weights is one forward over a shared KV cache. Because attention is causal, this
        equals a forward per token.
        """
        fed = [*request.prompt_ids, *done.token_ids[:-1]]
        cache, rows, start = DynamicCache(config=self._model.config), [], 0
        for index, run in groupby(weights_by_position):
            end = start + len(list(run))
            self._load(index)
            ids_1T = torch.tensor([fed[start:end]])
            rows.append(self._model(input_ids=ids_1T, past_key_values=cache, use_cache=True).logits[0])
            start = end
        logits_TV = torch.cat(rows)[len(request.prompt_ids) - 1 :].float() / (request.sampling.temperature or 1.0)
        logprobs_T1: Tensor = logits_TV.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])
        return logprobs_T1[:, 0]

    def _load(self, index: int) -> None:
        if self._sets[index] is not self._sets[self._loaded]:
            load_weights(self._model, self._sets[index])
        self._loaded = index

    def write(self, version: int, index: int) -> WeightUpdateRequest:
        self._load(index)
        path = Path(self._directory.name, f"{version}.safetensors")
        write_safetensors(self._weights, path)
        return WeightUpdateRequest(version=version, checksum=checksum(self._weights), path=str(path))


def _prompt_versions(request: GenerationRequest, done: Completion) -> list[int]:
    """Version for each prompt token. If the server does not report them: the version of the first completion token."""
    if not done.prompt_versions:
        return [done.weight_versions[0].version] * len(request.prompt_ids)
    return versions_from_spans(done.prompt_versions, len(request.prompt_ids))


def _difference(done: Completion, expected_T: Tensor) -> float:
    return float((torch.tensor(done.logprobs) - expected_T).abs().max())


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy in which tied tensors stay tied."""
    firsts = first_names(weights)
    copies = {name: weights[name].clone() for name in dict.fromkeys(firsts.values())}
    return {name: copies[first] for name, first in firsts.items()}


def _perturbed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    copies = _copied(weights)
    generator = torch.Generator().manual_seed(0)
    for name, first in first_names(copies).items():
        tensor = copies[name]
        if name == first and tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor += (PERTURBATION * tensor.abs().mean() * noise).to(tensor.dtype)
    return copies
