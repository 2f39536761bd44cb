"""Tools of real MCP servers: what the model is shown, and what servers do wrong. Nothing hangs or is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp_types", reason="the interface of mcp 2")

from pipelinerl.environments.chat.tool_use import Tool, ToolError
from pipelinerl.environments.registry import make_environment
from pipelinerl.environments.user import mcp_servers
from pipelinerl.environments.user.mcp_servers import McpServer, McpTools
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from tests.integration.runs import alive, until
from tests.unit.chat_parts import SamplingClient, calling, make_tokenizer
from tests.unit.environments.env_client import one_line

pytestmark = pytest.mark.slow  # processes that import mcp
TOKENIZER = make_tokenizer()
SERVER = '''
import asyncio, os, sys, time
from mcp.server import MCPServer
from mcp.types import ImageContent, TextContent

server = MCPServer("odd")

@server.tool()
async def look_up(name: str, times: int = 1) -> str:
    """Look up a name."""
    return f"{name} is {len(name)}" * times

@server.tool()
async def act(what: str) -> str:
    """Do what it is told."""
    if what == "pid":
        return str(os.getpid())
    if what == "variables":
        return " ".join(sorted(os.environ))
    if what == "wait":
        await asyncio.sleep(60)
    if what == "block":  # the server can't answer anything else
        time.sleep(60)
    if what == "die":
        print("no more", file=sys.stderr)
        os._exit(3)
    raise KeyError(what)

@server.tool(structured_output=False)
async def draw() -> list[TextContent | ImageContent]:
    """Draw."""
    return [TextContent(type="text", text="a dot"), ImageContent(type="image", data="AA==", mime_type="image/png")]

if __name__ == "__main__":
    print("loading", file=sys.stderr)
    server.run()
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "odd.py"
    path.write_text(SERVER)
    return path


def connected(*servers: McpServer, timeout_s: float = 30.0, retries: int = 0) -> McpTools:
    named = {f"s{number}": server for number, server in enumerate(servers)}
    return McpTools(named, timeout_s=timeout_s, retries=retries, concurrency=8)


def program(file: Path, **options: Any) -> McpServer:
    return McpServer(command="python", args=[str(file)], **options)


def gone(pid: int) -> bool:
    return not alive(pid)


def call(tools: list[Tool], called: str, /, **arguments: Any) -> Any:
    return asyncio.run(next(tool for tool in tools if tool.name == called).call(arguments))


# ---- in a rollout


def test_its_tools_are_offered_beside_functions_and_what_they_return_is_shown(file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'def ours() -> str:\n    """Say it."""\n    return "us"\n\n\ndef reward(text, _):\n    return text == "3"'
    )
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"How long is name {n}?"}) for n in range(4)))
    args = {
        "data": str(tmp_path / "data.jsonl"),
        "reward": f"{tmp_path}/mine.py:reward",
        "functions": f"{tmp_path}/mine.py:ours",
        "mcp_servers": {"odd": {"command": "python", "args": [str(file)], "tools": ["look_up"]}},
        "isolate": False,
    }
    environment: Any = make_environment("tools", args, TOKENIZER, 0)
    texts = calling("look_up", name="Ada") + calling("ours"), calling("look_up", name=[]) + calling("act", what="pid"), "3"
    rollout = asyncio.run(environment.rollout(environment.problem(0), SamplingClient.saying(TOKENIZER, *texts)))
    turn = rollout.turns[-1]
    shown = TOKENIZER.decode([*turn.prompt_ids, *turn.completion.token_ids])
    assert (rollout.reward, rollout.metrics["tool_calls"], rollout.metrics["tool_errors"]) == (1.0, 4, 2)
    for text in (
        "Look up a name.",
        "tool\nAda is 3<",
        "tool\nus<",
        "tool\nError: ",
        "Error: there is no tool 'act'; there are: ours, ",
    ):
        assert text in shown
    for repeated in ({"a": {"command": "python", "args": [str(file)]}, "b": {"command": "python", "args": [str(file)]}},):
        with one_line(EnvironmentSetupError, "environment.args has two tools called 'act'"):
            make_environment("tools", {**args, "mcp_servers": repeated}, TOKENIZER, 0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "give `functions`, `mcp_servers` or both"),
        ({"mcp_servers": {"a": {}}}, "mcp_servers.a: give either `command` or `url`"),
        (
            {"mcp_servers": {"a": {"command": "x", "headers": {"A": "HOME"}}}},
            "mcp_servers.a.headers has no effect with `command`",
        ),
        ({"mcp_servers": {"a": {"url": "http://x", "args": ["1"]}}}, "mcp_servers.a.args has no effect with `url`"),
        (
            {"mcp_servers": {"a": {"url": "http://x", "headers": {"A": "Bearer 1"}}}},
            "A has to name the environment variable",
        ),
        ({"mcp_servers": {"a": {"command": "x"}}, "workers": 3}, "workers has no effect"),
        ({"mcp_servers": {"a": {"command": "x"}}, "ended_reward": 0.0}, "ended_reward has no effect"),
    ],
)
def test_wrong_arguments(args: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(text, _):\n    return 1.0")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}')
    own = {"data": str(tmp_path / "data.jsonl"), "reward": f"{tmp_path}/mine.py:reward", "isolate": False}
    with one_line(EnvironmentSetupError, message):
        make_environment("tools", {**own, **args}, TOKENIZER, 0)


# ---- a program


def test_what_a_tool_does_wrong_costs_one_call(file: Path) -> None:
    tools = connected(program(file), timeout_s=1.0).tools
    assert [tool.name for tool in tools] == ["look_up", "act", "draw"]
    assert tools[0].schema["function"]["parameters"]["required"] == ["name"]
    assert call(tools, "draw") == "a dot\n(image that can't be shown)"
    first = call(tools, "act", what="pid")
    for what, shown in (("x", "Error executing tool act"), ("wait", "it took longer than 1 s")):
        with pytest.raises(ToolError, match=shown):
            call(tools, "act", what=what)
        assert call(tools, "act", what="pid") == first
    for what, shown in (("block", "it took longer than 1 s"), ("die", "its server closed the connection: no more")):
        with pytest.raises(ToolError, match=shown):
            call(tools, "act", what=what)
        ended, first = first, call(tools, "act", what="pid")  # of another process
        assert ended != first
        until(partial(gone, int(ended)))


def test_a_server_that_died_between_two_calls_is_started_again(file: Path) -> None:
    tools = connected(program(file), retries=1).tools
    pid = int(call(tools, "act", what="pid"))
    os.kill(pid, signal.SIGKILL)
    assert int(call(tools, "act", what="pid")) != pid


def test_a_program_gets_the_variables_that_are_named_and_no_others(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_SECRET", "1")
    monkeypatch.setenv("OTHER_SECRET", "1")
    names = call(connected(program(file, env={"ITS_KEY": "OUR_SECRET"})).tools, "act", what="variables").split()
    assert {"ITS_KEY", "PATH", "HOME"} <= set(names)
    assert not {"OUR_SECRET", "OTHER_SECRET"} & set(names)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (McpServer(command="/no/such/program"), r"the MCP server `s0` \(/no/such/program\) can't be used: .*No such file"),
        (McpServer(command="python", args=["-c", "raise ValueError(3)"]), "can't be used: .*: ValueError: 3"),
        (McpServer(command="sleep", args=["60"]), "it did not answer within 1 s"),
        (McpServer(url="http://127.0.0.1:1/mcp"), "can't be used: ConnectError"),
    ],
)
def test_a_server_that_cannot_be_used(server: McpServer, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if server.command == "sleep":
        monkeypatch.setattr(mcp_servers, "START_TIMEOUT_S", 1.0)
    with one_line(EnvironmentSetupError, match=message):
        connected(server)


def test_a_choice_of_tools_that_are_not_there(file: Path) -> None:
    with one_line(EnvironmentSetupError, "has no tool 'find'; it has: look_up, act, draw"):
        connected(program(file, tools=["find"]))


def test_programs_end_with_the_object(file: Path) -> None:
    tools = connected(program(file))
    pid = int(call(tools.tools, "act", what="pid"))
    assert alive(pid)
    del tools
    gc.collect()
    until(lambda: not alive(pid), timeout_s=20.0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they see the end of their input")
def test_programs_end_when_their_process_is_killed(file: Path, tmp_path: Path) -> None:
    """Also a program that does not look at its input, and what it has started."""
    started = "print(subprocess.Popen(['sleep', '600']).pid, file=open(sys.argv[1], 'w'), flush=True)"
    ends = f"    import subprocess\n    {started}\n    try:\n        server.run()\n    finally:\n        time.sleep(600)"
    deaf = tmp_path / "deaf.py"
    deaf.write_text(SERVER.replace("    server.run()", ends))
    code = (
        "import asyncio, time\n"
        "from pipelinerl.environments.user.mcp_servers import McpServer, McpTools\n"
        f"server = McpServer(command='python', args=['{deaf}', '{tmp_path}/child'])\n"
        "tools = McpTools({'deaf': server}, timeout_s=60, retries=0, concurrency=1).tools\n"
        "print(asyncio.run(tools[1].call({'what': 'pid'})), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()), int((tmp_path / "child").read_text())]
    assert all(map(alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(map(alive, pids)), timeout_s=20.0)


# ---- a URL


@pytest.fixture(scope="module")
def url(file: Path) -> Iterator[str]:
    """A server that asks for a key."""
    import uvicorn

    space: dict[str, Any] = {"__name__": "odd"}
    exec(compile(SERVER, str(file), "exec"), space)  # noqa: S102 - above
    inner = space["server"].streamable_http_app()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and dict(scope["headers"]).get(b"authorization") != b"Bearer 123":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await inner(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(guarded, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        server.should_exit = True
        thread.join(10.0)


def test_a_server_behind_http_gets_a_secret_from_a_variable(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "Bearer 123")
    tools = connected(McpServer(url=url, headers={"Authorization": "KEY"}), timeout_s=1.0).tools
    assert call(tools, "look_up", name="Ada", times=2) == "Ada is 3" * 2
    with pytest.raises(ToolError, match="took longer than 1 s"):
        call(tools, "act", what="wait")
    assert call(tools, "look_up", name="Ada") == "Ada is 3"
    monkeypatch.setenv("KEY", "Bearer 456")
    with one_line(EnvironmentSetupError, match="HTTP status 401"):
        connected(McpServer(url=url, headers={"Authorization": "KEY"}))


def test_a_server_that_is_gone_costs_the_rollout(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"exec(open({str(file)!r}).read().replace('server.run()', 'server.run(\"streamable-http\", port={port})'))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        listens = lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0  # noqa: E731
        until(listens)
        tools = connected(McpServer(url=f"http://127.0.0.1:{port}/mcp")).tools
        process.kill()
        process.wait()
        for _ in range(2):
            with pytest.raises((RolloutError, ToolError), match=re.escape(f"127.0.0.1:{port}") + "|closed the connection"):
                call(tools, "look_up", name="Ada")
        with pytest.raises(RolloutError, match="can't be used: ConnectError"):
            call(tools, "look_up", name="Ada")
