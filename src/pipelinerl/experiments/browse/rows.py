"""A flat row for each rollout: what is searched, listed and exported; and token ids as text."""

from __future__ import annotations

import difflib
import operator
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.schema import ModelConfig
from pipelinerl.environments.prompts import TextStream, plain_decoder
from pipelinerl.errors import ModelLoadError, RunDirectoryError, UserError
from pipelinerl.experiments.browse.records import Fate, RunRollouts
from pipelinerl.types import Group, Rollout

_DECODE_ERRORS = (OverflowError, ValueError, IndexError, KeyError, TypeError)
"""What tokenizers raise for token ids that they do not have."""


class TokenText:
    """Converts tokens to text, including special tokens. Without a tokenizer (`missing` says why), gives ids in brackets."""

    def __init__(self, tokenizer: Any | None = None, missing: str = "") -> None:
        self._tokenizer = tokenizer
        self.known = tokenizer is not None
        self.missing = missing

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """One piece of text per token. A character made of several tokens is in the piece of the last one."""
        if self._tokenizer is None:
            return _bracketed(token_ids)
        stream = TextStream(plain_decoder(self._tokenizer, special=True))
        try:
            pieces = [stream.feed((token_id,)) for token_id in token_ids]
            if pieces:
                pieces[-1] += stream.rest()
        except _DECODE_ERRORS:
            return _bracketed(token_ids)
        return pieces

    def text(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """The text of all tokens, with or without special tokens."""
        if self._tokenizer is not None:
            with suppress(*_DECODE_ERRORS):
                return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special))
        return "".join(_bracketed(token_ids))


def load_token_text(model: ModelConfig) -> TokenText:
    """A `TokenText` with the model's tokenizer, or without one if it can't be loaded. Never runs the model's own code."""
    from pipelinerl.models.loading import load_tokenizer  # noqa: PLC0415 (loads torch and transformers: seconds)

    try:
        return TokenText(load_tokenizer(model.model_copy(update={"trust_remote_code": False})))
    except ModelLoadError as error:
        return TokenText(missing=str(error))


def _bracketed(token_ids: Sequence[int]) -> list[str]:
    return [f"[{token_id}]" for token_id in token_ids]


