"""Differences between log-probs under saved weights and the engine's, which are the only ones that a run records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.config import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.types import Rollout

if TYPE_CHECKING:
    from pipelinerl.trainer.logprobs import FrozenModelScorer


class Gaps:
    """Log-prob under saved weights minus the engine's, for each sampled token. The model is loaded at first use.

    `config` is the run's configuration, or the reason why it can't be read. `weights` None: the run's newest checkpoint.
    The engine's log-probs are after truncation by `top_p` and `top_k`; those computed here are not.
    """

    def __init__(self, run_dir: Path, config: RunConfig | str, weights: Path | None) -> None:
        self._run_dir = run_dir
        self._config = config
        self._weights = weights
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
        from pipelinerl.checkpoint import latest_checkpoint  # noqa: PLC0415 (loads torch)
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
        )
