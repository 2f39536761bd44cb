"""The stale-KV study: how off-policy is data whose weights changed during generation?

Behaviour policies compared with the policy pi = C+g, starting from a checkpoint C:

    mixed policy, stale KV       C, C+1, ... C+g-2 sample one sequence in turn; the KV cache keeps older weights' entries
    mixed policy, recomputed KV  the same, but at each switch the new weights recompute all keys and values
    lag k = 0, 1, ..., g         conventional RL: C+g-k samples the whole sequence

All policies get the same problems and random numbers, so two policies sample the same tokens until they first disagree.
Source: PipelineRL, arXiv 2509.19128, section 5.1 and Figure 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Literal

import msgspec
import numpy as np
import torch

from pipelinerl.actor.client import derive_seed
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.experiments.recompute import KV, Recompute, SavedWeights
from pipelinerl.experiments.statistics import Interval, difference_interval, draw_counts, mean_interval
from pipelinerl.experiments.study.policies import (
    MixedSampler,
    Tokens,
    divergences,
    equivalent_lag,
    interval_edges,
    mixed_policy,
    sums,
)
from pipelinerl.models.loading import load_tokenizer, model_max_length, stop_token_ids
from pipelinerl.report.series import RecordedGroup, read_groups
from pipelinerl.types import GenerationRequest, SamplingParams

FORMAT = 2
Kind = Literal["stale", "recomputed", "lagged"]
RESAMPLES = 2000
LEVEL = 0.95
LENGTH_QUANTILE = 0.9
NAMED_STARTS = ("early", "middle", "late")
KV_OF: Mapping[Kind, KV] = {"stale": "keep", "recomputed": "recompute", "lagged": "keep"}


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


# ---- what the study takes from a run


def choose_starts(run_dir: Path, saved: Sequence[int], wanted: Sequence[str], lag: int) -> Mapping[str, int]:
    """Name -> version C, from which C, C+1, ..., C+lag are among the ascending `saved` versions.

    A name is `early`, `middle` or `late` (of all such versions), or a version number. If several names mean the same
    version, only the first is kept. Raises RunDirectoryError if there is no such version, UserError for any other name.
    """
    possible = [version for version in saved if {*saved}.issuperset(range(version, version + lag + 1))]
    if not possible:
        raise RunDirectoryError(
            f"{run_dir} has no {lag + 1} consecutive checkpoints; train with --trainer.checkpoint_every 1 "
            "--trainer.keep_checkpoints N, where N is the number of steps, or choose a smaller --lag"
        )
    named = dict(zip(NAMED_STARTS, (possible[0], median_low(possible), possible[-1]), strict=True))
    chosen: dict[str, int] = {}
    for name in wanted or [""]:
        version = named.get(name, int(name) if name.isdecimal() else -1)
        if version not in possible:
            raise UserError(
                f"--from {name}: give {', '.join(NAMED_STARTS)}, or versions from which {lag} more were saved "
                f"({possible[0]} to {possible[-1]} here)"
            )
        if version not in chosen.values():
            chosen[name] = version
    return chosen


def read_history(run_dir: Path) -> tuple[list[RecordedGroup], int]:
    """The recorded groups with a prompt, the latest first, and the length that 90% of the completions do not exceed.

    Raises RunDirectoryError if there are no readable records, and UserError for a task of several turns.
    """
    groups = read_groups(run_dir)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise RunDirectoryError(f"{run_dir} holds no rollout; give the directory of a run that trained")
    if any(len(rollout.turns) > 1 for rollout in rollouts):
        raise UserError(
            f"the rollouts in {run_dir} have several turns; this study switches weights within one completion, so give "
            "a run on a task of a single turn"
        )
    lengths = [rollout.tokens for rollout in rollouts if rollout.turns]
    latest = sorted(groups, key=lambda group: -group.index)
    with_prompt = [group for group in latest if any(rollout.turns for rollout in group.rollouts)]
    return with_prompt, int(np.quantile(lengths, LENGTH_QUANTILE, method="inverted_cdf"))


def make_requests(
    groups: Sequence[RecordedGroup], sampling: SamplingParams, settings: StudySettings
) -> list[tuple[int, GenerationRequest]]:
    """Problem number and request for each attempt at the first problems, with the recorded prompts, each with a seed."""
    found = []
    for problem, group in enumerate(groups[: settings.problems]):
        prompts = [turn.prompt_ids for rollout in group.rollouts for turn in rollout.turns]
        for number in range(settings.attempts):
            own = msgspec.structs.replace(sampling, seed=derive_seed(settings.seed, "study", problem, number))
            name, ids = f"p{problem}.a{number}", prompts[number % len(prompts)]
            found.append((problem, GenerationRequest(id=name, prompt_ids=ids, sampling=own)))
    return found


# ---- the study


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
    versions = choose_starts(run_dir, weights.kept, starts, lag)
    groups, usual_length = read_history(run_dir)
    length = max_tokens or usual_length
    if length < lag:
        raise UserError(
            f"{length} tokens can't be divided among {lag} steps; choose a --lag of at most {length}, or a larger "
            "--max-tokens"
        )
    settings = StudySettings(
        lag=lag,
        max_tokens=length,
        switches=tuple(token for token, (a, b) in enumerate(pairwise(mixed_policy(0, lag, length)), start=1) if a != b),
        problems=min(problems, len(groups)),
        attempts=attempts,
        temperature=config.actor.temperature,
        seed=seed,
        resamples=RESAMPLES,
        level=LEVEL,
    )
    experiment = _Experiment(config, weights, settings, groups)
    return StudyRecord(
        model=Path(config.model.path).name,
        environment=Path(config.environment.kind).name,
        run_seed=config.seed,
        settings=settings,
        starts=tuple(experiment.study(name, version, on_progress) for name, version in versions.items()),
    )


class _Experiment:
    """The requests, models and resamples that all measurements share."""

    def __init__(
        self, config: RunConfig, weights: SavedWeights, settings: StudySettings, groups: Sequence[RecordedGroup]
    ) -> None:
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
        self._requests = make_requests(groups, sampling, settings)
        prompt_tokens = max(len(request.prompt_ids) for _, request in self._requests)
        longest = prompt_tokens + settings.max_tokens
        limit = config.engine.max_length or model_max_length(models[0])
        if limit is not None and longest > limit:
            raise UserError(
                f"prompt and completion of {longest} tokens do not fit into {limit}; choose a smaller --max-tokens"
            )
        slots = min(config.engine.slots, len(self._requests))
        kinds: tuple[KV, ...] = ("keep", "recompute")
        self._samplers = {
            kv: MixedSampler(model, weights, slots=slots, prompt_tokens=prompt_tokens, max_tokens=settings.max_tokens, kv=kv)
            for kv, model in zip(kinds, models[:2], strict=True)
        }
        self._behaviour, self._target = (
            Recompute(model, slots=slots, max_length=longest, temperature=settings.temperature) for model in models[2:]
        )
        self._counts_RU = draw_counts(settings.problems, settings.resamples, settings.seed)

    def study(self, name: str, version: int, on_progress: Callable[[str], object]) -> StartRecord:
        lag, length = self._settings.lag, self._settings.max_tokens
        target = version + lag
        self._target.load(self._weights(target))
        mixed = mixed_policy(version, lag, length)
        where = f"{name}: " if name != str(version) else ""
        on_progress(f"{where}weights {version} to {target}, mixed policy with stale and with recomputed KV")
        stale, stale_tokens = self._measure("stale", mixed, target)
        recomputed, recomputed_tokens = self._measure("recomputed", mixed, target)
        lagged = []
        oldest_tokens = stale_tokens
        for behind in range(lag + 1):
            on_progress(f"{where}weights {version} to {target}, conventional lag {behind} of {lag}")
            record, oldest_tokens = self._measure("lagged", [target - behind] * length, target)
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

    def _difference(self, one: Tokens, other: Tokens) -> Interval:
        problems = self._settings.problems
        both = sums(one, "exact", problems), sums(other, "exact", problems)
        return _required(difference_interval(*both, self._counts_RU, LEVEL))

    def _measure(self, kind: Kind, policy: Sequence[int], target: int) -> tuple[PolicyRecord, Tokens]:
        """Sample from a behaviour policy and compare it with the weights of version `target`."""
        settings, kv = self._settings, KV_OF[kind]
        samples = self._samplers[kv].sample(self._requests, policy)
        tokens, gap = divergences(self._behaviour, self._target, samples, self._weights, kv)

        def mean(name: str, start: int = 0, end: float = np.inf) -> Interval | None:
            return mean_interval(*sums(tokens, name, settings.problems, start, end), self._counts_RU, LEVEL)

        # By position in intervals of one optimizer step: within an interval a mixed policy has one version.
        by_position = []
        for start, end in pairwise(interval_edges(settings.lag, settings.max_tokens)):
            inside = int(((tokens["position"] >= start) & (tokens["position"] < end)).sum())
            by_position.append(PositionRecord(start=start, end=end, tokens=inside, kl=mean("exact", start, end)))
        record = PolicyRecord(
            kind=kind,
            lag=target - policy[0] if kind == "lagged" else None,
            tokens=len(tokens["position"]),
            lag_mean=float((target - tokens["version"]).mean()),
            kl=_required(mean("exact")),
            kl_k1=_required(mean("k1")),
            kl_k3=_required(mean("k3")),
            engine_gap=gap,
            by_position=tuple(by_position),
        )
        return record, tokens


def _required(interval: Interval | None) -> Interval:
    if interval is None:  # can't happen: every completion has at least one token, the stop token
        raise RuntimeError("a policy sampled no tokens")
    return interval
