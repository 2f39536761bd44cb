"""Test settings: property tests draw the same examples every time (use --hypothesis-profile=wild to explore).

A test may be a coroutine function.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests import forks

# Small models gain nothing from several threads, and tests may run in parallel. Must be set before anything imports torch;
# processes started by tests inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # until everything is imported: nearly all of it stays

settings.register_profile("seeded", derandomize=True, deadline=None)
settings.register_profile("wild", derandomize=False, deadline=None, max_examples=1000)
settings.load_profile("seeded")


NEEDED = {
    "needs_redis": lambda: shutil.which("redis-server") is not None,
    "needs_ray": lambda: importlib.util.find_spec("ray") is not None,
}
"""What tests with these marks need: a bare machine does not have it, and skips them."""


def pytest_configure(config: pytest.Config) -> None:
    if "TESTS_FORKS" not in os.environ:  # the workers of xdist have it
        folder = tempfile.mkdtemp(prefix="forks-")
        config.add_cleanup(lambda: shutil.rmtree(folder))
        os.environ["TESTS_FORKS"] = f"{folder} {os.getpid()}"
    folder, owner = os.environ["TESTS_FORKS"].split()
    forks.install(folder, int(owner))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, as tests also wait for processes."""
    return (os.cpu_count() or 1) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="also run the tests that are marked as exhaustive")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for mark, is_here in NEEDED.items():
        if not is_here():
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(f"{mark.removeprefix('needs_')} is not installed here"))
    if config.getoption("--exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What was imported is never searched for garbage, here, by hypothesis or by pytest."""
    gc.freeze()
    gc.set_threshold(50_000)  # as in the processes of a run
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package look as if it were not installed."""
    from pipelinerl import extras

    def hide(package: str) -> None:
        found = extras.version
        monkeypatch.setattr(extras, "version", lambda name: None if name == package else found(name))

    return hide


@pytest.fixture(autouse=True, scope="session")
def one_recording_per_model() -> Iterator[None]:
    """Engines of the same model share its exported graph, in tests that import torch: see `tests/recordings.py`."""
    if "torch" not in sys.modules:
        yield
        return
    from tests import recordings

    with recordings.shared_recordings():
        yield
