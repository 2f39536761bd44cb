"""The processes of a run: their names (roles), used in messages, log names and command lines, and the stages of each."""

from __future__ import annotations

from pipelinerl.config.schema import RunConfig
from pipelinerl.status.board import generation_stages
from pipelinerl.types import PREPROCESSOR, TRAINER

TRAINING = "training"
PREPROCESSING = "preprocessing"


def generation_roles(config: RunConfig) -> list[str]:
    """The generation processes, numbered only if there are several."""
    processes = config.engine.processes
    return ["generation"] if processes == 1 else [f"generation-{index}" for index in range(processes)]


def server_roles(config: RunConfig) -> list[str]:
    """The engine servers that the run starts itself."""
    if config.engine.kind == "local" or config.engine.urls:
        return []
    return [f"server-{index}" for index in range(config.engine.servers)]


def rank_roles(config: RunConfig) -> list[str]:
    """The processes of a sharded trainer besides rank 0, which is `TRAINING`. They publish no status."""
    return [f"{TRAINING}-rank-{rank}" for rank in range(1, config.trainer.ranks)]


def worker_roles(config: RunConfig) -> list[str]:
    """The processes that run stages."""
    preprocessing = [PREPROCESSING] if config.launch.preprocessor == "process" else []
    return [*generation_roles(config), *preprocessing, TRAINING, *rank_roles(config)]


def worker_stages(config: RunConfig) -> list[str]:
    """The names on the status board of the stages of these processes."""
    preprocessor = [PREPROCESSOR] if config.launch.preprocessor == "process" else []
    generation = [stage for stages in generation_stages(config.engine.processes) for stage in stages]
    return [*generation, *preprocessor, TRAINER]


def stages_of(config: RunConfig, role: str) -> list[str]:
    """The names on the status board of the stages of one process. Engine servers have none."""
    if role in (roles := generation_roles(config)):
        return [*generation_stages(config.engine.processes)[roles.index(role)]]
    return {TRAINING: [TRAINER], PREPROCESSING: [PREPROCESSOR]}.get(role, [])
