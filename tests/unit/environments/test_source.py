"""A user's function or class is named by its file; one of a notebook is written to a file that can be imported alone."""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pipelinerl.environments.user.source import name_by_file
from pipelinerl.errors import UserError
from pipelinerl.user_code import find_function, import_code

CELLS = (
    "import math as m\nfrom pathlib import Path\nBONUS = {'right': 1.0}\nopened = open(__import__('os').devnull)",
    "def length(text):\n    return m.sqrt(len(text)) * BONUS['right']",
    "class Base:\n    def power(self):\n        return 2",
    "class Task(Base):\n    def score(self, text, opened=None):\n        return length(text) ** self.power()",
    "def reward(text, example):\n    def inner(x):\n        return length(x)\n    return inner(text) + Task().score(text)",
    "def leaks(text, example):\n    return opened",
    "small = lambda text, example: 1.0",
)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module without a file, made of cells."""
    module = ModuleType("a_notebook")
    monkeypatch.setitem(sys.modules, "a_notebook", module)
    for number, cell in enumerate(CELLS):
        name = f"<cell {number}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        exec(compile(cell, name, "exec"), vars(module))  # noqa: S102 - our own cells
    yield module
    module.opened.close()


def test_what_has_a_file_is_named_by_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(text, example):\n    return 2.0\n")
    found = import_code(str(file))
    assert name_by_file(found.reward, tmp_path / "inputs") == f"{file.resolve()}:reward"
    assert name_by_file(random.Random, tmp_path) == f"{Path(random.__file__).resolve()}:Random"
    assert not (tmp_path / "inputs").exists()


def test_what_a_notebook_defines_is_written_with_all_that_it_uses(notebook: ModuleType, tmp_path: Path) -> None:
    spec = name_by_file(notebook.reward, tmp_path / "inputs")
    assert spec == f"{tmp_path / 'inputs' / 'reward.py'}:reward"
    assert find_function(spec)("abcd", {}) == notebook.reward("abcd", {}) == 6.0
    text = (tmp_path / "inputs" / "reward.py").read_text()
    assert "Path" not in text, "it is not used"
    assert "opened" in text, "as the name of an argument only"
    assert name_by_file(notebook.Task, tmp_path).endswith("Task.py:Task")


def test_what_can_not_be_written_is_refused(notebook: ModuleType, tmp_path: Path) -> None:
    def nested() -> None: ...

    refused = {
        "uses opened, a TextIOWrapper": notebook.leaks,
        "lambda.* has no name": notebook.small,
        "write a function with `def`": notebook.BONUS,
        "inside a function": nested,
    }
    for message, value in refused.items():
        with pytest.raises(UserError, match=message):
            name_by_file(value, tmp_path)
