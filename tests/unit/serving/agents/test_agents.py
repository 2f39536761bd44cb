"""Agents that are given an address and nothing else: over real HTTP, with the official client."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import pytest
from transformers import AutoModelForCausalLM

from pipelinerl.actor.client import EngineClient, RolloutClient
from pipelinerl.actor.failures import Failure
from pipelinerl.actor.rollouts import attempt
from pipelinerl.engine import LocalEngine
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.preprocess.preprocessor import join_turns
from pipelinerl.serving.agents.environment import AgentEnvironment
from pipelinerl.serving.agents.gateway import RETRY_HEADER, AgentSession, Gateway
from pipelinerl.types import GenerationRequest, Problem, Rollout, SamplingParams
from tests.unit.chat_parts import SamplingClient, make_tokenizer, write_model
from tests.unit.environments.env_client import one_line
from tests.unit.scripted_engine import STOP, CharTokenizer, ScriptedEngine

TOKENIZER = make_tokenizer()
PROBLEM = Problem(id="p", payload={"number": 5})
CALL = '<tool_call>\n{"name": "add",  "arguments": {"a": 2, "b": 3}}\n</tool_call>'
CLIENT = openai.OpenAI(base_url="http://unused", api_key="unused", max_retries=0)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def at(base_url: str) -> openai.OpenAI:
    return CLIENT.with_options(base_url=base_url)


@pytest.fixture(scope="module")
def gateway() -> Any:
    gateway = Gateway()
    yield gateway
    gateway.close()


def agent_of(function: Callable[..., Any], tmp_path: Path, **args: Any) -> AgentEnvironment:
    """The environment whose agent is this function."""
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"number": number}) for number in range(10)))
    run = f"{__file__}:{function.__name__}"
    with mock.patch("pipelinerl.serving.agents.environment.find_function", return_value=function):
        made = make_environment("agent", {"run": run, "data": str(data), "threads": 8, **args}, TOKENIZER, 0)
    assert isinstance(made, AgentEnvironment)
    return made


def play(function: Callable[..., Any], tmp_path: Path, *texts: str, **args: Any) -> Rollout:
    """The rollout of this agent, of a model that says these things."""
    client = SamplingClient.saying(TOKENIZER, *texts)
    return asyncio.run(agent_of(function, tmp_path, **args).rollout(PROBLEM, client))


def ask(gateway: Gateway, function: Callable[[str], Any], *texts: str) -> Any:
    """What the function returns, called in a thread with an address at which these things are texts."""

    async def serve() -> Any:
        with gateway.serving(AgentSession(SamplingClient.saying(TOKENIZER, *texts))) as base_url:
            return await asyncio.to_thread(function, base_url)

    return asyncio.run(serve())


def test_plain_text_and_token_ids(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("3 + 4 =")

    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> bool:
        first = at(base_url).completions.create(model="any", prompt="2 + 3 =")
        second = at(base_url).completions.create(model="any", prompt=ids, max_tokens=1)
        assert first.usage is not None
        assert first.usage.completion_tokens == len(TOKENIZER.encode(" five.")) + 1
        return (first.choices[0].text, second.choices[0].finish_reason) == (" five.", "length")

    rollout = play(solve, tmp_path, " five.", " seven.")
    assert rollout.reward == 1.0
    assert [turn.prompt_ids for turn in rollout.turns] == [tuple(TOKENIZER.encode("2 + 3 =")), tuple(ids)]
    assert len(rollout.turns[1].completion.token_ids) == 1


def test_another_sampling_is_ignored_and_counted_if_the_run_file_says_so(tmp_path: Path) -> None:
    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        create = at(base_url).chat.completions.create
        create(model="any", messages=[user("?")], temperature=0.2, seed=3, presence_penalty=1.0)
        create(model="any", messages=[user("!")], temperature=1.0)
        with pytest.raises(openai.BadRequestError, match="n: this server"):
            create(model="any", messages=[user("?")], n=2)
        return 1.0

    rollout = play(solve, tmp_path, "one", "two", sampling="ignore")
    assert rollout.metrics["sampling_ignored"] == 1.0
    assert rollout.metrics["turns"] == 2


def test_a_stop_string_ends_an_answer_and_what_was_sampled_is_kept(tmp_path: Path) -> None:
    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        messages: list[Any] = [user("Think.")]
        answer = at(base_url).chat.completions.create(model="any", messages=messages, stop=["\nUser:", "END"])
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("I think", "stop")
        messages += [choice.message, user("Go on.")]
        answer = at(base_url).chat.completions.create(model="any", messages=messages, stop="END")
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("done", "stop")
        return 1.0

    rollout = play(solve, tmp_path, "I think\nUser: what is unseen", "done")
    (segment,) = join_turns(rollout.turns).segments  # the second turn continues the ids of the first
    text = TOKENIZER.decode(segment.token_ids)
    assert "assistant\nI think\nUser:<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>" in text
    assert "unseen" not in text
    first, second = (turn.completion for turn in rollout.turns)
    assert TOKENIZER.decode(first.token_ids) == "I think\nUser:"
    assert second.finish_reason == "stop"
    assert rollout.turns[0].text == "I think"


def test_a_stop_string_cancels_the_request_in_the_engine(tmp_path: Path) -> None:
    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        answer = at(base_url).completions.create(model="any", prompt="?", stop="34")
        return float(answer.choices[0].text)

    (rollout,), engine = outcomes(solve, tmp_path, script=lambda _: [ord(digit) for digit in "12345678" * 5])
    assert isinstance(rollout, Rollout)
    assert rollout.reward == 12.0
    assert rollout.turns[0].completion.token_ids == tuple(map(ord, "1234"))
    assert engine.cancelled == ["r0.t0"]


# ------------------------------------------------------------------------------------------------ token ids


def generate(base_url: str, ids: Sequence[int], timeout: float | None = None, **body: Any) -> dict[str, Any]:
    """As clients of vLLM's `POST /inference/v1/generate` ask, which know the base URL of OpenAI's API."""
    url = base_url.removesuffix("/v1") + "/inference/v1/generate"
    given = {
        "model": "policy",
        "token_ids": list(ids),
        "sampling_params": {"logprobs": 1, **body.pop("sampling", {})},
        **body,
    }
    client = at(base_url) if timeout is None else at(base_url).with_options(timeout=timeout)
    answer: Any = client.post(url, body=given, cast_to=object)
    return dict(answer)


def test_token_ids_get_the_exact_sampled_ids_with_log_probs_and_versions(tmp_path: Path) -> None:
    first, tail = TOKENIZER.encode("2 + 3 ="), TOKENIZER.encode("\nAnd 4 + 4 =")
    answers: list[dict[str, Any]] = []

    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        other = generate(base_url, TOKENIZER.encode("Another chat."))
        one = generate(base_url, first, sampling={"stop_token_ids": [TOKENIZER.eos_token_id], "skip_special_tokens": False})
        two = generate(
            base_url, [*first, *one["choices"][0]["token_ids"], *tail], cache_salt="7", sampling={"max_tokens": 2}
        )
        answers.extend([other, one, two])
        return 1.0

    rollout = play(solve, tmp_path, "hm", "five", "the answer is eight")
    assert [turn.completion.request_id for turn in rollout.turns] == [answer["request_id"] for answer in answers]
    for turn, answer in zip(rollout.turns, answers, strict=True):
        (choice,) = answer["choices"]
        assert tuple(choice["token_ids"]) == turn.completion.token_ids
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert tuple(entry["logprob"] for entry in entries) == turn.completion.logprobs
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(choice["token_ids"])}]
        assert answer["usage"]["total_tokens"] == len(turn.prompt_ids) + len(choice["token_ids"])
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["stop", "stop", "length"]
    assert rollout.metrics["new_segments"] == 1  # the second call of the second chat continues its ids
    assert [len(segment.sampled) for segment in join_turns(rollout.turns).segments] == [1, 2]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"sampling": {"temperature": 0.5}}, "temperature 0.5"),
        ({"sampling": {"logprobs": 5}}, "logprobs"),
        ({"sampling": {"prompt_logprobs": 0}}, "prompt_logprobs"),
        ({"sampling": {"stop": ["x"]}}, "stop"),
        ({"sampling": {"n": 2}}, "n: "),
        ({"sampling": {"min_tokens": 3}}, "min_tokens"),
        ({"sampling": {"max_tokens": "3"}}, "sampling_params: .*max_tokens"),
        ({"sampling": {"new_in_vllm": 1}}, "new_in_vllm"),
        ({"stream": True}, "stream"),
        ({"features": {"mm_hashes": {}}}, "features"),
    ],
)
def test_what_a_request_for_token_ids_cannot_have_is_refused_by_name(
    gateway: Gateway, body: dict[str, Any], named: str
) -> None:
    def solve(base_url: str) -> None:
        with pytest.raises(openai.BadRequestError, match=named):
            generate(base_url, [5, 6], **body)
        assert generate(base_url, [5, 6], sampling={"n": 1, "min_tokens": 0, "ignore_eos": False}, features=None)["choices"]

    ask(gateway, solve, "yes")


def test_a_stop_token_of_the_request_ends_the_completion_in_the_engine(tmp_path: Path) -> None:
    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        (choice,) = generate(base_url, [63], sampling={"stop_token_ids": [ord("4"), STOP]})["choices"]
        assert choice["finish_reason"] == "stop"
        return len(choice["token_ids"])

    (rollout,), engine = outcomes(solve, tmp_path, script=lambda _: [ord(digit) for digit in "12345678" * 5])
    assert isinstance(rollout, Rollout)
    assert (rollout.reward, rollout.turns[0].completion.token_ids) == (4.0, tuple(map(ord, "1234")))
    assert engine.cancelled == ["r0.t0"]


def test_ids_that_a_client_gave_up_are_not_recorded_and_its_retry_is(tmp_path: Path) -> None:
    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        with pytest.raises(openai.APITimeoutError):
            generate(base_url, [1, 2], timeout=0.5)
        return float(len(generate(base_url, [1, 2])["choices"]))

    lengths = iter([1_000_000, 1])
    (made,), engine = outcomes(
        solve, tmp_path, script=lambda _: [*[ord("a")] * next(lengths), STOP], max_tokens=2_000_000, timeout_s=60.0
    )
    assert isinstance(made, Rollout)
    assert [turn.completion.request_id for turn in made.turns] == ["r0.t1"]
    assert made.metrics["cancelled_turns"] == 1
    assert engine.cancelled == ["r0.t0"]


def test_an_answer_that_was_lost_on_its_way_is_sent_again_to_the_clients_retry(tmp_path: Path) -> None:
    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> bool:
        create = at(base_url).chat.completions.create
        first, other = (create(model="any", messages=[user("?")]).id for _ in range(2))  # asked twice: no retry
        again = create(model="any", messages=[user("?")], extra_headers={RETRY_HEADER: "1"}).id
        new = create(
            model="any", messages=[user("!")], extra_headers={RETRY_HEADER: "1"}
        ).id  # the first one never came here
        return again == other != first and new not in (first, other)

    rollout = play(solve, tmp_path, "one", "two", "three")
    assert rollout.reward == 1.0
    assert [turn.text for turn in rollout.turns] == ["one", "two", "three"]
    assert rollout.metrics["cancelled_turns"] == 0


def test_later_turns_of_every_chat_compute_only_what_they_add(tmp_path: Path) -> None:
    """With a real engine: the rest of a prompt is read from the turn that it continues, in each of two chats."""
    folder = write_model(tmp_path / "model")
    tokenizer: Any = TOKENIZER
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(folder), slots=4, max_length=900)
    environment = agent_of(two_chats, tmp_path)

    async def run() -> Rollout | Failure:
        client = EngineClient(engine)
        sampling = SamplingParams(max_tokens=8, stop_token_ids=(tokenizer.eos_token_id,), seed=1)
        view = RolloutClient(client, tokenizer, sampling, name="r", seed=1, reuses_from=lambda: 0)
        task = asyncio.create_task(attempt(environment, PROBLEM, view, 60.0))
        while not task.done():
            if not await client.advance():
                await asyncio.sleep(0.001)
        return task.result()

    rollout = asyncio.run(run())
    assert isinstance(rollout, Rollout), rollout
    assert len(rollout.turns) == 8
    segments = join_turns(rollout.turns).segments
    assert [len(segment.sampled) for segment in segments] == [4, 4]
    given = sum(len(segment.token_ids) for segment in segments) - sum(
        len(turn.completion.token_ids) for turn in rollout.turns
    )
    progress = engine.progress()
    assert progress.prompt_tokens == sum(len(turn.prompt_ids) for turn in rollout.turns) > 2 * given
    assert given <= progress.prefilled_tokens <= given + len(rollout.turns)  # a completion's last token has no keys yet


def two_chats(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """A chat by messages and one by token ids, whose turns alternate."""
    messages: list[Any] = [user("Which number is it? " * 4)]
    ids = TOKENIZER.encode("Something else entirely, in ids alone. " * 4)
    for turn in range(4):
        answer = at(base_url).chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, user(f"And {turn}? " * 4)]
        sampled = generate(base_url, ids)["choices"][0]["token_ids"]
        ids = [*ids, *sampled, *TOKENIZER.encode(f" more {turn}" * 4)]
    return 1.0


# ------------------------------------------------------------------------------------------------ with an engine


def outcomes(
    function: Callable[..., Any],
    tmp_path: Path,
    *,
    script: Callable[[GenerationRequest], Sequence[int]] = lambda _: [ord("5"), STOP],
    attempts: int = 1,
    timeout_s: float = 20.0,
    max_tokens: int = 50,
    **args: Any,
) -> tuple[list[Rollout | Failure], ScriptedEngine]:
    """The outcomes of attempts at the same time, as the actor runs them."""
    engine = ScriptedEngine(script, max_length=max_tokens + 1000)
    environment = agent_of(function, tmp_path, **args)

    async def run() -> list[Rollout | Failure]:
        client = EngineClient(engine)
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,))
        views = [RolloutClient(client, CharTokenizer(), sampling, name=f"r{i}", seed=i) for i in range(attempts)]
        tasks = [asyncio.create_task(attempt(environment, PROBLEM, view, timeout_s)) for view in views]
        while not all(task.done() for task in tasks):
            if not await client.advance():
                await asyncio.sleep(0.001)
        for _ in range(3):  # what was cancelled leaves the engine
            await client.advance()
            await asyncio.sleep(0)
        return [task.result() for task in tasks]

    ended = asyncio.run(run())
    engine.environment = environment  # type: ignore[attr-defined]  # its API answers until nobody has it any more
    return ended, engine


@pytest.mark.parametrize(
    ("returned", "reason", "message"),
    [
        (None, "bad_rollout", "the result of the agent is None, not a number"),
        ({"reward": "1"}, "bad_rollout", "the agent['reward'] is a str"),
        (KeyError("what"), "raised", "KeyError: 'what'"),
        (SystemExit(3), "raised", "it raised SystemExit"),
        (StopIteration(), "raised", "it raised StopIteration"),
        ("asks nothing", "bad_rollout", "sent no request to the model"),
    ],
)
def test_mistakes_of_an_agent_cost_its_rollout(tmp_path: Path, returned: Any, reason: str, message: str) -> None:
    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> Any:
        if returned == "asks nothing":
            return 1.0
        at(base_url).completions.create(model="any", prompt="?")
        if isinstance(returned, BaseException):
            raise returned
        return returned

    (failure,), _ = outcomes(solve, tmp_path)
    assert isinstance(failure, Failure)
    assert failure.reason == reason
    assert message in failure.message


def test_an_agent_that_never_returns_costs_its_rollout_alone(tmp_path: Path) -> None:
    release, ended = threading.Event(), threading.Event()

    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        release.wait()
        with pytest.raises(openai.NotFoundError):
            at(base_url).completions.create(model="any", prompt="late")
        ended.set()
        return 1.0

    (failure,), engine = outcomes(solve, tmp_path, timeout_s=0.3)
    assert isinstance(failure, Failure)
    assert failure.reason == "timeout"
    release.set()
    assert ended.wait(10)
    assert engine.requests == []


def test_a_call_in_the_midst_of_which_the_rollout_ends_is_cancelled(tmp_path: Path) -> None:
    started, ended = threading.Event(), threading.Event()

    def ask_for_ever(base_url: str) -> None:
        with pytest.raises(openai.NotFoundError):
            at(base_url).completions.create(model="any", prompt="long")
        ended.set()

    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        at(base_url).completions.create(model="any", prompt="?")
        threading.Thread(target=ask_for_ever, args=(base_url,), daemon=True).start()
        started.wait()
        return 1.0

    def script(request: GenerationRequest) -> Sequence[int]:
        if len(request.prompt_ids) == 1:
            return [ord("5"), STOP]
        started.set()
        return [ord("a")] * 100_000

    (made,), engine = outcomes(solve, tmp_path, script=script, max_tokens=100_000)
    assert isinstance(made, Rollout)
    assert len(made.turns) == 1
    assert ended.wait(10)
    assert engine.cancelled == ["r0.t1"]
    assert engine.in_progress == engine.queued == 0


def test_a_call_that_its_agent_gave_up_is_cancelled_and_no_part_of_the_rollout(tmp_path: Path) -> None:
    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        with pytest.raises(openai.APITimeoutError):
            at(base_url).with_options(timeout=1.0).completions.create(model="any", prompt="long")
        return float(at(base_url).completions.create(model="any", prompt="?").choices[0].text)

    def script(request: GenerationRequest) -> Sequence[int]:
        return [ord("a")] * 1_000_000 if len(request.prompt_ids) > 1 else [ord("5"), STOP]

    (made,), engine = outcomes(solve, tmp_path, script=script, max_tokens=1_000_000)
    assert isinstance(made, Rollout)
    assert [turn.completion.request_id for turn in made.turns] == ["r0.t1"]
    assert engine.cancelled == ["r0.t0"]


def test_attempts_of_an_async_agent_share_a_client(tmp_path: Path) -> None:
    """Its connections belong to one event loop: the second attempt used those of the first, whose loop was closed."""
    shared = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0)
    loops: set[int] = set()

    async def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        loops.add(id(asyncio.get_running_loop()))
        client = shared.with_options(base_url=base_url)
        await asyncio.gather(*(client.completions.create(model="any", prompt="?") for _ in range(3)))
        return float((await client.completions.create(model="any", prompt="last")).choices[0].text)

    made, engine = outcomes(solve, tmp_path, attempts=6, threads=2)
    assert [len(one.turns) for one in made if isinstance(one, Rollout)] == [4] * 6
    assert len(engine.requests) == 24
    assert len(loops) == 1


def test_an_async_agent_that_exits_costs_its_rollout_alone(tmp_path: Path) -> None:
    begun: list[int] = []

    async def leave() -> None:
        sys.exit(3)

    async def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        begun.append(1)
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        await client.completions.create(model="any", prompt="?")
        if len(begun) == 1:
            await asyncio.gather(leave())  # a task of its own, whose exit would end the event loop
        return 1.0

    made, _ = outcomes(solve, tmp_path, attempts=3, threads=1)
    failures = [one for one in made if isinstance(one, Failure)]
    assert [(one.reason, "SystemExit" in one.message) for one in failures] == [("raised", True)]
    assert len(made) == 3


def test_an_async_agent_is_cancelled_with_its_rollout(tmp_path: Path) -> None:
    cancelled = threading.Event()

    async def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 1.0

    (failure,), _ = outcomes(solve, tmp_path, timeout_s=0.3)
    assert isinstance(failure, Failure)
    assert failure.reason == "timeout"
    assert cancelled.wait(10)


def test_no_more_agents_run_at_once_than_there_may_be_threads(tmp_path: Path) -> None:
    lock = threading.Lock()

    def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
        assert lock.acquire(blocking=False)
        at(base_url).completions.create(model="any", prompt="?")
        lock.release()
        return 1.0

    made, _ = outcomes(solve, tmp_path, attempts=4, threads=1)
    assert all(isinstance(outcome, Rollout) for outcome in made)


# ------------------------------------------------------------------------------------------------ run files


def test_problems_are_lines_of_a_file_or_those_of_another_environment(tmp_path: Path) -> None:
    environment = agent_of(len, tmp_path, held_out=0.2)
    numbers = {environment.problem(index).payload["number"] for index in range(8)}
    held_out = {problem.payload["number"] for problem in environment.held_out(9)}
    assert (len(numbers), len(held_out), numbers & held_out) == (8, 2, set())
    other = make_environment("agent", {"run": "math:floor", "problems": {"kind": "gcd"}}, TOKENIZER, 3)
    assert other.problem(5) == make_environment("gcd", {}, TOKENIZER, 3).problem(5)


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ({"run": "nowhere.py:solve", "problems": {"kind": "gcd"}}, "no file"),
        ({"run": "math:sqroot", "problems": {"kind": "gcd"}}, "no function"),
        ({"run": "math:floor"}, "either `data` or `problems`"),
        ({"run": "math:floor", "problems": {"kind": "gdc"}}, "environment.args.problems.*did you mean"),
        ({"run": "math:floor", "data": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"run": "math:floor", "problems": {"kind": "gcd"}, "threads": 0}, "threads"),
    ],
)
def test_mistakes_in_the_run_file_are_one_line(args: dict[str, Any], what: str) -> None:
    with one_line(EnvironmentSetupError, match=f"(?i){what}"):
        make_environment("agent", args, TOKENIZER, 0)
