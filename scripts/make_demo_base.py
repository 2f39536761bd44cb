"""Make the demo's base model: a tiny Llama trained on worked gcd examples of mixed quality.

    python scripts/make_demo_base.py --out src/pipelinerl/assets/demo_base

It first learns the arithmetic from careful examples, then imitates a population of demonstrators: some work
to the end, some answer at once, some give up on the way, some make errors. Each example has one demonstrator, so
the model learns the right way but follows it only some of the time. Reinforcement learning has to find out
which behaviour is rewarded. Held-out pairs are never a prompt here (though they can occur as an intermediate step).

The schedule counts steps, not seconds, and runs on one thread, so the same library versions on the
same kind of machine reproduce the weights.

`--recurrent` makes a hybrid of the same size instead (Qwen3.5: a layer with a recurrent state, then one with attention), for
`docs/on_policyness.md`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pretraining import pretrain
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from pipelinerl.environments.tasks.gcd import (
    ALPHABET,
    MAX_STEPS,
    GcdProblem,
    draw_problem,
    prompt_text,
    subtract_once,
)

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = {symbol: index for index, symbol in enumerate([PAD, EOS, *ALPHABET])}
IGNORED_LABEL = -100

Example = tuple[str, str]  # prompt, completion


# ---- demonstrators


def finish_line(cells: list[tuple[int, int]], result: int) -> str:
    return ";".join(f"{a:02d},{b:02d}" for a, b in cells) + f">{result:02d}"


def demonstrate(problem: GcdProblem, rng: random.Random, *, quit_chance: float = 0.0, slip_chance: float = 0.0) -> str:
    """Work through `problem`. `quit_chance`: of giving up before each step. `slip_chance`: of an error of one at each step.

    A demonstrator that gives up reports the larger number, which is always wrong: the smaller one would often be
    right by chance.
    """
    a, b = problem.a, problem.b
    cells: list[tuple[int, int]] = []
    while a != b and len(cells) < MAX_STEPS and rng.random() >= quit_chance:
        a_was_larger = a > b
        a, b = subtract_once(a, b)
        if rng.random() < slip_chance:
            off_by = rng.choice((-1, 1))
            a, b = (max(1, a + off_by), b) if a_was_larger else (a, max(1, b + off_by))
        cells.append((a, b))
    return finish_line(cells, max(a, b))


def careful(problem: GcdProblem, rng: random.Random) -> str:
    return demonstrate(problem, rng)


def hasty(problem: GcdProblem, rng: random.Random) -> str:
    """Almost always answer at once."""
    return demonstrate(problem, rng, quit_chance=0.9)


def impatient(problem: GcdProblem, rng: random.Random) -> str:
    """Work correctly but possibly give up at any step."""
    return demonstrate(problem, rng, quit_chance=0.28)


def sloppy(problem: GcdProblem, rng: random.Random) -> str:
    """Work to the end, with occasional errors."""
    return demonstrate(problem, rng, slip_chance=0.2)


# More than half of them guess at once, so that greedy decoding of the base model fails, too: it can solve
# the task, but a solution is not its most likely answer.
POPULATION: dict[Callable[[GcdProblem, random.Random], str], float] = {
    careful: 0.10,
    hasty: 0.62,
    impatient: 0.14,
    sloppy: 0.14,
}


def careful_example(rng: random.Random, progress: float) -> Example:
    """A careful example. Problems are short at first; later many are long, because errors add up there."""
    longest = min(MAX_STEPS, 4 + int((MAX_STEPS - 4) * progress / 0.3))
    problem = draw_problem(rng, held_out=False, steps=rng.randint(1, longest) if rng.random() < 0.3 else None)
    if problem.steps > longest:
        problem = draw_problem(rng, held_out=False, steps=rng.randint(1, longest))
    return prompt_text(problem), careful(problem, rng)


def population_example(rng: random.Random, _progress: float) -> Example:
    """An example of a random demonstrator."""
    flat = rng.random() < 0.15
    problem = draw_problem(rng, held_out=False, steps=rng.randint(1, MAX_STEPS) if flat else None)
    (demonstrator,) = rng.choices(list(POPULATION), weights=list(POPULATION.values()))
    return prompt_text(problem), demonstrator(problem, rng)


# ---- tokenizer and model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character. A character outside the alphabet is an error, not a silent replacement."""
    tokenizer = Tokenizer(models.WordLevel(vocab=VOCABULARY))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def make_model(layers: int, hidden: int, heads: int, *, recurrent: bool) -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": VOCABULARY[PAD],
        "eos_token_id": VOCABULARY[EOS],
        "bos_token_id": None,
    }
    if not recurrent:
        return LlamaForCausalLM(LlamaConfig(**shape))
    config = Qwen3_5TextConfig(
        **shape,
        layer_types=["full_attention" if layer % 2 else "linear_attention" for layer in range(layers)],
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )
    return Qwen3_5ForCausalLM(config)


