"""The contents of each screen, and the plain table: pure functions from records to rich renderables or text."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pipelinerl.experiments.browse.query import Query, TrainedBy
from pipelinerl.experiments.browse.records import Attempt, Attempts, Browsed, Damaged, Trained, reasons_text
from pipelinerl.experiments.browse.tokens import TokenText, one_line, printable
from pipelinerl.types import Rollout, Turn, VersionSpan

# ---- colours of tokens: rich styles with a legend


ColourBy = Literal["version", "logprob", "gap"]
MODES: tuple[ColourBy, ...] = ("version", "logprob", "gap")

_VERSIONS = ("cyan", "yellow", "magenta", "green", "bright_blue", "bright_red", "white")
_PROBABILITIES = (0.01, 0.1, 0.5, 0.9)
_PROBABILITY_STYLES = ("bold red", "dark_orange", "yellow", "green", "")
_GAPS = (-0.7, -0.1, -0.01, 0.01, 0.1, 0.7)
_GAP_STYLES = ("bold red", "red", "dark_orange", "", "cyan", "bright_blue", "bold bright_blue")


class Colouring(NamedTuple):
    """A style for each token, and a legend of (label, style)."""

    styles: list[str]
    legend: list[tuple[str, str]]


def by_version(versions: Sequence[int]) -> Colouring:
    """By weight version. Consecutive versions never share a colour; distant ones may."""
    styles = {version: _VERSIONS[i % len(_VERSIONS)] for i, version in enumerate(sorted(set(versions)))}
    return Colouring(
        [styles[version] for version in versions], [(f"v{version}", style) for version, style in styles.items()]
    )


def by_logprob(logprobs: Sequence[float]) -> Colouring:
    """By the probability with which the engine sampled each token."""
    styles = [_PROBABILITY_STYLES[bisect_right(_PROBABILITIES, math.exp(min(0.0, logprob)))] for logprob in logprobs]
    labels = [f"p < {_PROBABILITIES[0]:g}", *(f"from {limit:g}" for limit in _PROBABILITIES)]
    return Colouring(styles, list(zip(labels, _PROBABILITY_STYLES, strict=True)))


def by_gap(gaps: Sequence[float]) -> Colouring:
    """By log-prob under saved weights minus the engine's, in nats: red is less likely now, blue more likely."""
    styles = [_GAP_STYLES[bisect_right(_GAPS, gap)] for gap in gaps]
    labels = [f"below {_GAPS[0]:g}", *(f"from {limit:g}" for limit in _GAPS)]
    return Colouring(styles, list(zip(labels, _GAP_STYLES, strict=True)))


_BARS = "·▁▂▃▄▅▆▇█"
_SELECTED = "reverse"
HEADINGS = ("group", "rewards", "mean", "tokens", "versions", "lag", "trained")
REPLACED = "replaced after a resume"
MAX_BARS = 16
COLUMN_WIDTH = 30


def versions_text(versions: Iterable[int]) -> str:
    found = list(versions)
    return "-" if not found else str(found[0]) if min(found) == max(found) else f"{min(found)}-{max(found)}"


def lag_text(trained: Iterable[Trained | None]) -> str:
    found = [record for record in trained if record is not None]
    return versions_text(lag for record in found for lag in (record.lag_min, record.lag_max))


