"""The tokens of one streamed request: each is passed on once and in order, however often the server sends them."""

from __future__ import annotations

from collections.abc import Callable

from pipelinerl.types import Completion, TokenEvent, spans_from_versions, versions_from_spans


class TokenRelay:
    """Between a server's stream, which may begin again, and whoever reads it. `request_id` is the reader's."""

    def __init__(self, request_id: str, forward: Callable[[TokenEvent], None]) -> None:
        self._request_id = request_id
        self._forward = forward
        self._seen: list[TokenEvent] = []

    @property
    def count(self) -> int:
        """Tokens passed on."""
        return len(self._seen)

    def take(self, event: TokenEvent) -> None:
        """Pass the token on, unless it was before or one before it is missing: `complete` brings those."""
        if event.index == len(self._seen):
            self._pass_on(event.token_id, event.logprob, event.version)

    def complete(self, completion: Completion) -> bool:
        """Pass on what is still missing. False, and nothing is, if the completion is not of the tokens seen so far."""
        versions = versions_from_spans(completion.weight_versions, len(completion.token_ids))
        tokens = list(zip(completion.token_ids, completion.logprobs, versions, strict=True))
        if [(event.token_id, event.logprob, event.version) for event in self._seen] != tokens[: self.count]:
            return False
        for token_id, logprob, version in tokens[self.count :]:
            self._pass_on(token_id, logprob, version)
        return True

    def cut(self) -> Completion:
        """The completion of what was passed on: for a stream that can't go on."""
        return Completion(
            request_id=self._request_id,
            token_ids=tuple(event.token_id for event in self._seen),
            logprobs=tuple(event.logprob for event in self._seen),
            weight_versions=spans_from_versions(event.version for event in self._seen),
            finish_reason="cancelled",
        )

    def _pass_on(self, token_id: int, logprob: float, version: int) -> None:
        event = TokenEvent(self._request_id, len(self._seen), token_id, logprob, version)
        self._seen.append(event)
        self._forward(event)
