"""May a group be trained on before its slowest verdict? The bias of five baselines, by enumeration, and what a quorum gains.

    python -m benchmarks.quorum                          # the table of biases: seconds
    python -m benchmarks.quorum --runs --seeds 3         # and runs of the demo's task with a slow judge, K = 16

`Quorum` is a prototype that changes no mechanism: each attempt is a group of one for the run, and the environment compares
it with the other attempts at its problem. Its reward is its advantage; `right` is the real reward.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks import common
from pipelinerl.environments.tasks.gcd import Gcd
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.report.series import reached_held_out, read_run
from pipelinerl.types import Problem, Rollout

# ---- the bias, exactly


class Ended(msgspec.Struct, frozen=True):
    """An attempt: which answer it gave, when its verdict came, and its reward."""

    answer: int
    time_s: float
    reward: float


def credits_of(attempts: Sequence[Ended], variant: str, quorum: int) -> list[float | None]:
    """The advantage of each attempt, in order of the verdicts; None: it is never trained on."""
    found: list[float | None] = []
    for place, own in enumerate(attempts):
        others = [one for at, one in enumerate(attempts) if at != place]
        first = [one for at, one in enumerate(attempts[:quorum]) if at != place]
        if variant == "all others":  # as the product does
            compared = others
        elif variant == "those that ended first":
            compared = [*(attempts[:place] or attempts[1:2])]
        elif variant == "quorum, the rest is dropped":
            compared = first if place < quorum else []
        elif variant == "quorum, late ones against all others":
            compared = first if place < quorum else others
        else:  # the first of the OTHERS: the same number, whoever is asked
            compared = others[: quorum - 1]
        found.append(own.reward - fmean(one.reward for one in compared) if compared else None)
    return found


VARIANTS = (
    "all others",
    "quorum of the others",
    "those that ended first",
    "quorum, late ones against all others",
    "quorum, the rest is dropped",
)


def expected_gradient(
    variant: str, policy: Sequence[float], cases: Sequence[Sequence[Ended]], *, size: int, quorum: int
) -> list[float]:
    """E[sum of A_i grad log pi(y_i)] / E[trained], by the logits of the answers, over all outcomes of `size` attempts.

    `cases[a]`: the equally likely (time, reward) of answer a. Ties are broken by the order of the attempts.
    """
    outcomes = [(policy[one.answer] / len(of_answer), one) for of_answer in cases for one in of_answer]
    total, trained = [0.0] * len(policy), 0.0
    for drawn in itertools.product(outcomes, repeat=size):
        chance = math.prod(p for p, _ in drawn)
        attempts = sorted((one for _, one in drawn), key=lambda one: one.time_s)
        for own, credit in zip(attempts, credits_of(attempts, variant, quorum), strict=True):
            if credit is None:
                continue
            trained += chance
            for answer, p in enumerate(policy):
                total[answer] += chance * credit * ((answer == own.answer) - p)
    return [value / trained for value in total]


def table_of_bias() -> list[dict[str, Any]]:
    """K = 4, M = 2, three answers, of which the first one is right. A verdict takes the length of the answer and a delay."""
    rows = []
    for name, lengths, rewards in (
        ("length and reward are independent", (1, 1, 1), (1, 0, 0)),
        ("long answers are wrong", (1, 1, 4), (1, 0, 0)),
        ("long answers are right", (4, 1, 1), (1, 0, 0)),
    ):
        policy = (0.3, 0.3, 0.4)
        cases = [[Ended(a, lengths[a] + late, rewards[a]) for late in (0, 1.1, 2.3)] for a in range(3)]
        mean = sum(p * r for p, r in zip(policy, rewards, strict=True))
        exact = [p * (r - mean) for p, r in zip(policy, rewards, strict=True)]
        for variant in VARIANTS:
            found = expected_gradient(variant, policy, cases, size=4, quorum=2)
            scale = math.hypot(*exact)
            bias = math.hypot(*(f - e for f, e in zip(found, exact, strict=True))) / scale
            rows.append({"case": name, "variant": variant, "gradient": found, "exact": exact, "relative_bias": bias})
    return rows


# ---- the prototype


class Quorum(Gcd):
    """The demo's task with a slow judge. An attempt ends with its verdict and those of `quorum` - 1 other attempts."""

    isolate_reward = False

    def __init__(self, tokenizer: Tokenizer, seed: int, *, size: int, quorum: int, median_s: float, token_s: float) -> None:
        super().__init__(tokenizer, seed)
        self.size, self.quorum, self.median_s, self.token_s = size, quorum, median_s, token_s
        self._started: Counter[int] = Counter()
        self._ended: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        self._changed: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    def problem(self, index: int) -> Problem:
        shared, attempt = divmod(index, self.size)
        made = super().problem(shared)
        return Problem(id=f"{made.id}/{attempt}", payload=dict(made.payload) | {"shared": shared, "attempt": attempt})

    def prompt(self, problem: Problem) -> str:
        return f"{problem.payload['a']:02d},{problem.payload['b']:02d}:"

    def reward(self, problem: Problem, text: str) -> float:
        result = text.partition(">")
        return float(bool(result[1]) and result[2] == f"{problem.payload['answer']:02d}")

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        shared, attempt = problem.payload.get("shared", -1), problem.payload.get("attempt", 0)
        self._started[shared] += 1
        rollout = await super().rollout(problem, client)
        if shared < 0 or self._started[shared] == 1:  # of an evaluation, or the launcher's try-out
            return msgspec.structs.replace(rollout, metrics={"right": rollout.reward})
        drawn = random.Random(f"{self.seed}/{problem.id}").lognormvariate(math.log(self.median_s), 1.0)
        await asyncio.sleep(drawn + self.token_s * len(rollout.turns[0].completion.token_ids))
        self._ended[shared].append((attempt, rollout.reward))
        self._changed[shared].set()
        while len(first := self._others(shared, attempt)) < self.quorum - 1:
            self._changed[shared].clear()
            await self._changed[shared].wait()
        credit = rollout.reward - fmean(first)
        return msgspec.structs.replace(rollout, reward=credit, metrics={"right": rollout.reward})

    def _others(self, shared: int, attempt: int) -> list[float]:
        """The rewards of the first `quorum` - 1 other attempts that have ended."""
        return [reward for other, reward in self._ended[shared] if other != attempt][: self.quorum - 1]


