"""Checks that vLLM applies in-flight weight updates exactly: all weights, from the reported token on. Measures the pause.

    python -m benchmarks.vllm_switch --python VLLM_ENV/bin/python --model demo

All weights are replaced twice while requests are in flight. Each token's log-prob is then compared with a reference: the
transformers model over its own KV cache, each part of the sequence with the weights that vLLM reports. `wrong`: the same
comparison with the tokens at each switch assigned to the other weights; it must be far off for "exact" to be
meaningful. Requests that begin after the last update are compared with a plain forward of the last weights.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import random
import statistics
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks import common
from benchmarks.common import Record
from pipelinerl.channel import free_port
from pipelinerl.models.folder import resolve_path
from pipelinerl.models.state import checksum, named_weights, write_safetensors
from pipelinerl.process.child import ChildProcess
from pipelinerl.serving.vllm.adapter import VllmServer
from pipelinerl.serving.vllm.start import HOST, VllmSettings, command_line, environment, kv_cache_bytes
from pipelinerl.serving.wire import WeightUpdateRequest
from pipelinerl.types import (
    Completion,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    UpdateReceipt,
    spans_from_versions,
    versions_from_spans,
)

BEFORE_SWITCH = 3
"""Tokens before the first update, and again before the second."""


def float32_settings(python: str, folder: str, *, slots: int, max_length: int) -> VllmSettings:
    """Of a server that has room for all slots at full length, in float32."""
    room = kv_cache_bytes(folder, slots=slots, max_length=max_length, item_bytes=4)
    return VllmSettings(python=python, model=folder, slots=slots, max_length=max_length, kv_cache_bytes=room)


class VllmProcess(ChildProcess):
    """A vLLM server under its guard, as the launcher starts it."""

    def __init__(self, settings: VllmSettings, log: Path, more: Sequence[str] = ()) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        super().__init__(
            [sys.executable, "-m", "pipelinerl.serving.vllm.start", *command_line(settings, port), *more],
            log=log,
            environment=environment(settings, os.environ),
            watches_parent=True,
            patience_s=30.0,
        )

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as answer:  # noqa: S310 - our own server
                return answer.status == 200
        except OSError:
            return False


@contextmanager
def running_vllm(
    settings: VllmSettings, log: Path, timeout_s: float = 180.0, more: Sequence[str] = ()
) -> Iterator[VllmProcess]:
    """A server that is healthy. Raises RuntimeError with the end of its log if it ends or is not healthy in time.

    `more`: arguments that are not of an engine.
    """
    with VllmProcess(settings, log, more) as server:
        if not server.wait_until(server.healthy, timeout_s, 0.25):
            raise RuntimeError(f"vLLM is not ready{server.log_excerpt()}")
        yield server


@dataclass(frozen=True)
class Switched:
    """Completions: `during` were in flight at both updates, `after` began after them."""

    requests: Sequence[GenerationRequest]
    during: Sequence[Completion]
    after: Sequence[Completion]
    receipts: Sequence[UpdateReceipt]


def perturbed(model: Any, seed: int, change: float = 0.4) -> Any:
    """A copy with random changes of every parameter, about `change` times the mean magnitude of its tensor."""
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(change * parameter.abs().mean() * noise)
    return changed


def save(model: Any, version: int, directory: Path) -> WeightUpdateRequest:
    """Save the model's weights as an update file."""
    tensors = named_weights(model)
    path = directory / f"v{version}.safetensors"
    write_safetensors(tensors, path)
    return WeightUpdateRequest(version=version, checksum=checksum(tensors), path=str(path))


def make_requests(count: int, vocabulary: int, max_tokens: int) -> list[GenerationRequest]:
    """Prompts of several lengths; the first is streamed, which shows the progress of all."""
    rng = random.Random("vllm/switch")
    return [
        GenerationRequest(
            id=f"stream-{index}",
            prompt_ids=tuple(rng.randrange(2, vocabulary) for _ in range(rng.randint(2, 24))),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0),
            stream=index == 0,
        )
        for index in range(count)
    ]


async def switch_in_flight(
    server: VllmServer, requests: Sequence[GenerationRequest], updates: Sequence[WeightUpdateRequest]
) -> Switched:
    """Generate all at once. Apply the next update whenever the streamed request has a few tokens of the previous weights."""
    seen: Counter[int] = Counter()

    def note(event: TokenEvent) -> None:
        seen[event.version] += 1

    tasks = [asyncio.ensure_future(server.generate(request, note)) for request in requests]
    receipts = []
    for update in updates:
        while seen[update.version - 1] < BEFORE_SWITCH and not any(task.done() for task in tasks):
            await asyncio.sleep(0.002)
        receipts.append(await server.update_weights(update))
    during = await asyncio.gather(*tasks)
    return Switched(requests, during, await asyncio.gather(*map(server.generate, requests)), receipts)