# ---- rows


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. `problem` is the problem's payload.

    With several turns, `prompt` is that of the first turn, with special tokens, and `completion` is the model's text of all
    turns, joined by newlines. Versions are those of sampled tokens. `step` (the version after the step), lags and
    `advantage` are null unless the rollout was trained on. `left_out` is the trainer's reason for dropping it, else null.
    """

    id: str
    group: int
    attempt: int
    problem_id: str
    problem: Any
    prompt: str | None
    completion: str | None
    reward: float
    metrics: dict[str, float]
    turns: int
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    version_min: int | None
    version_max: int | None
    step: int | None = None
    lag_min: int | None = None
    lag_max: int | None = None
    advantage: float | None = None
    left_out: str | None = None


def row_of(group: Group, rollout: Rollout, fate: Fate, texts: TokenText) -> RolloutRow:
    completions = [turn.completion for turn in rollout.turns]
    versions = [span.version for completion in completions for span in completion.weight_versions]
    written = [
        turn.text or (texts.text(turn.completion.token_ids, special=False) if texts.known else "") for turn in rollout.turns
    ]
    return RolloutRow(
        id=rollout.id,
        group=group.index,
        attempt=rollout.attempt,
        problem_id=group.problem.id,
        problem=group.problem.payload,
        prompt=texts.text(rollout.turns[0].prompt_ids) if texts.known and rollout.turns else None,
        completion="\n".join(written) if texts.known or any(written) else None,
        reward=rollout.reward,
        metrics=rollout.metrics,
        turns=len(rollout.turns),
        finish_reason=completions[-1].finish_reason if completions else None,
        prompt_tokens=len(rollout.turns[0].prompt_ids) if completions else 0,
        completion_tokens=sum(len(completion.token_ids) for completion in completions),
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        **fate,
    )


def rows_of(run: RunRollouts, place: int, group: Group, texts: TokenText) -> list[RolloutRow]:
    """The rows of the group at this place of the run."""
    return [row_of(group, rollout, run.fate(place, rollout.id), texts) for rollout in group.rollouts]


# ---- queries like `reward>0.5 version_max=12 "some text"`

_PART = re.compile(r'"([^"]*)"?|(\S+)')
_COMPARISON = re.compile(r"([^\W\d]\w*)(<=|>=|<|>|=)(.*)", re.DOTALL)
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
_NUMBERS = ("reward", "turns", "completion_tokens", "version_min", "version_max", "step", "lag_min", "lag_max", "advantage")
_TEXTS = ("finish_reason", "left_out")

Query = Sequence[Callable[[RolloutRow], bool]]
"""Conditions that must all hold for a row."""


def parse(text: str) -> Query:
    """Parse a query. Raises UserError for a comparison of something else, or with something that is not a number."""
    parts = [(match[1], match[2]) for match in _PART.finditer(text)]
    return [partial(_has_words, quoted.casefold()) if bare is None else _condition(bare) for quoted, bare in parts]


def _condition(part: str) -> Callable[[RolloutRow], bool]:
    if (found := _COMPARISON.fullmatch(part)) is None:
        return partial(_has_words, part.casefold())
    field, sign, value = found.groups()
    if field in _TEXTS and sign == "=":
        return lambda row: getattr(row, field) == value
    if field not in _NUMBERS:
        near = difflib.get_close_matches(field, (*_NUMBERS, *_TEXTS), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"{part!r}: {hint}these can be compared with numbers: {', '.join(_NUMBERS)}; and these with a word, by =: "
            f"{', '.join(_TEXTS)}. To search for this text, put it in double quotes"
        )
    try:
        limit = float(value)
    except ValueError:
        raise UserError(f"{part!r} does not compare with a number; as in reward>0.5") from None
    return lambda row: (known := getattr(row, field)) is not None and bool(_OPERATORS[sign](known, limit))


def _has_words(words: str, row: RolloutRow) -> bool:
    """Whether the text is in the problem or in the model's output, ignoring case."""
    problem = f"{row.problem_id} {msgspec.json.encode(row.problem).decode()}"
    return words in problem.casefold() or words in (row.completion or "").casefold()


def matching(rows: Iterable[RolloutRow], query: Query) -> Iterator[RolloutRow]:
    return (row for row in rows if all(condition(row) for condition in query))


# ---- the rows of a run


def groups_of(run: RunRollouts, warn: Callable[[str], None]) -> Iterator[tuple[int, Group]]:
    """The groups with their places. Damaged lines are left out, and reported with `warn`."""
    for damaged in run.damage:
        warn(damaged)
    for place in range(len(run)):
        try:
            group = run.group(place)
        except RunDirectoryError as error:
            warn(str(error))
        else:
            yield place, group


def read_rows(run: RunRollouts, texts: TokenText, warn: Callable[[str], None]) -> Iterator[RolloutRow]:
    """A row for each rollout, without groups that a resumed run started again. Damaged lines are reported with `warn`."""
    for place, group in groups_of(run, warn):
        if not run.is_replaced(place):
            yield from rows_of(run, place, group, texts)


def export(run: RunRollouts, texts: TokenText, out: Path, query: Query, warn: Callable[[str], None]) -> int:
    """Write a line of JSON for each of the `read_rows` that matches `query`; returns their number. The file is whole, or not
    there. Raises UserError for the name of another format, and RunDirectoryError.
    """
    if out.suffix != ".jsonl":
        raise UserError(f"--export {out}: give a name that ends in .jsonl")
    if out.resolve().parent == run.path.resolve().parent:
        raise UserError(f"--export {out}: that folder has the run's own records; give another one")
    count = 0
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as lines:
            for row in matching(read_rows(run, texts, warn), query):
                lines.write(msgspec.json.encode(row) + b"\n")
                count += 1
        os.replace(temporary, out)
    except OSError as error:
        raise RunDirectoryError(f"can't write {out}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count
