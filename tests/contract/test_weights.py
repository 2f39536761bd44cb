"""What the contract asks with the server's model: log-probabilities, and weight updates in flight; see `conftest`.

The server holds version v, the weights of a model folder. It gets v + 1, perturbed weights, while it generates, and then
v + 2, the folder's weights again. Afterwards it can't be used for a run that starts at version 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from benchmarks.vllm_switch import mixed_logprobs, perturbed, save

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import WeightUpdateError
from pipelinerl.files import SHARED_MEMORY
from pipelinerl.models.loading import load_model
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
    with TemporaryDirectory(prefix="pipelinerl-weights-", dir=setting("WEIGHTS") or SHARED_MEMORY) as folder:
        reference = Reference(model, subject.info.version, Path(folder))
        for temperature in (1.0, 0.7):
            await reference.compare_fresh(subject, subject.info.version, temperature)
        switched = await _updates_in_flight(subject, reference)
        await _bad_updates_change_nothing(subject, reference)
        again = reference.write(subject.info.version + 2)
        for _ in range(2):  # as after a lost answer
            _assert_receipt(await subject.server.update_weights(again), again)
        await reference.compare_fresh(subject, again.version, 1.0)
    if not switched:
        pytest.skip("no request was in progress when the weights changed: too fast to tell")


async def _updates_in_flight(subject: Subject, reference: Reference) -> int:
    """No request is aborted, and every token was sampled with the weights of its version. Returns how many have two."""
    base, length = subject.info.version, min(subject.info.max_length - 8, 192)
    saved = reference.write(base + 1)
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
    reference.compare_switched(switched[:COMPARED])
    await reference.compare_fresh(subject, base + 1, 1.0)
    return len(switched)


async def _bad_updates_change_nothing(subject: Subject, reference: Reference) -> None:
    good = reference.write(subject.info.version + 2)
    old, damaged, absent = {"version": subject.info.version}, {"checksum": "0" * 32}, {"path": f"{good.path}.absent"}
    for change in (old, damaged, absent):
        with suppress(WeightUpdateError):
            receipt = await subject.server.update_weights(msgspec.structs.replace(good, **change))
            assert receipt.error is not None, f"it accepts {change}"
    await reference.compare_fresh(subject, subject.info.version + 1, 1.0)


def _assert_receipt(receipt: UpdateReceipt, saved: WeightUpdateRequest) -> None:
    assert (receipt.error, receipt.version, receipt.checksum) == (None, saved.version, saved.checksum)
    assert receipt.pause_s >= 0


class Reference:
    """The Hugging Face model in float32, with the weights of three versions: original, perturbed, original.

    `model`: the folder (or `demo`) whose weights the server holds, as version `base`. `directory`: for weight files.
    """

    def __init__(self, model: str, base: int, directory: Path) -> None:
        original = load_model(ModelConfig(path=model))
        self._models = {base: original, base + 1: perturbed(original, 1, PERTURBATION), base + 2: original}
        self._directory = directory

    def write(self, version: int) -> WeightUpdateRequest:
        return save(self._models[version], version, self._directory)

    async def compare_fresh(self, subject: Subject, version: int, temperature: float) -> None:
        """New requests are sampled with the weights of this version."""
        for number in range(COMPARED):
            request = subject.request(
                subject.prompt(200 + number, 3 + 2 * number),
                max_tokens=min(24, subject.info.max_length - 16),
                temperature=temperature,
                seed=number,
            )
            done = await subject.complete(request)
            versions = versions_from_spans(done.weight_versions, len(done.token_ids))
            assert set(versions) == {version}
            assert _difference(done, mixed_logprobs(self._models, request, done, versions)) <= TOLERANCE

    def compare_switched(self, switched: Sequence[tuple[GenerationRequest, Completion]]) -> None:
        """Log-probs around the switch are those with KV entries from before it kept, or with them recomputed."""
        kept = recomputed = 0.0
        for request, done in switched:
            length = len(done.token_ids)
            sampled = versions_from_spans(done.weight_versions, length)
            prompt = versions_from_spans(done.prompt_versions, len(request.prompt_ids)) if done.prompt_versions else ()
            kept = max(kept, _difference(done, mixed_logprobs(self._models, request, done, sampled, prompt)))
            all_of = {version: mixed_logprobs(self._models, request, done, [version] * length) for version in {*sampled}}
            expected = [all_of[version][index] for index, version in enumerate(sampled)]
            recomputed = max(recomputed, _difference(done, expected))
        assert min(kept, recomputed) <= TOLERANCE


def _difference(done: Completion, expected: Sequence[float]) -> float:
    return max(abs(ours - theirs) for ours, theirs in zip(done.logprobs, expected, strict=True))