@torch.no_grad()
def mixed_logprobs(
    models: Mapping[int, Any],
    request: GenerationRequest,
    done: Completion,
    versions: Sequence[int],
    prompt_versions: Sequence[int] = (),
) -> list[float]:
    """Log-probs of the completion's tokens. Each token's KV entries and logits are computed by the model of its version.

    The prompt's last entry is computed by the first token's version, which was sampled in that step. So are the others,
    unless `prompt_versions` are given.
    """
    first = len(request.prompt_ids)
    fed = [*request.prompt_ids, *done.token_ids[:-1]]
    cache, rows = DynamicCache(config=models[versions[0]].config), []
    for span in spans_from_versions([*(prompt_versions or [versions[0]] * first)[:-1], *versions]):
        ids = torch.tensor([fed[span.start : span.end]])
        rows.append(models[span.version](input_ids=ids, past_key_values=cache, use_cache=True).logits[0])
    logits_TV = torch.cat(rows)[first - 1 :].float() / (request.sampling.temperature or 1.0)
    sampled_T1 = torch.tensor(done.token_ids)[:, None]
    return logits_TV.log_softmax(-1).gather(1, sampled_T1)[:, 0].tolist()


def switches_of(versions: Sequence[int]) -> list[int]:
    """Indices of tokens whose version differs from that of the previous token."""
    return [index for index in range(1, len(versions)) if versions[index] != versions[index - 1]]


def figures(models: Mapping[int, Any], switched: Switched) -> Record:
    """Log-prob errors against the reference before, between and after switches, and with switches off by one token."""
    errors: dict[int, float] = {}
    wrong: list[float] = []
    for request, done in zip(switched.requests, switched.during, strict=True):
        versions = versions_from_spans(done.weight_versions, len(done.token_ids))
        expected = mixed_logprobs(models, request, done, versions)
        for version, ours, theirs in zip(versions, expected, done.logprobs, strict=True):
            errors[version] = max(errors.get(version, 0.0), abs(ours - theirs))
        for index in switches_of(versions):
            late = [*versions[:index], versions[index - 1], *versions[index + 1 :]]
            early = [*versions[: index - 1], versions[index], *versions[index:]]
            for shifted, position in ((late, index), (early, index - 1)):
                wrong.append(abs(mixed_logprobs(models, request, done, shifted)[position] - done.logprobs[position]))
    last = max(models)
    fresh = 0.0
    for request, done in zip(switched.requests, switched.after, strict=True):
        assert {span.version for span in done.weight_versions} == {last}
        expected = mixed_logprobs(models, request, done, [last] * len(done.token_ids))
        fresh = max(fresh, *(abs(a - b) for a, b in zip(expected, done.logprobs, strict=True)))
    return {
        "streams": len(switched.requests),
        **{f"error v{version - min(models)}": errors[version] for version in sorted(errors)},
        "error of new requests": fresh,
        "wrong (median)": statistics.median(wrong or [0.0]),
        "switches": len(wrong) // 2,
        "pauses_s": [round(receipt.pause_s, 3) for receipt in switched.receipts],
        "in_flight": [receipt.sequences_in_flight for receipt in switched.receipts],
    }


async def measure(
    url: str, path: str, directory: Path, *, streams: int, tokens: int, change: float = 0.4, first: int = 0
) -> Record:
    """Update the server at `url` twice and compare its log-probs.

    It holds version `first`: the model of `path` if that is 0, else the last weights of the previous measurement.
    """
    model = common.fresh_model(path)
    models = {version: perturbed(model, version, change) if version else model for version in range(first, first + 3)}
    updates = [save(models[version], version, directory) for version in (first + 1, first + 2)]
    server = VllmServer(url)
    try:
        info = await server.info()
        switched = await switch_in_flight(server, make_requests(streams, info.vocabulary, tokens), updates)
    finally:
        await server.close()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = len(names) - len(dict(model.named_parameters()))
    return {"model": common.model_label(path), "weights": len(names), "tied": tied, **figures(models, switched)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python interpreter of vLLM's environment")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--change", type=float, default=0.4, help="relative change of all weights at each update")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = resolve_path(options.model)
    settings = float32_settings(options.python, path, slots=options.streams, max_length=options.tokens + 32)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        running_vllm(settings, Path(directory) / "vllm.log") as vllm,
    ):
        work = measure(
            vllm.url, path, Path(directory), streams=options.streams, tokens=options.tokens, change=options.change
        )
        record = asyncio.run(work)
    print(common.markdown([{"": name, "value": value} for name, value in record.items()]))


if __name__ == "__main__":
    main()
