"""JSON that jsonb always accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasedjob.lease.jsonsafe import ELLIPSIS, MAX_BYTES, MAX_DEPTH, clean, dumps, text
from leasedjob.lease.rows import MAX_DATA_BYTES

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(ANYTHING)
def test_the_result_is_json_that_can_be_stored(value: Any) -> None:
    encoded = dumps(value)
    json.loads(encoded, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert "\\u0000" not in encoded.replace("\\\\", "")
    encoded.encode()  # no lone surrogate is left
    assert len(encoded.encode()) <= MAX_BYTES


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text("abcü😀"), st.lists, max_leaves=20))
def test_plain_values_are_kept(value: Any) -> None:
    assert json.loads(dumps(value)) == value


@pytest.mark.parametrize(
    ("value", "cleaned"),
    [
        ("a\0b", "a\ufffdb"),
        ("\ud83d", "\ufffd"),
        ("😀", "😀"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
        (b"ok\xff\x00", "ok\ufffd\ufffd"),
        ((1, 2), [1, 2]),
        ({1: {"\0": ValueError("no\0")}}, {"1": {"\ufffd": "no\ufffd"}}),
        (True, True),
    ],
)
def test_replacements(value: Any, cleaned: Any) -> None:
    assert clean(value) == cleaned


def test_depth_is_bounded_also_for_circles() -> None:
    circle: list[Any] = []
    circle.append(circle)
    depth, inner = 0, clean(circle)
    while inner != ELLIPSIS:
        depth, inner = depth + 1, inner[0]
    assert depth == MAX_DEPTH


def test_size_is_bounded_in_bytes() -> None:
    cut = json.loads(dumps("é" * MAX_BYTES))
    assert cut["truncated"] is True
    assert cut["bytes"] == 2 * MAX_BYTES + 2
    assert cut["head"].startswith('"é')


def test_a_number_that_python_will_not_write() -> None:
    assert json.loads(dumps(10**5000))["truncated"] is True


def test_the_limit_is_the_rows_limit() -> None:
    assert MAX_BYTES == MAX_DATA_BYTES


def test_text() -> None:
    assert text("a\0\udc00") == "a\ufffd\ufffd"
