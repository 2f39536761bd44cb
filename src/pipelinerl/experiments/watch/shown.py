"""The newest groups of a run as text in spans of weight versions, for a page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.experiments.browse import skip_text
from pipelinerl.experiments.token_text import TokenText, load_token_text
from pipelinerl.status.view import one_line, printable
from pipelinerl.types import Group, Rollout, versions_from_spans

GROUPS = 3
"""The newest one whose rewards differ, and the newest others."""
ATTEMPTS = 4
MOST_TOKENS = 1200
MOST_FOLDED = 200
"""Sampled tokens of an attempt that are shown, and of those that are folded away at first; the rest is counted."""
MOST_CHARACTERS = 2000


class Texts:
    """The tokenizer of a run, loaded in a thread of its own at the first use."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._found: TokenText | None = None
        self._thread: threading.Thread | None = None

    def get(self) -> TokenText | None:
        """None until it is loaded."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._load, name="tokenizer", daemon=True)
            self._thread.start()
        return self._found

    def wait(self) -> None:
        """Until it is loaded, if that has begun."""
        if self._thread is not None:
            self._thread.join()

    def _load(self) -> None:
        self._found = load_token_text(self._run_dir)


def newest_of(groups: Sequence[Group]) -> list[Group]:
    """The groups to show of `groups`, which are in the order of the file; the one to show first comes last."""
    differ = [group for group in groups if len({rollout.reward for rollout in group.rollouts}) > 1][-1:]
    others = [group for group in groups if group not in differ]
    return [*others[len(differ) - GROUPS :], *differ]


def shown_group(group: Group, texts: TokenText) -> dict[str, Any]:
    """The group as JSON-like data: first the attempts of the lowest and of the highest rewards, the others shorter."""
    places = sorted(range(len(group.rollouts)), key=lambda place: group.rollouts[place].reward)
    chosen = {*places[: ATTEMPTS // 2], *places[-ATTEMPTS // 2 :]}
    payload = one_line(msgspec.json.encode(group.problem.payload).decode())
    attempts = enumerate(group.rollouts)
    shown = [
        (place in chosen, _attempt(one, texts, MOST_TOKENS if place in chosen else MOST_FOLDED)) for place, one in attempts
    ]
    return {
        "index": group.index,
        "problem": f"{one_line(group.problem.id)} {payload}"[:MOST_CHARACTERS],
        "attempts": [attempt for first, attempt in shown if first],
        "rest": [attempt for first, attempt in shown if not first],
        "dropped": {one_line(reason): count for reason, count in group.dropped.items()},
        "skipped": None if group.skipped is None else skip_text(group.skipped),
    }


def _attempt(rollout: Rollout, texts: TokenText, left: int) -> dict[str, Any]:
    turns = []
    for turn in rollout.turns:
        completion, count = turn.completion, len(turn.completion.token_ids)
        try:
            versions = versions_from_spans(completion.weight_versions, count)[:left]
        except ValueError:
            versions = [-1] * min(count, left)  # damaged
        pieces = zip(versions, texts.pieces(completion.token_ids[:left]), strict=True)
        spans = [(version, [text for _, text in some]) for version, some in groupby(pieces, key=lambda piece: piece[0])]
        prompt = printable(texts.text(turn.prompt_ids[-left:] if left else ()))
        shown = {
            "prompt": prompt[-MOST_CHARACTERS:],
            "spans": [
                {"version": version, "tokens": len(some), "text": printable("".join(some))} for version, some in spans
            ],
            "tokens": count,
            "hidden": max(0, count - left),
            "finish": completion.finish_reason,
        }
        turns.append(shown)
        left = max(0, left - count)
    return {"id": one_line(rollout.id), "reward": rollout.reward, "turns": turns}
