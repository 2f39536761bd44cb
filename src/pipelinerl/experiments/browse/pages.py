"""One rollout token by token, with what that takes loaded when it is first wanted: the tokenizer, a model for the gap."""

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
    """`texts` and `gaps` take their time: the run's tokenizer, and the gaps of a rollout's tokens in nats.

    So a page says that it waits for one, `work` gets it, and the next page has it. A PipelineRLError of `gaps` is shown.
    """

    def __init__(self, run: Browsed, texts: Callable[[], TokenText], gaps: Callable[[Rollout], Sequence[float]]) -> None:
        self._run = run
        self._load_texts = texts
        self._compute_gaps = gaps
        self._texts: TokenText | None = None
        self._gaps: tuple[Any, Sequence[float] | str] = (None, "")  # of the rollout that was asked for last
        self._asked: Callable[[], None] | None = None
        self._lines: tuple[Any, list[draw.Line]] = (None, [])  # of the page that was drawn last

    @property
    def asked(self) -> bool:
        """Whether a page waits for something."""
        return self._asked is not None

    def work(self) -> None:
        """Get what the last page waits for, if anything."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            asked()

    def page(self, place: int, attempt: int, colour: ColourBy, console: Console) -> tuple[list[Text], list[draw.Line]]:
        """What stays at the top, and the lines to scroll through."""
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
        # Kept, since decoding a long rollout takes longer than a key is held.
        key = (place, attempt, colour, bool(colouring.legend), console.width)
        if self._lines[0] != key:
            self._lines = (key, draw.lines(draw.rollout_text(rollout, self._texts, colouring), console))
        return [*facts, note], self._lines[1]

    def _colouring(self, which: tuple[int, int], rollout: Rollout, colour: ColourBy) -> Colouring | str:
        """Or why there is none. Raises ValueError for a rollout that does not fit together."""
        completions = [turn.completion for turn in rollout.turns]
        noted = any(one.logprobs for one in completions)
        if noted and any(len(one.token_ids) != len(one.logprobs) for one in completions):
            raise ValueError("it has another number of log-probs than of tokens")
        if colour == "version":
            spans = [versions_from_spans(one.weight_versions, len(one.token_ids)) for one in completions if one.token_ids]
            return by_version([version for versions in spans for version in versions])
        if not noted:
            return "log-probs are not recorded of this one"
        if colour == "logprob":
            return by_logprob([logprob for one in completions for logprob in one.logprobs])
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
