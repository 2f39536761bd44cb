"""`pipelinerl browse`: the recorded rollouts of a run, as tables and texts; and as rows of `pipelinerl.Run.rollouts`.

rollouts.jsonl, trained.jsonl ─▶ RunRollouts ─▶ RolloutRow: what is searched and listed ─▶ text
"""

from __future__ import annotations

import operator
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pipelinerl.environments.prompts import TextStream, plain_decoder
from pipelinerl.errors import INVALID_DATA, ModelLoadError, RunDirectoryError, UserError
from pipelinerl.metrics.reading import read_lines
from pipelinerl.metrics.records import TrainedRecord
from pipelinerl.report.series import read_config
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.view import one_line, printable
from pipelinerl.types import Group, Skip, versions_from_spans

_NAME = re.compile(r"g?(\d{1,18})(?:\.a\d+)?")
_INDEX = re.compile(rb'\{"index": ?(\d{1,18}),')


class RecordedGroups:
    """The groups in the file at `path`. Only their places in the file (from 0) are in memory.

    A resumed run generates a group that it lost once more, under the same index: `places` has the places of each index, in
    the order of the file. A last line without a newline is ignored: it is still being written, or partial.
    """

    def __init__(self, path: Path) -> None:
        """The file need not exist yet. Raises RunDirectoryError if it can't be read, or has a line that is not a group."""
        self.path = path
        self.indices: list[int] = []
        self.places: dict[int, list[int]] = {}
        self._starts = array("Q", [0])
        self._decoder = msgspec.json.Decoder(Group)
        if path.exists():
            with _reading(path) as file:
                for place, line in enumerate(line for line in file if line.endswith(b"\n")):
                    match = _INDEX.match(line)
                    index = int(match[1]) if match else self._decoded(place, line).index
                    self.indices.append(index)
                    self.places.setdefault(index, []).append(place)
                    self._starts.append(self._starts[-1] + len(line))

    def read(self, index: int) -> list[Group]:
        """The groups of this index, the latest first."""
        return [self.at(place) for place in reversed(self.places.get(index, []))]

    def at(self, place: int) -> Group:
        """Raises RunDirectoryError if the line is damaged."""
        with _reading(self.path) as file:
            file.seek(self._starts[place])
            return self._decoded(place, file.read(self._starts[place + 1] - self._starts[place]))

    def _decoded(self, place: int, line: bytes) -> Group:
        try:
            return self._decoder.decode(line)
        except INVALID_DATA as error:
            damage = f"{self.path}, line {place + 1}: {one_line(str(error))}"
            raise RunDirectoryError(f"damaged records: {damage}; repair or delete the line") from error


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}") from error


class RunRollouts(RecordedGroups):
    """The groups of a run, and `fates`: what the trainer did with a rollout by id, as fields of its `RolloutRow`.

    Raises RunDirectoryError if the folder has no rollouts, or a file can't be read or is damaged.
    """

    def __init__(self, run_dir: Path) -> None:
        run = RunDirectory(run_dir)
        if not run.rollouts.is_dir():
            raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {run.rollouts})")
        super().__init__(run.recorded)
        self.fates: dict[str, Mapping[str, Any]] = {}
        for step in read_lines(run.trained, TrainedRecord, lambda old, new: old.version >= new.version):
            self.fates |= {one.id: {"left_out": one.reason} for one in step.dropped}
            for one in step.samples:
                lags = {"lag_min": one.lag_min, "lag_max": one.lag_max}
                self.fates[one.id] = {"step": step.version, "advantage": one.advantage, **lags}

    def find(self, name: str) -> int:
        """The place of a group (`12`) or of a rollout's group (`g12.a3`), the last one if there are several."""
        match = _NAME.fullmatch(name)
        places = self.places.get(int(match[1]), []) if match else []
        if not places:
            groups = f"the {len(self.indices)} groups of {self.path}"
            raise UserError(f"{name!r} is not among {groups}; `pipelinerl browse` lists them")
        return places[-1]

    def is_replaced(self, place: int) -> bool:
        """Whether a resumed run started this group again, so that a later line replaces it."""
        return self.places[self.indices[place]][-1] != place


# ---- token ids as text

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
        if self._tokenizer is not None:
            stream = TextStream(plain_decoder(self._tokenizer, special=True))
            with suppress(*_DECODE_ERRORS):
                pieces = [stream.feed((token_id,)) for token_id in token_ids]
                return [*pieces[:-1], pieces[-1] + stream.rest()] if pieces else []
        return [f"[{token_id}]" for token_id in token_ids]

    def text(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """The text of all tokens, with or without special tokens."""
        if self._tokenizer is not None:
            with suppress(*_DECODE_ERRORS):
                return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special))
        return "".join(f"[{token_id}]" for token_id in token_ids)


