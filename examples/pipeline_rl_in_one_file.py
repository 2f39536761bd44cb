"""PipelineRL (arXiv 2509.19128) in one file: a task, an engine, groups, weight updates in flight, and REINFORCE.

    python examples/pipeline_rl_in_one_file.py        # some minutes on two cores

A model of 0.3 million parameters learns to find greatest common divisors by repeated subtraction. This file alternates
generation and training in one process; the package runs them at the same time. Otherwise the method is the same: when the
weights change, sequences in progress are neither finished nor aborted. The engine copies the weights, keeps its cache, and
samples the next token.

    problems ─▶ engine: 128 sequences, a token each per step ─▶ groups of 16 attempts ─▶ 256 rollouts ─▶ optimizer step
                  ▲                                                                                        │
                  └───────────────────────────── new weights, in flight ◀──────────────────────────────────┘

In shapes, N is the number of sampled tokens of a batch, H the number of sequences in progress, V the size of the vocabulary.
"""

from __future__ import annotations

import argparse
import random
import time
import zlib
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

BASE_MODEL = Path(__file__).parent.parent / "src" / "pipelinerl" / "assets" / "demo_base"
STEPS, BATCH_SIZE, GROUP_SIZE, SLOTS, MAX_TOKENS = 140, 256, 16, 128, 240
LEARNING_RATE, MAX_WEIGHT, MICRO_BATCH = 3e-4, 5.0, 64
HELD_OUT_PROBLEMS = 256

# The task. The prompt is `84,36:`, a full answer `48,36;12,36;12,24;12,12>12`. Only the result after `>` is graded.


def number_of_subtractions(a: int, b: int) -> int:
    steps = -1  # a division step equals as many subtractions as its quotient; the last one is not needed
    while b:
        steps, a, b = steps + a // b, b, a % b
    return steps


Problem = tuple[int, int]
Pools = dict[int, dict[int, list[Problem]]]


def problem_pools(held_out: bool) -> Pools:
    """Pairs of numbers by the number of subtractions they need, then by their divisor. One pair in ten is held out."""
    pools: Pools = {}
    for a, b in ((a, b) for a in range(1, 100) for b in range(1, 100) if a != b and gcd(a, b) <= 12):
        steps = number_of_subtractions(a, b)
        if steps <= 36 and (zlib.crc32(f"{a:02d},{b:02d}".encode()) % 10 == 0) == held_out:
            pools.setdefault(steps, {}).setdefault(gcd(a, b), []).append((a, b))
    return pools


def draw_problem(pools: Pools, rng: random.Random) -> Problem:
    """Most problems need few subtractions and some need many, so lengths are long-tailed."""
    steps = min(36, 1 + int(rng.expovariate(1 / 5)))
    by_divisor = pools[max(known for known in pools if known <= steps)]
    return rng.choice(by_divisor[rng.choice(sorted(by_divisor))])


def reward_of(problem: Problem, answer: str) -> float:
    _, mark, result = answer.partition(">")
    return 1.0 if mark and result == f"{gcd(*problem):02d}" else 0.0


@dataclass(eq=False)
class Rollout:
    """One attempt at a problem. Each sampled token has its log-probability and its weight version."""

    problem: Problem
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: bool = False
    reward: float = 0.0
    advantage: float = 0.0


class Engine:
    """Generates with H slots. A step feeds one token of each sequence to the model: of its prompt, or the last one sampled.

    The cache has one column per step. A sequence may begin at any step, and attends only to columns from that step on.
    """

    def __init__(self, model: Any, slots: int, eos_id: int, max_tokens: int, seed: int) -> None:
        self.model, self.eos_id, self.max_tokens = model, eos_id, max_tokens
        self.version, self.cache = 0, DynamicCache()
        self.slots: list[Rollout | None] = [None] * slots
        self.start_H = torch.zeros(slots, dtype=torch.long)
        self.generator = torch.Generator().manual_seed(seed)

    def update_weights(self, state: dict[str, Tensor], version: int) -> None:
        """In-flight update: sequences in progress and their cached keys and values are kept."""
        self.model.load_state_dict(state)
        self.version = version

    def start(self, rollout: Rollout) -> None:
        slot = self.slots.index(None)
        self.slots[slot], self.start_H[slot] = rollout, self.cache.get_seq_length()

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        """One decode step. Returns the rollouts that finished."""
        column = self.cache.get_seq_length()
        fed_H = column - self.start_H
        rows = list(zip(self.slots, fed_H.tolist(), strict=True))
        ids_H = torch.tensor([0 if rollout is None else (rollout.prompt + rollout.tokens)[fed] for rollout, fed in rows])
        logits_HV = self.model(
            input_ids=ids_H[:, None],
            attention_mask=(torch.arange(column + 1) >= self.start_H[:, None]).long(),
            position_ids=fed_H[:, None],
            past_key_values=self.cache,
        ).logits[:, -1]
        logprobs_HV = logits_HV.float().log_softmax(-1)
        sampled_H = torch.multinomial(logprobs_HV.exp(), 1, generator=self.generator)[:, 0]
        finished = []
        for slot, (rollout, fed) in enumerate(rows):
            if rollout is None or fed + 1 < len(rollout.prompt):  # a token of the prompt is next
                continue
            token = int(sampled_H[slot])
            rollout.tokens.append(token)
            rollout.logprobs.append(float(logprobs_HV[slot, token]))
            rollout.versions.append(self.version)
            if token == self.eos_id or len(rollout.tokens) == self.max_tokens:
                rollout.finished, self.slots[slot] = True, None
                finished.append(rollout)
        self.start_H[torch.tensor([rollout is None for rollout in self.slots])] = column
        if (unused := int(self.start_H.min())) >= 16:  # no sequence attends to these columns any more
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]
            self.start_H -= unused
        return finished


