"""What tests share: property tests draw the same examples every time (to explore: --hypothesis-profile=wild)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Models this small gain nothing by more threads than one, and tests may run side by side. Set before anything imports torch;
# the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("seeded", derandomize=True)
settings.register_profile("wild", derandomize=False, max_examples=1000)
settings.load_profile("seeded")


@pytest.fixture(scope="session")
def one_recording_per_model() -> Iterator[None]:
    """Engines of the same model share the recording of its operations from here on: see `tests/recordings.py`."""
    from tests import recordings  # imports torch

    with recordings.shared_recordings():
        yield