def load_token_text(run_dir: Path) -> TokenText:
    """A `TokenText` with the run's tokenizer, or without one if it can't be loaded. Never runs the model's own code.

    A `tokenizer.json` of a checkpoint or of the model takes a moment; otherwise transformers takes seconds and some 300 MB.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - a page needs it only for runs with rollouts

    from pipelinerl.checkpoint import latest_checkpoint  # noqa: PLC0415 - as above
    from pipelinerl.models.folder import resolve_path  # noqa: PLC0415 - as above

    try:
        model = read_config(run_dir).model
        folders = [latest_checkpoint(run_dir)]
        with suppress(ModelLoadError):  # the model was moved; a checkpoint has the same tokenizer
            folders.append(Path(resolve_path(model.path)))
        for folder in folders:
            if folder is not None and (folder / "tokenizer.json").is_file():
                return TokenText(Tokenizer.from_file(str(folder / "tokenizer.json")))
        from pipelinerl.models.loading import load_tokenizer  # noqa: PLC0415 (loads torch and transformers)

        return TokenText(load_tokenizer(model.model_copy(update={"trust_remote_code": False})))
    except Exception as error:  # noqa: BLE001 - a tokenizer is other people's code; ids are shown, and the reason
        return TokenText(missing=one_line(str(error)))


# ---- rows


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. `problem` is the problem's payload.

    With several turns, `prompt` is the first turn's, with special tokens, and `completion` is the model's text of all
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


def rows_of(run: RunRollouts, place: int, texts: TokenText) -> tuple[Group, list[RolloutRow]]:
    """The group at this place of the run, and its rows. Raises RunDirectoryError if it is damaged."""
    group, rows = run.at(place), []
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
            **({} if run.is_replaced(place) else run.fates.get(rollout.id, {})),
        )
        rows.append(row)
    return group, rows


def read_rows(run: RunRollouts, texts: TokenText) -> Iterator[RolloutRow]:
    """A row for each rollout, without groups that a resumed run started again."""
    for place in range(len(run.indices)):
        if not run.is_replaced(place):
            yield from rows_of(run, place, texts)[1]


# ---- queries like `reward>0.5 version_max=12 "some text"`

_PART = re.compile(r'"([^"]*)"?|(\S+)')
_COMPARISON = re.compile(r"[^\W\d]\w*(<=|>=|<|>|=).*", re.DOTALL)
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
_NUMBERS = ("reward", "turns", "completion_tokens", "version_min", "version_max", "step", "lag_min", "lag_max", "advantage")
_TEXTS = ("finish_reason", "left_out")

Query = Sequence[Callable[[RolloutRow], bool]]
"""Conditions that must all hold for a row."""


def parse(text: str) -> Query:
    """Parse a query. Raises UserError for a comparison of something else, or with something that is not a number."""
    return [
        _condition(bare) if _COMPARISON.fullmatch(bare) else partial(_has_words, (bare or quoted).casefold())
        for quoted, bare in _PART.findall(text)
    ]


def _condition(comparison: str) -> Callable[[RolloutRow], bool]:
    field, sign, value = re.split("(<=|>=|<|>|=)", comparison, maxsplit=1)
    if field in _TEXTS and sign == "=":
        return lambda row: getattr(row, field) == value
    with suppress(ValueError):
        limit = float(value if field in _NUMBERS else "")
        return lambda row: (known := getattr(row, field)) is not None and bool(_OPERATORS[sign](known, limit))
    raise UserError(
        f"{comparison!r}: compare one of these with a number: {', '.join(_NUMBERS)}; or with a word, by =: "
        f"{', '.join(_TEXTS)}. To search for this text, put it in double quotes"
    )


def _has_words(words: str, row: RolloutRow) -> bool:
    """Whether the text is in the problem or in the model's output, ignoring case."""
    problem = f"{row.problem_id} {msgspec.json.encode(row.problem).decode()}"
    return words in problem.casefold() or words in (row.completion or "").casefold()


def matching(rows: Iterable[RolloutRow], query: Query) -> list[RolloutRow]:
    return [row for row in rows if all(condition(row) for condition in query)]


# ---- tables and texts

_MAX_BARS = 16
_COLUMNS = {"group": 7, "rewards": _MAX_BARS, "mean": 7, "tokens": 7, "versions": 11, "lag": 7, "trained": 7}
"""Headings, and the widths of their columns."""
_BARS = "·▁▂▃▄▅▆▇█"


