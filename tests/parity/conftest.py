"""Engines of the same model start in most of these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_starts(one_recording_per_model: None) -> None: ...
