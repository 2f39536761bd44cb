"""Runs from Python: what is given to `train` and `start`, what they return, and what is done with a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pipelinerl
from pipelinerl.api import _prepare
from pipelinerl.cli import main
from pipelinerl.environments.tasks.gcd import Gcd
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.metrics.records import Record, StepRecord

pytestmark = pytest.mark.exhaustive

SMALL: dict[str, Any] = {
    "actor": {"group_size": 4, "max_tokens": 8},
    "engine": {"slots": 16, "threads": 1, "max_length": 64},
    "trainer": {"steps": 3, "batch_size": 16, "threads": 1, "learning_rate": 1e-3},
    "launch.kind": "embedded",
    "metrics.view": "none",
}
DATA = [{"prompt": f"{a},{b}:", "answer": str(a)} for a in range(10, 20) for b in range(20, 25)]


def reward(completion: str, example: dict[str, Any]) -> float:
    return float(completion.startswith(f">{example['answer']}")) + 0.01 * len(completion)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pipelinerl.Run:
    run_dir = str(tmp_path_factory.mktemp("api") / "run")
    config = {**SMALL, "run_dir": run_dir, "evaluation.problems": 4}
    return pipelinerl.train(config, model="demo", reward=reward, data=DATA)


def test_a_run_is_there_as_settings_data_frames_and_a_model(trained: pipelinerl.Run) -> None:
    assert trained.summary["status"] == "finished"
    assert trained.config.environment.args["reward"] == f"{Path(__file__).resolve()}:reward"
    model, tokenizer = trained.load_model()
    assert tokenizer.decode(tokenizer("12,30:")["input_ids"]).startswith("12")
    assert sum(weight.numel() for weight in model.parameters()) > 1e5
    assert list(trained.metrics["version"]) == [1, 2, 3]
    assert list(trained.evaluations["when"]) == ["before", "after"]
    assert len(trained.rollouts) >= 48
    assert {"completion", "reward", "step"} <= set(trained.rollouts.columns)


def test_a_dry_run_of_push_lists_the_weights_and_prints_the_card(
    trained: pipelinerl.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["push", str(trained.path), "someone/my-model", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "model.safetensors" in printed
    assert "optimizer" not in printed.split("---")[0]
    assert "state.json" not in printed
    assert "| training reward |" in printed
    assert 'from_pretrained("someone/my-model")' in printed
    assert str(trained.path) not in printed, "paths of this machine are not for others"
    assert main(["push", str(trained.path), "a/b/c", "--dry-run"]) == 2
    assert main(["push", str(trained.path), "someone/my-model"]) == 2
    assert "the hub did not take someone/my-model" in capsys.readouterr().err


def test_a_started_run_is_followed_and_stopped(tmp_path: Path) -> None:
    config = {**SMALL, "run_dir": str(tmp_path / "run"), "trainer": {**SMALL["trainer"], "steps": 10000}}
    with pipelinerl.start(config, environment="gcd") as run:
        for record in run:
            if record.version == 3:
                break
        assert run.running
    assert not run.running
    done = pipelinerl.Run(run.path)
    assert done.summary["status"] == "interrupted"
    assert done.summary["optimizer_steps"] >= 3


def test_a_started_run_raises_what_it_ends_with(tmp_path: Path) -> None:
    run = pipelinerl.start({**SMALL, "run_dir": str(tmp_path / "run")}, reward=reward, data=str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match=r"none\.jsonl"):
        run.wait()


def enough(record: Record) -> None:
    if isinstance(record, StepRecord):
        raise pipelinerl.StopRun("enough")


def test_a_callback_ends_the_run_after_the_current_step_and_a_resume_goes_on(tmp_path: Path) -> None:
    config = {**SMALL, "run_dir": str(tmp_path / "run"), "evaluation.problems": 2, "metrics.callback": f"{__file__}:enough"}
    config["trainer"] = {**SMALL["trainer"], "steps": 10000}
    run = pipelinerl.train(config, environment="gcd")
    assert (run.summary["status"], run.summary["stopped_by"]) == ("finished", "enough")
    steps = run.summary["optimizer_steps"]
    assert steps < 10000
    assert [one.when for one in run.evaluations.itertuples()] == ["before", "after"]
    resumed = pipelinerl.train({"trainer.steps": steps + 1, "metrics.callback": None}, resume=run.path)
    assert (resumed.summary["optimizer_steps"], resumed.summary["stopped_by"]) == (steps + 1, None)


def test_a_notebook_draws_a_run_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    path = Path(__file__).parents[2] / "examples" / "live_plot.ipynb"
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the plot"
    (written,) = tmp_path.glob("runs/*/inputs/*.py")
    assert "def reward" in written.read_text()


def brief(completion: str, example: dict[str, Any]) -> float:
    return -float(len(completion))


def prepared(tmp_path: Path, **given: Any) -> pipelinerl.RunConfig:
    values = (given.get(name) for name in ("model", "environment", "reward", "data"))
    config, _ = _prepare({"run_dir": str(tmp_path)}, *values)
    return config


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [
        ([reward, brief], (1.0, 1.0)),
        ([reward, (brief, 0.2)], (1.0, 0.2)),
        ({reward: 2.0, f"{__file__}:brief": 0.5}, (2.0, 0.5)),
    ],
)
def test_several_rewards_are_named_with_their_weights(rewards: Any, weights: Sequence[float], tmp_path: Path) -> None:
    named = prepared(tmp_path, reward=rewards, data=DATA).environment.args["reward"]
    assert named == {f"{__file__}:{name}": weight for name, weight in zip(("reward", "brief"), weights, strict=True)}


def test_a_partial_gives_a_class_its_arguments(tmp_path: Path) -> None:
    assert prepared(tmp_path, environment=partial(Gcd, level=3)).environment.args == {"level": 3}


def test_a_data_frame_has_a_row_for_each_example(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = prepared(tmp_path, reward=reward, data=pandas.DataFrame(DATA)).environment.args["data"]
    assert [json.loads(line) for line in Path(str(path)).read_text().splitlines()] == DATA


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"environment": object()}, "is no class; each process makes an object of its own"),
        ({"environment": partial(Gcd, 3)}, "by name"),
        ({"reward": [reward, reward], "data": DATA}, "given twice"),
        ({"reward": len, "data": DATA}, "write a function with `def`"),
        ({"reward": reward, "data": ["12,30:"]}, r"data\[0\] is a str, not a dict"),
        ({"reward": reward, "data": DATA[0]}, "give a list"),
        ({"reward": reward, "data": [*DATA, {"prompt": object()}]}, rf"data\[{len(DATA)}\] has a value"),
        ({"model": object()}, "neither a folder nor a hub id"),
    ],
)
def test_what_can_not_be_used_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        prepared(tmp_path / "new", **given)


def test_a_run_keeps_the_inputs_that_it_was_trained_on(trained: pipelinerl.Run) -> None:
    before = (trained.path / "inputs/data.jsonl").read_bytes()
    with pytest.raises(RunDirectoryError, match="already has a run"):
        pipelinerl.train({**SMALL, "run_dir": str(trained.path)}, reward=reward, data=DATA[:1])
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        pipelinerl.Run(trained.path / "inputs")
    with pytest.raises(UserError, match="a resumed run keeps"):
        pipelinerl.train(resume=trained.path, reward=brief)
    assert (trained.path / "inputs/data.jsonl").read_bytes() == before