# ---- training


def tensors_of(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded token ids, and labels for the completion and the end mark, not for the prompt."""
    width = max(len(prompt) + len(completion) for prompt, completion in examples) + 1
    ids = torch.full((len(examples), width), VOCABULARY[PAD])
    labels = torch.full((len(examples), width), IGNORED_LABEL)
    for row, (prompt, completion) in enumerate(examples):
        tokens = torch.tensor([VOCABULARY[symbol] for symbol in prompt + completion] + [VOCABULARY[EOS]])
        ids[row, : len(tokens)] = tokens
        labels[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return ids, labels


def batches_by_length(examples: list[Example], rng: random.Random, max_tokens: int) -> list[list[Example]]:
    """Batches of examples of similar length, at most `max_tokens` each including padding, in random order."""
    batches: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda item: len(item[1])):
        if (len(batches[-1]) + 1) * (len(example[0]) + len(example[1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(example)
    rng.shuffle(batches)
    return batches


def train(
    model: PreTrainedModel,
    make_example: Callable[[random.Random, float], Example],
    *,
    seed: str,
    steps: int,
    first_rate: float,
    last_rate: float,
    batch_tokens: int,
    pool_size: int = 1024,
) -> None:
    """Next-token training on batches of `pool_size` examples at a time, which are sorted by length."""
    rng = random.Random(seed)
    batches: list[list[Example]] = []

    def next_loss(step: int) -> torch.Tensor:
        nonlocal batches
        if not batches:
            pool = [make_example(rng, step / steps) for _ in range(pool_size)]
            batches = batches_by_length(pool, rng, batch_tokens)
        ids, labels = tensors_of(batches.pop())
        logits = model(input_ids=ids).logits[:, :-1]
        # Not the mean over labels: it would give the tokens of short examples, which are batched together, more weight.
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return loss / ids.numel()

    pretrain(model, next_loss, name=seed, steps=steps, first_rate=first_rate, last_rate=last_rate, say_every=200)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's base model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--careful-steps", type=int, default=2500)
    parser.add_argument("--population-steps", type=int, default=500)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--recurrent", action="store_true", help="a hybrid with a recurrent state instead of a Llama")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    model = make_model(layers=2, hidden=96, heads=3, recurrent=arguments.recurrent)
    train(
        model,
        careful_example,
        seed=f"careful/{arguments.seed}",
        steps=arguments.careful_steps,
        first_rate=3e-3,
        last_rate=1e-4,
        batch_tokens=arguments.batch_tokens,
    )
    train(
        model,
        population_example,
        seed=f"population/{arguments.seed}",
        steps=arguments.population_steps,
        first_rate=5e-4,
        last_rate=2e-5,
        batch_tokens=arguments.batch_tokens,
    )

    model.generation_config = GenerationConfig(eos_token_id=VOCABULARY[EOS], pad_token_id=VOCABULARY[PAD])
    model.save_pretrained(arguments.out)
    make_tokenizer().save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
