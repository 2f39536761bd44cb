"""The command line: what it accepts, what it says, and how it exits."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import pipelinerl.cli.project
from pipelinerl import __version__
from pipelinerl.cli import COMMANDS, main
from pipelinerl.config.load import config_from_yaml, config_to_yaml, load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RunInterruptedError, StalledError
from pipelinerl.process import counted_interrupts

Capture = pytest.CaptureFixture[str]


def run_file(tmp_path: Path, text: str = "seed: 5\n") -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def test_config_prints_a_run_file(capsys: Capture, tmp_path: Path) -> None:
    path = run_file(tmp_path)
    orders = (["config", path, "--seed", "7"], ["config", "--seed", "7", path], ["config", "--seed=7", path, "--debug"])
    for arguments in orders:
        assert main(arguments) == 0
        assert config_from_yaml(capsys.readouterr().out) == load_config(Path(path), ["--seed", "7"])
    assert main(["config"]) == 0
    assert config_from_yaml(capsys.readouterr().out) == RunConfig(), "the defaults, not the demo's values"


def test_version_and_help(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pipelinerl {__version__}\n"
    for arguments in (["--help"], ["train", "--help"], ["config", "-h"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out.startswith("usage: pipelinerl")
    assert main(["--help"]) == 0
    listed = re.findall(r"^  ([\w-]+)  ", capsys.readouterr().out.partition("options:")[2], re.MULTILINE)
    assert [name for name in listed if not name.startswith("-")] == [*COMMANDS], "each command once"
    assert main([]) == 2
    assert "usage: pipelinerl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean `train`?"),
        (["run", "x.yaml"], "unknown command 'run'; did you mean `train RUN.yaml` or `train --resume RUN_DIR`?"),
        (["compare", "run.yaml"], "unknown command 'compare'; did you mean `lab compare`?"),
        (["lab", "comprae"], "unknown command 'lab comprae'; did you mean `lab compare`?"),
        (["lab"], "name a command: lab compare, study,"),
        (["train", "."], ". is a folder, not a run file; `pipelinerl train --resume .` continues a run"),
        (["frobnicate", "x"], "unknown command 'frobnicate'; there are init, config,"),
        (["--foo"], "pipelinerl without a command has no flag --foo (see `pipelinerl --help`)"),
        (["train", "trainer.steps=3"], "a key of the run file is set by a flag: `--trainer.steps=3`"),
        (["train", "--metrics.plot", "run.yaml"], "--metrics.plot: 'run.yaml' is not allowed here; this takes true"),
        (["train", "--resum", "x"], "unknown flag --resum; did you mean `--resume`?"),
        (["train", "--verbose"], "pipelinerl train has no flag --verbose (the table at the end always has all rows)"),
        (["browse", "--evaluations", "x"], "has no flag --evaluations (read rollouts/evaluation-*.jsonl of the run"),
        (["train", "--resume"], "argument --resume: expected one argument"),
        (["config", "--resume", "x"], "--resume: unknown key; `pipelinerl config` prints all keys"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_resume_takes_no_run_file_and_its_flags_are_checked(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config_to_yaml(load_config(None)))
    assert main(["train", run_file(tmp_path), "--resume", str(tmp_path)]) == 2
    assert "leave out" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path), "--trainer.steps", "0"]) == 2, "flags are checked here too"
    assert "--trainer.steps: 0" in capsys.readouterr().err


@pytest.mark.parametrize("nested", [False, True])
def test_after_sigterm_the_status_is_that_of_sigterm(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(*_: object) -> None:
        with counted_interrupts() if nested else nullcontext():
            signal.raise_signal(signal.SIGTERM)
            raise RunInterruptedError("stopped before its goal")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(pipelinerl.cli.project, "load_config", terminated)
    assert main(["config"]) == 143
    assert signal.getsignal(signal.SIGTERM) is before


ALLOCATOR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 912384 bytes."


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (StalledError("the trainer waits"), 3, "error: the trainer waits\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (MemoryError(), 1, "error: no memory is left: "),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "error: no memory is left: "),
        (RuntimeError("can't start new thread"), 1, "error: no memory is left: "),
        (RuntimeError(ALLOCATOR), 1, "error: no memory is left: "),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 1, "error: no memory is left: "),
        (ImportError("tokenizers.abi3.so: failed to map segment from shared object"), 1, "error: no memory is left: "),
        (OSError(errno.EFBIG, "File too large"), 1, "error: can't write: [Errno 27] File too large; make room on that disk"),
        (ZeroDivisionError(), None, ""),
    ],
)
def test_errors_are_one_line_with_their_status_and_bugs_are_not_hidden(
    error: BaseException, status: int | None, message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        try:
            raise error
        finally:
            if "no memory" in message:
                raise RuntimeError("while it ended")

    monkeypatch.setattr(pipelinerl.cli.project, "load_config", fail)
    if status is None:
        with pytest.raises(type(error)):
            main(["config"])
        return
    assert main(["config"]) == status
    said = capsys.readouterr().err
    assert said.startswith(message)
    assert said.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; from pipelinerl.cli import main; sys.exit(main(['config']))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 141
