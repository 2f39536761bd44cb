"""The benchmarks are run rarely: at least their imports stay right."""

from __future__ import annotations

import importlib
import pkgutil

import benchmarks
import pytest


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__)])
def test_it_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
