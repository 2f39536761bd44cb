"""Every example runs as it is: the run files unchanged, in a small world.

The world is a folder with `examples/`, a model of random weights in the place of SmolLM2, and a few problems in the place of
`openai/gsm8k`. Flags make the runs short; they change no model, source or environment.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelinerl import load_config
from pipelinerl.config.keys import json_schema
from pipelinerl.launch.checks import check_without_running
from pipelinerl.launch.run import train
from tests.integration.runs import assert_whole, flags
from tests.unit.chat_parts import write_model

ROOT = Path(__file__).parents[2]
RUN_FILES = sorted(path.name for path in ROOT.glob("examples/*.yaml"))
ELSEWHERE = {
    "pipeline_rl_in_one_file.py": "tests/unit/test_one_file.py",
    "expressions.py": "tests/unit/environments/test_env_countdown.py",
    "harbor_agent.py": "tests/integration/test_harbor.py",
    "live_plot.ipynb": "tests/integration/test_python_api.py",
    "tinker_loop.py": "tests/integration/test_tinker.py",
}
"""Examples without a run file, and the tests that run them."""
SHORT = {"trainer__steps": 1, "trainer__batch_size": 8, "trainer__warmup_steps": 0, "evaluation__problems": 1}
SHORT_ANSWERS = {"actor__max_tokens": 4}
OF_RANDOM_WEIGHTS = {"engine__max_length": 4000, **SHORT_ANSWERS}
"""Such a model has no words: a prompt has nearly as many tokens as characters."""
OWN = {
    "agent.yaml": {},
    "apart.yaml": {"launch__kind": "processes", **SHORT_ANSWERS},
    "distill.yaml": {"trainer__teacher": "demo", **SHORT_ANSWERS},
    "openenv.yaml": {},
    "slow_judge.yaml": {"environment__args__median_s": 0.01, "engine__processes": 1, **SHORT_ANSWERS},
    "tools.yaml": {},
    "tools_agent.yaml": {},
    "tools_mcp.yaml": {},
    "verifiers_env.yaml": {},
    **{name: OF_RANDOM_WEIGHTS for name in RUN_FILES if "smollm2" in (ROOT / "examples" / name).read_text()},
}
EXHAUSTIVE = {
    "apart.yaml": "five processes, and tests/integration/test_apart.py runs the same parts",
    "smollm2_sums.yaml": "importing reasoning-gym takes seconds",
    "verifiers_env.yaml": "importing verifiers takes seconds",
}
NEEDED = {"openenv.yaml": "openenv", "tools_mcp.yaml": "mcp_types"}
"""Packages that not every environment for tests has."""
CLUSTERS = {"cluster.yaml": "tests/integration/test_ray.py runs the same parts on a cluster"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    (folder / "examples").symlink_to(ROOT / "examples")
    write_model(folder / "models/smollm2-135m-instruct", positions=4096)
    return folder


def few_problems(path: str, config: str, split: str) -> list[dict[str, str]]:
    """In the place of `datasets.load_dataset`, for `openai/gsm8k`."""
    assert (path, config) == ("openai/gsm8k", "main")
    numbers = {"train": range(8), "test": range(90, 93)}[split]
    return [{"question": f"What is {n} + {n}?", "answer": f"Add them.\n#### {2 * n}"} for n in numbers]


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The world as working directory, without a network; runs are in a folder of their own."""
    for path in world.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", few_problems)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUN_FILES if name not in CLUSTERS])
def test_a_run_file_passes_the_checks_before_a_run(name: str, here: Path) -> None:
    pytest.importorskip(NEEDED.get(name, "pipelinerl"))
    own = ["--trainer.teacher", "demo"] if name == "distill.yaml" else []
    check_without_running(load_config(f"examples/{name}", ["--run_dir", str(here / "run"), *own]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else ())
        for name in RUN_FILES
        if name not in CLUSTERS
    ],
)
def test_a_run_file_trains(name: str, here: Path) -> None:
    pytest.importorskip(NEEDED.get(name, "pipelinerl"))
    summary = train(load_config(f"examples/{name}", flags(Path("run"), **SHORT, **OWN.get(name, SHORT_ANSWERS))))
    assert (summary["status"], summary["optimizer_steps"]) == ("finished", 1)
    assert summary["rollouts_trained"] == 8
    assert_whole(here / "run")


def test_every_example_is_run_and_has_its_place_in_the_table() -> None:
    page = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\(\.\./examples/([\w.]+)\)", page))
    files = {path.name for path in (ROOT / "examples").iterdir() if path.is_file() and path.name != "run.schema.json"}
    assert listed == files
    named = "".join((ROOT / "examples" / name).read_text(encoding="utf-8") for name in RUN_FILES)
    for name in files - {*RUN_FILES}:
        assert name in named or (ROOT / ELSEWHERE[name]).is_file(), name


def test_every_example_names_the_schema_for_editors_which_is_the_current_one() -> None:
    for name in RUN_FILES:
        first = (ROOT / "examples" / name).read_text().partition("\n")[0]
        assert first == "# yaml-language-server: $schema=run.schema.json", name
    written = (ROOT / "examples/run.schema.json").read_text()
    assert written == json_schema(), "run `pipelinerl config --schema > examples/run.schema.json`"
