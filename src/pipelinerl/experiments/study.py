"""`pipelinerl lab study kv-cache`: how off-policy is data whose weights changed during generation?

Behaviour policies compared with the policy pi = C+g, starting from a checkpoint C:

    mixed, stale KV          C, C+1, ... C+g-2 sample one sequence in turn; the KV cache keeps older weights' entries
    mixed, recomputed KV     the same, but at each switch the new weights recompute all keys and values
    lag k = 0, 1, ..., g     conventional RL: C+g-k samples the whole sequence. Lag g is also what weights that are pinned
                             at the start of each sequence sample while the trainer comes to C+g
    prefix of lag k          C+g-k computes the prompt and samples the first half of L; C+g continues from its KV entries.
                             Only C+g's tokens count: what reading the beginning of a prompt from the cache costs

A policy is the version of the weights that samples each token of a completion. All policies get the same problems and random
numbers, so two policies sample the same tokens until they first disagree. Then the sampled sequences are fed to two models
(`recompute.py`), for both policies' distributions at every sampled token: the behaviour model has the weights that sampled
each token, the target model the weights of C+g. Source: PipelineRL, arXiv 2509.19128, section 5.1 and Figure 7.

Shapes: N tokens, V vocabulary, U problems.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelinerl.actor.client import derive_seed
from pipelinerl.actor.rollouts import sampling_of
from pipelinerl.config.schema import RunConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.experiments.recompute import KV, Recompute, Sampled, SavedWeights, Tensors, values_of
from pipelinerl.experiments.statistics import LEVEL, Floats, Interval, intervals, resampled_means
from pipelinerl.experiments.watch.page import page
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.loading import load_tokenizer, model_max_length, stop_token_ids
from pipelinerl.models.state import checksum
from pipelinerl.report import Chart, PageSection, in_terminal, only_shown, table, write_file, write_json, writing_to
from pipelinerl.report.series import RecordedGroup, read_groups
from pipelinerl.types import GenerationRequest, SamplingParams, VersionSpan, versions_from_spans

RESAMPLES = 2000
LENGTH_QUANTILE = 0.9
NAMED_STARTS = ("early", "middle", "late")
STALE, RECOMPUTED = "mixed, stale KV", "mixed, recomputed KV"
PREFIX_LAGS = (1, 4, 16)
KL = "KL(mu || pi), nats per token"


# ---- the results, as written to JSON


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One behaviour policy compared with the on-policy one.

    lag_mean         mean lag of the tokens
    kl               KL(mu || pi), exact at each position over the vocabulary, averaged over the sampled prefixes
    engine_gap       largest difference between the engine's log-probabilities and those of the replay that computes `kl`
    by_position      `kl` between the study's `edges`; null where no completion is that long; none for a prefix
    equivalent_lag   the lag at which conventional RL is equally off-policy, interpolated; None if it never is
    """

    tokens: int
    lag_mean: float
    kl: Interval
    engine_gap: float
    by_position: tuple[Interval, ...]
    equivalent_lag: float | None = None


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The study from one checkpoint C = `version`; the on-policy policy is `target` = C + g.

    `policies` by name: lag 0 is the target itself and shows the numerical error. The `differences` of mean KL are paired by
    problem.
    """

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


def choose_starts(run_dir: Path, saved: Sequence[int], wanted: Sequence[str], lag: int) -> list[int]:
    """The versions C that `wanted` names, each once: C, C+1, ..., C+lag are among the ascending `saved` versions.

    A name is `early`, `middle` or `late` (of all such versions), or a version number. Raises RunDirectoryError if there is
    no such version, UserError for any other name.
    """
    possible = [version for version in saved if {*saved}.issuperset(range(version, version + lag + 1))]
    if not possible:
        raise RunDirectoryError(
            f"{run_dir} has no {lag + 1} consecutive checkpoints; train with --trainer.checkpoint_every 1 "
            "--trainer.keep_checkpoints N, where N is the number of steps, or choose a smaller --lag"
        )
    named = dict(zip(NAMED_STARTS, (possible[0], median_low(possible), possible[-1]), strict=True))
    chosen = {name: named.get(name, int(name) if name.isdecimal() else -1) for name in wanted or [""]}
    for name, version in chosen.items():
        if version not in possible:
            raise UserError(
                f"--from {name}: give {', '.join(NAMED_STARTS)}, or versions from which {lag} more were saved "
                f"({possible[0]} to {possible[-1]} here)"
            )
    return list(dict.fromkeys(chosen.values()))


def read_history(run_dir: Path) -> tuple[list[RecordedGroup], int]:
    """The recorded groups with a prompt, the latest first, and the length that 90% of the completions do not exceed.

    Raises RunDirectoryError if there are no readable records, and UserError for a task of several turns.
    """
    groups = sorted(read_groups(run_dir), key=lambda group: -group.index)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise RunDirectoryError(f"{run_dir} holds no rollout; give the directory of a run that trained")
    if any(len(rollout.turns) > 1 for rollout in rollouts):
        raise UserError(
            f"the rollouts in {run_dir} have several turns; this study switches weights within one completion, so give "
            "a run on a task of a single turn"
        )
    lengths = [rollout.tokens for rollout in rollouts if rollout.turns]
    with_prompt = [group for group in groups if any(rollout.turns for rollout in group.rollouts)]
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


# ---- sampling from a policy


def mixed_policy(first: int, lag: int, length: int) -> list[int]:
    """The version of each token of a mixed policy: C + max(0, floor(t g / L) - 1).

    A sequence of up to L = `length` tokens is sampled while the trainer takes g = `lag` optimizer steps, from C = `first`
    to C+g. One step takes as long as an interval of L/g tokens. The first weight update arrives after two intervals, and
    one more at the end of each further interval:

        token       0 ... 2L/g ... 3L/g ...      (g-1)L/g ... L
        weights     |   C   |  C+1  |  C+2  ...      |  C+g-2 |      trained on by C+g: lags g, g-1, ..., 2

    So there are g - 2 switches, and the lowest lag is 2. If L/g is not an integer, a switch takes place at the first token
    at or after its point. Source: PipelineRL, arXiv 2509.19128, section 5.1.
    """
    return [first + max(0, token * lag // length - 1) for token in range(length)]


class MixedSampler:
    """Samples from one policy after another with one engine.

    An engine's version can't decrease, but the study's versions do. So the engine gets an update number that increases
    with every update, and the numbers in its completions are replaced by the versions they stand for.
    """

    def __init__(self, model: Any, tensors: Tensors, *, slots: int, prompt_tokens: int, max_length: int, kv: KV) -> None:
        """Takes ownership of the model. No prompt is longer than `prompt_tokens`."""
        self._tensors = tensors
        self._slots = slots
        self._versions = [-1]  # by update number; 0: the initial weights, never used
        self._engine = LocalEngine(
            model,
            slots=slots,
            max_length=max_length,
            # All prompts are processed in the first step: every sequence then samples token s in step s.
            prefill_tokens=slots * prompt_tokens,
            kv_on_update=kv,
        )

    def sample(self, requests: Sequence[tuple[int, GenerationRequest]], policy: Sequence[int]) -> list[Sampled]:
        """Complete requests, given with their problems; token t is sampled by `policy[t]`. Stop tokens end a sequence.

        Raises RuntimeError if a token was sampled by another version.
        """
        found: list[Sampled] = []
        for begin in range(0, len(requests), self._slots):
            wave = {request.id: (problem, request) for problem, request in requests[begin : begin + self._slots]}
            for _, request in wave.values():
                self._engine.submit(request)
            token, done = 0, len(found) + len(wave)
            while len(found) < done:
                if token < len(policy) and (token == 0 or policy[token] != policy[token - 1]):
                    weights = self._tensors(policy[token])
                    self._engine.update_weights(WeightUpdate(len(self._versions), checksum(weights), weights))
                    self._versions.append(policy[token])
                for completion in self._engine.step().finished:
                    problem, request = wave[completion.request_id]
                    spans = tuple(
                        VersionSpan(self._versions[span.version], span.start, span.end)
                        for span in completion.weight_versions
                    )
                    length = len(completion.token_ids)
                    if versions_from_spans(spans, length) != list(policy[:length]):
                        raise RuntimeError(f"{completion.request_id} was sampled by {spans}, not by {policy}")
                    own = msgspec.structs.replace(completion, weight_versions=spans, prompt_versions=())
                    found.append(Sampled(request.prompt_ids, own, problem))
                token += 1
        return found


# ---- the divergence of a policy from the target


class Tokens(NamedTuple):
    """Arrays [N] with an entry for each sampled token. `kl` is in nats, given the sampled prefix."""

    problem: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    version: npt.NDArray[np.int64]
    kl: Floats


def exact_kl(behaviour_NV: Tensor, target_NV: Tensor) -> Tensor:
    """sum_v mu_v (log mu_v - log pi_v) in nats, [N] in float64, given log-probabilities. Tokens with mu = 0 add nothing."""
    mu_NV = behaviour_NV.double().exp()
    terms_NV = mu_NV * (behaviour_NV.double() - target_NV.double())
    return terms_NV.masked_fill(mu_NV == 0, 0.0).sum(-1)


def divergences(
    behaviour: Recompute, target: Recompute, samples: Sequence[Sampled], tensors: Tensors, kv: KV
) -> tuple[Tokens, float]:
    """Divergence of the behaviour policy from the weights that `target` has, at every sampled token. `kv` as in sampling.

    Also returns the largest |log mu here - log mu of the engine| over sampled tokens. It should be rounding error.
    """
    parts: list[Tokens] = []
    fed: dict[str, int] = defaultdict(int)
    gap = 0.0
    for version, feeds, mu_NV in behaviour.run(samples, tensors, kv):
        pi_NV = target.log_probabilities([feed._replace(start=fed[feed.sequence.completion.request_id]) for feed in feeds])
        fed |= {feed.sequence.completion.request_id: feed.end for feed in feeds}
        ids, engine = values_of(feeds)
        mu_N = mu_NV.gather(1, torch.tensor(ids, device=mu_NV.device)[:, None])[:, 0].cpu().numpy()
        gap = max(gap, float(np.abs(mu_N - engine).max()))
        parts.append(
            Tokens(
                problem=np.repeat([feed.sequence.of for feed in feeds], [feed.predicted for feed in feeds]),
                position=np.concatenate([np.arange(feed.token, feed.token + feed.predicted) for feed in feeds]),
                version=np.full(len(ids), version),
                kl=exact_kl(mu_NV, pi_NV).cpu().numpy(),
            )
        )
    return Tokens(*map(np.concatenate, zip(*parts, strict=True))), gap


def by_problem(tokens: Tokens, problems: int, edges: Sequence[int]) -> tuple[Floats, Floats]:
    """Sum of the KL and number of tokens of each problem, both [U, 1 + intervals]: over all tokens, then between edges."""
    sums, counts = [], []
    for start, end in [(0, math.inf), *pairwise(edges)]:
        inside_N = (tokens.position >= start) & (tokens.position < end)
        problem_n = tokens.problem[inside_N]
        sums.append(np.bincount(problem_n, weights=tokens.kl[inside_N], minlength=problems))
        counts.append(np.bincount(problem_n, minlength=problems))
    return np.stack(sums, axis=1), np.stack(counts, axis=1).astype(np.float64)


def equivalent_lag(kl: float, kl_by_lag: Sequence[float]) -> float | None:
    """The lag k at which `kl_by_lag[k]` first reaches `kl`, interpolated linearly; None if it never does."""
    for lag, (below, above) in enumerate(pairwise(kl_by_lag)):
        if above >= kl:
            return lag + (max(0.0, kl - below) / (above - below) if above > below else 0.0)
    return None


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
    versions = choose_starts(run_dir, weights.saved, starts, lag)
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
        # Edge i is ceil(i L / g), the first token t with floor(t g / L) = i.
        edges=tuple(-(-i * length // lag) for i in range(lag + 1)),
        problems=min(problems, len(groups)),
        attempts=attempts,
        temperature=config.actor.temperature,
        seed=seed,
    )
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    models = [weights.new_model(0, config.engine.device) for _ in range(4)]
    sampling = sampling_of(config.actor, stop_token_ids(models[0], load_tokenizer(config.model)))
    sampling = msgspec.structs.replace(sampling, max_tokens=length)
    requests = make_requests(groups[:problems], sampling, attempts, seed)
    prompt_tokens = max(len(request.prompt_ids) for _, request in requests)
    longest = prompt_tokens + length
    limit = config.engine.max_length or model_max_length(models[0])
    if limit is not None and longest > limit:
        raise UserError(f"prompt and completion of {longest} tokens do not fit into {limit}; choose a smaller --max-tokens")
    sizes = {"slots": min(config.engine.slots, len(requests)), "max_length": longest}
    kinds: tuple[KV, ...] = ("keep", "recompute")
    samplers = {
        kv: MixedSampler(model, weights, prompt_tokens=prompt_tokens, **sizes, kv=kv)
        for kv, model in zip(kinds, models[:2], strict=True)
    }
    behaviour, target = (Recompute(model, temperature=study.temperature, **sizes) for model in models[2:])

    def measure(name: str, policy: Sequence[int], version: int) -> tuple[PolicyRecord, Floats]:
        """Compare a behaviour policy with the weights of `version`. Also returns its mean KL in each resample.

        If these weights sample the end, only their tokens count.
        """
        on_progress(f"weights {version - lag} to {version}: {name}")
        kv: KV = "recompute" if name == RECOMPUTED else "keep"
        tokens, gap = divergences(behaviour, target, samplers[kv].sample(requests, policy), weights, kv)
        if policy[-1] == version:
            own_N = tokens.version == version
            tokens = Tokens(*(values[own_N] for values in tokens))
        sums = by_problem(tokens, study.problems, study.edges)
        means_RQ = resampled_means(*sums, resamples=study.resamples, seed=seed)
        kl, *along = intervals(means_RQ, study.level)
        lag_mean = float((version - tokens.version).mean())
        by_position = () if policy[0] != policy[-1] == version else tuple(along)
        record = PolicyRecord(tokens=len(tokens.kl), lag_mean=lag_mean, kl=kl, engine_gap=gap, by_position=by_position)
        return record, means_RQ[:, :1]

    found = []
    for version in versions:
        target.load(weights(version + lag))
        found.append(_start(version, lag, length, measure))
    return msgspec.structs.replace(study, starts=tuple(found))


def _start(
    version: int, lag: int, length: int, measure: Callable[[str, Sequence[int], int], tuple[PolicyRecord, Floats]]
) -> StartRecord:
    """The study from one checkpoint, whose policies `measure` compares with the target."""
    target, mixed = version + lag, mixed_policy(version, lag, length)
    found = {name: measure(name, mixed, target) for name in (STALE, RECOMPUTED)}
    lagged = {f"lag {behind}": behind for behind in range(lag + 1)}
    found |= {name: measure(name, [target - behind] * length, target) for name, behind in lagged.items()}
    by_lag = [found[name][0].kl.mean for name in lagged]
    for behind in PREFIX_LAGS:
        if behind <= lag:
            policy = [target - behind] * (length // 2) + [target] * (length - length // 2)
            found[_prefix(behind)] = measure(_prefix(behind), policy, target)
    policies = {}
    for name, (record, _) in found.items():
        equivalent = float(lagged[name]) if name in lagged else equivalent_lag(record.kl.mean, by_lag)
        policies[name] = msgspec.structs.replace(record, equivalent_lag=equivalent)
    differences = {
        f"stale - {what}": intervals(found[STALE][1] - found[other][1])[0]
        for what, other in (("recomputed", RECOMPUTED), (f"lag {lag}", f"lag {lag}"))
    }
    return StartRecord(version=version, target=target, policies=policies, differences=differences)


def _prefix(lag: int) -> str:
    return f"prefix of lag {lag}"


# ---- output: the numbers, a page with charts, and the tables of the page in the terminal


def make_folder(out: Path) -> None:
    """Create `out` if needed and check that it is writable, before the study runs. Raises RunDirectoryError."""
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()


def write_study(study: StudyRecord, out: Path) -> str:
    """Write `kv-cache.json` and `kv-cache.html` into the folder `out`, and return what the command prints.

    Raises RunDirectoryError.
    """
    numbers, picture = out / "kv-cache.json", out / "kv-cache.html"
    sections = [_section(study, start) for start in study.starts]
    write_json(numbers, study)
    with only_shown(picture.name):
        write_file(picture, page(f"Stale KV entries: {study.environment}", sections).encode())
    return "".join([*map(in_terminal, sections), f"{numbers}\n{picture}\n"])


def _section(study: StudyRecord, start: StartRecord) -> PageSection:
    """A table and two charts, like Figure 7 of the paper. All numbers are in the JSON."""
    lead = (
        f"{KL}, to the on-policy policy: g_max = {study.lag}, L = {study.max_tokens}, {study.problems} problems, "
        f"{study.attempts} attempts at each. In brackets, and as thin lines: {study.level:.0%} intervals over "
        "problems. As lag: the conventional lag that is equally off-policy."
    )
    shown = [STALE, RECOMPUTED, *(f"lag {max(1, study.lag // part)}" for part in (8, 4, 2, 1))]
    policies = {name: start.policies[name] for name in shown}  # a lag that is there twice counts once
    rows = []
    prefixes = {name: start.policies[name].kl for name in map(_prefix, PREFIX_LAGS) if name in start.policies}
    for name, kl in ({name: one.kl for name, one in policies.items()} | prefixes | start.differences).items():
        one = start.policies.get(name)
        row = {"behaviour policy": name, "mean lag": "", "KL, exact": f"{kl.mean:.2e} ({kl.low:.2e} to {kl.high:.2e})"}
        as_lag = ""
        if one is not None:
            row["mean lag"] = f"{one.lag_mean:.2f}"
            as_lag = "more" if one.equivalent_lag is None else f"{one.equivalent_lag:.1f}"
        rows.append(row | {"as lag": as_lag})
    along = Chart(
        title=f"{KL}: along the sequence",
        x_label="token position",
        x=study.edges[:-1],
        lines={name: [kl.mean for kl in policy.by_position] for name, policy in policies.items()},
        log=True,
    )
    lagged = [start.policies[f"lag {behind}"].kl for behind in range(study.lag + 1)]
    curves = {"conventional, lag k": lagged}
    for name in (STALE, RECOMPUTED):
        curves[f"{name} (mean lag {policies[name].lag_mean:.1f})"] = [policies[name].kl] * len(lagged)
    by_lag = Chart(
        title=f"{KL}: mean over tokens",
        x_label="lag k of the whole sequence, optimizer steps",
        x=list(range(len(lagged))),
        lines={name: [kl.mean for kl in curve] for name, curve in curves.items()},
        intervals=[[[kl.low for kl in curve], [kl.high for kl in curve]] for curve in curves.values()],
    )
    section = table(f"Weights {start.version} to {start.target}", rows, lead)
    return msgspec.structs.replace(section, charts=[along, by_lag])
