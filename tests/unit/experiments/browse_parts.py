"""A run directory with rollouts to look at, and a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.metrics.records import TrainedRecord, TrainedSample
from pipelinerl.types import DroppedRollout, Group, Rollout, Turn
from tests.unit import group_parts


class Bytes:
    """A token is a byte; 256 is special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        parts, text = b"", ""
        for token_id in token_ids:
            if token_id == 256:
                text, parts = text + parts.decode("utf-8", "replace") + ("" if skip_special_tokens else "<end>"), b""
            else:
                parts += bytes([token_id])
        return text + parts.decode("utf-8", "replace")


def turn(prompt: str, text: str, *spans: tuple[int, int], end: bool = True) -> Turn:
    """`spans`: (version, how many tokens); the rest is the last version's."""
    ids = (*text.encode(), *([256] if end else []))
    versions = [version for version, count in spans for _ in range(count)] + [spans[-1][0] if spans else 0] * len(ids)
    return group_parts.turn(
        prompt.encode(),
        ids,
        [-0.01 if i % 2 else -3.0 for i in range(len(ids))],
        versions[: len(ids)],
        reason="stop" if end else "length",
        text=text,
    )


def rollout(group: int, attempt: int, reward: float, *turns: Turn, **metrics: float) -> Rollout:
    return Rollout(turns=turns, reward=reward, metrics=metrics, id=f"g{group}.a{attempt}", attempt=attempt)


def group(index: int, *rollouts: Rollout, question: str = "2+3=", dropped: dict[str, int] | None = None) -> Group:
    return group_parts.group(index, rollouts, f"sum/{index}", {"question": question}, dropped=dropped)


def some_groups() -> list[Group]:
    return [
        group(0, rollout(0, 0, 1.0, turn("2+3=", "five", (0, 2), (1, 0))), rollout(0, 1, 0.0, turn("2+3=", "Six", (0, 9)))),
        group(2, rollout(2, 0, 0.25, turn("7*8=", "fifty", (3, 9), end=False), guesses=2.0), question="7*8="),
        group(1, question="lost", dropped={"timeout": 2}),
        group(3, rollout(3, 0, 0.5, turn("1-1=", "five", (4, 9))), rollout(3, 1, 1.0, turn("1-1=", "0", (5, 9)))),
    ]


def step(version: int, *samples: tuple[str, int, int], **left_out: list[str]) -> TrainedRecord:
    """A record of what was trained on: (rollout, lowest lag, highest lag)."""
    trained = tuple(
        TrainedSample(id=name, group_index=0, tokens=1, lag_min=low, lag_max=high, advantage=0.5)
        for name, low, high in samples
    )
    dropped = tuple(DroppedRollout(one, reason, 1, 0.0) for reason, ids in left_out.items() for one in ids)
    return TrainedRecord(version=version, samples=trained, dropped=dropped)


STEPS = [step(1, ("g0.a0", 0, 0), stale=["g0.a1"]), step(5, ("g2.a0", 1, 1), ("g3.a0", 0, 2))]


def lines(records: Sequence[Any]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def run_directory(folder: Path, groups: Sequence[Any] | None = None, steps: Sequence[Any] = STEPS) -> Path:
    rollouts = folder / "rollouts"
    rollouts.mkdir(parents=True)
    (rollouts / "rollouts.jsonl").write_bytes(lines(some_groups() if groups is None else groups))
    (rollouts / "trained.jsonl").write_bytes(lines(steps))
    return folder
