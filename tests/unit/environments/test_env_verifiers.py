"""Environments of the real package `verifiers`, each kind played: what the model is given, what becomes of its answers."""

from __future__ import annotations

import asyncio
import signal
import textwrap
from typing import Any

import pytest

from pipelinerl.environments import make_environment
from pipelinerl.errors import EnvironmentSetupError, PromptTooLongError, RequestError, RolloutError
from pipelinerl.preprocess.preprocessor import join_turns
from pipelinerl.types import Rollout
from tests.unit.chat_parts import SamplingClient, calling, make_tokenizer
from tests.unit.environments.env_client import one_line

pytestmark = pytest.mark.slow  # for what verifiers imports
TOKENIZER = make_tokenizer()
HEAD = """
import threading
import verifiers as vf
from datasets import Dataset

def sums():
    return Dataset.from_list([{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20)])

def right(completion, answer, parser):
    return float(parser.parse_answer(completion) == answer)

def load_environment():
    return vf.SingleTurnEnv(dataset=sums(), rubric=vf.Rubric(funcs=[reward]))
"""

SINGLE = """
def load_environment(system="Be brief.", **more):
    parser = vf.XMLParser(["answer"])
    rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.5], parser=parser)
    return vf.SingleTurnEnv(dataset=sums(), system_prompt=system, parser=parser, rubric=rubric,
                            sampling_args={"max_tokens": 1, "temperature": 0.0}, **more)
"""

MULTI = """
class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["guesses"] = []

    async def env_response(self, messages, state, **_):
        state["guesses"].append(messages[-1].content)
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [vf.types.UserMessage(content="Right.")]
            return state["final_env_response"]
        return [{"role": "user", "content": "No."}]

def found(state):
    return float(state["final_env_response"] is not None)

async def guesses(state):
    return len(state["guesses"])

def load_environment(max_turns=5):
    rubric = vf.Rubric(funcs=[found])
    rubric.add_metric(guesses)
    return Guess(dataset=sums(), max_turns=max_turns, rubric=rubric)
"""

TOOLS = """
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

def load_environment(**more):
    def says(completion, answer):
        return float(answer in completion[-1].content)
    return vf.ToolEnv(dataset=sums(), tools=[add], max_turns=3, rubric=vf.Rubric(funcs=[says]), **more)
"""


@pytest.fixture
def load(tmp_path):
    """Makes the environment of a file with this code: a `reward`, or a `load_environment` of its own."""

    def make(code: str, tokenizer: Any = TOKENIZER, seed: int = 0, **arguments: Any) -> Any:
        path = tmp_path / f"file{len(list(tmp_path.glob('*.py')))}.py"
        path.write_text(HEAD + textwrap.dedent(code))
        return make_environment("verifiers", {"load": f"{path}:load_environment", **arguments}, tokenizer, seed)

    return make


def play(
    environment: Any, *texts: str | Exception, tokenizer: Any = TOKENIZER, problem: Any = None
) -> tuple[Rollout, list[str]]:
    """A rollout in which the model says these things, and the prompts that it was given."""
    client = SamplingClient.saying(tokenizer, *texts)
    rollout = asyncio.run(environment.rollout(environment.problem(0) if problem is None else problem, client))
    assert [(turn.prompt_ids, turn.completion) for turn in rollout.turns] == list(
        zip(client.prompts, client.completions, strict=True)
    )
    return rollout, [tokenizer.decode(ids) for ids in client.prompts]


def play_together(environment: Any, *texts: str) -> list[Rollout]:
    """Rollouts at the same time, in each of which the model says one of these things."""

    async def main() -> list[Rollout]:
        clients = [SamplingClient.saying(TOKENIZER, text) for text in texts]
        return await asyncio.gather(*(environment.rollout(environment.problem(0), client) for client in clients))

    return asyncio.run(main())


