"""The stale-KV study: how off-policy is data whose weights changed during generation?

Behaviour policies compared with the policy pi = C+g, starting from a checkpoint C:

    mixed policy, stale KV       C, C+1, ... C+g-2 sample one sequence in turn; the KV cache keeps older weights' entries
    mixed policy, recomputed KV  the same, but at each switch the new weights recompute all keys and values
    lag k = 0, 1, ..., g         conventional RL: C+g-k samples the whole sequence

All policies get the same problems and random numbers, so two policies sample the same tokens until they first disagree.
Source: PipelineRL, arXiv 2509.19128, section 5.1 and Figure 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import torch

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.experiments.recompute import KV, SavedWeights
from pipelinerl.experiments.statistics import Interval, Ints, difference_interval, draw_counts, mean_interval
from pipelinerl.experiments.study.inputs import RunHistory, choose_starts, make_prompts, possible_starts, read_history
from pipelinerl.experiments.study.policies import (
    Divergences,
    MixedSampler,
    Stretch,
    TokenDivergences,
    equivalent_lag,
    interval_edges,
    lagged_policy,
    mixed_policy,
)
from pipelinerl.models.loading import load_tokenizer, model_max_length, stop_token_ids
from pipelinerl.types import SamplingParams

FORMAT = 2


Kind = Literal["stale", "recomputed", "lagged"]


# ---- the results, as written to JSON. KL is KL(mu || pi) in nats per token.


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

    kind: Kind
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


# ---- the study


RESAMPLES = 2000
LEVEL = 0.95
LENGTH_QUANTILE = 0.9
_KV: tuple[KV, ...] = ("keep", "recompute")


def study_kv_cache(
    run_dir: Path,
    config: RunConfig,
    *,
    lag: int,
    starts: Sequence[str],
    problems: int,
    attempts: int,
    max_tokens: int | None,
    seed: int,
    on_progress: Callable[[str], object],
) -> StudyRecord:
    """Run the study on the checkpoints of `run_dir`, whose configuration is `config`.

    `max_tokens` None: the length that 90% of the run's completions do not exceed. Raises UserError (or a subclass) if the
    run lacks data that the study needs. `on_progress` is called with lines of text.
    """
    weights = SavedWeights(run_dir, config.model)
    versions = choose_starts(starts, possible_starts(run_dir, weights.kept, lag), lag)
    history = read_history(run_dir)
    length = max_tokens or history.length_quantile(LENGTH_QUANTILE)
    if length < lag:
        raise UserError(
            f"{length} tokens can't be divided among {lag} steps; choose a --lag of at most {length}, or a larger "
            "--max-tokens"
        )
    settings = StudySettings(
        lag=lag,
        max_tokens=length,
        switches=tuple(stretch.start for stretch in mixed_policy(0, lag, length)[1:]),
        problems=min(problems, len(history.prompts)),
        attempts=attempts,
        temperature=config.actor.temperature,
        seed=seed,
        resamples=RESAMPLES,
        level=LEVEL,
    )
    experiment = _Experiment(config, weights, settings, history)
    return StudyRecord(
        model=Path(config.model.path).name,
        environment=Path(config.environment.kind).name,
        run_seed=config.seed,
        settings=settings,
        starts=tuple(experiment.study(name, version, on_progress) for name, version in versions.items()),
    )


class _Experiment:
    """The prompts, models and resamples that all measurements share."""

    def __init__(self, config: RunConfig, weights: SavedWeights, settings: StudySettings, history: RunHistory) -> None:
        if config.engine.threads is not None:
            torch.set_num_threads(config.engine.threads)
        self._weights = weights
        self._settings = settings
        models = [weights.new_model(0, config.engine.device) for _ in range(4)]
        sampling = SamplingParams(
            max_tokens=settings.max_tokens,
            temperature=config.actor.temperature,
            top_p=config.actor.top_p,
            top_k=config.actor.top_k,
            stop_token_ids=stop_token_ids(models[0], load_tokenizer(config.model)),
        )
        self._prompts = make_prompts(
            history, sampling, problems=settings.problems, attempts=settings.attempts, seed=settings.seed
        )
        prompt_tokens = max(len(prompt.request.prompt_ids) for prompt in self._prompts)
        longest = prompt_tokens + settings.max_tokens
        limit = config.engine.max_length or model_max_length(models[0])
        if limit is not None and longest > limit:
            raise UserError(
                f"prompt and completion of {longest} tokens do not fit into {limit}; choose a smaller --max-tokens"
            )
        slots = min(config.engine.slots, len(self._prompts))
        self._samplers = {
            kv: MixedSampler(model, weights, slots=slots, prompt_tokens=prompt_tokens, max_tokens=settings.max_tokens, kv=kv)
            for kv, model in zip(_KV, models[:2], strict=True)
        }
        self._divergences = Divergences(*models[2:], slots=slots, max_length=longest, temperature=settings.temperature)
        self._counts_RU = draw_counts(settings.problems, settings.resamples, settings.seed)

    def study(self, name: str, version: int, on_progress: Callable[[str], object]) -> StartRecord:
        lag, length = self._settings.lag, self._settings.max_tokens
        target = version + lag
        mixed = mixed_policy(version, lag, length)
        where = f"{name}: " if name != str(version) else ""
        on_progress(f"{where}weights {version} to {target}, mixed policy with stale and with recomputed KV")
        stale, stale_tokens = self._measure("stale", mixed, target, kv="keep")
        recomputed, recomputed_tokens = self._measure("recomputed", mixed, target, kv="recompute")
        lagged = []
        oldest_tokens = stale_tokens
        for behind in range(lag + 1):
            on_progress(f"{where}weights {version} to {target}, conventional lag {behind} of {lag}")
            record, oldest_tokens = self._measure("lagged", lagged_policy(target - behind, length), target, kv="keep")
            lagged.append(record)
        by_lag = [record.kl.mean for record in lagged]
        return StartRecord(
            name=name,
            version=version,
            target=target,
            stale=stale,
            recomputed=recomputed,
            lagged=tuple(lagged),
            stale_minus_recomputed=self._difference(stale_tokens, recomputed_tokens),
            stale_minus_oldest=self._difference(stale_tokens, oldest_tokens),
            equivalent_lag_stale=equivalent_lag(stale.kl.mean, by_lag),
            equivalent_lag_recomputed=equivalent_lag(recomputed.kl.mean, by_lag),
        )

    def _difference(self, one: TokenDivergences, other: TokenDivergences) -> Interval:
        problems = self._settings.problems
        sums = (one.sums(one.exact_N, problems), other.sums(other.exact_N, problems))
        return _required(difference_interval(*sums, self._counts_RU, LEVEL))

    def _measure(
        self, kind: Kind, stretches: Sequence[Stretch], target: int, *, kv: KV
    ) -> tuple[PolicyRecord, TokenDivergences]:
        """Sample from a behaviour policy and compare it with the weights of version `target`."""
        problems = self._settings.problems
        samples = self._samplers[kv].sample(self._prompts, stretches)
        tokens, gap = self._divergences.run(samples, target, self._weights, kv=kv)
        kl, kl_k1, kl_k3 = (
            _required(mean_interval(*tokens.sums(values_N, problems), self._counts_RU, LEVEL))
            for values_N in (tokens.exact_N, tokens.k1_N, tokens.k3_N)
        )
        record = PolicyRecord(
            kind=kind,
            lag=target - stretches[0].version if kind == "lagged" else None,
            tokens=len(tokens.position_N),
            lag_mean=float((target - tokens.version_N).mean()),
            kl=kl,
            kl_k1=kl_k1,
            kl_k3=kl_k3,
            engine_gap=gap,
            by_position=_by_position(tokens, self._settings, self._counts_RU),
        )
        return record, tokens


def _by_position(tokens: TokenDivergences, settings: StudySettings, counts_RU: Ints) -> tuple[PositionRecord, ...]:
    """KL by position, in intervals of one optimizer step: within an interval a mixed policy has one version."""
    records = []
    for start, end in pairwise(interval_edges(settings.lag, settings.max_tokens)):
        sums_U, tokens_U = tokens.sums(tokens.exact_N, settings.problems, start, end)
        kl = mean_interval(sums_U, tokens_U, counts_RU, LEVEL)
        records.append(PositionRecord(start=start, end=end, tokens=int(tokens_U.sum()), kl=kl))
    return tuple(records)


def _required(interval: Interval | None) -> Interval:
    if interval is None:  # can't happen: every completion has at least one token, the stop token
        raise RuntimeError("a policy sampled no tokens")
    return interval
