"""The ledger is a set of group indices; a plain set is the reference."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.types import GroupLedger


def ledger_of(added: Iterable[int]) -> GroupLedger:
    ledger = GroupLedger()
    for index in added:
        ledger.add(index)
    return ledger


indices = st.lists(st.integers(0, 40), max_size=60)


@given(indices, st.integers(-3, 45))
def test_it_is_the_set_of_what_was_added_in_any_order(added: list[int], start: int) -> None:
    ledger, reference = ledger_of(added), set(added)
    assert [index for index in range(-2, 45) if index in ledger] == sorted(reference)
    assert ledger.first_missing(start) == next(index for index in count(max(start, 0)) if index not in reference)
    assert ledger == ledger_of(sorted(added, reverse=True))
    again, copied = msgspec.json.decode(msgspec.json.encode(ledger), type=GroupLedger), ledger.copy()
    assert again == copied == ledger
    copied.add(ledger.below)
    assert copied != ledger


def test_it_stays_small() -> None:
    assert ledger_of(index for index in range(10_000) if index != 9_990) == GroupLedger(9_990, {*range(9_991, 10_000)})
