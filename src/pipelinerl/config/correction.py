"""Defaults for null in `correction` and in the clipping keys of `trainer`.

`trainer.loss` is the objective. `correction` is the treatment of tokens sampled by another policy than the trained one. The
formulas are in `trainer/losses.py`, their sources in `docs/corrections.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipelinerl.config.schema import CorrectionConfig, SequenceCorrection, TokenCorrection, TrainerConfig

WEIGHTED_LOSSES = ("reinforce", "decoupled")
"""Losses that multiply each token by an importance weight without a gradient. The others bound the ratio themselves."""

THRESHOLDS: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "token": {
        "none": (None, None),
        "truncate": (None, 5.0),
        "mask": (None, 2.0),
        "band": (0.5, 5.0),
        "tv": (0.2, 0.2),
    },
    "sequence": {
        "none": (None, None),
        "truncate": (None, 5.0),
        "geo_truncate": (None, 2.0),
        "geo_mask": (0.9, 1.1),
    },
}
"""Defaults of `token_low`, `token_high`, `sequence_low` and `sequence_high` by kind; None: there is none."""

SEQUENCE_WEIGHTS = ("truncate", "geo_truncate")
"""Kinds that give all tokens of a rollout one weight in place of their own."""

_CLIP_RANGES = {"ppo": (0.2, 0.2), "cispo": (0.2, 0.2), "decoupled": (0.2, 0.2), "gspo": (3e-4, 4e-4)}


@dataclass(frozen=True)
class Correction:
    """A `CorrectionConfig` with nulls resolved. A threshold that the kind does not have is 0 (low) or infinite (high)."""

    token: TokenCorrection
    token_low: float
    token_high: float
    sequence: SequenceCorrection
    sequence_low: float
    sequence_high: float
    drift: float


def resolve(trainer: TrainerConfig, correction: CorrectionConfig) -> Correction:
    """The correction that a run uses, with all defaults filled in.

    `token` null is `truncate` if the loss has an importance weight, else `none`. A weight of the sequence
    (`SEQUENCE_WEIGHTS`) replaces the tokens' weights, so null is `none` then, too.
    """
    sequence, weighted = correction.sequence, trainer.loss in WEIGHTED_LOSSES
    token = correction.token or ("truncate" if weighted and correction.sequence not in SEQUENCE_WEIGHTS else "none")
    low, high = THRESHOLDS["token"][token]
    sequence_low, sequence_high = THRESHOLDS["sequence"][sequence]
    return Correction(
        token=token,
        token_low=correction.token_low or low or 0.0,
        token_high=correction.token_high or high or math.inf,
        sequence=sequence,
        sequence_low=correction.sequence_low or sequence_low or 0.0,
        sequence_high=correction.sequence_high or sequence_high or math.inf,
        drift=correction.drift,
    )


def clip_range(trainer: TrainerConfig) -> tuple[float, float]:
    """(`clip_low`, `clip_high`) with the loss's own defaults: 0.2 and 0.2, for `gspo` its paper's 3e-4 and 4e-4.

    Raises KeyError for `reinforce`, which clips nothing.
    """
    low, high = _CLIP_RANGES[trainer.loss]
    return (
        low if trainer.clip_low is None else trainer.clip_low,
        high if trainer.clip_high is None else trainer.clip_high,
    )