def table_of_groups(run: RunRollouts, query: Query) -> Iterator[str]:
    """A heading, then one line per group; with a query, per group with matching rollouts: the line ends with their ids."""
    widths = _COLUMNS.values()
    yield "  ".join([*(f"{name:>{width}}" for name, width in _COLUMNS.items()), "problem"]) + "\n"
    for place in range(len(run.indices)):
        group, rows = rows_of(run, place, TokenText())
        hits = matching(rows, query)
        if query and not hits:
            continue
        count = len(rows)
        cells = [
            str(group.index),
            "".join(_BARS[int(max(0.0, min(1.0, row.reward)) * (len(_BARS) - 1) + 0.5)] for row in rows[:_MAX_BARS]),
            f"{sum(row.reward for row in rows) / count:.3f}" if count else "-",
            f"{sum(row.completion_tokens for row in rows) / count:.0f}" if count else "-",
            _range(version for row in rows for version in (row.version_min, row.version_max)),
            _range(lag for row in rows for lag in (row.lag_min, row.lag_max)),
            f"{sum(row.step is not None for row in rows)}/{group.started}",
        ]
        shown = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        ids = [" ".join(one_line(row.id) for row in hits)] if query else []
        yield "  ".join([*shown, *_title_and_notes(run, place, group), *ids]) + "\n"


def attempts_of_group(run: RunRollouts, place: int, query: Query) -> Iterator[str]:
    """The problem, then the facts and the text of each attempt that matches. Raises RunDirectoryError for damage."""
    group, rows = rows_of(run, place, TokenText())
    yield "  ".join([f"group {group.index}", *_title_and_notes(run, place, group)]) + "\n"
    for row in matching(rows, query):
        versions = _range([row.version_min, row.version_max])
        facts = f"{row.completion_tokens} tokens, {row.finish_reason or '-'}, versions {versions}"
        yield f"\n── {_rollout_facts(row)}, {facts}\n{printable(row.completion or '')}\n"


def _rollout_facts(row: RolloutRow) -> str:
    trained = f"left out by the trainer: {one_line(row.left_out)}" if row.left_out else "not trained on"
    if row.step is not None:
        trained = f"trained on in step {row.step}, lag {_range([row.lag_min, row.lag_max])}, advantage {row.advantage:.4g}"
    return f"{one_line(row.id)}  reward {row.reward:.4g}, {trained}"


def _range(numbers: Iterable[int | None]) -> str:
    found = [number for number in numbers if number is not None]
    return "-" if not found else str(found[0]) if min(found) == max(found) else f"{min(found)}-{max(found)}"


def _title_and_notes(run: RunRollouts, place: int, group: Group) -> Iterator[str]:
    """The problem (id and payload), and why the group has no rollouts, or fewer."""
    yield one_line(f"{group.problem.id} {msgspec.json.encode(group.problem.payload).decode()}")
    if group.skipped is not None:
        yield skip_text(group.skipped)
    elif group.dropped:
        yield "dropped: " + ", ".join(f"{one_line(why)} {count}" for why, count in sorted(group.dropped.items()))
    if run.is_replaced(place):
        yield "replaced after a resume"


def skip_text(skip: Skip) -> str:
    """Why `actor.online_filter` skipped a problem."""
    times = f"{skip.equal_groups} groups in a row" if skip.equal_groups > 1 else "its latest group"
    return f"skipped: equal rewards in {times}, up to group {skip.last_group}; mean reward {skip.reward_mean:.3g}"


def tokens_of_rollout(run: RunRollouts, place: int, name: str, load: Callable[[], TokenText]) -> Iterator[str]:
    """Facts, prompt and completion of each turn, then a line for each sampled token: weight version and log-prob.

    Raises UserError for a rollout that the group does not have, and RunDirectoryError for damage.
    """
    group, rows = rows_of(run, place, TokenText())
    names = [rollout.id for rollout in group.rollouts]
    if name not in names:
        raise UserError(f"group {group.index} has no rollout {name!r}: {', '.join(names)}")
    rollout, row, texts = group.rollouts[names.index(name)], rows[names.index(name)], load()
    metrics = "".join(f"  {one_line(key)} {value:.4g}" for key, value in rollout.metrics.items())
    yield f"{_rollout_facts(row)}{metrics}\n"
    if texts.missing:
        yield f"token ids only: {one_line(texts.missing)}\n"
    seen: tuple[int, ...] = ()
    for number, turn in enumerate(rollout.turns):
        ids, added, what = turn.completion.token_ids, turn.prompt_ids, "prompt"
        if seen and added[: len(seen)] == seen:
            added, what = added[len(seen) :], "what the prompt adds"
        elif seen:
            what = "prompt, which does not continue the turn before"
        yield f"── turn {number}: {what}, {len(added)} tokens\n{printable(texts.text(added))}\n"
        yield f"── completion, {len(ids)} tokens, {turn.completion.finish_reason}\n{printable(texts.text(ids))}\n"
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
