"""Shows one rollout, token ids as safe text; and exports rollouts as flat rows."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.schema import ModelConfig, RunConfig
from pipelinerl.environments.prompts import TextStream, plain_decoder
from pipelinerl.errors import ModelLoadError, RunDirectoryError, UserError
from pipelinerl.experiments.browse.groups import Query, parse, rollout_facts, tokens_of, versions_of
from pipelinerl.experiments.browse.records import Damaged, Fate, RunRollouts, Trained, one_line
from pipelinerl.status.screen import printable
from pipelinerl.types import Group, Rollout, Turn, VersionSpan, versions_from_spans

# ---- token ids as text


_DECODE_ERRORS = (OverflowError, ValueError, IndexError, KeyError, TypeError)
"""What tokenizers raise for token ids that they do not have."""


class TokenText:
    """Converts tokens to text, including special tokens. Without a tokenizer (`missing` says why), gives ids in brackets."""

    def __init__(self, tokenizer: Any | None, missing: str = "") -> None:
        self._tokenizer = tokenizer
        self.missing = missing

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

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
        return TokenText(None, str(error))


def _bracketed(token_ids: Sequence[int]) -> list[str]:
    return [f"[{token_id}]" for token_id in token_ids]


# ---- one rollout


def rollout_text(rollout: Rollout, fate: Fate, texts: TokenText) -> Iterator[str]:
    """Facts, prompt and completion of each turn, then a line for each sampled token: weight version and log-prob.

    Raises ValueError for a rollout whose numbers of tokens, versions and log-probs differ.
    """
    metrics = "".join(f"  {one_line(name)} {value:.4g}" for name, value in rollout.metrics.items())
    yield f"{rollout_facts(rollout, fate)}{metrics}\n"
    if texts.missing:
        yield f"token ids only: {one_line(texts.missing)}\n"
    seen: tuple[int, ...] = ()
    for number, turn in enumerate(rollout.turns):
        ids = turn.completion.token_ids
        added, what = _new_prompt_ids(turn, seen)
        spans = _spans_text(turn.completion.prompt_versions)
        yield f"── turn {number}: {what}, {len(added)} tokens {spans}\n{printable(texts.text(added))}\n"
        spans = _spans_text(turn.completion.weight_versions)
        yield f"── completion, {len(ids)} tokens, {turn.completion.finish_reason} {spans}\n{printable(texts.text(ids))}\n"
        conversation = len(turn.text) > len(texts.text(ids))  # of an evaluation, with what the environment added
        if turn.text and (conversation or not texts.known):
            yield f"── as text\n{printable(turn.text)}\n"
        seen = (*turn.prompt_ids, *ids)
    yield f"{'turn':>4} {'token':>6} {'id':>8} {'version':>8} {'logprob':>9}  text\n"
    for number, turn in enumerate(rollout.turns):
        ids = turn.completion.token_ids
        logprobs = [f"{one:.4f}" for one in turn.completion.logprobs] or ["-"] * len(ids)
        versions = versions_from_spans(turn.completion.weight_versions, len(ids))
        for place, token in enumerate(zip(ids, versions, logprobs, texts.pieces(ids), strict=True)):
            token_id, version, logprob, piece = token
            text = printable(piece).replace("\n", "⏎")
            yield f"{number:>4} {place:>6} {token_id:>8} {version:>8} {logprob:>9}  {text}\n"


def _new_prompt_ids(turn: Turn, seen: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The part of a turn's prompt that was not shown with the previous turn, and a label for it."""
    if seen and turn.prompt_ids[: len(seen)] == seen:
        return turn.prompt_ids[len(seen) :], "what the prompt adds"
    return turn.prompt_ids, "prompt, which does not continue the turn before" if seen else "prompt"


def _spans_text(spans: Sequence[VersionSpan]) -> str:
    """Like `v3: 0-11, v4: 12-40`; positions are inclusive."""
    return ", ".join(f"v{span.version}: {span.start}-{span.end - 1}" for span in spans)


# ---- rollouts as rows


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. `problem` is the problem's payload.

    With several turns, `prompt` is that of the first turn, with special tokens, and `completion` is the model's text of all
    turns, joined by newlines. Versions are those of sampled tokens. `step` (the version after the step) and lags are null
    unless the rollout was trained on. `left_out` is the trainer's reason for dropping it, else null.
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
    step: int | None
    lag_min: int | None
    lag_max: int | None
    left_out: str | None


def export(run: RunRollouts, texts: TokenText, out: Path, query: Query, warn: Callable[[str], None]) -> int:
    """Write a line of JSON for each rollout that matches `query`; returns their number. The file is written atomically.

    Groups that a resumed run started again are omitted. Damaged lines are omitted and reported with `warn`. Raises UserError
    for the name of another format, and RunDirectoryError.
    """
    if out.suffix != ".jsonl":
        raise UserError(f"--export {out}: give a name that ends in .jsonl")
    for file in (run.path, run.trained_path):
        if out.exists() and file.exists() and out.samefile(file):
            raise UserError(f"--export {out}: that is the run's own record; give another file")
    count = 0
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as lines:
            for row in _rows(run, texts, query, warn):
                lines.write(msgspec.json.encode(row) + b"\n")
                count += 1
            lines.flush()
            os.fsync(lines.fileno())
        os.replace(temporary, out)
    except OSError as error:
        raise RunDirectoryError(f"can't write {out}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def read_rows(run_dir: Path, config: RunConfig, warn: Callable[[str], None]) -> Iterator[RolloutRow]:
    """A row for each rollout of a run. Damaged lines are omitted and reported with `warn`. Raises RunDirectoryError."""
    yield from _rows(RunRollouts(run_dir), load_token_text(config.model), parse(""), warn)


def _rows(run: RunRollouts, texts: TokenText, query: Query, warn: Callable[[str], None]) -> Iterator[RolloutRow]:
    for damaged in run.damage:
        warn(damaged)
    for place in range(len(run)):
        group = run.group(place)
        if isinstance(group, Damaged):
            warn(f"{run.path}, {group}")
        elif not run.is_replaced(place):
            for rollout in query.matches(group, partial(run.fate, place)) or ():
                yield _row(group, rollout, run.fate(place, rollout.id), texts)


def _row(group: Group, rollout: Rollout, fate: Fate, texts: TokenText) -> RolloutRow:
    completions = [turn.completion for turn in rollout.turns]
    versions = versions_of(rollout)
    trained = fate if isinstance(fate, Trained) else None
    known = texts.known and bool(rollout.turns)
    written = [
        turn.text or (texts.text(turn.completion.token_ids, special=False) if texts.known else "") for turn in rollout.turns
    ]
    return RolloutRow(
        id=rollout.id,
        group=group.index,
        attempt=rollout.attempt,
        problem_id=group.problem.id,
        problem=group.problem.payload,
        prompt=texts.text(rollout.turns[0].prompt_ids) if known else None,
        completion="\n".join(written) if texts.known or any(written) else None,
        reward=rollout.reward,
        metrics=rollout.metrics,
        turns=len(rollout.turns),
        finish_reason=completions[-1].finish_reason if completions else None,
        prompt_tokens=len(rollout.turns[0].prompt_ids) if completions else 0,
        completion_tokens=tokens_of(rollout),
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        step=trained.step if trained else None,
        lag_min=trained.lag_min if trained else None,
        lag_max=trained.lag_max if trained else None,
        left_out=fate if isinstance(fate, str) else None,
    )
