"""The stale-KV study: how off-policy is data whose weights changed during generation?

Behaviour policies compared with the policy pi = C+g, starting from a checkpoint C:

    mixed, stale KV          C, C+1, ... C+g-2 sample one sequence in turn; the KV cache keeps older weights' entries
    mixed, recomputed KV     the same, but at each switch the new weights recompute all keys and values
    lag k = 0, 1, ..., g     conventional RL: C+g-k samples the whole sequence

All policies get the same problems and random numbers, so two policies sample the same tokens until they first disagree.
Source: PipelineRL, arXiv 2509.19128, section 5.1 and Figure 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_low

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

RESAMPLES = 2000
LEVEL = 0.95
LENGTH_QUANTILE = 0.9
NAMED_STARTS = ("early", "middle", "late")
STALE, RECOMPUTED = "mixed, stale KV", "mixed, recomputed KV"


# ---- the results, as written to JSON. KL is KL(mu || pi) in nats per token.


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One behaviour policy compared with the on-policy one.

    lag_mean         mean lag of the sampled tokens
    kl               exact at each position over the vocabulary, averaged over the sampled prefixes
    kl_k1, kl_k3     the same, estimated from the sampled tokens' log-probabilities alone
    engine_gap       largest difference between the engine's log-probabilities and those of the replay that computes `kl`
    by_position      `kl` between the study's `edges`; null where no completion is that long
    equivalent_lag   the lag at which conventional RL is equally off-policy, interpolated; None if it never is
    """

    tokens: int
    lag_mean: float
    kl: Interval
    kl_k1: Interval
    kl_k3: Interval
    engine_gap: float
    by_position: tuple[Interval, ...]
    equivalent_lag: float | None = None


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The study from one checkpoint C = `version`; the on-policy policy is `target` = C + g.

    `policies` by name: lag 0 is the target itself and shows the numerical error. The `differences` of mean KL are paired by
    problem.
    """

    name: str
    version: int
    target: int
    policies: dict[str, PolicyRecord]
    differences: dict[str, Interval]


class StudyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The complete results.

    `lag` is g, `max_tokens` is L; `edges` divide the tokens into intervals of one optimizer step, within which a mixed
    policy has one version: C up to the third edge, and then one more after each.
    """

    model: str
    environment: str
    run_seed: int
    lag: int
    max_tokens: int
    edges: tuple[int, ...]
    problems: int
    attempts: int
    temperature: float
    seed: int
    resamples: int = RESAMPLES
    level: float = LEVEL
    starts: tuple[StartRecord, ...] = ()


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
    groups: Sequence[RecordedGroup], sampling: SamplingParams, attempts: int, seed: int
) -> list[tuple[int, GenerationRequest]]:
    """Problem number and request for each attempt at the problems, with the recorded prompts, each with a seed."""
    found = []
    for problem, group in enumerate(groups):
        prompts = [turn.prompt_ids for rollout in group.rollouts for turn in rollout.turns]
        for number in range(attempts):
            own = msgspec.structs.replace(sampling, seed=derive_seed(seed, "study", problem, number))
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
    study = StudyRecord(
        model=Path(config.model.path).name,
        environment=Path(config.environment.kind).name,
        run_seed=config.seed,
        lag=lag,
        max_tokens=length,
        edges=interval_edges(lag, length),
        problems=min(problems, len(groups)),
        attempts=attempts,
        temperature=config.actor.temperature,
        seed=seed,
    )
    found = _studied(study, config, weights, groups[:problems], versions, on_progress=on_progress)
    return msgspec.structs.replace(study, starts=tuple(found))


def _studied(
    study: StudyRecord,
    config: RunConfig,
    weights: SavedWeights,
    groups: Sequence[RecordedGroup],
    versions: Mapping[str, int],
    *,
    on_progress: Callable[[str], object],
) -> Iterator[StartRecord]:
    """The study from each of these versions, by name, with the problems of `groups`."""
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    lag, length = study.lag, study.max_tokens
    models = [weights.new_model(0, config.engine.device) for _ in range(4)]
    sampling = SamplingParams(
        max_tokens=length,
        temperature=study.temperature,
        top_p=config.actor.top_p,
        top_k=config.actor.top_k,
        stop_token_ids=stop_token_ids(models[0], load_tokenizer(config.model)),
    )
    requests = make_requests(groups, sampling, study.attempts, study.seed)
    prompt_tokens = max(len(request.prompt_ids) for _, request in requests)
    longest = prompt_tokens + length
    limit = config.engine.max_length or model_max_length(models[0])
    if limit is not None and longest > limit:
        raise UserError(f"prompt and completion of {longest} tokens do not fit into {limit}; choose a smaller --max-tokens")
    slots = min(config.engine.slots, len(requests))
    kinds: tuple[KV, ...] = ("keep", "recompute")
    samplers = {
        kv: MixedSampler(model, weights, slots=slots, prompt_tokens=prompt_tokens, max_tokens=length, kv=kv)
        for kv, model in zip(kinds, models[:2], strict=True)
    }
    behaviour, target_model = (
        Recompute(model, slots=slots, max_length=longest, temperature=study.temperature) for model in models[2:]
    )
    counts_RU = draw_counts(study.problems, RESAMPLES, study.seed)

    def measure(policy: Sequence[int], target: int, kv: KV) -> tuple[PolicyRecord, Tokens]:
        """Sample from a behaviour policy and compare it with the weights of version `target`."""
        tokens, gap = divergences(behaviour, target_model, samplers[kv].sample(requests, policy), weights, kv)

        def mean(name: str, start: int = 0, end: float = np.inf) -> Interval:
            return mean_interval(*sums(tokens, name, study.problems, start, end), counts_RU, LEVEL)

        record = PolicyRecord(
            tokens=len(tokens["position"]),
            lag_mean=float((target - tokens["version"]).mean()),
            kl=mean("exact"),
            kl_k1=mean("k1"),
            kl_k3=mean("k3"),
            engine_gap=gap,
            by_position=tuple(mean("exact", start, end) for start, end in pairwise(study.edges)),
        )
        return record, tokens

    def difference(one: Tokens, other: Tokens) -> Interval:
        both = sums(one, "exact", study.problems), sums(other, "exact", study.problems)
        return difference_interval(*both, counts_RU, LEVEL)

    for name, version in versions.items():
        target, mixed = version + lag, mixed_policy(version, lag, length)
        target_model.load(weights(target))
        where = f"{name}: weights {version} to {target}" if name != str(version) else f"weights {version} to {target}"
        on_progress(f"{where}, mixed policy with stale and with recomputed KV")
        stale, stale_tokens = measure(mixed, target, "keep")
        recomputed, recomputed_tokens = measure(mixed, target, "recompute")
        lagged, oldest_tokens = [], stale_tokens
        for behind in range(lag + 1):
            on_progress(f"{where}, conventional lag {behind} of {lag}")
            record, oldest_tokens = measure([target - behind] * length, target, "keep")
            lagged.append(msgspec.structs.replace(record, equivalent_lag=float(behind)))
        by_lag = [record.kl.mean for record in lagged]
        policies = {
            kind: msgspec.structs.replace(record, equivalent_lag=equivalent_lag(record.kl.mean, by_lag))
            for kind, record in ((STALE, stale), (RECOMPUTED, recomputed))
        }
        yield StartRecord(
            name=name,
            version=version,
            target=target,
            policies=policies | {f"lag {behind}": record for behind, record in enumerate(lagged)},
            differences={
                "stale - recomputed": difference(stale_tokens, recomputed_tokens),
                f"stale - lag {lag}": difference(stale_tokens, oldest_tokens),
            },
        )
