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


def token_correction(trainer: TrainerConfig, correction: CorrectionConfig) -> TokenCorrection:
    """`correction.token`, with null resolved: `truncate` if the loss has an importance weight, else `none`.

    A weight of the sequence (`SEQUENCE_WEIGHTS`) replaces the tokens' weights, so null is `none` then, too.
    """
    if correction.token is not None:
        return correction.token
    return "truncate" if trainer.loss in WEIGHTED_LOSSES and correction.sequence not in SEQUENCE_WEIGHTS else "none"


def resolve(trainer: TrainerConfig, correction: CorrectionConfig) -> Correction:
    """The correction that a run uses, with all defaults filled in."""
    token, sequence = token_correction(trainer, correction), correction.sequence
    (token_low, token_high), (sequence_low, sequence_high) = (
        (
            low if low is not None else THRESHOLDS[part][kind][0] or 0.0,
            high if high is not None else THRESHOLDS[part][kind][1] or math.inf,
        )
        for part, kind, low, high in (
            ("token", token, correction.token_low, correction.token_high),
            ("sequence", sequence, correction.sequence_low, correction.sequence_high),
        )
    )
    return Correction(token, token_low, token_high, sequence, sequence_low, sequence_high, correction.drift)


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
    resolved = resolve(trainer, correction)
    for part, kind in (("token", token), ("sequence", sequence)):
        low, high = getattr(resolved, f"{part}_low"), getattr(resolved, f"{part}_high")
        if kind in SEQUENCE_WEIGHTS and loss not in WEIGHTED_LOSSES:
            yield (
                f"correction.{part}: `{kind}` limits the importance weight of reinforce and decoupled; `{loss}` has none: "
                "it bounds the ratio itself (trainer.clip_low, clip_high). Remove this key, or set it to a mask"
            )
        if kind in ("mask", "band", "geo_mask") and not low < 1 < high:
            yield (
                f"correction.{part}: `{kind}` from {low:g} to {high:g} masks what is exactly on-policy (ratio 1); set "
                f"{part}_low below 1 and {part}_high above 1"
            )
        for name, default in zip((f"{part}_low", f"{part}_high"), THRESHOLDS[part][kind], strict=True):
            if default is None and getattr(correction, name) is not None:
                yield f"correction.{name}: `{kind}` (correction.{part}) has no such threshold; remove it"
    if sequence in SEQUENCE_WEIGHTS and correction.token == "truncate":
        yield (
            f"correction.sequence: `{sequence}` replaces the tokens' weights with one weight of the whole rollout, so no "
            "token weight is left to truncate; remove one of the two"
        )
    if correction.drift > 0 and config.preprocess.zero_advantage == "skip":
        yield (
            "preprocess.zero_advantage: with correction.drift above 0, samples of zero advantage have a gradient too, "
            "which `skip` would ignore; set it to keep (or to drop, to leave such samples out)"
        )
