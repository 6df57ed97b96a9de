"""JSON that is too deep for a parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasedjob.api import deep

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def nested(levels: int) -> str:
    return '{"a":[' * (levels // 2) + "]}" * (levels // 2)


def depth(value: Any) -> int:
    found = 0
    while value:
        value = value["a"] if isinstance(value, dict) else value[0]
        found += 1
    return found + 1


@pytest.mark.parametrize("levels", [10, 190, 900, 3_000, 9_000, 200_000])
def test_it_is_read_however_deep_it_is(levels: int) -> None:
    text = f'{{"metadata": {{"name": "x ]}}[{{ \\" y"}}, "spec": {nested(levels)}, "z": [1]}}'
    for found in (deep.loads(text), deep.loads(text.encode()), json.loads(deep.cut(text))):
        assert found["metadata"] == {"name": 'x ]}[{ " y'}
        assert found["z"] == [1]
        assert deep.too_deep(found["spec"]) is (levels > deep.MAX_LEVELS)
    assert depth(json.loads(deep.cut(text))["spec"]) <= deep.KEPT_LEVELS


@given(JSON)
def test_what_is_not_too_deep_stays_as_it_is(value: Any) -> None:
    text = json.dumps(value)
    assert json.loads(deep.cut(text)) == deep.loads(text) == value


@pytest.mark.parametrize("levels", [63, 64, 65, 66])
def test_the_limit_is_exact(levels: int) -> None:
    value: Any = "end"
    for _ in range(levels):
        value = [value, {}]
    assert deep.too_deep(value) is (levels > 64)


def test_what_is_no_json_is_said_to_be_none() -> None:
    for text in ("{", "[" * 5_000, ""):
        with pytest.raises(ValueError):
            deep.loads(text)


@pytest.mark.parametrize("levels", [2, 150, 5000])
def test_what_can_be_parsed_is_left_as_it_is(levels: int) -> None:
    text = nested(levels).encode()
    found = deep.readable(text)
    assert (found == text) is (levels < 1000)
    assert depth(json.loads(found)) <= max(levels + 1, deep.KEPT_LEVELS + 1)


def test_what_is_no_json_is_the_reader_s_to_find_out() -> None:
    assert deep.readable(b'{"a":') == b'{"a":'
