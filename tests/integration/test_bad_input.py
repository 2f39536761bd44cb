"""Everything that a user can get wrong: one line that says what and where, the right exit status, and a clean next try."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import pipelinerl
from pipelinerl.checkpoint import by_version, load_checkpoint
from pipelinerl.cli import main
from pipelinerl.launch.run_lock import RunLock
from pipelinerl.run_directory import RunDirectory
from tests.integration.runs import (
    assert_gone_on,
    command,
    flags,
    run,
    start,
    start_processes,
    steps,
    summary,
    wait,
    write_environment,
)
from tests.limits import small_files

Settings = dict[str, Any]


def environment(body: str) -> Callable[[Path], Settings]:
    return lambda folder: {"environment__kind": write_environment(folder, body)}


def demo_in(folder: Path, *ignored: str) -> Path:
    """A copy of the demo's model, less some of its files."""
    source = Path(pipelinerl.__file__).parent / "assets" / "demo_base"
    return shutil.copytree(source, folder / "model", ignore=shutil.ignore_patterns(*ignored))


def model_without_weights(folder: Path) -> Settings:
    return {"model__path": demo_in(folder, "*.safetensors")}


def model_with_a_strict_template(folder: Path) -> Settings:
    (demo_in(folder) / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    return {"model__path": folder / "model", "environment__kind": "reasoning_gym", "environment__args": "{task: chain_sum}"}


def malformed_jsonl(folder: Path) -> Settings:
    (folder / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "2 + 2?", \n')
    return {"environment__kind": "math", "environment__args": f"{{path: {folder / 'train.jsonl'}, judge: numbers}}"}


USER_ERRORS: dict[str, tuple[Callable[[Path], Settings], str]] = {
    "model folder missing": (lambda folder: {"model__path": folder / "nothing"}, "nothing"),
    "model template raises": (model_with_a_strict_template, "TemplateError: roles must alternate"),
    "no such GPU for the trainer": (
        lambda _: {"trainer__device": "cuda:99"},
        "trainer.device: device 'cuda:99' can't be used: ",
    ),
    "memory": (lambda _: {"engine__slots": 10**9}, "KV cache"),
    "model without weights": (model_without_weights, "model"),
    "held_out raises": (environment("def held_out(self, count):\n    raise KeyError('answers')"), "held_out("),
    "malformed JSONL": (malformed_jsonl, "train.jsonl:2 is not JSON"),
    "run_dir below a file": (lambda folder: {"run_dir": folder / "file" / "r"}, "choose a --run_dir"),
}

NEXT_TRY = ("model without weights", "held_out raises")


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line with which a command ends; its status is given."""

    def line(status: int, *arguments: str) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == status
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1, error
        return error

    return line


@pytest.mark.parametrize("name", USER_ERRORS)
def test_a_mistake_is_one_line_and_status_2(name: str, tmp_path: Path, refusal: Callable[..., str]) -> None:
    make, said = USER_ERRORS[name]
    (tmp_path / "file").write_text("")
    run_dir = tmp_path / "r"
    settings = {"evaluation__problems": 4, "trainer__steps": 1, **make(tmp_path)}
    wrong_dir = settings.pop("run_dir", run_dir)
    assert said in refusal(2, "train", *flags(wrong_dir, **settings))
    if name in NEXT_TRY:  # the corrected command works in the same folder
        assert main(["train", *flags(run_dir, trainer__steps=1)]) == 0
        assert summary(run_dir)["status"] == "finished"


@pytest.mark.slow
def test_a_learning_rate_that_breaks_the_weights_is_one_line(tmp_path: Path, refusal: Callable[..., str]) -> None:
    error = refusal(5, "train", *flags(tmp_path / "r", trainer__learning_rate=1e38, trainer__steps=50))
    assert "not finite" in error
    assert "lower trainer.learning_rate" in error
    # Whoever notices first ends the run. If that is the engine, the trainer is stopped and saves its weights.
    for saved in (tmp_path / "r").glob("checkpoints/*/model.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(saved).values())


def damaged(name: str, keep: int) -> Callable[[Path], object]:
    return lambda run_dir: (run_dir / name).write_bytes((run_dir / name).read_bytes()[:keep] + b"\xff{{")


DAMAGE: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "configuration": (damaged("config.yaml", 20), 2, "config.yaml: a run file is UTF-8 text; byte 20 is not"),
    "state": (
        damaged("checkpoints/step_00000001/state.json", 40),
        1,
        "delete this checkpoint to resume from the one before",
    ),
    "no configuration": (
        lambda run_dir: (run_dir / "config.yaml").unlink(),
        2,
        "is not a run directory: it has no config.yaml",
    ),
}


def test_a_damaged_run_directory_is_not_gone_on_with(tmp_path: Path, refusal: Callable[..., str]) -> None:
    assert run(tmp_path / "r", trainer__steps=1)["predicted_memory_bytes"].keys() == {"embedded"}
    for name, (damage, status, said) in DAMAGE.items():
        run_dir = tmp_path / name
        shutil.copytree(tmp_path / "r", run_dir)
        damage(run_dir)
        assert said in refusal(status, "train", "--resume", str(run_dir), "--trainer.steps=2")


@pytest.mark.slow
def test_a_mistake_in_a_worker_reaches_the_terminal(tmp_path: Path) -> None:
    make, said = USER_ERRORS["model without weights"]
    run_dir = tmp_path / "r"
    arguments = flags(run_dir, launch__kind="processes", trainer__steps=1, **make(tmp_path))
    ended = wait(start("train", *arguments))
    assert (ended.status, ended.error.count("\n")) == (2, 1), ended.error
    assert said in ended.error
    assert "Traceback" not in ended.out
    assert summary(run_dir)["restarts"] == {}, "what failed once is not tried again"
    RunLock(RunDirectory(run_dir)).close()  # nobody holds it any more: the other worker has ended, too


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    """A folder that happens to have a config.yaml and folders of the same names is no failed start."""
    for name in ("rollouts", "logs", "control"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.jsonl").write_text("{}")
    (tmp_path / "config.yaml").write_text("a: 1\n")
    assert main(["train", *flags(tmp_path)]) == 2
    assert len(list(tmp_path.glob("*/mine.jsonl"))) == 3


def test_an_environment_that_always_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last words are the environment's own: what it raised, and where."""
    kind = write_environment(tmp_path, "async def rollout(self, problem, client):\n    return problem.payload['prize']")
    assert main(["train", *flags(tmp_path / "r", environment__kind=kind)]) == 1
    error = capsys.readouterr().err
    assert "KeyError: 'prize'" in error
    assert "task.py" in error


@pytest.mark.slow
def test_a_disk_that_is_too_full_for_a_checkpoint(tmp_path: Path, refusal: Callable[..., str]) -> None:
    run_dir = tmp_path / "r"
    run(run_dir, trainer__steps=1)
    with small_files(2_000_000):
        error = refusal(1, "train", "--resume", str(run_dir), "--trainer.steps=2")
    assert f"can't write checkpoint {run_dir}/checkpoints/step_00000002: " in error
    (intact,) = by_version(run_dir / "checkpoints").values()
    assert load_checkpoint(intact).state.version == 1
    assert not [path for path in (run_dir / "checkpoints").iterdir() if path != intact]
    assert main(["train", "--resume", str(run_dir), "--trainer.steps=2"]) == 0


def tool(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small file system in memory, of so many MB."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        tool("mount", "-t", "tmpfs", "-o", f"size={int(request.param * 1024)}k", "tmpfs", str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield path
    tool("umount", "--lazy", str(path))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("disk", [0.02, 0.3, 1, 3, 5, 7, 9, 12, 16, 24], indirect=True, ids=str)
def test_a_disk_that_fills_up(disk: Path) -> None:
    """Sizes in MB, at which it is full at the start, while processes load, in the first checkpoint, or later."""
    run_dir = disk / "r"
    ended = wait(start_processes(run_dir, trainer__steps=100_000, trainer__checkpoint_every=2))
    assert ended.status in (1, 2), ended.error
    assert "Traceback" not in ended.out + ended.error
    assert ended.error.startswith("error: ")
    assert ended.error.count("\n") == 1, ended.error
    tool("mount", "-o", "remount,size=512m", str(disk))
    if (run_dir / "config.yaml").exists():
        goal = len(steps(run_dir)) + 3
        ended = command("train", "--resume", str(run_dir), f"--trainer.steps={goal}")
    else:
        goal = 3
        ended = command("train", *flags(run_dir, launch__kind="processes", trainer__steps=goal))
    assert (ended.status, ended.error) == (0, "")
    assert_gone_on(run_dir, goal)
