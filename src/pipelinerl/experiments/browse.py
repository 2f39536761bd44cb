"""`pipelinerl browse`: the recorded rollouts of a run, as tables and texts; and as rows of `pipelinerl.Run.rollouts`.

rollouts.jsonl, trained.jsonl ─▶ RunRollouts ─▶ RolloutRow: what is searched and listed ─▶ text
"""

from __future__ import annotations

import operator
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pipelinerl.errors import INVALID_DATA, RunDirectoryError, UserError
from pipelinerl.experiments.token_text import TokenText
from pipelinerl.metrics.reading import Tail, without_repeated
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.view import one_line, printable
from pipelinerl.types import Group, Skip, Turn, VersionSpan, versions_from_spans

_NAME = re.compile(r"g?(\d{1,18})(?:\.a\d+)?")
_INDEX = re.compile(rb'\{"index": ?(\d{1,18}),')


def skip_text(skip: Skip) -> str:
    """Why `actor.online_filter` skipped a problem."""
    times = f"{skip.equal_groups} groups in a row" if skip.equal_groups > 1 else "its latest group"
    return f"skipped: equal rewards in {times}, up to group {skip.last_group}; mean reward {skip.reward_mean:.3g}"


class RecordedGroups:
    """The groups in the file at `path`, by place (from 0): complete lines, which are read on demand.

    `indices` has the index of each group; None for a damaged line. A last line without a newline is ignored: it is still
    being written, or partial. The file need not exist yet. Raises RunDirectoryError if it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.indices: list[int | None] = []
        self._starts = array("Q", [0])
        self._decoder = msgspec.json.Decoder(Group)
        if path.exists():
            with self._open() as file:
                for line in file:
                    if line.endswith(b"\n"):
                        match = _INDEX.match(line)
                        self.indices.append(int(match[1]) if match else None)
                        self._starts.append(self._starts[-1] + len(line))

    def read(self, place: int) -> Group:
        """Raises RunDirectoryError if the line is damaged."""
        with self._open() as file:
            file.seek(self._starts[place])
            line = file.read(self._starts[place + 1] - self._starts[place])
        try:
            return self._decoder.decode(line)
        except INVALID_DATA as error:
            raise RunDirectoryError(f"{self.path}, line {place + 1} is damaged: {one_line(str(error))}") from error

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with open(self.path, "rb") as file:
                yield file
        except OSError as error:
            raise RunDirectoryError(f"can't read {self.path}: {error.strerror}") from error


Fate = Mapping[str, Any]
"""The fields of a `RolloutRow` that say what the trainer did with a rollout."""


class RunRollouts:
    """The groups of a run, by place in their file (from 0), and their training records, as they are now.

    Raises RunDirectoryError if the folder has no rollouts or a file can't be read.
    """

    def __init__(self, run_dir: Path) -> None:
        run = RunDirectory(run_dir)
        if not run.rollouts.is_dir():
            raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {run.rollouts})")
        self.path = run.recorded
        self.groups = RecordedGroups(run.recorded)
        self._place = {index: place for place, index in enumerate(self.groups.indices)}
        self._fates: dict[str, Fate] = {}
        trained = Tail(run.trained, _TrainedStep)
        steps = trained.look()
        while trained.more:
            steps += trained.look()
        self.damage = f"{trained.damaged} lines of {run.trained} are damaged" if trained.damaged else ""
        for step in without_repeated(steps, lambda old, new: old.version >= new.version):  # a resumed run repeats steps
            for reason, ids in step.dropped_ids.items():
                self._fates |= {one: {"left_out": reason} for one in ids}
            for one in step.samples:
                lags = {"lag_min": one.lag_min, "lag_max": one.lag_max}
                self._fates[one.id] = {"step": step.version, "advantage": one.advantage, **lags}

    def find(self, name: str) -> int | None:
        """The place of a group (`12`) or of a rollout's group (`g12.a3`), the last one if there are several; else None."""
        match = _NAME.fullmatch(name)
        return self._place.get(int(match[1])) if match else None

    def is_replaced(self, place: int) -> bool:
        """Whether a resumed run started this group again, so that a later line replaces it."""
        index = self.groups.indices[place]
        return index is not None and self._place[index] != place

    def fate(self, place: int, rollout_id: str) -> Fate:
        """What the trainer did with a rollout; empty: nothing (yet) that is recorded."""
        return {} if self.is_replaced(place) else self._fates.get(rollout_id, {})


