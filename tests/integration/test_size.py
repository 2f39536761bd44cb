"""The size of a default run: how much of this package its processes import, as a reader of it reads no more, and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipelinerl
from pipelinerl.resources.memory import BETWEEN

MOST_LINES = {"actor": 9850, "trainer": 9600}
MOST_LINES_OF_THE_LAUNCHER = 10_450
"""It owns the state of the run, which the others need not read."""

COMMAND = "import sys; from pipelinerl.cli import main; sys.exit(main())"
NOTE_IMPORTS = """
import atexit, os, sys
from pathlib import Path

def note():
    files = [module.__file__ for name, module in list(sys.modules.items()) if name.split(".")[0] == "pipelinerl"]
    if files:
        Path(os.environ["IMPORTS"], f"{os.getpid()}").write_text("\\n".join(files))

def noted_exit(code, leave=os._exit):  # a worker ends without the exit handlers
    note()
    leave(code)

os._exit = noted_exit
atexit.register(note)
"""


@pytest.mark.slow
def test_the_processes_of_a_default_run_import_their_share_and_have_the_memory_that_was_predicted(tmp_path: Path) -> None:
    noted = tmp_path / "imports"
    noted.mkdir()
    (tmp_path / "sitecustomize.py").write_text(NOTE_IMPORTS)
    search = os.pathsep.join([str(tmp_path), str(Path(pipelinerl.__file__).parents[1])])
    few = ["--trainer.steps", "1", "--trainer.batch_size", "32", "--evaluation.problems", "4"]
    few += ["--engine.threads", "1", "--trainer.threads", "1", "--actor.max_tokens", "32"]
    run = [sys.executable, "-c", COMMAND, "train", *few, "--run_dir", str(tmp_path / "run")]
    subprocess.run(run, env={**os.environ, "PYTHONPATH": search, "IMPORTS": str(noted)}, check=True, capture_output=True)
    lines = {}
    for note in noted.iterdir():
        files = [Path(file) for file in note.read_text().splitlines()]
        lines[max(files, key=lambda file: file.name in {"actor.py", "trainer.py"}).stem] = sum(
            len(file.read_text().splitlines()) for file in files
        )
    assert len(lines) == 3, "the command, generation and training"
    assert {"actor", "trainer"} < set(lines)
    assert all(4000 < count <= MOST_LINES.get(name, MOST_LINES_OF_THE_LAUNCHER) for name, count in lines.items()), lines
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    predicted_bytes, measured_bytes = summary["predicted_memory_bytes"], summary["peak_memory_bytes"]
    between = predicted_bytes.pop(BETWEEN)
    assert predicted_bytes.keys() == measured_bytes.keys() == {"generation", "training"}
    for role, most in predicted_bytes.items():
        assert 0.8 * measured_bytes[role] < most + between < 1.5 * measured_bytes[role], role
