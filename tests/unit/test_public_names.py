"""The names that users import, and the files that newcomers read, are where the documentation says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPORTED = {
    "pipelinerl": {"Run", "RunConfig", "StartedRun", "StopRun", "__version__", "load_config", "start", "train", "try_run"},
    "pipelinerl.engine": {"LocalEngine"},
    "pipelinerl.environments": {"SingleTurn", "ToolTask", "make_environment"},
}
IMPORT = re.compile(r"^\s*from (pipelinerl[\w.]*) import \(?([^#()\n]+)", re.MULTILINE)


@pytest.mark.parametrize("module", EXPORTED)
def test_a_package_exports_these_names_and_no_others(module: str) -> None:
    assert set(importlib.import_module(module).__all__) == EXPORTED[module]


def shown() -> set[tuple[str, str]]:
    """Every (module, name) that the README, the docs, the examples or a new project import."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")]
    files += [path for path in (ROOT / "src/pipelinerl/assets/templates").rglob("*.*") if path.is_file()]
    return {
        (module, name.split(" as ")[0].strip())
        for file in files
        for module, names in IMPORT.findall(file.read_text(encoding="utf-8"))
        for name in names.split(",")
        if name.strip()
    }


def test_everything_that_documentation_imports_exists() -> None:
    found = shown()
    assert ("pipelinerl.environments", "SingleTurn") in found
    for module, name in sorted(found):
        assert hasattr(importlib.import_module(module), name), f"from {module} import {name}"


def test_the_reading_path_is_short_and_its_sizes_are_right() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| \[`.*?`\]\((.*?)\).*? \| (?:(\d+) of )?(\d+) \|", readme, re.MULTILINE)
    assert rows[0][0] == "examples/pipeline_rl_in_one_file.py"
    assert len(rows) <= 12
    assert sum(int(part or whole) for _, part, whole in rows) <= 2000
    for path, _, whole in rows:
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        assert abs(lines - int(whole)) <= 20, f"README.md says {whole} lines, {path} has {lines}"
