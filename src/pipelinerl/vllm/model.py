"""What a model's folder says that vLLM does not tell over HTTP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from pipelinerl.config.schema import ModelConfig

BLOCK = 128
"""Tokens in a block of vLLM's KV cache on CPU, the largest there is."""
SPARE_BLOCKS = 4


class ModelFacts(NamedTuple):
    """`vocabulary`: how many tokens it has. `stop_token_ids`: those that end a completion, by its own configuration."""

    vocabulary: int
    stop_token_ids: tuple[int, ...]


def model_facts(path: str) -> ModelFacts:
    """Read them, without the weights. Raises ModelLoadError if there is no model or tokenizer at `path`."""
    from transformers import AutoConfig, GenerationConfig  # noqa: PLC0415 - takes seconds

    from pipelinerl.errors import ModelLoadError  # noqa: PLC0415
    from pipelinerl.models.loading import load_tokenizer, resolve_path, stop_token_ids  # noqa: PLC0415 - as above

    folder = resolve_path(path)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"can't read the configuration of {path!r}: {error}") from error
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:
        generation = None
    tokenizer = load_tokenizer(ModelConfig(path=path))
    model = SimpleNamespace(config=config, generation_config=generation)
    return ModelFacts(int(config.get_text_config().vocab_size), stop_token_ids(model, tokenizer))


def kv_cache_bytes(path: str, *, slots: int, max_length: int, item_bytes: int) -> int:
    """Memory for the keys and values of all slots at full length, so that vLLM never has to drop any and recompute them."""
    from transformers import AutoConfig  # noqa: PLC0415 - as above

    from pipelinerl.models.loading import resolve_path  # noqa: PLC0415 - as above

    config = AutoConfig.from_pretrained(resolve_path(path)).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block_bytes = 2 * config.num_hidden_layers * heads * head_dim * item_bytes * BLOCK
    return int(block_bytes * (slots * -(-max_length // BLOCK) + SPARE_BLOCKS))
