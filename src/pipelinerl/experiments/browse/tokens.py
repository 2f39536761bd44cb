"""Shows one rollout: token ids as safe text, a table of its tokens, and gaps between log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelinerl.config.schema import ModelConfig, RunConfig
from pipelinerl.environments.prompts import plain_decoder
from pipelinerl.environments.text_stream import TextStream
from pipelinerl.errors import ModelLoadError, UserError
from pipelinerl.experiments.browse.groups import rollout_facts
from pipelinerl.experiments.browse.records import Fate, one_line
from pipelinerl.status.screen import printable
from pipelinerl.types import Rollout, Turn, VersionSpan, versions_from_spans

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


def rollout_text(rollout: Rollout, fate: Fate, texts: TokenText, gaps: Sequence[float] = ()) -> Iterator[str]:
    """Facts, prompt and completion of each turn, then a line for each sampled token: weight version, log-prob, gap.

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
    yield f"{'turn':>4} {'token':>6} {'id':>8} {'version':>8} {'logprob':>9} {'gap':>9}  text\n"
    left = iter(gaps)
    for number, turn in enumerate(rollout.turns):
        ids, logprobs = turn.completion.token_ids, turn.completion.logprobs or (None,) * len(turn.completion.token_ids)
        versions = versions_from_spans(turn.completion.weight_versions, len(ids))
        for place, (token_id, version, logprob, piece) in enumerate(
            zip(ids, versions, logprobs, texts.pieces(ids), strict=True)
        ):
            numbers = " ".join(f"{'-' if one is None else f'{one:.4f}':>9}" for one in (logprob, next(left, None)))
            text = printable(piece).replace("\n", "⏎")
            yield f"{number:>4} {place:>6} {token_id:>8} {version:>8} {numbers}  {text}\n"


def _new_prompt_ids(turn: Turn, seen: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The part of a turn's prompt that was not shown with the previous turn, and a label for it."""
    if seen and turn.prompt_ids[: len(seen)] == seen:
        return turn.prompt_ids[len(seen) :], "what the prompt adds"
    return turn.prompt_ids, "prompt, which does not continue the turn before" if seen else "prompt"


def _spans_text(spans: Sequence[VersionSpan]) -> str:
    """Like `v3: 0-11, v4: 12-40`; positions are inclusive."""
    return ", ".join(f"v{span.version}: {span.start}-{span.end - 1}" for span in spans)


# ---- gaps between log-probs


def gaps_of(rollout: Rollout, config: RunConfig, weights: Path) -> list[float]:
    """Log-prob under saved weights minus the engine's in nats, for each sampled token.

    `weights`: a model folder, or a run directory, whose newest checkpoint is taken. The engine's log-probs, the only ones
    that a run records, are after truncation by `top_p` and `top_k`; those computed here are not. Raises UserError if these
    weights can't score the rollout, and what `load_model` raises.
    """
    from pipelinerl.checkpoint_folders import latest_checkpoint  # noqa: PLC0415 (loads torch, as those below)
    from pipelinerl.models.loading import load_model  # noqa: PLC0415
    from pipelinerl.preprocess.packing import pack  # noqa: PLC0415
    from pipelinerl.preprocess.turns import join_turns  # noqa: PLC0415
    from pipelinerl.trainer.logprobs import FrozenModelScorer  # noqa: PLC0415

    joined = join_turns(rollout.turns)
    if config.actor.temperature == 0:
        raise UserError("the run sampled greedily: its log-probs have no distribution to compare with")
    if not joined.behaviour_logprobs:
        raise UserError("log-probs are not recorded for this rollout")
    path = latest_checkpoint(weights) or weights
    scorer = FrozenModelScorer(
        load_model(config.model.model_copy(update={"path": str(path), "trust_remote_code": False})),
        temperature=config.actor.temperature,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        pack=pack,
        head_chunk=config.trainer.head_chunk,
    )
    try:
        scores = [logprob for segment in scorer.score(joined.segments) for logprob in segment]
    except (IndexError, RuntimeError) as error:  # ids beyond the vocabulary, no memory
        raise UserError(f"these weights can't score the rollout: {str(error).splitlines()[0]}") from error
    return [new - old for new, old in zip(scores, joined.behaviour_logprobs, strict=True)]
