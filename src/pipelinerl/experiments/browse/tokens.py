"""Shows one rollout token by token: token ids as safe text, colours by version, log-prob or gap, and the gaps themselves."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.text import Text

from pipelinerl.config.schema import ModelConfig, RunConfig
from pipelinerl.environments.prompts import plain_decoder
from pipelinerl.environments.text_stream import TextStream
from pipelinerl.errors import ModelLoadError, UserError
from pipelinerl.experiments.browse.groups import lag_text
from pipelinerl.experiments.browse.records import Trained, one_line
from pipelinerl.status.screen import printable
from pipelinerl.types import Rollout, Turn, VersionSpan, versions_from_spans

if TYPE_CHECKING:
    from pipelinerl.trainer.logprobs import FrozenModelScorer

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

    def legend_text(self) -> Text:
        text = Text()
        for label, style in self.legend[:12]:
            text.append("██ ", style.removeprefix("bold ")).append(f"{label}  ", "dim")
        return text.append("...", "dim") if len(self.legend) > 12 else text


def by_version(versions: Sequence[int]) -> Colouring:
    """By weight version. Consecutive versions never share a colour; distant ones may."""
    styles = {version: _VERSIONS[i % len(_VERSIONS)] for i, version in enumerate(sorted(set(versions)))}
    return Colouring(
        [styles[version] for version in versions], [(f"v{version}", style) for version, style in styles.items()]
    )


def by_logprob(logprobs: Sequence[float]) -> Colouring:
    """By the probability with which the engine sampled each token."""
    return _by_limits([math.exp(min(0.0, logprob)) for logprob in logprobs], _PROBABILITIES, _PROBABILITY_STYLES, "p <")


def by_gap(gaps: Sequence[float]) -> Colouring:
    """By log-prob under saved weights minus the engine's, in nats: red is less likely now, blue more likely."""
    return _by_limits(gaps, _GAPS, _GAP_STYLES, "below")


def _by_limits(values: Sequence[float], limits: Sequence[float], styles: Sequence[str], below: str) -> Colouring:
    labels = [f"{below} {limits[0]:g}", *(f"from {limit:g}" for limit in limits)]
    return Colouring([styles[bisect_right(limits, value)] for value in values], list(zip(labels, styles, strict=True)))


def colouring_of(rollout: Rollout, colour: ColourBy, gaps: Sequence[float] | str) -> Colouring | str:
    """The colouring of all sampled tokens, or the reason why there is none. Raises ValueError for an inconsistent rollout.

    `gaps`: for the colours by gap, one per token, or the reason why there are none.
    """
    completions = [turn.completion for turn in rollout.turns]
    recorded = any(completion.logprobs for completion in completions)
    if recorded and any(len(completion.token_ids) != len(completion.logprobs) for completion in completions):
        raise ValueError("the numbers of log-probs and tokens differ")
    if colour == "version":
        spans = [(one.weight_versions, len(one.token_ids)) for one in completions if one.token_ids]
        return by_version([version for of_turn, count in spans for version in versions_from_spans(of_turn, count)])
    if not recorded:
        return "log-probs are not recorded for this rollout"
    if colour == "logprob":
        return by_logprob([logprob for completion in completions for logprob in completion.logprobs])
    return gaps if isinstance(gaps, str) else by_gap(gaps)


# ---- the text of one rollout


def rollout_facts(rollout: Rollout, trained: Trained | None, left_out: str | None) -> Text:
    facts = Text.assemble(
        (one_line(rollout.id), "bold"),
        ("   reward ", "dim"),
        (f"{rollout.reward:.4g}", "bold"),
        ("   trained on in step ", "dim"),
        ("-" if trained is None else f"{trained.step}", "bold"),
        ("   lag ", "dim"),
        (lag_text([trained]), "bold"),
    )
    if left_out is not None:
        facts.append("   left out by the trainer: ", "dim").append(one_line(left_out), "bold")
    return facts


