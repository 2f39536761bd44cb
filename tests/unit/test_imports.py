"""What is imported only where it is used: a launcher, a stage or a command without models starts in a moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers"}
CHECK_STATICALLY = """
from pipelinerl.environments.registry import BUILT_IN, check_statically
for kind in BUILT_IN:
    try:
        check_statically(kind, {})
    except Exception:
        pass
"""


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import pipelinerl.preprocess", HEAVY),
        (
            "from pipelinerl.metrics import sinks, summary; from pipelinerl.status import view, watchdog",
            HEAVY | {"tensorboard"},
        ),
        ("import pipelinerl.metrics.tensorboard", HEAVY),
        ("import pipelinerl.config as c; c.render(c.load_config(None))", HEAVY | {"numpy"}),
        (CHECK_STATICALLY, HEAVY),
        ("from pipelinerl.weights.shared_file import create_shared_file; create_shared_file()", {"torch"}),
        ("from pipelinerl.weights.broadcast.control import listen; listen().close()", {"torch"}),
        ("import pipelinerl.environments.adapters.verifiers", {"verifiers"}),
    ],
)
def test_code_imports_none_of_these(code: str, absent: set[str]) -> None:
    code += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not absent & set(shown.stdout.split())
