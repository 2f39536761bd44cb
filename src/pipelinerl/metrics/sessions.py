"""What a run records about each of its sessions for a replay: one line of `sessions.jsonl`, without secrets."""

from __future__ import annotations

from typing import Any

import msgspec

FORMAT = 1
"""Version of the records that a replay reads: those of sessions, steps, rollouts and published weights together."""


class Computer(msgspec.Struct, frozen=True, kw_only=True):
    """What bits may depend on besides the records. `instructions`: the vector instructions that torch uses."""

    processor: str
    instructions: str
    packages: dict[str, str]


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session of a run, from the weights of `version` on.

    `config` is the session's configuration without secrets, `threads` the trainer's CPU threads, and `rng` the state of
    torch's generators before the first step. If a later session begins at the same version or an earlier one, the steps of
    this one from there on do not count. `rollouts_bytes` and `trained_bytes` are the sizes of the files with these names
    before the session. `id`: that of the session, which its checkpoints have too. `inputs`: checksums of
    the environment's files.
    """

    version: int
    id: str = ""
    inputs: dict[str, str] = {}
    config: dict[str, Any]
    threads: int
    machine: Computer
    rng: dict[str, str]
    rollouts_bytes: int = 0
    trained_bytes: int = 0
    format: int = FORMAT
