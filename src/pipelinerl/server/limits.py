"""What a request from outside may ask for, beyond what the engine itself checks.

The engine serves many requests at once in one computation, so a number that it can't compute with would end them all.
"""

from __future__ import annotations

from pipelinerl.errors import RequestError
from pipelinerl.types import GenerationRequest, SamplingParams

MAX_BODY_BYTES = 8 << 20
MAX_ID_LENGTH = 256
MAX_STOPS = 64
MAX_STOP_STRING = 256
_TEMPERATURES = (0.01, 100.0)
_MAX_INTEGER = 2**31 - 1


def check_request(request: GenerationRequest) -> None:
    """Raises RequestError."""
    if not 0 < len(request.id) <= MAX_ID_LENGTH:
        raise RequestError(f"a request id has 1 to {MAX_ID_LENGTH} characters, not {len(request.id)}")
    check_sampling(request.sampling)


def check_sampling(sampling: SamplingParams) -> None:
    """Raises RequestError that names the parameter and what it may be."""
    lowest, highest = _TEMPERATURES
    if sampling.temperature != 0 and not lowest <= sampling.temperature <= highest:
        raise RequestError(f"temperature {sampling.temperature:g}: give 0 (greedy), or {lowest:g} to {highest:g}")
    if not 0 < sampling.top_p <= 1:
        raise RequestError(f"top_p {sampling.top_p:g}: give a number above 0 and at most 1")
    if not 0 <= sampling.top_k <= _MAX_INTEGER:
        raise RequestError(f"top_k {sampling.top_k}: give 0 (off), or how many of the likeliest tokens to keep")
    if sampling.max_tokens < 1:
        raise RequestError(f"max_tokens {sampling.max_tokens}: ask for at least 1")
    stops = sampling.stop_token_ids
    if len(stops) > MAX_STOPS or any(not 0 <= stop <= _MAX_INTEGER for stop in stops):
        raise RequestError(f"stop_token_ids: give at most {MAX_STOPS} token ids")