def advantage(group: Any) -> list[float]:
    """For `preprocess.advantage`."""
    return [rollout.reward for rollout in group.rollouts]


TARGET = 0.85
RUN = """
environment: {kind: "KIND:Quorum", args: {size: 16, quorum: QUORUM, median_s: MEDIAN_S, token_s: TOKEN_S}}
actor: {group_size: 1, max_tokens: 240, max_open_rollouts: 2048}
engine: {slots: 256, max_length: 256}
preprocess: {advantage: "KIND:advantage"}
trainer:
  {steps: STEPS, batch_size: 256, learning_rate: 3e-4, lr_schedule: linear, warmup_steps: 5, micro_batch_tokens: 2048,
   ess_lr: sqrt, checkpoint_every: 0}
correction: {sequence: truncate}
evaluation: {problems: 512, every: 16}
metrics: {view: none, plot: false}
"""


def measured(options: argparse.Namespace, quorum: int, seed: int) -> dict[str, Any]:
    """One run: its lag, and how many samples it took to a held-out reward of `TARGET`."""
    folder, text = options.folder, RUN.replace("KIND", str(Path(__file__).resolve())).replace("QUORUM", str(quorum))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"m{quorum}.yaml"
    for name in ("steps", "median_s", "token_s"):
        text = text.replace(name.upper(), str(getattr(options, name)))
    file.write_text(text)
    run_dir = folder / f"m{quorum}-seed{seed}"
    command = [sys.executable, "-m", "pipelinerl", "train", str(file), "--run_dir", str(run_dir), "--seed", str(seed)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {"quorum": quorum, "seed": seed, "median_s": options.median_s} | record_of(run_dir)


def record_of(run_dir: Path) -> dict[str, Any]:
    """`never_trained`: share of the started rollouts."""
    run = read_run(run_dir)
    points = [(one.version, one.reward_mean or 0.0) for one in run.evaluations]
    reached = reached_held_out(points, run.steps, run.begin_s, TARGET)
    summary = run.summary or {}
    return {
        "lag_mean": summary["lag_mean"],
        "lag_p99_mean": fmean(step.lag_p99 for step in run.steps if step.lag_p99 is not None),
        "lag_max": summary["lag_max"],
        "ess_mean": summary["ess_mean"],
        "ess_min": summary["ess_min"],
        "never_trained": 1 - summary["rollouts_trained"] / summary["rollouts_started"],
        "samples_to_target": reached[1] if reached else None,
        "held_out": points,
        "seconds": run.steps[-1].time_s - run.begin_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quorums", default="16,8,4")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--median-s", type=float, default=2.0, help="the judge's median time")
    parser.add_argument("--token-s", type=float, default=0.0, help="what it takes per token, besides")
    parser.add_argument("--folder", type=Path, default=Path("runs/quorum"))
    options = parser.parse_args()
    bias, before = table_of_bias(), common.machine()
    for row in bias:
        print(f"{row['case']:36} {row['variant']:40} {row['relative_bias']:8.2%}")
    if not options.runs:
        return
    runs = []
    for seed in range(options.seeds):
        for quorum in map(int, options.quorums.split(",")):
            runs.append(measured(options, quorum, seed))
            print(runs[-1], flush=True)
    found = {"settings": common.settings_of(options), "machine": before, "bias": bias, "runs": runs}
    (common.RESULTS / "quorum.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
