"""A seed's faults: a function of the seed and the run file, all of them possible there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pipelinerl
from pipelinerl.config.load import load_config
from tests.chaos.plan import KINDS, LAYOUTS, SMALL, places, plan_faults

LINKS = ("redis", "server-0")
CONFIGS = {layout: load_config(None, [*SMALL, *flags]) for layout, flags in LAYOUTS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_place_is_hurt_by_every_fault_that_fits(layout: str) -> None:
    config = CONFIGS[layout]
    possible = {(kind, place) for kind, there in places(config, LINKS).items() for place in there}
    plans = [plan_faults(seed, config, 20, links=LINKS) for seed in range(100)]
    assert {(fault.kind, fault.place) for plan in plans for fault in plan} == possible
    assert plans[7] == plan_faults(7, config, 20, list(reversed(KINDS)), LINKS), "a function of the seed"


LABELS = (
    "experiments/",
    "report/trackers.py",
    "serving/server/service.py",
    "serving/server/chat.py",
    "serving/server/tinker/learner.py",
)
"""Where the wall clock is read: dates in reports, exports, trackers, saved adapters, and `created` in OpenAI's API."""


def test_no_decision_of_a_run_reads_the_wall_clock() -> None:
    """So a clock that jumps changes none."""
    source = Path(pipelinerl.__file__).parent
    reads = re.compile(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow|today)\(|st_mtime|getmtime|CLOCK_REALTIME")
    readers = {str(path.relative_to(source)) for path in source.rglob("*.py") if reads.search(path.read_text())}
    assert readers, "the pattern finds something"
    assert all(reader.startswith(LABELS) for reader in readers), readers