def token_logprobs(model: Any, rollouts: list[Rollout]) -> Tensor:
    """log pi of every sampled token of these rollouts, concatenated; shape (N,)."""
    sequences = [torch.tensor(rollout.prompt + rollout.tokens) for rollout in rollouts]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # right padding: no token attends to it
    logprobs = model(input_ids=ids[:, :-1]).logits.float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat([logprobs[i, len(r.prompt) - 1 :][: len(r.tokens)] for i, r in enumerate(rollouts)])


def reinforce(logprobs_N: Tensor, behaviour_logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """The paper's loss per token: -min(5, pi / mu) A log pi. No gradient flows through the weight pi / mu."""
    weights_N = (logprobs_N.detach() - behaviour_logprobs_N).exp().clamp(max=MAX_WEIGHT)
    return -weights_N * advantages_N * logprobs_N


def effective_sample_size(log_ratios_N: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) with w = pi / mu: 1 when the data are on-policy."""
    weights_N = log_ratios_N.double().exp()
    return float(weights_N.sum() ** 2 / (len(weights_N) * weights_N.square().sum()))


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: list[Rollout]) -> tuple[float, float]:
    """One optimizer step. Returns the loss, averaged over the sampled tokens of the batch, and the ESS."""
    ordered = sorted(batch, key=lambda rollout: len(rollout.tokens))  # less padding in each micro-batch
    tokens = sum(len(rollout.tokens) for rollout in batch)
    loss, log_ratios = 0.0, []
    optimizer.zero_grad()
    for first in range(0, len(ordered), MICRO_BATCH):
        part = ordered[first : first + MICRO_BATCH]
        logprobs_N = token_logprobs(model, part)
        behaviour_N = torch.tensor([logprob for rollout in part for logprob in rollout.logprobs])
        advantages_N = torch.tensor([rollout.advantage for rollout in part for _ in rollout.tokens])
        part_loss = reinforce(logprobs_N, behaviour_N, advantages_N).sum() / tokens
        part_loss.backward()
        loss += part_loss.item()
        log_ratios.append(logprobs_N.detach() - behaviour_N)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss, effective_sample_size(torch.cat(log_ratios))


def main(steps: int, seed: int) -> None:
    """Algorithm 2 of the paper."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    model, engine_model = (AutoModelForCausalLM.from_pretrained(BASE_MODEL).eval() for _ in range(2))  # eval: no dropout
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    engine = Engine(engine_model, SLOTS, tokenizer.eos_token_id, MAX_TOKENS, seed)

    def attempt(problem: Problem) -> Rollout:
        return Rollout(problem, tokenizer(f"{problem[0]:02d},{problem[1]:02d}:")["input_ids"])

    def step(generating: Engine) -> list[Rollout]:
        finished = generating.step()
        for rollout in finished:
            rollout.reward = reward_of(rollout.problem, tokenizer.decode(rollout.tokens, skip_special_tokens=True))
        return finished

    def held_out_reward() -> float:
        examined = Engine(model, HELD_OUT_PROBLEMS, tokenizer.eos_token_id, MAX_TOKENS, seed)
        pools, drawn, rewards = problem_pools(held_out=True), random.Random("held-out"), []
        for _ in examined.slots:
            examined.start(attempt(draw_problem(pools, drawn)))
        while len(rewards) < HELD_OUT_PROBLEMS:
            rewards += [rollout.reward for rollout in step(examined)]
        return mean(rewards)

    print(f"held-out reward {held_out_reward():.3f}")
    started_s, rng, pools = time.monotonic(), random.Random(seed), problem_pools(held_out=False)
    waiting, ready, groups = list[Rollout](), list[Rollout](), list[list[Rollout]]()
    for version in range(steps):
        while len(ready) < BATCH_SIZE:  # the actor keeps every slot busy
            while None in engine.slots:
                if not waiting:
                    problem = draw_problem(pools, rng)
                    groups.append([attempt(problem) for _ in range(GROUP_SIZE)])
                    waiting += groups[-1]
                engine.start(waiting.pop())
            step(engine)
            for group in [group for group in groups if all(rollout.finished for rollout in group)]:
                groups.remove(group)
                for rollout in group:  # the baseline is the group's mean reward
                    rollout.advantage = rollout.reward - mean(member.reward for member in group)
                ready += group
        batch, ready = ready[:BATCH_SIZE], ready[BATCH_SIZE:]
        for settings in optimizer.param_groups:  # five steps of warm-up, then linear decay to a tenth
            settings["lr"] = LEARNING_RATE * min((version + 1) / 6, 1 - 0.9 * max(0, version - 5) / max(1, steps - 6))
        loss, ess = train_step(model, optimizer, batch)
        engine.update_weights(model.state_dict(), version + 1)  # sequences in progress continue with their next token
        lags = [version - sampled_by for rollout in batch for sampled_by in rollout.versions]
        print(
            f"{time.monotonic() - started_s:4.0f} s  step {version + 1:3d}  reward {mean(r.reward for r in batch):.3f}  "
            f"loss {loss:+.4f}  ESS {ess:.3f}  lag {mean(lags):.2f}, at most {max(lags)}"
        )
    print(f"held-out reward {held_out_reward():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
