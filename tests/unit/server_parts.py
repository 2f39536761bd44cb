"""What tests of the server share: a tokenizer of bytes, a small model that speaks it, and the application over both."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pipelinerl.config.schema import EngineConfig, ModelConfig
from pipelinerl.serving.server.endpoints import app_of
from pipelinerl.serving.server.http import ServerApp
from pipelinerl.serving.server.run import ServeOptions
from pipelinerl.serving.server.service import Service, load
from pipelinerl.serving.wire import ErrorBody, ErrorDetail
from tests.parity.models import CONFIGS

EOS = 2
MAX_LENGTH = 96
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'clown' %}{{ raise_exception('no clowns') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Token 3 + i is byte number i of the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = template
    return tokenizer


def byte_model(seed: int = 0) -> Any:
    config = copy.deepcopy(CONFIGS["llama"])
    config.vocab_size = 259
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def options_of(directory: Path, **changes: Any) -> ServeOptions:
    of_engine = {"slots": 4, "max_length": MAX_LENGTH} | {
        name: changes.pop(name) for name in list(changes) if name in EngineConfig.model_fields
    }
    values = {"max_queue": 8, "weight_directories": (directory,)} | changes
    engine, listen = EngineConfig(**of_engine), ("127.0.0.1", 0)
    return ServeOptions(model=ModelConfig(path="bytes"), engine=engine, name="bytes", listen=listen, **values)


@asynccontextmanager
async def running(directory: Path, *, tokenizer: Any = None, **changes: Any) -> AsyncIterator[tuple[Service, Client]]:
    """A service with its engine's thread, and a client of the application over it."""
    options = options_of(directory, **changes)
    service = Service(load(options, byte_model(), tokenizer or byte_tokenizer(), flatten=False), options)
    app = ServerApp(options.api_key)
    app.app = app_of(service)
    try:
        async with Client(transport=httpx2.ASGITransport(app), base_url="http://localhost", timeout=30) as client:
            yield service, client
    finally:
        assert service.engine.close()


class Client(httpx2.AsyncClient):
    """Speaks to the application without a network; streams come whole."""

    async def refusal(self, path: str, body: Any, status: int = 400) -> ErrorDetail:
        """The error that a request is answered with."""
        response = await self.post(path, content=body if isinstance(body, bytes) else msgspec.json.encode(body))
        assert response.status_code == status, response.text
        return msgspec.json.decode(response.content, type=ErrorBody).error

    async def json(self, path: str, body: Any) -> Any:
        """The answer to a request that is served."""
        response = await self.post(path, content=msgspec.json.encode(body))
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, body: Any) -> list[Any]:
        """What a stream of an API of OpenAI sends."""
        response = await self.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *lines, done = [line for line in response.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]
