"""What reading the beginnings of prompts from the cache saves: agents of ten turns on the demo's model.

python -m benchmarks.prefixes               # two minutes on two quiet cores

Each turn samples up to 12 tokens, and the environment answers with 12 to 15. Runs with `engine.prefix` keep, version and off
take turns. The tokens that a rollout must have prefilled are those of its conversation that it did not sample, once each.
Writes `prefixes.json`.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import common
from benchmarks.common import Record
from pipelinerl import load_config
from pipelinerl.environments.tasks.gcd import Gcd
from pipelinerl.interfaces import GenerationClient
from pipelinerl.launch.run import train
from pipelinerl.metrics.reading import read_lines
from pipelinerl.preprocess.preprocessor import join_turns
from pipelinerl.types import Group, Problem, Rollout, Turn

TURNS = 10
POLICIES = ("keep", "version", "off")


class TenTurns(Gcd):
    """The reward is for digits: what is learned does not matter here."""

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        turns: list[Turn] = []
        prompt = tuple(self.tokenizer.encode(self.prompt(problem)))
        for number in range(TURNS):
            done = await client.generate(prompt, max_tokens=12)
            text = self.tokenizer.decode(done.answer_ids)
            turns.append(Turn(prompt_ids=prompt, completion=done, text=text))
            prompt = (*prompt, *done.token_ids, *self.tokenizer.encode(f"{number}{number};{self.prompt(problem)}12,1"))
        return Rollout(turns=tuple(turns), reward=sum(turn.text.count("1") for turn in turns) / 100)


def measure(policy: str, folder: Path, steps: int) -> Record:
    flags = {
        "run_dir": folder,
        "environment.kind": f"{Path(__file__).resolve()}:TenTurns",
        "engine.prefix": policy,
        "engine.max_length": 512,
        "engine.slots": 32,
        "actor.group_size": 8,
        "trainer.steps": steps,
        "trainer.batch_size": 32,
        "evaluation.problems": 0,
        "metrics.view": "none",
        "metrics.plot": "false",
    }
    summary = train(load_config(None, [f"--{key}={value}" for key, value in flags.items()]))
    rollouts = [one for group in read_lines(folder / "rollouts/rollouts.jsonl", Group) for one in group.rollouts]
    given = sum(len(turn.prompt_ids) for one in rollouts for turn in one.turns)
    joined = [segment for one in rollouts for segment in join_turns(one.turns).segments]
    once = sum(len(one.token_ids) - len(one.sampled_positions) for one in joined)
    return {
        "prefilled over once": round(summary["prefilled_tokens"] / summary["prompt_tokens"] * given / once, 3),
        "given over once": round(given / once, 3),
        "rollouts_per_s": round(summary["samples_per_s"], 1),
        "tokens_per_s": round(summary["tokens_per_s"]),
        "lag_mean": round(summary["lag_mean"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    before = common.machine()
    with tempfile.TemporaryDirectory(prefix="prefixes-") as folder:
        folders = (Path(folder) / str(number) for number in itertools.count())
        systems = {policy: partial(lambda one: measure(one, next(folders), options.steps), policy) for policy in POLICIES}
        records = common.take_turns(systems, options.repetitions, scenario={"turns": TURNS}, warm_up=False)
    names = [name for name in records[0] if name not in ("turns", "system", "repetition")]
    medians = {name: common.medians(records, name) for name in names}
    common.write_results(
        "prefixes",
        settings=common.settings_of(options),
        machine_before=before,
        records=records,
        table=[{"engine.prefix": policy} | {name: medians[name][policy] for name in names} for policy in POLICIES],
        directory=options.out,
    )


if __name__ == "__main__":
    main()
