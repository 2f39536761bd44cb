"""vLLM's configuration as its server reports it, checks of its settings, and facts from the model's folder."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pipelinerl.config.schema import ModelConfig
from pipelinerl.models.contract import read_contract
from pipelinerl.serving.vllm.messages import BACKEND


class WeightLabel(msgspec.Struct, frozen=True):
    """GET /weight_info."""

    weight_version: str


class PauseState(msgspec.Struct, frozen=True):
    """GET /is_paused."""

    is_paused: bool


class ModelSection(msgspec.Struct, frozen=True):
    model: str
    max_model_len: int
    logprobs_mode: str


class CacheSection(msgspec.Struct, frozen=True):
    enable_prefix_caching: bool | None = None


class SchedulerSection(msgspec.Struct, frozen=True):
    max_num_seqs: int


class WeightTransferSection(msgspec.Struct, frozen=True):
    backend: str


class VllmConfig(msgspec.Struct, frozen=True):
    """The part of vLLM's configuration that is used here."""

    instance_id: str
    model_config: ModelSection
    cache_config: CacheSection
    scheduler_config: SchedulerSection
    weight_transfer_config: WeightTransferSection | None = None

    def problems(self) -> list[str]:
        """Settings that must be changed before the server can be used, each with the flag for it."""
        transfer, found = self.weight_transfer_config, []
        if self.model_config.logprobs_mode != "processed_logprobs":
            found.append("its log-probs are not of the sampled distribution (--logprobs-mode processed_logprobs)")
        if self.cache_config.enable_prefix_caching:
            found.append("it would reuse KV entries of older weights for prompts (--no-enable-prefix-caching)")
        if transfer is None or transfer.backend != BACKEND:
            found.append(f'it uses another weight transfer (--weight-transfer-config \'{{"backend":"{BACKEND}"}}\')')
        return found


class ServerDescription(msgspec.Struct, frozen=True):
    """GET /server_info?config_format=json."""

    vllm_config: VllmConfig


# ---- facts from the model's folder, which vLLM does not report over HTTP


BLOCK = 128
"""Tokens per block of vLLM's KV cache on CPU, where blocks are largest."""
SPARE_BLOCKS = 4


class ModelFacts(NamedTuple):
    """`vocabulary`: its size. The others: see `models.contract.Contract`."""

    vocabulary: int
    stop_token_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


def model_facts(path: str) -> ModelFacts:
    """Read the facts, without loading weights. Raises ModelLoadError if there is no model or tokenizer at `path`."""
    from pipelinerl.models.loading import load_config, load_tokenizer  # noqa: PLC0415 - takes seconds

    named = ModelConfig(path=path)
    model = load_config(named)
    return ModelFacts(int(model.config.get_text_config().vocab_size), *read_contract(model, load_tokenizer(named)))


def kv_cache_bytes(path: str, *, slots: int, max_length: int, item_bytes: int) -> int:
    """Memory for the KV cache of all slots at full length, so that vLLM never has to preempt and recompute a request."""
    from transformers import AutoConfig  # noqa: PLC0415 - as above

    from pipelinerl.models.folder import resolve_path  # noqa: PLC0415 - as above

    config = AutoConfig.from_pretrained(resolve_path(path)).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block_bytes = 2 * config.num_hidden_layers * heads * head_dim * item_bytes * BLOCK
    return int(block_bytes * (slots * -(-max_length // BLOCK) + SPARE_BLOCKS))
