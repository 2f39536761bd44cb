"""What vLLM says of itself, and whether it is set up as an engine has to be. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


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


class ServerConfig(NamedTuple):
    """The settings that matter here."""

    instance: str
    model: str
    max_length: int
    slots: int
    logprobs_mode: str
    prefix_caching: bool
    weight_backend: str


class VllmConfig(msgspec.Struct, frozen=True):
    """The part of vLLM's configuration that is looked at."""

    instance_id: str
    model_config: ModelSection
    cache_config: CacheSection
    scheduler_config: SchedulerSection
    weight_transfer_config: WeightTransferSection | None = None

    @property
    def settings(self) -> ServerConfig:
        transfer = self.weight_transfer_config
        return ServerConfig(
            instance=self.instance_id,
            model=self.model_config.model,
            max_length=self.model_config.max_model_len,
            slots=self.scheduler_config.max_num_seqs,
            logprobs_mode=self.model_config.logprobs_mode,
            prefix_caching=bool(self.cache_config.enable_prefix_caching),
            weight_backend=transfer.backend if transfer else "",
        )


class ServerDescription(msgspec.Struct, frozen=True):
    """GET /server_info?config_format=json."""

    vllm_config: VllmConfig


def problems(config: ServerConfig, backend: str) -> list[str]:
    """What must be changed before the server can be used, each with the flag that does it."""
    found = []
    if config.logprobs_mode != "processed_logprobs":
        found.append("its log-probs are not of the distribution sampled from (--logprobs-mode processed_logprobs)")
    if config.prefix_caching:
        found.append("it would give prompts KV entries of older weights (--no-enable-prefix-caching)")
    if config.weight_backend != backend:
        found.append(f'it takes weights another way (--weight-transfer-config \'{{"backend":"{backend}"}}\')')
    return found
