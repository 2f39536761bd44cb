"""Completions, receipts, turns and groups that no engine made, and a stream of groups in memory, with both of its ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pipelinerl.hub.stream import FileStream
from pipelinerl.types import Completion, FinishReason, Group, Problem, Rollout, Turn, UpdateReceipt, spans_from_versions


def completion(
    token_ids: Iterable[int],
    logprobs: float | Iterable[float] = -0.5,
    versions: int | Iterable[int] = 0,
    *,
    name: str = "r",
    reason: FinishReason = "stop",
) -> Completion:
    """`logprobs` and `versions`: of each token, or the same for all."""
    ids = tuple(token_ids)
    return Completion(
        request_id=name,
        token_ids=ids,
        logprobs=(logprobs,) * len(ids) if isinstance(logprobs, float) else tuple(logprobs),
        weight_versions=spans_from_versions([versions] * len(ids) if isinstance(versions, int) else versions),
        finish_reason=reason,
    )


def receipt(version: int, checksum: str, **fields: Any) -> UpdateReceipt:
    others = {"engine": "engine-0", "pause_s": 0.1, "sequences_in_flight": 3}
    return UpdateReceipt(version=version, checksum=checksum, **{**others, **fields})


def turn(prompt_ids: Iterable[int], token_ids: Iterable[int], *sampled: Any, text: str = "", **named: Any) -> Turn:
    """`sampled`, `named`: as for `completion`."""
    return Turn(prompt_ids=tuple(prompt_ids), completion=completion(token_ids, *sampled, **named), text=text)


def group(
    index: int,
    rollouts: Iterable[Rollout],
    problem: str = "p",
    payload: Mapping[str, Any] | None = None,
    *,
    dropped: Mapping[str, int] | None = None,
    version: int = 0,
) -> Group:
    made, lost = tuple(rollouts), dict(dropped or {})
    return Group(
        index=index,
        problem=Problem(id=problem, payload=dict(payload or {})),
        rollouts=made,
        started=len(made) + sum(lost.values()),
        dropped=lost,
        started_version=version,
    )


class GroupStream:
    def __init__(self, prepare: Callable[[Group], Any] = lambda group: group) -> None:
        self._stream, self._prepare = FileStream(), prepare

    @property
    def waiting(self) -> int:
        return self._stream.waiting

    def write(self, group: Group) -> None:
        self._stream.append(msgspec.json.encode(group))

    def read(self, limit: int) -> Sequence[tuple[int, Any]]:
        items = self._stream.read(limit)
        return [(offset, self._prepare(msgspec.json.decode(json, type=Group))) for offset, json in items]

    def commit(self, offset: int) -> None:
        self._stream.commit(offset)
