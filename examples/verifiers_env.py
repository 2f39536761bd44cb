"""An environment for the package `verifiers`, as it would be published: sums of products, with calculator tools.

pip install -e '.[verifiers]'
pipelinerl train examples/verifiers_env.yaml
"""

from __future__ import annotations

import random

import verifiers as vf
from datasets import Dataset

SYSTEM = "Use the tools. Then say the result between <answer> and </answer>."


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


def load_environment(problems: int = 1000, largest: int = 99) -> vf.Environment:
    rng = random.Random(0)  # every process of a run must load the same rows

    def row() -> dict[str, str]:
        a, b, c, d = (rng.randint(2, largest) for _ in range(4))
        return {"question": f"What is {a} * {b} + {c} * {d}?", "answer": str(a * b + c * d)}

    parser = vf.XMLParser(["answer"])

    def right(completion: vf.Messages, answer: str) -> float:
        return float(parser.parse_answer(completion) == answer)

    rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.1], parser=parser)
    return vf.ToolEnv(
        dataset=Dataset.from_list([row() for _ in range(problems)]),
        eval_dataset=Dataset.from_list([row() for _ in range(100)]),
        tools=[multiply, add],
        max_turns=6,
        system_prompt=SYSTEM,
        parser=parser,
        rubric=rubric,
    )
