"""The ledger is a set of group indices; a plain set is the reference."""

from __future__ import annotations

from itertools import count, islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.ledger import GroupLedger, LedgerRecord

indices = st.lists(st.integers(0, 40), max_size=60)


@given(indices)
def test_it_is_the_set_of_what_was_added(added: list[int]) -> None:
    ledger, reference = GroupLedger(), set()
    for index in added:
        ledger.add(index)
        reference.add(index)
        assert len(ledger) == len(reference)
    assert [index for index in range(-2, 45) if index in ledger] == sorted(reference)


@given(indices, st.integers(-3, 45))
def test_missing_indices_come_in_order_from_any_start(added: list[int], start: int) -> None:
    expected = list(islice((index for index in count(max(start, 0)) if index not in set(added)), 30))
    assert list(islice(GroupLedger(added).missing_from(start), 30)) == expected


def test_what_is_added_meanwhile_is_no_longer_missing() -> None:
    ledger = GroupLedger([0, 2])
    missing = ledger.missing_from()
    assert next(missing) == 1
    for index in (1, 3, 5):
        ledger.add(index)
    assert next(missing) == 4
    assert next(missing) == 6


@given(indices)
def test_a_record_brings_it_back_whatever_the_order(added: list[int]) -> None:
    ledger = GroupLedger(added)
    record = ledger.to_record()
    assert record == GroupLedger(sorted(added, reverse=True)).to_record()
    stored = msgspec.json.decode(msgspec.json.encode(record), type=LedgerRecord)
    again = GroupLedger.from_record(stored)
    assert again.to_record() == record
    again.add(record.below)
    assert len(again) == len(ledger) + 1


def test_it_stays_small() -> None:
    ledger = GroupLedger(index for index in range(10_000) if index != 9_990)
    assert ledger.to_record() == LedgerRecord(9_990, tuple(range(9_991, 10_000)))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="negative: -1"):
        GroupLedger([-1])
    with pytest.raises(ValueError, match="not a ledger"):
        GroupLedger.from_record(LedgerRecord(5, (5,)))
    with pytest.raises(ValueError, match="not a ledger"):
        GroupLedger.from_record(LedgerRecord(-1))
