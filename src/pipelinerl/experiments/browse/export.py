"""Exports the rollouts of a run as flat rows, in JSON lines or Parquet."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.experiments.browse.groups import Query, parse, tokens_of, versions_of
from pipelinerl.experiments.browse.records import Damaged, Fate, RunRollouts, Trained
from pipelinerl.experiments.browse.tokens import TokenText, load_token_text
from pipelinerl.extras import require
from pipelinerl.types import Group, Rollout

_BATCH_ROWS = 1024


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. `problem` is the problem's payload. Parquet stores it and `metrics` as JSON texts.

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


_ARROW_TYPES = {"str": "string", "int": "int64", "float": "float64", "Any": "string", "dict[str, float]": "string"}
Write = Callable[[list[Row]], None]


def export(run: RunRollouts, texts: TokenText, out: Path, query: Query, warn: Callable[[str], None]) -> int:
    """Write a row for each rollout that matches `query`; returns their number. The file is written atomically.

    Groups that a resumed run started again are omitted. Damaged lines are omitted and reported with `warn`. Raises UserError
    for an unknown file format or a number that it can't store, MissingDependencyError, and RunDirectoryError.
    """
    open_writer = {".jsonl": _jsonl, ".parquet": _parquet}.get(out.suffix)
    if open_writer is None:
        raise UserError(f"--export {out}: give a name that ends in .jsonl or .parquet")
    for file in (run.path, run.trained_path):
        if out.exists() and file.exists() and out.samefile(file):
            raise UserError(f"--export {out}: that is the run's own record; give another file")
    count = 0
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open_writer(temporary) as write:
            remaining = _rows(run, texts, query, warn)
            while rows := list(islice(remaining, _BATCH_ROWS)):
                write(rows)
                count += len(rows)
        os.replace(temporary, out)
    except OSError as error:
        raise RunDirectoryError(f"can't write {out}: {error.strerror or error}") from error
    except (ValueError, OverflowError) as error:
        raise UserError(f"can't write {out}: a record does not fit the format: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def read_rows(run_dir: Path, config: RunConfig, warn: Callable[[str], None]) -> Iterator[Row]:
    """A row for each rollout of a run. Damaged lines are omitted and reported with `warn`. Raises RunDirectoryError."""
    yield from _rows(RunRollouts(run_dir), load_token_text(config.model), parse(""), warn)


def _rows(run: RunRollouts, texts: TokenText, query: Query, warn: Callable[[str], None]) -> Iterator[Row]:
    for damaged in run.damage:
        warn(damaged)
    for place in range(len(run)):
        group = run.group(place)
        if isinstance(group, Damaged):
            warn(f"{run.path}, {group}")
        elif not run.is_replaced(place):
            for rollout in query.matches(group, partial(run.fate, place)) or ():
                yield _row(group, rollout, run.fate(place, rollout.id), texts)


def _row(group: Group, rollout: Rollout, fate: Fate, texts: TokenText) -> Row:
    completions = [turn.completion for turn in rollout.turns]
    versions = versions_of(rollout)
    trained = fate if isinstance(fate, Trained) else None
    known = texts.known and bool(rollout.turns)
    written = [
        turn.text or (texts.text(turn.completion.token_ids, special=False) if texts.known else "") for turn in rollout.turns
    ]
    return Row(
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


@contextmanager
def _jsonl(path: Path) -> Iterator[Write]:
    encoder = msgspec.json.Encoder()
    with open(path, "xb") as file:

        def write(rows: list[Row]) -> None:
            file.write(encoder.encode_lines(rows))

        yield write
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    require("parquet", "writing Parquet", "; or export .jsonl")
    # imported by name because pyarrow has no type hints
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    fields = [
        arrow.field(name, getattr(arrow, _ARROW_TYPES[kind.removesuffix(" | None")])(), nullable=kind.endswith("None"))
        for name, kind in Row.__annotations__.items()
    ]
    schema = arrow.schema(fields)

    def flat(row: Row) -> dict[str, Any]:
        texts = {name: msgspec.json.encode(getattr(row, name)).decode() for name in ("problem", "metrics")}
        return msgspec.structs.asdict(row) | texts

    with parquet.ParquetWriter(str(path), schema) as writer:

        def write(rows: list[Row]) -> None:
            writer.write_table(arrow.Table.from_pylist([flat(row) for row in rows], schema=schema))

        yield write
