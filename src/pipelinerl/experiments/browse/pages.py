"""The screen of one rollout, token by token. The tokenizer, and the model for the gap, are loaded at first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from pipelinerl.errors import PipelineRLError
from pipelinerl.experiments.browse import draw
from pipelinerl.experiments.browse.draw import ColourBy, Colouring, by_gap, by_logprob, by_version
from pipelinerl.experiments.browse.records import Browsed, Damaged
from pipelinerl.experiments.browse.tokens import TokenText, one_line
from pipelinerl.types import Rollout, versions_from_spans


class RolloutPages:
    """Draws single rollouts. `texts` loads the run's tokenizer; `gaps` computes the gaps of a rollout's tokens in nats.

    Both are slow: a page that needs one shows that it is loading, `work` runs it, and the next page has the result. A
    PipelineRLError raised by `gaps` is shown on the page.
    """

    def __init__(self, run: Browsed, texts: Callable[[], TokenText], gaps: Callable[[Rollout], Sequence[float]]) -> None:
        self._run = run
        self._load_texts = texts
        self._compute_gaps = gaps
        self._texts: TokenText | None = None
        self._gaps: tuple[Any, Sequence[float] | str] = (None, "")  # of the last requested rollout
        self._asked: Callable[[], None] | None = None
        self._lines: tuple[Any, list[draw.Line]] = (None, [])  # of the last drawn page

    @property
    def asked(self) -> bool:
        """Whether the last page needs something that is not loaded yet."""
        return self._asked is not None

    def work(self) -> None:
        """Load what the last page needs, if anything."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            asked()

    def page(self, place: int, attempt: int, colour: ColourBy, console: Console) -> tuple[list[Text], list[draw.Line]]:
        """The fixed lines at the top, and the lines to scroll."""
        group = self._run.group(place)
        if isinstance(group, Damaged):
            return [Text(str(group), "red")], []
        rollout = group.rollouts[attempt]
        facts = [draw.rollout_facts(rollout, self._run.trained(place, rollout.id), self._run.left_out(place, rollout.id))]
        if self._texts is None:
            self._asked = self._load
            return [*facts, Text("loading the tokenizer", "dim")], []
        try:
            colouring = self._colouring((place, attempt), rollout, colour)
        except ValueError as error:
            return [*facts, Text(f"line {place + 1} is damaged: {error}", "red")], []
        if isinstance(colouring, str):
            note = Text(f"by {colour}: {colouring}", "yellow")
            colouring = Colouring([""] * sum(len(turn.completion.token_ids) for turn in rollout.turns), [])
        else:
            note = Text.assemble((f"by {colour}: ", "dim"), draw.legend_text(colouring), no_wrap=True, overflow="ellipsis")
        # Cached: decoding a long rollout takes longer than the interval at which a held key repeats.
        key = (place, attempt, colour, bool(colouring.legend), console.width)
        if self._lines[0] != key:
            self._lines = (key, draw.lines(draw.rollout_text(rollout, self._texts, colouring), console))
        return [*facts, note], self._lines[1]

    def _colouring(self, which: tuple[int, int], rollout: Rollout, colour: ColourBy) -> Colouring | str:
        """The colouring, or the reason why there is none. Raises ValueError for an inconsistent rollout."""
        completions = [turn.completion for turn in rollout.turns]
        recorded = any(completion.logprobs for completion in completions)
        if recorded and any(len(completion.token_ids) != len(completion.logprobs) for completion in completions):
            raise ValueError("the numbers of log-probs and tokens differ")
        if colour == "version":
            versions = [
                version
                for completion in completions
                if completion.token_ids
                for version in versions_from_spans(completion.weight_versions, len(completion.token_ids))
            ]
            return by_version(versions)
        if not recorded:
            return "log-probs are not recorded for this rollout"
        if colour == "logprob":
            return by_logprob([logprob for completion in completions for logprob in completion.logprobs])
        known, gaps = self._gaps
        if known != which:
            self._asked = partial(self._compute, which, rollout)
            return "loading weights and computing"
        return gaps if isinstance(gaps, str) else by_gap(gaps)

    def _load(self) -> None:
        self._texts = self._load_texts()

    def _compute(self, which: tuple[int, int], rollout: Rollout) -> None:
        try:
            self._gaps = (which, self._compute_gaps(rollout))
        except PipelineRLError as error:
            self._gaps = (which, one_line(str(error)))
