"""The models to evaluate, resolved from MODEL arguments, and their engines: embedded with a loaded model, or servers."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pipelinerl.actor.client import EngineClient
from pipelinerl.actor.rollouts import RolloutContext
from pipelinerl.checkpoint import best_version, load_checkpoint, saved_versions
from pipelinerl.config.schema import LONGEST_SLOT, ModelConfig, RunConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.launch.stages.servers import server_clients
from pipelinerl.models.folder import resolve_path
from pipelinerl.models.loading import load_model, model_max_length, stop_token_ids
from pipelinerl.report.series import read_config
from pipelinerl.run_directory import existing_run


class Target(NamedTuple):
    """A model to evaluate. `checkpoint`: its folder was written by a run and has checksums to verify.

    `name` is unique, and for human readers. `version` is only known for models of a run.
    """

    name: str
    model: ModelConfig
    version: int | None = None
    checkpoint: bool = False

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.@#-]", "-", self.name)

    def load(self, device: str = "cpu") -> Any:
        """Load the model. Raises ModelLoadError, UnsupportedModelError, and CheckpointError for a damaged file."""
        if self.checkpoint:
            load_checkpoint(Path(self.model.path))  # verifies every file
        return load_model(self.model, device)


def find_targets(texts: Sequence[str]) -> list[Target]:
    """All models that `texts` name, in order. No model is loaded.

        RUN_DIR, RUN_DIR@all, RUN_DIR@7    its last checkpoint, all of them, version 7 (0: the model it started from)
        RUN_DIR@best                       the saved version with the highest held-out reward in the run
        DIR, owner/name, demo              as in `model.path` of a run file

    Raises RunDirectoryError or ModelLoadError for any other text.
    """
    seen: Counter[str] = Counter()
    found = []
    for target in (target for text in texts for target in _targets_of(text)):
        resolve_path(target.model.path)
        seen[target.name] += 1
        times = seen[target.name]
        found.append(target if times == 1 else target._replace(name=f"{target.name}#{times}"))
    return found


def run_config_of(text: str) -> RunConfig | None:
    """The configuration of the run that `text` names; None if it is not a run. Raises ConfigError, RunDirectoryError."""
    run_dir, _ = _split(text)
    return None if run_dir is None else read_config(run_dir)


def _split(text: str) -> tuple[Path | None, str]:
    """The run directory (None if `text` does not name one), and the text after `@`."""
    whole = Path(text).expanduser()
    if (whole / "config.yaml").is_file() and not (whole / "config.json").exists():
        return whole, ""
    front, at, wanted = text.rpartition("@")
    path = Path(front).expanduser()
    if not at or whole.exists() or not path.is_dir():
        return None, ""
    return existing_run(path).root, wanted or "?"


def _targets_of(text: str) -> Iterator[Target]:
    run_dir, wanted = _split(text)
    if run_dir is None:
        path = Path(text).expanduser()
        yield Target(path.resolve().name if path.is_dir() else text, ModelConfig(path=text))
        return
    name, config, saved = run_dir.resolve().name, read_config(run_dir), saved_versions(run_dir)
    if wanted == "0" and 0 not in saved:
        yield Target(f"{name}@0", config.model, 0)
        return
    if not saved:
        raise RunDirectoryError(f"{run_dir} has no checkpoints; {run_dir}@0 is the model that it started from")
    if wanted == "best":
        if (best := best_version(run_dir, saved)) is None:
            raise RunDirectoryError(f"{text}: the run has no evaluation (evaluation.problems, evaluation.every)")
        wanted = str(best)
    if wanted not in ("", "all") and not (wanted.isdecimal() and int(wanted) in saved):
        versions = ", ".join(map(str, saved))
        raise RunDirectoryError(
            f"{text}: give {run_dir}@all, {run_dir}@best, or one of the versions that it has: 0, {versions}"
        )
    for version in saved if wanted == "all" else [int(wanted) if wanted else max(saved)]:
        model = config.model.model_copy(update={"path": str(saved[version])})
        yield Target(f"{name}@{version}", model, version, checkpoint=True)


# ---- engines


STARTUP_S = 30.0
"""Time limit for the first response of servers, which should already be running."""


@asynccontextmanager
async def ready_context(
    target: Target, config: RunConfig, environment: Environment, tokenizer: Tokenizer
) -> AsyncIterator[RolloutContext]:
    """What attempts share, with the engine that `config.engine` describes; its memory is freed on exit.

    Raises ModelLoadError, UnsupportedModelError or CheckpointError; for servers what `RemoteEngine.connect` raises, and
    UserError if they serve another model.
    """
    engine, actor = config.engine, config.actor
    make = partial(RolloutContext, actor, environment, tokenizer=tokenizer, seed=config.seed)
    if engine.kind == "local":
        model = target.load(engine.device)
        most = model_max_length(model) or LONGEST_SLOT + actor.max_tokens
        local = LocalEngine(
            model,
            slots=engine.slots,
            max_length=engine.max_length or min(most, max(LONGEST_SLOT, actor.max_tokens + LONGEST_SLOT // 2)),
            prefill_tokens=engine.prefill_tokens,
            version=target.version or 0,
        )
        yield make(EngineClient(local), slots=engine.slots, stop_token_ids=stop_token_ids(model, tokenizer))
        del local, model
        gc.collect()
        return
    from pipelinerl.serving.client.adapter import Bounds  # noqa: PLC0415 - HTTP client, only needed here
    from pipelinerl.serving.client.engine import RemoteEngine  # noqa: PLC0415 - as above
    from pipelinerl.serving.vllm.adapter import model_facts  # noqa: PLC0415 - as above

    facts = model_facts(target.model.path)
    servers = server_clients(engine.kind, engine.urls, facts, os.environ.get(engine.api_key_env or ""))
    async with RemoteEngine.connect(servers, bounds=Bounds(startup_s=STARTUP_S)) as remote:
        if remote.vocabulary != facts.vocabulary:
            raise UserError(
                f"{engine.urls[0]} serves a model with a vocabulary of {remote.vocabulary} tokens, but "
                f"{target.model.path} has {facts.vocabulary}: give the MODEL that it serves, for its tokenizer"
            )
        yield make(remote, slots=remote.slots, stop_token_ids=facts.stop_token_ids)
