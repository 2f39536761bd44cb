"""Compilers for graphs, for tests that don't need the real one, and a fresh start for those that do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.fspath(tmp_path_factory.getbasetemp() / "compiled"))
    yield
    torch.compiler.reset()


class NotingCompiler:
    """Compiles nothing, and keeps the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, _: object) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]


def absent_compiler(graph: Any, _: object) -> Callable[..., Any]:
    raise RuntimeError("No working C++ compiler found\nand more")


def wrong_compiler(graph: Any, _: object) -> Callable[..., Any]:
    """What it makes is a hundredth off."""
    return lambda *given: tuple(
        out * 1.01 if isinstance(out, Tensor) and out.is_floating_point() else out for out in graph.forward(*given)
    )
