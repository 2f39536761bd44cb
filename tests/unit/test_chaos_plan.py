"""A seed's faults: a function of the seed and the run file, all of them possible there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelinerl
from pipelinerl.config.load import load_config
from tests.chaos.plan import KINDS, LAYOUTS, LONG_S, SHORT_S, SMALL, Kind, places, plan_faults

LINKS = ("redis", "server-0")
CONFIGS = {layout: load_config(None, [*SMALL, *flags]) for layout, flags in LAYOUTS.items()}


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 12),
    layout=st.sampled_from(list(LAYOUTS)),
    kinds=st.lists(st.sampled_from(KINDS), unique=True),
)
def test_faults_are_repeatable_and_possible(seed: int, count: int, layout: str, kinds: list[Kind]) -> None:
    config = CONFIGS[layout]
    there = places(config, LINKS)
    possible = set(kinds) & there.keys()
    faults = plan_faults(seed, config, count, kinds, LINKS)
    assert faults == plan_faults(seed, config, count, list(reversed(kinds)), LINKS)
    assert len(faults) == (count if possible else 0)
    longest_s = LONG_S[1] * config.launch.watchdog_s
    for fault in faults:
        assert fault.kind in possible
        assert fault.place in there[fault.kind]
        assert fault.after_s >= 0
        if fault.kind in ("kill", "weights"):
            assert fault.lasts_s == 0
        else:
            assert SHORT_S[0] <= fault.lasts_s <= (longest_s if fault.kind == "stop" else SHORT_S[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_place_is_hurt_by_every_fault_that_fits(layout: str) -> None:
    config = CONFIGS[layout]
    found = Counter((fault.kind, fault.place) for seed in range(100) for fault in plan_faults(seed, config, 20, links=LINKS))
    assert found.keys() == {(kind, place) for kind, there in places(config, LINKS).items() for place in there}


LABELS = (
    "experiments/",
    "report/trackers.py",
    "serving/server/service.py",
    "serving/server/chat.py",
)
"""Where the wall clock is read: dates in reports, exports and trackers, and `created` in answers of OpenAI's API."""


def test_no_decision_of_a_run_reads_the_wall_clock() -> None:
    """So a clock that jumps changes none."""
    source = Path(pipelinerl.__file__).parent
    reads = re.compile(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow|today)\(|st_mtime|getmtime|CLOCK_REALTIME")
    readers = {str(path.relative_to(source)) for path in source.rglob("*.py") if reads.search(path.read_text())}
    assert readers, "the pattern finds something"
    assert all(reader.startswith(LABELS) for reader in readers), readers
