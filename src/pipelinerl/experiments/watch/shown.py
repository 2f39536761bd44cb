"""The newest groups of a run as text in spans of weight versions, for a page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.checkpoint import latest_checkpoint
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ModelLoadError
from pipelinerl.experiments.browse.records import one_line, skip_text
from pipelinerl.experiments.browse.rows import TokenText, load_token_text
from pipelinerl.models.folder import resolve_path
from pipelinerl.status.screen import printable
from pipelinerl.types import Group, Rollout, Turn, versions_from_spans

GROUPS = 3
"""The newest one whose rewards differ, and the newest others."""
ATTEMPTS = 4
MOST_TOKENS = 1200
MOST_FOLDED = 200
"""Sampled tokens of an attempt that are shown, and of those that are folded away at first; the rest is counted."""
MOST_CHARACTERS = 2000


class Texts:
    """The tokenizer of a run, loaded in a thread of its own at the first use."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._run_dir, self._config = run_dir, config
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
        try:
            self._found = _from_file(self._run_dir, self._config) or load_token_text(self._config.model)
        except Exception as error:  # noqa: BLE001 - a tokenizer is other people's code; the page shows ids and the reason
            self._found = TokenText(missing=one_line(str(error)))


def _from_file(run_dir: Path, config: RunConfig) -> TokenText | None:
    """The tokenizer in a `tokenizer.json`, which takes a moment; transformers takes seconds and some 300 MB to import."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - only for runs with rollouts

    folders = [latest_checkpoint(run_dir)]
    with suppress(ModelLoadError):  # the model was moved; a checkpoint has the same tokenizer
        folders.append(Path(resolve_path(config.model.path)))
    for folder in folders:
        if folder is not None and (folder / "tokenizer.json").is_file():
            return TokenText(Tokenizer.from_file(str(folder / "tokenizer.json")))
    return None


def newest_of(groups: Sequence[Group]) -> list[Group]:
    """The groups to show of `groups`, which are in the order of the file; the one to show first comes last."""
    differ = [group for group in groups if len({rollout.reward for rollout in group.rollouts}) > 1][-1:]
    others = [group for group in groups if group not in differ]
    return [*others[len(differ) - GROUPS :], *differ]


def shown_group(group: Group, texts: TokenText) -> dict[str, Any]:
    """The group as JSON-like data."""
    chosen = _chosen(group.rollouts)
    rest = [rollout for rollout in group.rollouts if rollout not in chosen]
    payload = one_line(msgspec.json.encode(group.problem.payload).decode())
    return {
        "index": group.index,
        "problem": f"{one_line(group.problem.id)} {payload}"[:MOST_CHARACTERS],
        "attempts": [_attempt(rollout, texts) for rollout in chosen],
        "rest": [_attempt(rollout, texts, MOST_FOLDED) for rollout in rest],
        "dropped": {one_line(reason): count for reason, count in group.dropped.items()},
        "skipped": None if group.skipped is None else skip_text(group.skipped),
    }


def _chosen(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """At most `ATTEMPTS`, in order: those of the lowest and of the highest rewards."""
    places = sorted(range(len(rollouts)), key=lambda place: rollouts[place].reward)
    low = ATTEMPTS // 2
    kept = places if len(places) <= ATTEMPTS else [*places[:low], *places[low - ATTEMPTS :]]
    return [rollouts[place] for place in sorted(kept)]


def _attempt(rollout: Rollout, texts: TokenText, left: int = MOST_TOKENS) -> dict[str, Any]:
    turns = []
    for turn in rollout.turns:
        turns.append(_turn(turn, texts, left))
        left = max(0, left - len(turn.completion.token_ids))
    return {"id": one_line(rollout.id), "reward": rollout.reward, "turns": turns}


def _turn(turn: Turn, texts: TokenText, most: int) -> dict[str, Any]:
    completion = turn.completion
    count = len(completion.token_ids)
    try:
        versions = versions_from_spans(completion.weight_versions, count)[:most]
    except ValueError:
        versions = [-1] * min(count, most)  # damaged
    pieces = zip(versions, texts.pieces(completion.token_ids[:most]), strict=True)
    spans = [(version, list(of_version)) for version, of_version in groupby(pieces, key=lambda piece: piece[0])]
    prompt = printable(texts.text(turn.prompt_ids[-most:] if most else ()))
    return {
        "prompt": prompt[-MOST_CHARACTERS:],
        "spans": [
            {"version": version, "tokens": len(of_version), "text": printable("".join(text for _, text in of_version))}
            for version, of_version in spans
        ],
        "tokens": count,
        "hidden": max(0, count - most),
        "finish": completion.finish_reason,
    }
