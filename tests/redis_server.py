"""A Redis server for tests, on a socket file that only this user can open."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def redis_for_tests(directory: Path, *options: str) -> Iterator[str]:
    """Its URL. Its data survive it: a later one in the same directory has them. Skips the test where it can't be had."""
    redis = pytest.importorskip("redis", reason="needs the package redis: pip install 'pipelinerl[redis]'")
    if shutil.which("redis-server") is None:
        pytest.skip("needs the program redis-server: apt-get install redis-server, or brew install redis")
    directory.mkdir(exist_ok=True)
    socket = directory / "redis.sock"
    command = [
        "redis-server",
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--unixsocketperm",
        "700",
        "--dir",
        str(directory),
    ]
    command += ["--save", "", "--appendonly", "yes", "--appendfsync", "no", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(unix_socket_path=str(socket), retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0)) as client:
            deadline_s = time.monotonic() + 30
            while True:
                try:
                    client.ping()
                    break
                except redis.AuthenticationError:
                    break
                except redis.RedisError:
                    assert time.monotonic() < deadline_s, "redis-server does not start"
                    time.sleep(0.02)
        yield f"unix://{socket}"
    finally:
        process.kill()
        process.wait()
