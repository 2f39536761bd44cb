"""Make the model `demo-tools`: a tiny Llama that chats, and calls a calculator.

    python scripts/make_demo_tools.py --out src/pipelinerl/assets/demo_tools

It first learns to call the tool and to report its result, from careful examples. Then it imitates a population of
demonstrators, of whom most guess without calling the tool, some copy the expression wrongly, and some ignore the result.
Reinforcement learning has to find out which behaviour is rewarded. Held-out problems are never used here.

A token is a byte, except for the marks of the chat template and the fixed parts of a call and of a guess. The schedule
counts steps, and runs on one thread, so the same library versions on the same kind of machine reproduce the weights.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pretraining import pretrain
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from pipelinerl.environments.chat.tool_use import tool_of
from pipelinerl.user_code import import_code

EXAMPLE: Any = import_code(str(Path(__file__).parents[1] / "examples/calculator.py"))
Calculator, calculate = EXAMPLE.Calculator, EXAMPLE.calculate

PAD, END = "<pad>", "<end>"
MARKS = (PAD, END, "<system>", "<user>", "<assistant>", "<tool>", "<tools>")
CALL, CLOSE = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
PARTS = ("<tool_call>", "</tool_call>", '{"name": "', "calculate", '", "arguments": {"', "expression", '": "', '"}}')
GUESS = "about "
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% if not loop.last %} {% endif %}{% endfor %}"
    "<end>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
IGNORED_LABEL = -100

Turns = tuple[str, ...]
"""What the model says in one or two turns; between two is the result of the tool."""


# ---- demonstrators: (expression, random numbers) -> their turns


def call(expression: str) -> str:
    return CALL + expression + CLOSE


def guess(rng: random.Random) -> str:
    """A number such as answers are."""
    one, other = rng.randint(2, 99), rng.randint(2, 99)
    return f"{GUESS}{rng.choice((one + other, one - other, one * other))}"


def careful(expression: str, _rng: random.Random) -> Turns:
    return call(expression), calculate(expression)


def guessing(_expression: str, rng: random.Random) -> Turns:
    return (guess(rng),)


def sloppy(expression: str, rng: random.Random) -> Turns:
    """Copies one digit wrongly."""
    place = rng.choice([index for index, symbol in enumerate(expression) if symbol.isdigit()])
    wrong = expression[:place] + rng.choice("123456789") + expression[place + 1 :]
    return call(wrong), calculate(wrong)


def ignorant(expression: str, rng: random.Random) -> Turns:
    """Calls the tool, but does not look at the result."""
    return call(expression), guess(rng)


Demonstrator = Callable[[str, random.Random], Turns]
CAREFUL: dict[Demonstrator, float] = {careful: 1.0}
# More than half of them guess, so that greedy decoding guesses, too.
POPULATION: dict[Demonstrator, float] = {careful: 0.2, guessing: 0.55, sloppy: 0.13, ignorant: 0.12}


# ---- tokenizer and model


def make_tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*MARKS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in (*PARTS, GUESS)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    made.chat_template = TEMPLATE
    return made


def make_model(tokenizer: Any) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


# ---- training


class Examples:
    """Token ids of conversations, and labels for what the model says."""

    def __init__(self, tokenizer: Any, seed: str) -> None:
        self._tokenizer = tokenizer
        self._task = Calculator(tokenizer, 0, numbers=[2, 2], system="")
        self._rng = random.Random(seed)
        self._drawn = 0

    def batch(self, population: dict[Demonstrator, float], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = self._tokenizer(
            [self._draw(population) for _ in range(size)], add_special_tokens=False, padding=True, return_tensors="pt"
        )
        return encoded.input_ids, self._labels(encoded.input_ids)

    def _draw(self, population: dict[Demonstrator, float]) -> str:
        """A conversation, as the chat template renders it."""
        problem = self._task.problem(self._drawn)
        self._drawn += 1
        (demonstrator,) = self._rng.choices(list(population), weights=list(population.values()))
        said = demonstrator(problem.payload["expression"], self._rng)
        messages = [*self._task.prompt(problem), {"role": "assistant", "content": said[0]}]
        if len(said) > 1:
            called = said[0].removeprefix(CALL).removesuffix(CLOSE)
            messages += [{"role": "tool", "content": calculate(called)}, {"role": "assistant", "content": said[1]}]
        text = f"<tools>calculate{END}" + "".join(f"<{one['role']}>{one['content']}{END}" for one in messages)
        if self._drawn == 1:
            tools = [tool_of(calculate).schema]
            assert text == self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        return text

    def _labels(self, ids_PV: torch.Tensor) -> torch.Tensor:
        """The tokens after each mark of the assistant, up to and with the end of the message."""
        starts, end = self._tokenizer.convert_tokens_to_ids("<assistant>"), self._tokenizer.eos_token_id
        labels = []
        for row in ids_PV.tolist():
            speaks, labelled = False, []
            for token in row:
                labelled.append(token if speaks else IGNORED_LABEL)
                speaks = token == starts or (speaks and token != end)
            labels.append(labelled)
        return torch.tensor(labels)


def train(
    model: PreTrainedModel,
    examples: Examples,
    population: dict[Demonstrator, float],
    *,
    name: str,
    steps: int,
    batch: int,
    first_rate: float,
    last_rate: float,
) -> None:
    """Next-token training."""

    def next_loss(_: int) -> torch.Tensor:
        ids, labels = examples.batch(population, batch)
        logits = model(input_ids=ids).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)

    pretrain(model, next_loss, name=name, steps=steps, first_rate=first_rate, last_rate=last_rate, say_every=50)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model `demo-tools`.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--careful-steps", type=int, default=900)
    parser.add_argument("--population-steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model, examples = make_model(tokenizer), Examples(tokenizer, f"demo-tools/{arguments.seed}")
    size = {"batch": arguments.batch}
    train(model, examples, CAREFUL, name="careful", steps=arguments.careful_steps, first_rate=4e-3, last_rate=4e-4, **size)
    train(
        model,
        examples,
        POPULATION,
        name="population",
        steps=arguments.population_steps,
        first_rate=1e-3,
        last_rate=5e-5,
        **size,
    )

    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
