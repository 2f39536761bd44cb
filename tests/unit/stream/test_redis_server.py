"""What is said where Redis can't be had: these tests need no server."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError, MissingDependencyError, StreamError
from pipelinerl.stream.redis import RedisStreamReader
from pipelinerl.stream.redis_server import start_server
from tests.unit.stream.streams import Item


@pytest.mark.parametrize(
    ("wrong", "kind", "complaint"),
    [
        ("http://127.0.0.1:6379", ConfigError, r"stream\.url http://127.* schemes"),
        ("redis://127.0.0.1:many", ConfigError, r"stream\.url redis://127.*Port"),
        ("redis://127.0.0.1/0?colour=red", ConfigError, r"stream\.url redis://127.*colour"),
        ("redis://:secret@127.0.0.1:1/0", StreamError, r"redis://\*\*\*@127\.0\.0\.1:1/0: no connection.*refused"),
        ("unix:///nowhere/redis.sock?password=secret", StreamError, r"password=\*\*\*: no connection.*No such file"),
    ],
)
def test_wrong_urls(wrong: str, kind: type[Exception], complaint: str) -> None:
    with pytest.raises(kind, match=complaint) as error:
        RedisStreamReader(wrong, "s", Item, patience_s=0.1)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_a_missing_package_is_named(not_installed: Callable[[str], None]) -> None:
    not_installed("redis")
    modules = ("pipelinerl.stream.redis", "pipelinerl.redis_connection")
    loaded = {name: sys.modules.pop(name) for name in modules}
    try:
        with pytest.raises(MissingDependencyError, match="pip install 'redis>="):
            importlib.import_module(modules[0])
    finally:
        sys.modules.update(loaded)


def test_a_missing_server_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(MissingDependencyError, match="no-such-server is not installed: apt-get install redis-server"),
        start_server(tmp_path, program="no-such-server"),
    ):
        pass


def test_a_server_that_does_not_start_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho ready soon\necho the folder is in the way of $1\nexit 1\n")
    program.chmod(0o700)
    end = f"the folder is in the way of {re.escape(str(tmp_path))}/redis.conf"
    with (
        pytest.raises(StreamError, match=f"redis-server did not start: .* status 1; its log, .*, ends with: {end}"),
        start_server(tmp_path, durable=True, program=str(program)),
    ):
        pass