def groups_table(rows: Sequence[tuple[Attempts | Damaged, bool, TrainedBy]], selected: int) -> Table:
    """One row per group. `rows` are the visible ones: group, whether a later line replaces it, and its training records."""
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="dim")
    for name in HEADINGS:
        table.add_column(name, justify="left" if name == "rewards" else "right", no_wrap=True)
    table.add_column("problem", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("dropped", no_wrap=True)
    for number, (group, replaced, trained) in enumerate(rows):
        style = _SELECTED if number == selected else "dim" if replaced else ""
        if isinstance(group, Damaged):
            table.add_row("?", *[""] * (len(HEADINGS) - 1), Text(str(group), "red"), "", style=style)
            continue
        note = REPLACED if replaced else reasons_text(group.dropped)
        table.add_row(*group_cells(group, trained), Text(one_line(group.title)), Text(note), style=style)
    return table


def group_cells(group: Attempts, trained: TrainedBy) -> list[str]:
    """The cells for the columns in HEADINGS."""
    count = len(group.rollouts)
    records = [trained(rollout.id) for rollout in group.rollouts]
    return [
        str(group.index),
        "".join(_bar(rollout.reward) for rollout in group.rollouts[:MAX_BARS]),
        f"{sum(rollout.reward for rollout in group.rollouts) / count:.3f}" if count else "-",
        f"{sum(rollout.tokens for rollout in group.rollouts) / count:.0f}" if count else "-",
        versions_text(group.versions),
        lag_text(records),
        f"{sum(record is not None for record in records)}/{group.started}",
    ]


def _bar(reward: float) -> str:
    return _BARS[int(max(0.0, min(1.0, reward)) * (len(_BARS) - 1) + 0.5)]


def group_columns(group: Attempts, trained: TrainedBy, selected: int, width: int) -> Table:
    """As many attempts side by side as fit into the width, including the selected one."""
    count = min(len(group.rollouts), max(1, width // COLUMN_WIDTH))
    first = max(0, min(selected - count // 2, len(group.rollouts) - count))
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    shown = range(first, first + count)
    for i in shown:
        heading = _heading(group.rollouts[i], trained(group.rollouts[i].id))
        table.add_column(Text(heading, _SELECTED if i == selected else "dim"), ratio=1, overflow="fold")
    table.add_row(*(Text(printable(group.rollouts[i].text)) for i in shown))
    return table


def _heading(rollout: Attempt, trained: Trained | None) -> str:
    step = "not trained on" if trained is None else f"step {trained.step}, lag {lag_text([trained])}"
    end = rollout.turns[-1].completion.finish_reason if rollout.turns else "-"
    versions = f"versions {versions_text(rollout.versions)}"
    name = rollout.label or f"attempt {rollout.attempt}"
    return f"{name}  reward {rollout.reward:.4g}\n{rollout.tokens} tokens, {end}\n{versions}\n{step}"


def rollout_facts(rollout: Rollout, trained: Trained | None, left_out: str | None) -> Text:
    facts = (
        Text(no_wrap=True, overflow="ellipsis")
        .append(one_line(rollout.id), "bold")
        .append("   reward ", "dim")
        .append(f"{rollout.reward:.4g}", "bold")
    )
    facts.append("   trained on in step ", "dim").append("-" if trained is None else f"{trained.step}", "bold")
    facts.append("   lag ", "dim").append(lag_text([trained]), "bold")
    if left_out is not None:
        facts.append("   left out by the trainer: ", "dim").append(one_line(left_out), "bold")
    return facts


def rollout_text(rollout: Rollout, texts: TokenText, colouring: Colouring) -> Text:
    """Metrics, then prompt and completion of each turn. `colouring` covers all sampled tokens, in order."""
    body, offset = Text(), 0
    if texts.missing:
        body.append(f"token ids only: {one_line(texts.missing)}\n", "yellow")
    for name, value in rollout.metrics.items():
        body.append(f"{one_line(name)} ", "dim").append(f"{value:.4g}   ", "bold")
    body.append("\n" if rollout.metrics else "")
    seen: tuple[int, ...] = ()
    for number, turn in enumerate(rollout.turns):
        added, what = _new_prompt_ids(turn, seen)
        body.append(f"── turn {number}: {what}, {len(added)} tokens ", "bold")
        body.append(spans_text(turn.completion.prompt_versions)).append("\n").append(
            printable(texts.text(added)), "dim"
        ).append("\n")
        ids = turn.completion.token_ids
        body.append(f"── completion, {len(ids)} tokens, {turn.completion.finish_reason} ", "bold")
        body.append(spans_text(turn.completion.weight_versions)).append("\n")
        for piece, style in zip(texts.pieces(ids), colouring.styles[offset : offset + len(ids)], strict=True):
            body.append(printable(piece).replace("\n", "⏎\n"), style)
        body.append("\n")
        if not texts.known and turn.text:
            body.append("── as the environment read it\n", "bold").append(f"{printable(turn.text)}\n")
        offset += len(ids)
        seen = (*turn.prompt_ids, *ids)
    return body


def _new_prompt_ids(turn: Turn, seen: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The part of a turn's prompt that was not shown with the previous turn, and a label for it."""
    if seen and turn.prompt_ids[: len(seen)] == seen:
        return turn.prompt_ids[len(seen) :], "what the prompt adds"
    return turn.prompt_ids, "prompt, which does not continue the turn before" if seen else "prompt"


def spans_text(spans: Sequence[VersionSpan]) -> str:
    """Like `v3: 0-11, v4: 12-40`; positions are inclusive."""
    return ", ".join(f"v{span.version}: {span.start}-{span.end - 1}" for span in spans)


def legend_text(colouring: Colouring) -> Text:
    legend = Text()
    for label, style in colouring.legend[:12]:
        legend.append("██ ", style.removeprefix("bold ")).append(f"{label}  ", "dim")
    return legend.append("...", "dim") if len(colouring.legend) > 12 else legend


Line = list[Segment]


def lines(body: RenderableType, console: Console) -> list[Line]:
    """Render `body` at the console's width, as lines."""
    return console.render_lines(body, console.options.update(height=None), pad=False)


def joined(lines: Sequence[Line]) -> Text:
    """Join lines into one text."""
    return Text("\n").join(Text.assemble(*((part.text, part.style or "") for part in line)) for line in lines)


# ---- groups as plain lines, for output that is not a terminal


_WIDTHS = (7, MAX_BARS, 7, 7, 11, 7, 7)


def plain_table(run: Browsed, query: Query | None, warn: Callable[[str], None]) -> Iterator[str]:
    """A heading, then one line per group that matches `query`; it ends with the ids of the matching rollouts.

    Damaged lines are reported with `warn`.
    """
    while run.look():
        pass
    for damaged in run.damage:
        warn(damaged)
    yield _line(HEADINGS, "problem")
    for place in range(len(run)):
        group = run.summary(place)
        if isinstance(group, Damaged):
            warn(f"{run.path}, {group}")
            continue
        trained = partial(run.trained, place)
        hits = [] if query is None else query.matches(group, trained)
        if hits is not None:
            dropped = f"dropped: {reasons_text(group.dropped)}" if group.dropped else ""
            replaced = REPLACED if run.is_replaced(place) else ""
            ids = " ".join(one_line(group.rollouts[i].id) for i in hits)
            yield _line(group_cells(group, trained), one_line(group.title), dropped, replaced, ids)


def _line(cells: Sequence[str], *notes: str) -> str:
    columns = [f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)]
    return "  ".join([*columns, *(note for note in notes if note)]) + "\n"
