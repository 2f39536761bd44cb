"""How far the engine's log-probs are from those of other weights: the records of a run hold only the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.types import Rollout

if TYPE_CHECKING:
    from pipelinerl.trainer.logprobs import FrozenModelScorer


class Gaps:
    """Log-prob under saved weights minus the engine's, for each sampled token. The model is loaded at first use.

    `config` is the run's, or why there is none. `weights` None: the run's newest checkpoint. What the engine noted is
    after `top_p` and `top_k`; what is computed here is not.
    """

    def __init__(self, run_dir: Path, config: RunConfig | str, weights: Path | None) -> None:
        self._run_dir = run_dir
        self._config = config
        self._weights = weights
        self._scorer: FrozenModelScorer | None = None

    def of(self, rollout: Rollout) -> list[float]:
        """Nats. Raises UserError if there are no weights or the records do not allow it, and what loading a model raises."""
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
            raise UserError("the run sampled greedily: its log-probs are of no distribution to compare with")
        path = self._weights or latest_checkpoint(self._run_dir)
        if path is None:
            raise UserError("no gap without weights: the run has no checkpoint yet; name a model folder with --weights")
        model = load_model(msgspec.structs.replace(config.model, path=str(path), trust_remote_code=False))
        return FrozenModelScorer(
            model,
            temperature=config.actor.temperature,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            pack=pack,
        )
