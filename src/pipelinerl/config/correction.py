"""Defaults for null in `correction` and in the clipping keys of `trainer`, and checks of their combinations.

`trainer.loss` is the objective. `correction` is the treatment of tokens sampled by another policy than the trained one. The
formulas are in `trainer/losses/corrections.py`, their sources in `docs/corrections.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pipelinerl.config.schema import CorrectionConfig, RunConfig, SequenceCorrection, TokenCorrection, TrainerConfig

WEIGHTED_LOSSES = ("reinforce", "decoupled")
"""Losses that multiply each token by an importance weight without a gradient. The others bound the ratio themselves."""

TOKEN_THRESHOLDS: dict[TokenCorrection, tuple[float | None, float | None]] = {
    "none": (None, None),
    "truncate": (None, 5.0),
    "mask": (None, 2.0),
    "band": (0.5, 5.0),
    "tv": (0.2, 0.2),
}
"""Defaults of `token_low` and `token_high` by kind; None: the kind has no such threshold."""

SEQUENCE_THRESHOLDS: dict[SequenceCorrection, tuple[float | None, float | None]] = {
    "none": (None, None),
    "truncate": (None, 5.0),
    "geo_truncate": (None, 2.0),
    "geo_mask": (0.9, 1.1),
}
"""Defaults of `sequence_low` and `sequence_high` by kind."""

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


def token_correction(trainer: TrainerConfig, correction: CorrectionConfig) -> TokenCorrection:
    """`correction.token`, with null resolved: `truncate` if the loss has an importance weight, else `none`.

    A weight of the sequence (`SEQUENCE_WEIGHTS`) replaces the tokens' weights, so null is `none` then, too.
    """
    if correction.token is not None:
        return correction.token
    return "truncate" if trainer.loss in WEIGHTED_LOSSES and correction.sequence not in SEQUENCE_WEIGHTS else "none"


def resolve(trainer: TrainerConfig, correction: CorrectionConfig) -> Correction:
    """The correction that a run uses, with all defaults filled in."""
    token = token_correction(trainer, correction)
    token_low, token_high = _filled(TOKEN_THRESHOLDS[token], correction.token_low, correction.token_high)
    sequence_low, sequence_high = _filled(
        SEQUENCE_THRESHOLDS[correction.sequence], correction.sequence_low, correction.sequence_high
    )
    return Correction(token, token_low, token_high, correction.sequence, sequence_low, sequence_high, correction.drift)


def clip_range(trainer: TrainerConfig) -> tuple[float, float]:
    """(`clip_low`, `clip_high`) with the loss's own defaults: 0.2 and 0.2, for `gspo` its paper's 3e-4 and 4e-4.

    Raises KeyError for `reinforce`, which clips nothing.
    """
    low, high = _CLIP_RANGES[trainer.loss]
    return (
        low if trainer.clip_low is None else trainer.clip_low,
        high if trainer.clip_high is None else trainer.clip_high,
    )


def mistakes(config: RunConfig) -> Iterator[str]:
    """Error messages for invalid combinations, each with the key and the fix."""
    trainer, correction = config.trainer, config.correction
    loss, token, sequence = trainer.loss, token_correction(trainer, correction), correction.sequence
    for key, kind in (("token", token), ("sequence", sequence)):
        if kind in SEQUENCE_WEIGHTS and loss not in WEIGHTED_LOSSES:
            yield (
                f"correction.{key}: `{kind}` limits the importance weight of reinforce and decoupled; `{loss}` has none: "
                "it bounds the ratio itself (trainer.clip_low, clip_high). Remove this key, or set it to a mask"
            )
    if sequence in SEQUENCE_WEIGHTS and correction.token == "truncate":
        yield (
            f"correction.sequence: `{sequence}` replaces the tokens' weights with one weight of the whole rollout, so no "
            "token weight is left to truncate; remove one of the two"
        )
    yield from _threshold_mistakes("token", token, TOKEN_THRESHOLDS[token], correction.token_low, correction.token_high)
    yield from _threshold_mistakes(
        "sequence", sequence, SEQUENCE_THRESHOLDS[sequence], correction.sequence_low, correction.sequence_high
    )
    resolved = resolve(trainer, correction)
    if token in ("mask", "band") and not resolved.token_low < 1 < resolved.token_high:
        yield (
            f"correction.token: `{token}` from {resolved.token_low:g} to {resolved.token_high:g} masks tokens that are "
            "exactly on-policy (ratio 1); set token_low below 1 and token_high above 1"
        )
    if sequence == "geo_mask" and not resolved.sequence_low < 1 < resolved.sequence_high:
        yield (
            f"correction.sequence: `geo_mask` from {resolved.sequence_low:g} to {resolved.sequence_high:g} masks rollouts "
            "that are exactly on-policy (ratio 1); set sequence_low below 1 and sequence_high above 1"
        )
    if correction.drift > 0 and config.preprocess.zero_advantage == "skip":
        yield (
            "preprocess.zero_advantage: with correction.drift above 0, samples of zero advantage have a gradient too, "
            "which `skip` would ignore; set it to keep (or to drop, to leave such samples out)"
        )


def _filled(defaults: tuple[float | None, float | None], low: float | None, high: float | None) -> tuple[float, float]:
    default_low, default_high = defaults
    return (
        low if low is not None else 0.0 if default_low is None else default_low,
        high if high is not None else math.inf if default_high is None else default_high,
    )


def _threshold_mistakes(
    part: str, kind: str, defaults: tuple[float | None, float | None], low: float | None, high: float | None
) -> Iterator[str]:
    for name, default, value in ((f"{part}_low", defaults[0], low), (f"{part}_high", defaults[1], high)):
        if default is None and value is not None:
            yield f"correction.{name}: `{kind}` (correction.{part}) has no such threshold; remove it"
