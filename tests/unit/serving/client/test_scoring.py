"""A teacher behind HTTP: which requests it gets, and what is made of its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.models.encoding import vocabulary_digest
from pipelinerl.serving.client import scoring
from pipelinerl.serving.client.adapter import ServerBusyError, ServerError
from pipelinerl.serving.client.scoring import ServerScorer
from pipelinerl.types import Segment
from tests.unit.server_parts import byte_tokenizer

Answer = Callable[[str, dict[str, Any]], object]


def vllm(path: str, body: dict[str, Any]) -> object:
    """As vLLM answers, with the log-prob -id / 10 for each token of the prompt but the first. None: not found."""
    match path:
        case "/info":
            return None
        case "/v1/models":
            return {"object": "list", "data": [{"id": "teacher"}]}
        case "/tokenize":
            tokens = byte_tokenizer().encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return {"tokens": tokens, "count": len(tokens)}
    assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("teacher", 1, 0)
    scores = [{str(token): {"logprob": -token / 10, "rank": 3}, "1": {"logprob": 0.0}} for token in body["prompt"][1:]]
    return {"choices": [{"index": 0, "text": "?", "prompt_logprobs": [None, *scores]}]}


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    servers = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                self.reply(msgspec.json.decode(self.rfile.read(int(self.headers["content-length"]))))

            def reply(self, body: dict[str, Any]) -> None:
                assert self.headers["authorization"] == "Bearer key"
                found = answer(self.path, body)
                data = msgspec.json.encode(found)
                self.send_response(404 if found is None else found if isinstance(found, int) else 200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


SEGMENTS = [Segment(token_ids=(5, 6, 7, 8), sampled=((1, 2), (3, 4))), Segment(token_ids=(5, 9), sampled=((1, 2),))]


def test_sampled_tokens_have_the_servers_scores(serve: Callable[[Answer], str]) -> None:
    scorer = ServerScorer(serve(vllm), "key")
    assert scorer.score(SEGMENTS) == [[-0.6, -0.8], [-0.9]]
    scorer.check(byte_tokenizer(), byte_tokenizer().encode("abc"), longest=9)


def test_a_server_that_cannot_teach_is_refused(serve: Callable[[Answer], str]) -> None:
    def silent(path: str, body: dict[str, Any]) -> object:
        return {"choices": [{"text": "?"}]} if path == "/v1/completions" else vllm(path, body)

    with pytest.raises(ServerError, match="does not return `prompt_logprobs`"):
        ServerScorer(serve(silent), "key").score(SEGMENTS)

    def foreign(path: str, body: dict[str, Any]) -> object:
        return {"tokens": [1, 2]} if path == "/tokenize" else vllm(path, body)

    with pytest.raises(ConfigError, match="another vocabulary"):
        ServerScorer(serve(foreign), "key").check(byte_tokenizer(), byte_tokenizer().encode("abc"), longest=9)


@pytest.mark.parametrize("same", [True, False])
def test_our_own_server_scores_all_segments_of_a_request_and_its_vocabulary_is_compared(
    serve: Callable[[Answer], str], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ours(path: str, body: dict[str, Any]) -> object:
        if path == "/info":
            digest = vocabulary_digest(byte_tokenizer()) if same else "other"
            names = {"instance": "i", "name": "n", "model": "m", "checksum": "c", "stop_token_ids": []}
            counts = dict.fromkeys(("slots", "max_length", "vocabulary", "version", "in_progress", "queued"), 9)
            return {**names, **counts, "vocabulary_digest": digest}
        asked.append(len(body["segments"]))
        return {"logprobs": [[-one["token_ids"][start] / 10 for start, _ in one["sampled"]] for one in body["segments"]]}

    monkeypatch.setattr(scoring, "MOST_IDS", 9)
    scorer = ServerScorer(serve(ours), "key")
    assert scorer.score([*SEGMENTS, *SEGMENTS]) == [[-0.6, -0.8], [-0.9]] * 2
    assert asked == [2, 2]  # of at most four tokens each
    if same:
        scorer.check(byte_tokenizer(), byte_tokenizer().encode("abc"), longest=9)
    else:
        with pytest.raises(ConfigError, match="another vocabulary"):
            scorer.check(byte_tokenizer(), byte_tokenizer().encode("abc"), longest=9)


def test_a_busy_server_is_asked_again(serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "TRIES", 3)
    answers = [503, 429]

    def busy(path: str, body: dict[str, Any]) -> object:
        return answers.pop() if answers and path == "/v1/completions" else vllm(path, body)

    assert ServerScorer(serve(busy), "key").score(SEGMENTS[:1]) == [[-0.6, -0.8]]
    answers += [503] * 9
    with pytest.raises(ServerBusyError):
        ServerScorer(serve(busy), "key").score(SEGMENTS[:1])
    assert len(answers) == 6