def asked(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


# ------------------------------------------------------------------------------------------------------ the kinds


def test_single_turn(load) -> None:
    environment = load(SINGLE, args={"system": "Think."})
    problem = environment.problem(0)
    answer = problem.payload["answer"]
    right, (prompt,) = play(environment, f"<answer>{answer}</answer>")
    assert prompt == "<|im_start|>system\nThink.<|im_end|>\n" + asked(problem.payload["question"])
    assert right.reward == pytest.approx(1.5)
    assert right.metrics["right"] == right.metrics["format_reward_func"] == right.metrics["num_turns"] == 1.0
    assert right.metrics["reward_errors"] == right.metrics["prompt_too_long"] == 0.0
    assert right.turns[0].text == f"<answer>{answer}</answer>"  # whatever `max_tokens` the environment has

    plain, _ = play(environment, answer)
    assert plain.reward < 0.5
    nothing, _ = play(environment, "")
    assert nothing.turns[0].completion.token_ids == (TOKENIZER.eos_token_id,)
    assert nothing.metrics["right"] == 0.0


def test_turns_continue_by_ids_until_the_environment_ends_it(load) -> None:
    environment = load(MULTI)
    answer = environment.problem(0).payload["answer"]
    rollout, prompts = play(environment, "  7", "seven", answer)
    assert prompts[1] == prompts[0] + "  7<|im_end|>\n" + asked("No.")
    assert (rollout.reward, rollout.metrics["guesses"], rollout.metrics["num_turns"]) == (1.0, 3.0, 3.0)
    joined = join_turns(rollout.turns)
    (segment,) = joined.segments
    assert [TOKENIZER.decode(segment.token_ids[start:end]) for start, end in segment.sampled] == [
        f"{text}<|im_end|>" for text in ("  7", "seven", answer)
    ]
    lost, _ = play(load(MULTI, args={"max_turns": 2}), "1", "1")
    assert (lost.reward, len(lost.turns)) == (0.0, 2)


def test_options_reach_the_template(load) -> None:
    template = "{% if brief %}Be brief.\n{% endif %}" + TOKENIZER.chat_template
    tokenizer = make_tokenizer(template=template)
    _, (prompt,) = play(load(SINGLE, tokenizer, template_options={"brief": True}), "4", tokenizer=tokenizer)
    assert prompt.startswith("Be brief.\n")


def test_tools_are_shown_called_and_counted(load) -> None:
    environment = load(TOOLS)
    n = int(environment.problem(0).payload["answer"]) // 2
    rollout, prompts = play(environment, "Well. " + calling("add", a=n, b=n), f"It is {2 * n}.")
    assert '"name": "add"' in prompts[0]
    assert "Add two numbers." in prompts[0]
    assert "strict" not in prompts[0]
    assert prompts[1].startswith(prompts[0] + "Well. " + calling("add", a=n, b=n) + "<|im_end|>")
    assert f"<|im_start|>tool\n{2 * n}<|im_end|>" in prompts[1]
    assert rollout.reward == 1.0
    assert rollout.metrics["add_calls"] == rollout.metrics["total_tool_calls"] == 1.0
    assert len(join_turns(rollout.turns).segments) == 1


def test_the_environment_sees_ids_and_log_probabilities(load) -> None:
    environment = load("""
    def reward(state):
        (step,) = state["trajectory"]
        return len(step["tokens"]["completion_ids"]) + sum(step["tokens"]["completion_logprobs"])
    """)
    rollout, _ = play(environment, "It is 4.")
    assert rollout.reward == len(rollout.turns[0].completion.token_ids) / 2  # each has a log-probability of -0.5


def test_a_group_of_environments(load) -> None:
    environment = load(
        SINGLE.replace("load_environment", "single")
        + MULTI.replace("load_environment", "multi")
        + "def load_environment():\n    return vf.EnvGroup([single(), multi(1)], env_names=['single', 'multi'])\n"
    )
    problems = {problem.payload["info"]["env_id"]: problem for problem in map(environment.problem, range(36))}
    for name, metric in (("single", "right"), ("multi", "found")):
        answer = problems[name].payload["answer"]
        rollout, _ = play(environment, f"<answer>{answer}</answer>", problem=problems[name])
        assert metric in rollout.metrics
        assert "reward_errors" in rollout.metrics


# ------------------------------------------------------------------------------------------------------ problems


EVALUATED = """
def load_environment(rows):
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "source": "test"} for n in rows]
    return vf.SingleTurnEnv(dataset=sums(), eval_dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
"""


def test_evaluation_rows_are_never_trained_on(load) -> None:
    environment = load(EVALUATED, args={"rows": [3, 50, 4]})
    held_out = [problem.payload["question"] for problem in environment.held_out(10)]
    assert sorted(held_out) == sorted(f"What is {n} + {n}?" for n in (3, 50, 4))
    seen = {environment.problem(index).payload["question"] for index in range(18)}
    assert len(seen) == 18
    assert seen.isdisjoint(held_out)
    with pytest.raises(EnvironmentSetupError, match="the dataset of environment file1: all of its 20 problems are held out"):
        load(EVALUATED, args={"rows": list(range(20))})


# ------------------------------------------------------------------------------------------------------ rewards


def test_a_reward_that_raises_is_worth_0_and_counted_for_its_own_rollout(load) -> None:
    environment = load("def reward(completion):\n    return float(completion[-1].content)")
    rollouts = play_together(environment, "1", "x", "2", "y")
    scored = [(rollout.reward, rollout.metrics["reward_errors"]) for rollout in rollouts]
    assert scored == [(1.0, 0.0), (0.0, 1.0), (2.0, 0.0), (0.0, 1.0)]


def test_a_judge_that_can_not_be_reached_costs_the_rollout(load) -> None:
    environment = load("""
    import openai

    def load_environment():
        client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none", max_retries=0)
        rubric = vf.JudgeRubric(judge_client=client)

        async def judged(judge, prompt, completion, answer):
            return float("yes" in await judge(prompt, completion, answer))

        rubric.add_reward_func(judged)
        return vf.SingleTurnEnv(dataset=sums(), rubric=rubric)
    """)
    with pytest.raises(RolloutError, match="judged raised RuntimeError"):
        play(environment, "It is 4.")


def test_a_slow_reward_keeps_nothing_waiting(load) -> None:
    """The first one's reward waits for what the second one's does: on the loop's own thread it would wait for ever."""
    environment = load("""
    done = threading.Event()

    def reward(completion):
        if completion[-1].content == "first":
            return float(done.wait(60))
        done.set()
        return 2.0
    """)
    assert [rollout.reward for rollout in play_together(environment, "first", "second")] == [1.0, 2.0]


def test_a_reward_that_needs_the_main_thread_says_so(load) -> None:
    code = """
    import signal

    def reward():
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return 1.0
    """
    with pytest.raises(RolloutError, match=r"main thread .* \(set environment.args.threads to false\)"):
        play(load(code), "4")
    assert play(load(code, threads=False), "4")[0].reward == 1.0


# ------------------------------------------------------------------------------------------------------ failures


def test_what_a_call_of_the_model_raises_comes_out_but_a_later_prompt_that_is_too_long_is_the_end(load) -> None:
    environment = load(MULTI)
    for texts in ([PromptTooLongError("no room")], [RequestError("no engine")], ["1", RequestError("no engine")]):
        with pytest.raises(type(texts[-1]), match=str(texts[-1])):
            play(environment, *texts)
    rollout, _ = play(environment, "1", "2", PromptTooLongError("no room"))
    assert (len(rollout.turns), rollout.reward, rollout.metrics["prompt_too_long"]) == (2, 0.0, 1.0)


def test_errors_of_the_environment_cost_the_rollout(load) -> None:
    stops = TOOLS.replace("max_turns=3", "max_turns=3, stop_errors=[TypeError]")
    with pytest.raises(RolloutError, match=r"environment file0 ended with ToolCallError\(\) -> TypeError"):
        play(load(stops), calling("add", a=1))
    raises = MULTI.replace('state["guesses"].append', 'state["nothing"].append')
    environment = load(raises)
    with pytest.raises(KeyError, match="nothing"):
        play(environment, "1")


# ------------------------------------------------------------------------------------------------------ setting up


def test_an_installed_environment_is_found_by_its_name_and_leaves_signal_handlers_alone(tmp_path, monkeypatch) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    (tmp_path / "very_own_sums.py").write_text(HEAD + SINGLE)
    monkeypatch.syspath_prepend(tmp_path)
    environment = make_environment("verifiers", {"environment": "someone/very-own-sums"}, TOKENIZER, 0)
    assert environment.problem(0).id.startswith("someone/very-own-sums/")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


GROUP = """
def relative(completions):
    return [1.0 for _ in completions]

def load_environment():
    return vf.EnvGroup([vf.SingleTurnEnv(dataset=sums(), rubric=vf.Rubric(funcs=[right, relative]))])
"""
RETURNS = "def load_environment():\n    return "


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (SINGLE, {"tokenizer": make_tokenizer(template=None)}, "no chat template"),
        (SINGLE.replace(", **more", ""), {"args": {"sistem": ""}}, "environment file0 can't be loaded: TypeError: .*sistem"),
        (SINGLE, {"environment": "gsm8k"}, "either `environment`.*or `load`"),
        (SINGLE, {"load": "", "environment": "no-such-env"}, "no module no_such_env"),
        (RETURNS + "3", {}, "returned a int, not a verifiers.Environment"),
        (
            RETURNS + "vf.SingleTurnEnv(dataset=lambda: 1 / 0, rubric=vf.Rubric(funcs=[right]))",
            {},
            "file0.py, line 15: ",
        ),
        (RETURNS + "vf.SingleTurnEnv(eval_dataset=sums(), rubric=vf.Rubric(funcs=[right]))", {}, "no dataset to train on"),
        (RETURNS + "vf.SingleTurnEnv(dataset=sums())", {}, "no reward function with a weight"),
        (GROUP, {}, "reward functions of whole groups"),
    ],
)
def test_what_can_not_be_used_is_one_line(load, code, arguments, message) -> None:
    with one_line(EnvironmentSetupError, match=message):
        load(code, **arguments)
