"""The checks of the contract for which the server's model is needed: log-probabilities, and weights that change in flight.

The server holds version v of the model in a folder. It is given v + 1, which is disturbed, while it generates, and then
v + 2, which is the folder's again. So it can't be used for a run that begins at version 0 afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import checksum, first_names, load_weights, named_weights
from pipelinerl.serving.client.adapter import SavedWeights
from pipelinerl.serving.client.weights_file import WeightFiles
from pipelinerl.serving.contract.checks import Check, NotSupportedError, Subject, require
from pipelinerl.types import Completion, GenerationRequest, UpdateReceipt, versions_from_spans

_DISTURBANCE = 0.05
"""Of each tensor, in parts of its mean absolute value: far more than rounding, far less than noise."""
_COMPARED = 4
"""Completions that are compared token by token: a reference forward for each."""


class WeightChecks:
    """`model` is the folder (or `demo`) whose weights the server holds; files of weights go to `directory`.

    `tolerance`: how far log-probs may be from those of the Hugging Face model in float32.
    """

    def __init__(self, model: str, directory: Path, tolerance: float = 1e-3) -> None:
        self._model = load_model(ModelConfig(path=model))
        self._files = WeightFiles(directory)
        self._tolerance = tolerance
        self._weights = named_weights(self._model)
        original = _copied(self._weights)
        self._sets = [original, _disturbed(original), original]  # by version, from the one that it holds
        self._loaded = 0

    def checks(self) -> tuple[Check, ...]:
        """In this order: each leaves the server as the next expects it."""
        return (
            Check("log-probs are the model's", self.logprobs_are_the_models),
            Check("weights change in flight", self.weights_change_in_flight, "weight updates"),
            Check("bad updates change nothing", self.bad_updates_change_nothing, "weight updates"),
            Check("the next update is taken", self.next_update_is_taken, "weight updates"),
        )

    def close(self) -> None:
        """Remove the files."""
        self._files.close()

    async def logprobs_are_the_models(self, subject: Subject) -> str:
        worst = 0.0
        for temperature in (1.0, 0.7):
            worst = max(worst, await self._compare_fresh(subject, 0, temperature))
        return f"within {worst:.1g}, also at temperature 0.7"

    async def weights_change_in_flight(self, subject: Subject) -> str:
        """Nothing is aborted, and every token is by the weights that its version says."""
        base, length = subject.info.version, min(subject.info.max_length - 8, 192)
        saved = self._write(base + 1, 1)
        wanted = [
            subject.request(subject.prompt(100 + number), max_tokens=length, stream=True, seed=number)
            for number in range(min(2 * subject.info.slots, 32))
        ]
        receipt, done = await self._update_amid(subject, wanted, saved)
        _check_receipt(receipt, saved)
        switched = []
        for request, completion in zip(wanted, done, strict=True):
            versions = versions_from_spans(completion.weight_versions, length)
            require(completion.finish_reason == "length", f"the update ended a request: {completion.finish_reason}")
            require(set(versions) <= {base, base + 1}, f"versions {set(versions)}: it has held {base} and {base + 1}")
            require(all(a <= b for a, b in pairwise(versions)), "versions of one completion go back")
            if len(set(versions)) == 2:
                switched.append((request, completion))
        if not switched:
            raise NotSupportedError(
                f"none of {len(wanted)} requests was in progress when the weights changed: too fast to tell"
            )
        info = await subject.server.info()
        require(info.version == base + 1, f"it says that it holds version {info.version}, after taking {base + 1}")
        kept, worst = self._compare_switched(switched[:_COMPARED], base)
        await self._compare_fresh(subject, 1, 1.0)
        return (
            f"in the middle of {len(switched)} of {len(wanted)} requests, pause {receipt.pause_s:.3f} s, "
            f"KV {'kept' if kept else 'recomputed'}, log-probs within {worst:.1g}"
        )

    async def bad_updates_change_nothing(self, subject: Subject) -> str:
        base = subject.info.version
        good = self._write(base + 2, 2)
        older = good._replace(version=base)
        damaged = good._replace(checksum="0" * 32)
        absent = good._replace(path=good.path.with_name("absent.safetensors"))
        for what, update in (
            ("an older version", older),
            ("another checksum", damaged),
            ("a file that is not there", absent),
        ):
            try:
                receipt = await subject.server.update_weights(update)
            except WeightUpdateError:
                continue
            require(receipt.error is not None, f"it takes weights of {what}")
        worst = await self._compare_fresh(subject, 1, 1.0)
        return f"old version, wrong checksum, no file; log-probs then within {worst:.1g}"

    async def next_update_is_taken(self, subject: Subject) -> str:
        """Back to the weights that it began with; sent twice, as after a lost answer."""
        saved = self._write(subject.info.version + 2, 2)
        for _ in range(2):
            _check_receipt(await subject.server.update_weights(saved), saved)
        worst = await self._compare_fresh(subject, 2, 1.0)
        return f"twice, as after a lost answer; log-probs within {worst:.1g}"

    # ------------------------------------------------------------------------------------------------ asking

    async def _update_amid(
        self, subject: Subject, wanted: Sequence[GenerationRequest], saved: SavedWeights
    ) -> tuple[UpdateReceipt, list[Completion]]:
        begun = asyncio.Event()
        tasks = [asyncio.create_task(subject.complete(request, lambda _: begun.set())) for request in wanted]
        try:
            first = asyncio.create_task(begun.wait())
            await asyncio.wait({first, *tasks}, return_when=asyncio.FIRST_COMPLETED, timeout=5.0)
            first.cancel()
            receipt = await subject.server.update_weights(saved)
            return receipt, await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _compare_fresh(self, subject: Subject, index: int, temperature: float) -> float:
        """Requests that begin now are by the weights of set `index`; the largest difference of their log-probs."""
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
            require(versions == {version}, f"a new request is by version {versions}, not {version}")
            expected = self._logprobs(request, done, [index] * (len(request.prompt_ids) + len(done.token_ids) - 1))
            worst = max(worst, _difference(done, expected))
        require(worst <= self._tolerance, f"log-probs of version {version} are up to {worst:.3g} from the model's own")
        return worst

    def _compare_switched(self, switched: Sequence[tuple[GenerationRequest, Completion]], base: int) -> tuple[bool, float]:
        """Whether KV entries of before the switch were kept, and the largest difference of log-probs."""
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

    # --------------------------------------------------------------------------------------------- reference

    @torch.no_grad()
    def _logprobs(self, request: GenerationRequest, done: Completion, fed_by: Sequence[int]) -> Tensor:
        """Log-probs [completion tokens] of Hugging Face's model, position i fed to it with weights `fed_by[i]`.

        In runs over one cache: attention is causal, so a run at once is the same as token by token.
        """
        fed = [*request.prompt_ids, *done.token_ids[:-1]]
        cache, rows, start = DynamicCache(config=self._model.config), [], 0
        for index, run in groupby(fed_by):
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

    def _write(self, version: int, index: int) -> SavedWeights:
        self._load(index)
        return self._files.write(WeightUpdate(version, checksum(self._weights), self._weights))


def _check_receipt(receipt: UpdateReceipt, saved: SavedWeights) -> None:
    require(receipt.error is None, f"it refuses the weights: {receipt.error}")
    require(receipt.version == saved.version, f"the receipt is for version {receipt.version}, not {saved.version}")
    require(receipt.checksum == saved.checksum, f"it holds weights of checksum {receipt.checksum}, not {saved.checksum}")
    require(receipt.pause_s >= 0, f"a pause of {receipt.pause_s} s")


def _prompt_versions(request: GenerationRequest, done: Completion) -> list[int]:
    """By prompt token; a server that does not say computed all of them just before the first token."""
    if not done.prompt_versions:
        return [done.weight_versions[0].version] * len(request.prompt_ids)
    return versions_from_spans(done.prompt_versions, len(request.prompt_ids))


def _difference(done: Completion, expected_T: Tensor) -> float:
    return float((torch.tensor(done.logprobs) - expected_T).abs().max())


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied tensors stay tied."""
    firsts = first_names(weights)
    copies = {name: weights[name].clone() for name in dict.fromkeys(firsts.values())}
    return {name: copies[first] for name, first in firsts.items()}


def _disturbed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    copies = _copied(weights)
    generator = torch.Generator().manual_seed(0)
    for name, first in first_names(copies).items():
        tensor = copies[name]
        if name == first and tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor += (_DISTURBANCE * tensor.abs().mean() * noise).to(tensor.dtype)
    return copies
