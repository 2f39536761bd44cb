"""The benchmarks are run rarely: at least their imports stay right."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from pathlib import Path

import benchmarks
import pytest

ROOT = Path(__file__).parents[2]
OURS = ("pipelinerl", "benchmarks", "tests")
NAMES = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]


def imports(file: Path) -> list[tuple[str, str]]:
    """Every (module, name) that a file imports; the name is empty for `import module`."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(one.name, "") for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, one.name) for one in node.names]
    return found


def absent_packages(module: str) -> set[str]:
    """Packages that are not installed here, and that a module of this repository needs when it is imported."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None
    packages = {name.partition(".")[0] for name, _ in imports(Path(spec.origin))} - {"__future__", *OURS}
    return {name for name in packages if importlib.util.find_spec(name) is None}


@pytest.mark.parametrize("name", NAMES)
def test_what_it_imports_exists(name: str) -> None:
    """Also where a package that it needs is not installed: what it imports of ours is then looked up one by one."""
    module = f"benchmarks.{name}"
    if not absent_packages(module):
        importlib.import_module(module)
    for source, imported in imports(ROOT / "benchmarks" / f"{name}.py"):
        if source.partition(".")[0] not in OURS:
            continue
        if absent_packages(source):
            spec = importlib.util.find_spec(source)
            assert imported in assigned(Path(str(spec and spec.origin))), f"from {source} import {imported}"
        elif imported and not hasattr(importlib.import_module(source), imported):
            assert importlib.util.find_spec(f"{source}.{imported}"), f"from {source} import {imported}"


def assigned(file: Path) -> set[str]:
    """The names of a module's classes, functions and constants."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found
