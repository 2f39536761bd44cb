"""Three ways to serve the same requests in one process: this package's engine, `generate`, continuous batching."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.common import Record
from pipelinerl.engine.static import engine_for
from pipelinerl.types import GenerationRequest, SamplingParams

PREFILL_TOKENS = 2048


class Job(NamedTuple):
    """A request: its prompt and the number of tokens to generate."""

    prompt: list[int]
    tokens: int


class System(Protocol):
    def run(self, jobs: Sequence[Job]) -> list[int]:
        """Serve the jobs, sampling at temperature 1. Returns the number of tokens of each."""
        ...

    def close(self) -> None: ...


class Pipelinerl:
    """This package's engine."""

    def __init__(self, model: Any, slots: int, longest: int) -> None:
        self.engine = engine_for(model, slots=slots, max_length=longest, prefill_tokens=PREFILL_TOKENS)

    def run(self, jobs: Sequence[Job]) -> list[int]:
        return [len(completion.token_ids) for completion in self.engine.generate(requests(jobs))]

    def close(self) -> None:
        """Holds only memory: nothing to close."""


class Generate:
    """`model.generate` over static batches of H, in the given order."""

    def __init__(self, model: Any, slots: int, _longest: int) -> None:
        model.generation_config.eos_token_id = None
        self._model, self._slots = model, slots

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> list[int]:
        useful: list[int] = []
        for start in range(0, len(jobs), self._slots):
            batch = jobs[start : start + self._slots]
            prompts_BP = torch.tensor([job.prompt for job in batch], device=self._model.device)
            longest = max(job.tokens for job in batch)
            options = GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, pad_token_id=0
            )
            out_BL = self._model.generate(
                input_ids=prompts_BP, attention_mask=torch.ones_like(prompts_BP), generation_config=options
            )
            produced = out_BL.shape[1] - prompts_BP.shape[1]
            useful += [min(job.tokens, produced) for job in batch]
        return useful

    def close(self) -> None:
        """Holds only memory: nothing to close."""


class ContinuousBatching:
    """transformers' continuous batching, one manager for all repetitions, at most H requests at a time."""

    def __init__(self, model: Any, slots: int, longest: int) -> None:
        model.generation_config.eos_token_id = None
        options = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0
        )
        defaults = ContinuousBatchingConfig()
        config = ContinuousBatchingConfig(
            max_requests_per_batch=slots,
            max_batch_tokens=PREFILL_TOKENS,
            num_blocks=slots * (-(-longest // defaults.page_size) + 1),
        )
        self._manager = model.init_continuous_batching(generation_config=options, continuous_batching_config=config)
        self._manager.start()

    def run(self, jobs: Sequence[Job]) -> list[int]:
        order = [self._manager.add_request(job.prompt, max_new_tokens=job.tokens) for job in jobs]
        produced: dict[str, int] = {}
        while len(produced) < len(jobs):
            output = self._manager.get_result(timeout=1)
            if output is not None and output.error is not None:
                raise RuntimeError(f"continuous batching failed: {output.error}")
            if output is None and not self._manager.is_running():
                raise RuntimeError("the thread of continuous batching has ended")
            if output is not None and output.is_finished():
                produced[output.request_id] = len(output.generated_tokens)
        return [produced[request_id] for request_id in order]

    def close(self) -> None:
        self._manager.stop(block=True)
        self._manager.destroy()


SYSTEMS: dict[str, Callable[[Any, int, int], System]] = {
    "pipelinerl": Pipelinerl,
    "generate": Generate,
    "continuous_batching": ContinuousBatching,
}


def requests(jobs: Sequence[Job]) -> list[GenerationRequest]:
    return [
        GenerationRequest(id=f"{i}", prompt_ids=tuple(job.prompt), sampling=SamplingParams(max_tokens=job.tokens))
        for i, job in enumerate(jobs)
    ]


def timed(system: System, jobs: Sequence[Job]) -> Record:
    """Serve the jobs once. `cpu_per_wall` is 1 if exactly one core was busy all the time."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    produced = system.run(jobs)
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    if produced != [job.tokens for job in jobs]:
        raise RuntimeError(f"{type(system).__name__} did not produce the tokens that were asked for")
    tokens = sum(produced)
    return {"wall_s": wall_s, "tokens": tokens, "tokens_per_s": tokens / wall_s, "cpu_per_wall": cpu_s / wall_s}


def make_jobs(lengths: Sequence[int], prompt_tokens: int, vocabulary: int) -> list[Job]:
    """Random, distinct prompts, so that no system benefits from shared prefixes."""
    rng = random.Random("prompts")
    return [Job([rng.randrange(vocabulary) for _ in range(prompt_tokens)], length) for length in lengths]
