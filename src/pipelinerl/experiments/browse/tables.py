"""Groups and rollouts as text: a table of groups, the attempts of one group, and the tokens of one rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from pipelinerl.experiments.browse.records import RunRollouts, one_line, skip_text
from pipelinerl.experiments.browse.rows import Query, RolloutRow, TokenText, groups_of, matching, rows_of
from pipelinerl.status.screen import printable
from pipelinerl.types import Group, Rollout, Turn, VersionSpan, versions_from_spans

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
    group = run.group(place)
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


# ---- one rollout


def rollout_text(rollout: Rollout, row: RolloutRow, texts: TokenText) -> Iterator[str]:
    """Facts, prompt and completion of each turn, then a line for each sampled token: weight version and log-prob.

    Raises ValueError for a rollout whose numbers of tokens, versions and log-probs differ.
    """
    metrics = "".join(f"  {one_line(name)} {value:.4g}" for name, value in rollout.metrics.items())
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
