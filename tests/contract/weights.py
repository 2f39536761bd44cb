"""The checks of the contract that need the server's model: log-probabilities, and weight updates in flight.

The server starts with version v, the weights of a model folder. It gets v + 1, perturbed weights, while it generates, and
then v + 2, the folder's weights again. Afterwards it can't be used for a run that starts at version 0.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import DynamicCache

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import checksum, first_names, load_weights, named_weights, write_safetensors
from pipelinerl.serving.wire import WeightUpdateRequest
from pipelinerl.types import Completion, GenerationRequest, UpdateReceipt, versions_from_spans
from tests.contract.checks import Check, NotSupportedError, Subject, first_event, require

_PERTURBATION = 0.05
"""Scale of the noise, relative to each tensor's mean absolute value: much more than rounding errors."""
_COMPARED = 4
"""Number of completions that are compared with the reference model, at one forward each."""


class WeightChecks:
    """`model`: the folder (or `demo`) whose weights the server holds. `directory`: for weight files.

    `tolerance`: largest allowed difference of log-probs from the Hugging Face model's in float32.
    """

    def __init__(self, model: str, directory: Path, tolerance: float = 1e-3) -> None:
        self._model = load_model(ModelConfig(path=model))
        self._directory = tempfile.TemporaryDirectory(prefix="pipelinerl-weights-", dir=directory)
        self._tolerance = tolerance
        self._weights = named_weights(self._model)
        original = _copied(self._weights)
        self._sets = [original, _perturbed(original), original]  # indexed by version - v
        self._loaded = 0

    def checks(self) -> tuple[Check, ...]:
        """The checks. They must run in this order: each leaves the server in the state that the next one expects."""
        return (
            Check("log-probs match the model", self.logprobs_match_the_model),
            Check("weights change in flight", self.weights_change_in_flight, "weight updates"),
            Check("bad updates change nothing", self.bad_updates_change_nothing, "weight updates"),
            Check("the next update is applied", self.next_update_is_applied, "weight updates"),
        )

    def close(self) -> None:
        """Remove the files."""
        self._directory.cleanup()

    async def logprobs_match_the_model(self, subject: Subject) -> str:
        worst = 0.0
        for temperature in (1.0, 0.7):
            worst = max(worst, await self._compare_fresh(subject, 0, temperature))
        return f"within {worst:.1g}, also at temperature 0.7"

    async def weights_change_in_flight(self, subject: Subject) -> str:
        """No request is aborted, and every token was sampled with the weights of its version."""
        base, length = subject.info.version, min(subject.info.max_length - 8, 192)
        saved = self._write(base + 1, 1)
        wanted = [
            subject.request(subject.prompt(100 + number), max_tokens=length, stream=True, seed=number)
            for number in range(min(2 * subject.info.slots, 32))
        ]
        receipt, done = await self._update_during(subject, wanted, saved)
        _check_receipt(receipt, saved)
        switched = []
        for request, completion in zip(wanted, done, strict=True):
            versions = versions_from_spans(completion.weight_versions, length)
            require(completion.finish_reason == "length", f"the update ended a request: {completion.finish_reason}")
            require(set(versions) <= {base, base + 1}, f"versions {set(versions)}: it has only held {base} and {base + 1}")
            require(all(a <= b for a, b in pairwise(versions)), "versions within one completion decrease")
            if len(set(versions)) == 2:
                switched.append((request, completion))
        if not switched:
            raise NotSupportedError(
                f"none of {len(wanted)} requests was in progress when the weights changed: too fast to tell"
            )
        info = await subject.server.info()
        require(info.version == base + 1, f"it reports version {info.version} after an update to {base + 1}")
        kept, worst = self._compare_switched(switched[:_COMPARED], base)
        await self._compare_fresh(subject, 1, 1.0)
        return (
            f"in the middle of {len(switched)} of {len(wanted)} requests, pause {receipt.pause_s:.3f} s, "
            f"KV {'kept' if kept else 'recomputed'}, log-probs within {worst:.1g}"
        )

    async def bad_updates_change_nothing(self, subject: Subject) -> str:
        base = subject.info.version
        good = self._write(base + 2, 2)
        for what, change in (
            ("an older version", {"version": base}),
            ("a wrong checksum", {"checksum": "0" * 32}),
            ("a missing file", {"path": f"{good.path}.absent"}),
        ):
            try:
                receipt = await subject.server.update_weights(msgspec.structs.replace(good, **change))
            except WeightUpdateError:
                continue
            require(receipt.error is not None, f"it accepts {what}")
        worst = await self._compare_fresh(subject, 1, 1.0)
        return f"old version, wrong checksum, missing file; log-probs afterwards within {worst:.1g}"

    async def next_update_is_applied(self, subject: Subject) -> str:
        """Return to the original weights. The update is sent twice, as after a lost answer."""
        saved = self._write(subject.info.version + 2, 2)
        for _ in range(2):
            _check_receipt(await subject.server.update_weights(saved), saved)
        worst = await self._compare_fresh(subject, 2, 1.0)
        return f"twice, as after a lost answer; log-probs within {worst:.1g}"

    # ---- requests

    async def _update_during(
        self, subject: Subject, wanted: Sequence[GenerationRequest], saved: WeightUpdateRequest
    ) -> tuple[UpdateReceipt, list[Completion]]:
        begun = asyncio.Event()
        tasks = [asyncio.create_task(subject.complete(request, lambda _: begun.set())) for request in wanted]
        try:
            await first_event(begun, tasks, timeout_s=5.0)
            receipt = await subject.server.update_weights(saved)
            return receipt, await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _compare_fresh(self, subject: Subject, index: int, temperature: float) -> float:
        """Check that new requests use the weights of set `index`; returns the largest difference of log-probs."""
        version, worst = subject.info.version + index, 0.0
        for number in range(_COMPARED):
            request = subject.request(
                subject.prompt(200 + number, 3 + 2 * number),
                max_tokens=min(24, subject.info.max_length - 16),
                temperature=temperature,
                seed=number,
            )
            done = await subject.complete(request)
            versions = set(versions_from_spans(done.weight_versions, len(done.token_ids)))
            require(versions == {version}, f"a new request has versions {versions}, not {version}")
            expected = self._logprobs(request, done, [index] * (len(request.prompt_ids) + len(done.token_ids) - 1))
            worst = max(worst, _difference(done, expected))
        require(worst <= self._tolerance, f"log-probs of version {version} are up to {worst:.3g} from the model's own")
        return worst

    def _compare_switched(self, switched: Sequence[tuple[GenerationRequest, Completion]], base: int) -> tuple[bool, float]:
        """Returns whether KV entries from before the switch were kept, and the largest difference of log-probs."""
        worst = {True: 0.0, False: 0.0}
        for request, done in switched:
            sampled = [version - base for version in versions_from_spans(done.weight_versions, len(done.token_ids))]
            prompt = [version - base for version in _prompt_versions(request, done)]
            kept = self._logprobs(request, done, [*prompt[:-1], *sampled])
            worst[True] = max(worst[True], _difference(done, kept))
            count = len(request.prompt_ids) + len(done.token_ids) - 1
            old, new = (self._logprobs(request, done, [index] * count) for index in (0, 1))
            recomputed = torch.where(torch.tensor(sampled) == 0, old, new)
            worst[False] = max(worst[False], _difference(done, recomputed))
        keeps = worst[True] <= worst[False]
        require(
            worst[keeps] <= self._tolerance,
            f"log-probs around the switch are up to {worst[True]:.3g} from those with KV entries kept, {worst[False]:.3g} "
            "from those with them recomputed",
        )
        return keeps, worst[keeps]

    # ---- the reference model

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

    def _write(self, version: int, index: int) -> WeightUpdateRequest:
        self._load(index)
        path = Path(self._directory.name, f"{version}.safetensors")
        write_safetensors(self._weights, path)
        return WeightUpdateRequest(version=version, checksum=checksum(self._weights), path=str(path))


def _check_receipt(receipt: UpdateReceipt, saved: WeightUpdateRequest) -> None:
    require(receipt.error is None, f"it refused the weights: {receipt.error}")
    require(receipt.version == saved.version, f"the receipt is for version {receipt.version}, not {saved.version}")
    require(receipt.checksum == saved.checksum, f"it holds weights of checksum {receipt.checksum}, not {saved.checksum}")
    require(receipt.pause_s >= 0, f"the receipt has a pause of {receipt.pause_s} s")


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
            tensor += (_PERTURBATION * tensor.abs().mean() * noise).to(tensor.dtype)
    return copies
