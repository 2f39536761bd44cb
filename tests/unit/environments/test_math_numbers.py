"""Numbers in texts: which one is the answer, and its exact value."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.environments.tasks.numbers import answer_in, number_of


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("first 7, then 8 apples", 8),
        ("#### 42", 42),
        ("#### 42\nand then I said 7", 42),
        ("#### 41\nno: #### 42", 42),
        ("#### $1,234,567.00", 1234567),
        ("#### 5 dollars and 3 cents", 5),
        ("#### none", None),
        (r"so \boxed{42}. Or 7?", 42),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{-\frac{3}{4}}", Fraction(-3, 4)),
        (r"\boxed{x = 12\text{ cm}}", 12),
        (r"\boxed{1{,}000}", 1000),
        (r"\boxed{7", 7),
        (r"is 75\%", 75),
        ("75%", 75),
        ("is $3.50.", Fraction(7, 2)),
        ("about .5 of it", Fraction(1, 2)),
        ("2 1/2 hours", Fraction(5, 2)),
        ("5/0", None),
        ("-3", -3),
        ("is $-3", -3),
        ("is \u22123", -3),
        ("(-3)", -3),
        ("10-3", 3),
        ("10 - 3", 3),
        ("x - 3", 3),
        ("(a)-3", 3),
        ("- 3 eggs", 3),
        ("eggs:\n- 3", 3),
        ("1,2,3", 3),
        ("H2O", None),
        ("version 1.2.3", Fraction(6, 5)),
        ("9" * 5000, None),
        ("", None),
    ],
)
def test_the_answer_of_a_text(text, value):
    assert answer_in(text)[0] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("42", 42), (" $1,200. ", 1200), ("-3/4", Fraction(-3, 4)), ("18 dollars", 18), ("50%", 50)]
    + [(text, None) for text in ("a 42", "1 or 2", "")],
)
def test_a_text_that_is_one_number(text, value):
    assert number_of(text) == value


@given(
    whole=st.integers(-(10**12), 10**12),
    decimals=st.integers(0, 3),
    before=st.sampled_from(["", "It is ", "x = ", "12 + 5 = ", "#### ", "\\boxed{", "cost: $"]),
    after=st.sampled_from(["", ".", " apples", "%", "!"]),
)
def test_however_a_number_is_written_it_has_its_value(whole, decimals, before, after):
    value = Fraction(whole, 10**decimals)
    digits = f"{abs(whole) // 10**decimals:,}"
    tail = f".{abs(whole) % 10**decimals:0{decimals}d}" if decimals else ""
    assert answer_in(f"{before}{'-' if whole < 0 else ''}{digits}{tail}{after}")[0] == value


@given(st.text())
def test_no_text_breaks_it_and_the_place_of_an_answer_is_marked_or_not(text):
    answer_in(text)
    number_of(text)
    assert [answer_in(text)[1] for text in ("so it is 7\n#### 7", r"\boxed{7}", "it is 7")] == [True, True, False]
