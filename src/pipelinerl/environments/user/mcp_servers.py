"""The tools of MCP servers (modelcontextprotocol.io), called through the official client.

A generation process has one connection with each server, which all its rollouts share. The connections are in a thread with
an event loop of its own, so they go on while the engine computes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from pipelinerl.config.schema import Section
from pipelinerl.environments.chat.tool_use import Tool, ToolError, texts_of
from pipelinerl.environments.user.code import end_loop, loop_in_thread
from pipelinerl.environments.user.pool import retried
from pipelinerl.errors import EnvironmentSetupError, RolloutError

if TYPE_CHECKING:
    from mcp import Client

START_TIMEOUT_S = 60.0
"""How long a server may take to start and to answer, and then to list its tools."""
END_S = 6.0
"""How long connections may take to end. The client ends a program within this time."""
TIED = """
import fcntl, os, signal, sys
pipe = os.open(sys.argv[1], os.O_RDONLY)
os.set_inheritable(pipe, True)
fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes a program, whose process group the kernel kills when a parent-death pipe closes (see `process.child`)."""


class McpServer(Section, frozen=True):
    """A program or a URL. Values that may be secret are in variables of the environment; the run file only names these."""

    command: str = ""
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    url: str = ""
    headers: dict[str, str] = Field(default_factory=dict)
    tools: list[str] | None = None

    def check(self, where: str) -> None:
        """Raises EnvironmentSetupError if this is not one server, or a variable is not set."""
        if bool(self.command) == bool(self.url):
            raise EnvironmentSetupError(f"{where}: give either `command` or `url`")
        for name in ("headers",) if self.command else ("args", "env"):
            if getattr(self, name):
                raise EnvironmentSetupError(f"{where}.{name} has no effect with `{'command' if self.command else 'url'}`")
        for name, variable in (self.env | self.headers).items():
            if variable not in os.environ:
                named = f"{where}: {name} has to name the environment variable with its value"
                raise EnvironmentSetupError(f"{named}, and {variable!r} is not set")


class McpTools:
    """Connections with servers, which end with this object, and the tools that the servers have."""

    def __init__(self, servers: Mapping[str, McpServer], *, timeout_s: float, retries: int, concurrency: int) -> None:
        """Connect with all servers and list their tools. Raises EnvironmentSetupError.

        `timeout_s` limits a call, of which `concurrency` may be made at a time. `retries`: how often a call is made again,
        after 1, 4, 16, ... s, if the connection is lost or there is none.
        """
        self._timeout_s, self._retries, self._places = timeout_s, retries, asyncio.Semaphore(concurrency)
        self._loop = loop_in_thread("MCP servers")
        weakref.finalize(self, end_loop, self._loop, END_S, AsyncExitStack())  # each connection's task has its own resources
        connections = [_Connection(name, server) for name, server in servers.items()]
        listing = [asyncio.run_coroutine_threadsafe(connection.tools(), self._loop) for connection in connections]
        try:
            self.tools = [
                Tool({"type": "function", "function": tool}, partial(self._call, connection, tool["name"]))
                for connection, listed in zip(connections, listing, strict=True)
                for tool in listed.result()
            ]
        except ConnectionError as error:
            raise EnvironmentSetupError(str(error)) from error

    async def _call(self, connection: _Connection, name: str, arguments: dict[str, Any]) -> str:
        """Raises ToolError for what the model is shown, and RolloutError if there is no connection."""

        async def once() -> str:
            async with self._places:
                call = connection.call(name, arguments, self._timeout_s)
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

        try:
            return await retried(once, self._retries)
        except ConnectionResetError as error:
            raise ToolError(str(error)) from None
        except ConnectionError as error:
            raise RolloutError(str(error)) from error


class _Connection:
    """With one server: opened for the first call, and again for the next one after it was lost. In one event loop."""

    def __init__(self, name: str, server: McpServer) -> None:
        self._server = server
        self._what = f"the MCP server `{name}` ({server.url or ' '.join([server.command, *server.args])})"
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._holders: set[asyncio.Task[None]] = set()
        self._lost = asyncio.Event()
        self._known = ""  # of its state: the last line of a program's errors, or the status of the last HTTP response

    async def tools(self) -> list[dict[str, Any]]:
        """What the model is shown of each tool. Raises ConnectionError, and EnvironmentSetupError for a choice of none."""
        client = await self._open()
        found: dict[str, dict[str, Any]] = {}
        cursor = None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while cursor != "":
                    page = await client.list_tools(cursor=cursor)
                    for tool in page.tools:
                        shown = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                        found[tool.name] = shown
                    cursor = page.next_cursor or ""
        except Exception as error:
            raise ConnectionError(f"{self._what} does not list its tools: {self._reason(error)}") from error
        chosen = [*found] if self._server.tools is None else self._server.tools
        if unknown := [name for name in chosen if name not in found]:
            raise EnvironmentSetupError(f"{self._what} has no tool {unknown[0]!r}; it has: {', '.join(found) or 'none'}")
        return [found[name] for name in chosen]

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Raises ToolError, ConnectionResetError if the connection is lost, and ConnectionError if there is none."""
        from mcp import MCPError  # noqa: PLC0415 - an extra
        from mcp.types import CONNECTION_CLOSED  # noqa: PLC0415

        client = await self._open()
        try:
            async with asyncio.timeout(timeout_s):
                result = await client.call_tool(name, arguments)
        except TimeoutError:
            try:
                async with asyncio.timeout(timeout_s):  # does it answer anything?
                    await client.list_tools(cache_mode="bypass")
            except Exception:  # noqa: BLE001 - it does not
                self._lose(client)
            raise ToolError(f"it took longer than {timeout_s:g} s") from None
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(error.message) from None
            self._lose(client)
            raise ConnectionResetError(f"its server closed the connection{self._known}") from None
        text = texts_of([block.model_dump() for block in result.content])
        if result.is_error:
            raise ToolError(text)
        return text or msgspec.json.encode(result.structured_content).decode()

    async def _open(self) -> Client:
        async with self._opening:
            if self._client is None:
                opened, self._lost = asyncio.get_running_loop().create_future(), asyncio.Event()
                self._holders.add(holder := asyncio.create_task(self._hold(opened, self._lost)))
                holder.add_done_callback(self._holders.discard)
                self._client = await opened
            return self._client

    def _lose(self, client: Client) -> None:
        if self._client is client:
            self._client = None
            self._lost.set()

    async def _hold(self, opened: asyncio.Future[Client], lost: asyncio.Event) -> None:
        """Hold a connection until it is lost or this task is cancelled: the contexts of a client belong to one task."""
        from mcp import Client  # noqa: PLC0415 - an extra

        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(START_TIMEOUT_S):
                    transport = await self._http(stack) if self._server.url else self._program(stack)
                    client = await stack.enter_async_context(Client(transport))
                opened.set_result(client)
                await lost.wait()
        except Exception as error:  # noqa: BLE001 - also groups of errors, of the tasks of a client
            if not opened.done():
                opened.set_exception(ConnectionError(f"{self._what} can't be used: {self._reason(error)}"))
            elif self._client is not None and not opened.cancelled():
                self._lose(opened.result())

    async def _http(self, stack: AsyncExitStack) -> Any:
        import httpx2  # noqa: PLC0415 - an extra
        from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415

        async def note(response: httpx2.Response) -> None:
            self._known = f" (HTTP status {response.status_code})" if response.status_code >= 400 else ""

        headers = {name: os.environ[variable] for name, variable in self._server.headers.items()}
        timeout = httpx2.Timeout(START_TIMEOUT_S, read=None)  # calls have limits of their own
        client = httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [note]})
        return streamable_http_client(self._server.url, http_client=await stack.enter_async_context(client))

    def _program(self, stack: AsyncExitStack) -> Any:
        from mcp import StdioServerParameters, stdio_client  # noqa: PLC0415 - an extra

        def listen() -> None:
            if lines := os.read(errors, 1 << 16).decode(errors="replace").strip().splitlines():
                self._known = f": {lines[-1]}"

        command, loop = [self._server.command, *self._server.args], asyncio.get_running_loop()
        if command[0] == "python":
            command[0] = sys.executable
        (errors, said), (pipe, held) = os.pipe(), os.pipe()
        for file in (errors, pipe, held):
            stack.callback(os.close, file)
        loop.add_reader(errors, listen)
        stack.callback(loop.remove_reader, errors)
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", TIED, f"/proc/{os.getpid()}/fd/{pipe}", *command]
        variables = {name: os.environ[variable] for name, variable in self._server.env.items()}
        started = StdioServerParameters(command=command[0], args=command[1:], env=variables)
        return stdio_client(started, errlog=stack.enter_context(open(said, "w")))

    def _reason(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            return f"it did not answer within {START_TIMEOUT_S:g} s{self._known}"
        return " ".join(f"{type(error).__name__}: {error}{self._known}".split())
