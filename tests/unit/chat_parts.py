"""What tests of chats share: tokenizers of two families, templates like those of real models, and a model of set answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipelinerl.types import Completion, FinishReason, SamplingParams, TokenEvent
from tests.parity.models import tiny_llama
from tests.unit.group_parts import completion
from tests.unit.scripted_engine import STOP

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
CORPUS = [
    "user assistant system tool What is the sum of two and three? The answer is five.\n\n",
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>\n<think>\nlet me see...\n</think>\n\n',
    "user\nassistant\n  indented,  spaced.\nThe answer is The answer. tool_response",
]

_TOOLS = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}"""
_CALLS = """{%- if message.tool_calls %}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}"""


def _chatml(content: str) -> str:
    turn = "<|im_start|>{{ message.role }}\n" + content + _CALLS + "<|im_end|>\n"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return _TOOLS + "{% for message in messages %}" + turn + "{% endfor %}" + prompt


CHATML = _chatml("{{ message.content }}")
TRIMS = _chatml("{{ message.content | trim }}")
STRIPS_THOUGHTS = _chatml(
    "{% if message.role == 'assistant' and not loop.last %}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ message.content }}{% endif %}"
)
COUNTS = "There are {{ messages | length }} messages.\n" + CHATML
ALTERNATES = "{% for message in messages %}{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}" + (
    "{{ raise_exception('a result of no call') }}{% endif %}{% endfor %}" + CHATML
)
TEMPLATES = {
    "chatml": CHATML,
    "trims": TRIMS,
    "strips thoughts": STRIPS_THOUGHTS,
    "counts": COUNTS,
}


@cache
def _byte_level() -> Tokenizer:
    """Byte-level BPE with merges, also over spaces and newlines, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False),
    )
    return tokenizer


@cache
def _metaspace() -> Tokenizer:
    """As SentencePiece has it: a space is put in front of a text, and bytes are tokens for what isn't in the vocabulary."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", *SPECIAL, *byte_tokens]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False))
    return tokenizer


def make_tokenizer(family: str = "byte level", template: str | None = CHATML) -> Any:
    inner = {"byte level": _byte_level, "metaspace": _metaspace}[family]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(inner.to_str()), eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def calling(name: str, /, **arguments: Any) -> str:
    """What the model writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class SamplingClient:
    """Answers with the ids that `script` gives for a prompt; a last id that is the end-of-text token ended it."""

    def __init__(self, tokenizer: Any, script: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.tokenizer = tokenizer
        self._end_id = getattr(tokenizer, "eos_token_id", STOP)
        self.sampling = SamplingParams(max_tokens=200, stop_token_ids=(self._end_id,))
        self.prompts: list[tuple[int, ...]] = []
        self.limits: list[int | None] = []
        self.completions: list[Completion] = []
        self.script = script

    @classmethod
    def saying(cls, tokenizer: Any, *texts: str | Exception, end: str = "<|im_end|>") -> SamplingClient:
        """These texts, one after the other, each with `end`. An exception among them is raised."""
        left = list(texts)

        def script(_: Sequence[int]) -> Sequence[int]:
            text = left.pop(0)
            if isinstance(text, Exception):
                raise text
            return list(tokenizer.encode(text + end, add_special_tokens=False))

        return cls(tokenizer, script)

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> Completion:
        await asyncio.sleep(0)
        ids = tuple(self.script(prompt_ids))[: max_tokens or self.sampling.max_tokens]
        self.prompts.append(tuple(prompt_ids))
        self.limits.append(max_tokens)
        reason: FinishReason = "stop" if ids[-1:] == (self._end_id,) else "length"
        self.completions.append(completion(ids, name=f"t{len(self.completions)}", reason=reason))
        return self.completions[-1]

    async def stream(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> AsyncIterator[TokenEvent]:
        whole = await self.generate(prompt_ids, max_tokens=max_tokens)
        seen = 0
        try:
            for seen, token_id in enumerate(whole.token_ids, start=1):
                yield TokenEvent(whole.request_id, seen - 1, token_id, -0.5, 0)
        finally:
            if seen < len(whole.token_ids):
                cut = completion(whole.token_ids[:seen], name=whole.request_id, reason="cancelled")
                self.completions[self.completions.index(whole)] = cut


def write_model(folder: Path, positions: int = 1024) -> Path:
    """A model of random weights with a chat template."""
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": positions}
    tiny_llama(**sizes, **heads, eos_token_id=tokenizer.eos_token_id, pad_token_id=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
