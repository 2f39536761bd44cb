"""Results of the stale-KV study, as written to JSON. KL is KL(mu || pi) in nats per token."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipelinerl.experiments.statistics import Interval

FORMAT = 1


class PositionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens at positions `start <= t < end`. `kl` (exact) is None if no completion is that long."""

    start: int
    end: int
    tokens: int
    kl: Interval | None


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One behaviour policy compared with the on-policy one.

    kind           `stale` or `recomputed`: a mixed policy whose KV entries were kept or recomputed at each switch;
                   `lagged`: one version for all tokens, `lag` steps behind
    lag_mean       mean lag of the sampled tokens
    kl             exact at each position over the vocabulary, averaged over the sampled prefixes
    kl_k1, kl_k3   the same, estimated from the sampled tokens' log-probabilities alone
    engine_gap     largest difference between the engine's log-probabilities and those of the replay that computes `kl`
    """

    kind: Literal["stale", "recomputed", "lagged"]
    lag: int | None
    tokens: int
    lag_mean: float
    kl: Interval
    kl_k1: Interval
    kl_k3: Interval
    engine_gap: float
    by_position: tuple[PositionRecord, ...]


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The study from one checkpoint C = `version`; the on-policy policy is `target` = C + g.

    `lagged` holds lags 0, 1, ..., g; lag 0 is the target itself and shows the numerical error. The differences of mean KL
    (`stale_minus_oldest` is stale minus lag g) are paired by problem. `equivalent_lag_*` is the lag at which conventional
    RL is equally off-policy, interpolated; None if it never is.
    """

    name: str
    version: int
    target: int
    stale: PolicyRecord
    recomputed: PolicyRecord
    lagged: tuple[PolicyRecord, ...]
    stale_minus_recomputed: Interval
    stale_minus_oldest: Interval
    equivalent_lag_stale: float | None
    equivalent_lag_recomputed: float | None


class StudySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`lag` is g_max, `max_tokens` is L; `switches` are the first tokens sampled by C+1, C+2, ..."""

    lag: int
    max_tokens: int
    switches: tuple[int, ...]
    problems: int
    attempts: int
    first_problem: int
    temperature: float
    seed: int
    resamples: int
    level: float


class StudyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The complete results."""

    model: str
    environment: str
    run_seed: int
    settings: StudySettings
    starts: tuple[StartRecord, ...]
    study: Literal["kv-cache"] = "kv-cache"
    format: int = FORMAT
