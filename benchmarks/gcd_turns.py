"""The demo's task in several turns: one subtraction per turn, then the environment poses the remaining problem.

    prompt `84,36:` -> `48,36;`    prompt `48,36:` -> `12,36;`    ...    prompt `12,12:` or `24,12:` -> `12,12>`

Each prompt is a problem in the demo's format, so the model can do a turn, but mostly guesses instead: `>04`. A turn
has at most six tokens. Every turn is a separate segment with its own prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipelinerl.environments.prompts import text_decoder
from pipelinerl.environments.tasks import gcd
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.models.encoding import encode_prompt
from pipelinerl.types import Problem, Rollout, Turn

TURN_TOKENS = 6
MAX_STEPS = 12


class GcdTurns:
    """Reward 1 if every turn is one right subtraction until both numbers are equal, or a guess (`>NN`) is right; else 0."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self._decode = text_decoder(tokenizer)

    def problem(self, index: int) -> Problem:
        return _problem(f"gcd-turns/{index}", random.Random(f"gcd-turns/{self._seed}/{index}"), held_out=False)

    def held_out(self, count: int) -> Sequence[Problem]:
        numbers = range(count)
        return [_problem(f"gcd-turns/held-out/{n}", random.Random(f"gcd-turns/{n}"), held_out=True) for n in numbers]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        a, b, answer = (int(problem.payload[name]) for name in ("a", "b", "answer"))
        turns: list[Turn] = []
        while True:
            prompt_ids = encode_prompt(self._tokenizer, f"{a:02d},{b:02d}:")
            completion = await client.generate(prompt_ids, max_tokens=TURN_TOKENS)
            text = self._decode(completion.token_ids)
            turns.append(Turn(prompt_ids=prompt_ids, completion=completion, text=text))
            if text.startswith(">"):
                return self._ended(turns, text == f">{answer:02d}")
            a, b = gcd.subtract_once(a, b)
            if text[:5] != f"{a:02d},{b:02d}":
                return self._ended(turns, False)
            if a == b:
                return self._ended(turns, text[5:] == ">")

    def _ended(self, turns: Sequence[Turn], right: bool) -> Rollout:
        return Rollout(turns=tuple(turns), reward=float(right), metrics={"turns": len(turns)})


def _problem(name: str, rng: random.Random, *, held_out: bool) -> Problem:
    steps = min(MAX_STEPS, 1 + int(rng.expovariate(1 / gcd.MEAN_EXTRA_STEPS)))
    return Problem(id=name, payload=dict(vars(gcd.draw_problem(rng, held_out, steps))))
