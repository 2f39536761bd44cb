"""The client of our own server (`pipelinerl serve`), with the messages of `wire`."""

from __future__ import annotations

import msgspec

from pipelinerl.errors import INVALID_DATA, PromptTooLongError, RequestError, WeightUpdateError
from pipelinerl.serving.client.adapter import TokenListener
from pipelinerl.serving.client.errors import ServerError, ServerUnreachableError
from pipelinerl.serving.client.http import HttpClient, RefusedError
from pipelinerl.serving.wire import (
    CancelRequest,
    CompletionLine,
    ErrorBody,
    ProcessGroupRequest,
    ServerInfo,
    TokenLine,
    WeightUpdateRequest,
)
from pipelinerl.types import Completion, GenerationRequest, UpdateReceipt

_ABOUT_THE_REQUEST = (400, 409, 413, 422)
_STATUS_IN_A_STREAM = {"overloaded": 429, "unavailable": 503}
"""Statuses for errors that arrive in a stream; any other error is about the request."""


class PipelineServer:
    """One `pipelinerl serve`; implements `EngineServer`.

    `update_url`: the address for weight updates, if the server has a separate one. `run` and `epoch`: see
    `WeightUpdateRequest`. `timeout_s` limits short calls, `update_timeout_s` an update, `silence_s` the time without a byte
    on a connection. A request may take longer than `silence_s`: it is then sent again under its id, over another connection.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        update_url: str | None = None,
        run: str = "",
        epoch: int = 0,
        timeout_s: float = 10.0,
        update_timeout_s: float = 120.0,
        silence_s: float = 300.0,
    ) -> None:
        self._http = HttpClient(url, api_key=api_key)
        self._updates = self._http if update_url is None else HttpClient(update_url, api_key=api_key)
        self._run, self._epoch = run, epoch
        self._timeout_s, self._update_timeout_s, self._silence_s = timeout_s, update_timeout_s, silence_s
        self._decoder: msgspec.json.Decoder[TokenLine | CompletionLine] = msgspec.json.Decoder(TokenLine | CompletionLine)

    @property
    def url(self) -> str:
        return self._http.url

    async def info(self) -> ServerInfo:
        return await self._http.get("/info", ServerInfo, timeout_s=self._timeout_s)

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        try:
            if request.stream:
                return await self._stream(request, on_token)
            return await self._http.post("/generate", request, Completion, timeout_s=self._silence_s)
        except RefusedError as error:
            if error.code == "prompt_too_long":
                raise PromptTooLongError(error.detail) from error
            if error.status in _ABOUT_THE_REQUEST:
                raise RequestError(str(error)) from error
            raise

    async def _stream(self, request: GenerationRequest, on_token: TokenListener | None) -> Completion:
        lines = self._http.post_lines("/generate", request, timeout_s=self._silence_s)
        try:
            async for data in lines:
                line = self._line(data)
                if isinstance(line, CompletionLine):
                    return line.completion
                if on_token is not None:
                    on_token(line.token)
        finally:
            await lines.aclose()
        raise ServerUnreachableError(self.url, "broke off a stream before its completion")

    def _line(self, data: bytes) -> TokenLine | CompletionLine:
        try:
            return self._decoder.decode(data)
        except INVALID_DATA as error:
            raise self._error_line(data) or self._http.malformed(str(error), data) from error

    def _error_line(self, data: bytes) -> ServerError | None:
        try:
            code = msgspec.json.decode(data, type=ErrorBody).error.code
        except INVALID_DATA:
            return None
        return self._http.decode_error(_STATUS_IN_A_STREAM.get(code, 400), data)

    async def cancel(self, request_id: str) -> None:
        await self._http.post("/cancel", CancelRequest(request_id=request_id), dict, timeout_s=self._timeout_s)

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        request = msgspec.structs.replace(group, run=self._run, epoch=self._epoch)
        try:
            await self._updates.post("/init_process_group", request, dict, timeout_s=group.timeout_s + self._timeout_s)
        except RefusedError as error:
            raise WeightUpdateError(str(error)) from error

    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        request = msgspec.structs.replace(update, run=self._run, epoch=self._epoch)
        try:
            return await self._updates.post(
                "/request_weight_update", request, UpdateReceipt, timeout_s=self._update_timeout_s
            )
        except RefusedError as error:
            raise WeightUpdateError(str(error)) from error

    async def close(self) -> None:
        await self._http.close()
        if self._updates is not self._http:
            await self._updates.close()