class _TrainedSample(msgspec.Struct, frozen=True):
    id: str
    lag_min: int
    lag_max: int
    advantage: float = 0.0


class _TrainedStep(msgspec.Struct, frozen=True):
    version: int
    samples: tuple[_TrainedSample, ...]
    dropped_ids: dict[str, list[str]] = {}


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


def rows_of(run: RunRollouts, place: int, group: Group, texts: TokenText) -> list[RolloutRow]:
    """The rows of the group at this place of the run."""
    rows = []
    for rollout in group.rollouts:
        completions = [turn.completion for turn in rollout.turns]
        versions = [span.version for completion in completions for span in completion.weight_versions]
        written = [
            turn.text or (texts.text(turn.completion.token_ids, special=False) if texts.known else "")
            for turn in rollout.turns
        ]
        row = RolloutRow(
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
            **run.fate(place, rollout.id),
        )
        rows.append(row)
    return rows


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
        raise UserError(
            f"{part!r}: these can be compared with numbers: {', '.join(_NUMBERS)}; and these with a word, by =: "
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
    if run.damage:
        warn(run.damage)
    for place in range(len(run.groups.indices)):
        try:
            group = run.groups.read(place)
        except RunDirectoryError as error:
            warn(str(error))
        else:
            yield place, group


def read_rows(run: RunRollouts, texts: TokenText, warn: Callable[[str], None]) -> Iterator[RolloutRow]:
    """A row for each rollout, without groups that a resumed run started again. Damaged lines are reported with `warn`."""
    for place, group in groups_of(run, warn):
        if not run.is_replaced(place):
            yield from rows_of(run, place, group, texts)


# ---- tables and texts

_MAX_BARS = 16
_COLUMNS = {"group": 7, "rewards": _MAX_BARS, "mean": 7, "tokens": 7, "versions": 11, "lag": 7, "trained": 7}
"""Headings, and the widths of their columns."""
_BARS = "·▁▂▃▄▅▆▇█"


def table_of_groups(run: RunRollouts, query: Query, warn: Callable[[str], None]) -> Iterator[str]:
    """A heading, then one line per group; with a query, per group with matching rollouts: the line ends with their ids.

    Damaged lines are reported with `warn`.
    """
    yield _line(list(_COLUMNS), "problem")
    for place, group in groups_of(run, warn):
        rows = rows_of(run, place, group, TokenText())
        hits = list(matching(rows, query))
        if hits or not query:
            ids = " ".join(one_line(row.id) for row in hits) if query else ""
            yield _line(_cells(group, rows), _title(group), *_notes(run, place, group), ids)


def attempts_of_group(run: RunRollouts, place: int, query: Query) -> Iterator[str]:
    """The problem, then the facts and the text of each attempt that matches. Raises RunDirectoryError for damage."""
    group = run.groups.read(place)
    yield "  ".join([f"group {group.index}", _title(group), *_notes(run, place, group)]) + "\n"
    for row in matching(rows_of(run, place, group, TokenText()), query):
        versions = _range([row.version_min, row.version_max])
        facts = f"{row.completion_tokens} tokens, {row.finish_reason or '-'}, versions {versions}"
        yield f"\n── {rollout_facts(row)}, {facts}\n{printable(row.completion or '')}\n"


def rollout_facts(row: RolloutRow) -> str:
    trained = f"left out by the trainer: {one_line(row.left_out)}" if row.left_out else "not trained on"
    if row.step is not None:
        trained = f"trained on in step {row.step}, lag {_range([row.lag_min, row.lag_max])}, advantage {row.advantage:.4g}"
    return f"{one_line(row.id)}  reward {row.reward:.4g}, {trained}"


def _range(numbers: Iterable[int | None]) -> str:
    found = [number for number in numbers if number is not None]
    return "-" if not found else str(found[0]) if min(found) == max(found) else f"{min(found)}-{max(found)}"


def _title(group: Group) -> str:
    """The problem: id and payload."""
    return one_line(f"{group.problem.id} {msgspec.json.encode(group.problem.payload).decode()}")


def _notes(run: RunRollouts, place: int, group: Group) -> Iterator[str]:
    if group.skipped is not None:
        yield skip_text(group.skipped)
    elif group.dropped:
        yield "dropped: " + ", ".join(f"{one_line(why)} {count}" for why, count in sorted(group.dropped.items()))
    if run.is_replaced(place):
        yield "replaced after a resume"


def _cells(group: Group, rows: Sequence[RolloutRow]) -> list[str]:
    """The cells of `_COLUMNS`."""
    count = len(rows)
    return [
        str(group.index),
        "".join(_BARS[int(max(0.0, min(1.0, row.reward)) * (len(_BARS) - 1) + 0.5)] for row in rows[:_MAX_BARS]),
        f"{sum(row.reward for row in rows) / count:.3f}" if count else "-",
        f"{sum(row.completion_tokens for row in rows) / count:.0f}" if count else "-",
        _range(version for row in rows for version in (row.version_min, row.version_max)),
        _range(lag for row in rows for lag in (row.lag_min, row.lag_max)),
        f"{sum(row.step is not None for row in rows)}/{group.started}",
    ]


def _line(cells: Sequence[str], *notes: str) -> str:
    columns = [f"{cell:>{width}}" for cell, width in zip(cells, _COLUMNS.values(), strict=True)]
    return "  ".join([*columns, *(note for note in notes if note)]) + "\n"


def tokens_of_rollout(run: RunRollouts, place: int, name: str, texts: TokenText) -> Iterator[str]:
    """Facts, prompt and completion of each turn, then a line for each sampled token: weight version and log-prob.

    Raises UserError for a rollout that the group does not have, and RunDirectoryError for damage.
    """
    group = run.groups.read(place)
    names = [rollout.id for rollout in group.rollouts]
    if name not in names:
        raise UserError(f"group {group.index} has no rollout {name!r}: {', '.join(names)}")
    rollout, row = group.rollouts[names.index(name)], rows_of(run, place, group, TokenText())[names.index(name)]
    metrics = "".join(f"  {one_line(key)} {value:.4g}" for key, value in rollout.metrics.items())
    yield f"{rollout_facts(row)}{metrics}\n"
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
        if turn.text and not texts.known:
            yield f"── as text\n{printable(turn.text)}\n"
        seen = (*turn.prompt_ids, *ids)
    yield f"{'turn':>4} {'token':>6} {'id':>8} {'version':>8} {'logprob':>9}  text\n"
    for number, turn in enumerate(rollout.turns):
        ids = turn.completion.token_ids
        logprobs = [f"{one:.4f}" for one in turn.completion.logprobs] or ["-"] * len(ids)
        try:
            versions = versions_from_spans(turn.completion.weight_versions, len(ids))
            tokens = list(zip(ids, versions, logprobs, texts.pieces(ids), strict=True))
        except ValueError as error:  # the numbers of tokens, versions and log-probs differ
            raise RunDirectoryError(f"{run.path}: {name} is damaged: {error}") from error
        for at, (token_id, version, logprob, piece) in enumerate(tokens):
            text = printable(piece).replace("\n", "⏎")
            yield f"{number:>4} {at:>6} {token_id:>8} {version:>8} {logprob:>9}  {text}\n"


def _new_prompt_ids(turn: Turn, seen: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The part of a turn's prompt that was not shown with the previous turn, and a label for it."""
    if seen and turn.prompt_ids[: len(seen)] == seen:
        return turn.prompt_ids[len(seen) :], "what the prompt adds"
    return turn.prompt_ids, "prompt, which does not continue the turn before" if seen else "prompt"


def _spans_text(spans: Sequence[VersionSpan]) -> str:
    """Like `v3: 0-11, v4: 12-40`; positions are inclusive."""
    return ", ".join(f"v{span.version}: {span.start}-{span.end - 1}" for span in spans)