def rollout_text(rollout: Rollout, texts: TokenText, styles: Sequence[str]) -> Text:
    """Metrics, then prompt and completion of each turn. `styles`: one for each sampled token, in order."""
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
        body.append(f"{_spans_text(turn.completion.prompt_versions)}\n")
        body.append(f"{printable(texts.text(added))}\n", "dim")
        ids = turn.completion.token_ids
        body.append(f"── completion, {len(ids)} tokens, {turn.completion.finish_reason} ", "bold")
        body.append(f"{_spans_text(turn.completion.weight_versions)}\n")
        for piece, style in zip(texts.pieces(ids), styles[offset : offset + len(ids)], strict=True):
            body.append(printable(piece).replace("\n", "⏎\n"), style)
        body.append("\n")
        conversation = len(turn.text) > len(texts.text(ids))  # of an evaluation, with what the environment added
        if turn.text and (conversation or not texts.known):
            body.append("── as text\n", "bold").append(f"{printable(turn.text)}\n")
        offset += len(ids)
        seen = (*turn.prompt_ids, *ids)
    return body


def _new_prompt_ids(turn: Turn, seen: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The part of a turn's prompt that was not shown with the previous turn, and a label for it."""
    if seen and turn.prompt_ids[: len(seen)] == seen:
        return turn.prompt_ids[len(seen) :], "what the prompt adds"
    return turn.prompt_ids, "prompt, which does not continue the turn before" if seen else "prompt"


def _spans_text(spans: Sequence[VersionSpan]) -> str:
    """Like `v3: 0-11, v4: 12-40`; positions are inclusive."""
    return ", ".join(f"v{span.version}: {span.start}-{span.end - 1}" for span in spans)


# ---- gaps between log-probs


class Gaps:
    """Log-prob under saved weights minus the engine's, for each sampled token. The model is loaded at first use.

    `config` is the run's configuration, or the reason why it can't be read. `weights` None: the run's newest checkpoint.
    The engine's log-probs, the only ones that a run records, are after truncation by `top_p` and `top_k`; those computed
    here are not.
    """

    def __init__(self, run_dir: Path, config: RunConfig | str, weights: Path | None) -> None:
        self._run_dir, self._config, self._weights = run_dir, config, weights
        self._scorer: FrozenModelScorer | None = None

    def of(self, rollout: Rollout) -> list[float]:
        """The gaps in nats. Raises UserError if no weights can score the rollout, and what `load_model` raises."""
        from pipelinerl.preprocess.turns import join_turns  # noqa: PLC0415 (with the others)

        joined = join_turns(rollout.turns)
        if not joined.segments:
            return []
        if isinstance(self._config, str):
            raise UserError(self._config)
        self._scorer = self._scorer or self._load(self._config)
        try:
            scores = [logprob for segment in self._scorer.score(joined.segments) for logprob in segment]
        except (IndexError, RuntimeError) as error:  # ids beyond the vocabulary, no memory
            raise UserError(f"these weights can't score the rollout: {str(error).splitlines()[0]}") from error
        return [new - old for new, old in zip(scores, joined.behaviour_logprobs, strict=True)]

    def _load(self, config: RunConfig) -> FrozenModelScorer:
        from pipelinerl.checkpoint_folders import latest_checkpoint  # noqa: PLC0415
        from pipelinerl.models.loading import load_model  # noqa: PLC0415
        from pipelinerl.preprocess.packing import pack  # noqa: PLC0415
        from pipelinerl.trainer.logprobs import FrozenModelScorer  # noqa: PLC0415

        if config.actor.temperature == 0:
            raise UserError("the run sampled greedily: its log-probs have no distribution to compare with")
        path = self._weights or latest_checkpoint(self._run_dir)
        if path is None:
            raise UserError("the gap needs weights: the run has no checkpoint yet; name a model folder with --weights")
        model = load_model(config.model.model_copy(update={"path": str(path), "trust_remote_code": False}))
        return FrozenModelScorer(
            model,
            temperature=config.actor.temperature,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            pack=pack,
            head_chunk=config.trainer.head_chunk,
        )
