"""Identity, run keys, codes and Pod names."""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasedjob.errors import InvalidJobIdentityOptionsError, LeasedJobError
from leasedjob.identity import (
    JobSchedulerType,
    RunIdentity,
    bullmq_job_id,
    job_code,
    js_trim,
    pod_name,
    run_key_for,
    short_hash,
    tick_of,
    utf16_length,
)

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
EMOJI = "\U0001f600"


# --- RunIdentity -----------------------------------------------------------------------------------------------------


def test_values_are_trimmed_as_javascript_trims() -> None:
    # U+FEFF is white space there and not in Python; U+0085 and U+001C are the other way round.
    assert RunIdentity.of(code="\ufeff a \u2029", run_key="\u3000b\v") == RunIdentity(
        JobSchedulerType.SCHEDULE, "a", "b"
    )
    assert RunIdentity.of(code="\x1ca\x85", run_key="b").code == "\x1ca\x85"


@pytest.mark.parametrize(
    "text",
    ["\t", "\n", "\v", "\f", "\r", " ", "\u00a0", "\u1680", "\u2000", "\u200a", "\u2028", "\u202f", "\u205f", "\ufeff"],
)
def test_javascript_white_space(text: str) -> None:
    assert js_trim(f"{text}x{text}") == "x"


@pytest.mark.parametrize("text", ["\x1c", "\x1f", "\x85", "\u200b", "\u180e", "\u2060"])
def test_not_javascript_white_space(text: str) -> None:
    assert js_trim(f"{text}x") == f"{text}x"


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"code": "", "run_key": "k"}, id="empty code"),
        pytest.param({"code": " \ufeff", "run_key": "k"}, id="blank code"),
        pytest.param({"code": "x" * 65, "run_key": "k"}, id="long code"),
        pytest.param({"code": EMOJI * 33, "run_key": "k"}, id="66 code units in 33 characters"),
        pytest.param({"code": None, "run_key": "k"}, id="no code"),
        pytest.param({"code": 7, "run_key": "k"}, id="number as code"),
        pytest.param({"code": b"x", "run_key": "k"}, id="bytes as code"),
        pytest.param({"code": "a\0b", "run_key": "k"}, id="NUL in code"),
        pytest.param({"code": "a\ud800", "run_key": "k"}, id="lone surrogate in code"),
        pytest.param({"code": "x"}, id="SCHEDULE without run key"),
        pytest.param({"code": "x", "run_key": "  "}, id="blank run key"),
        pytest.param({"code": "x", "run_key": "k" * 1025}, id="long run key"),
        pytest.param({"code": "x", "run_key": 1}, id="number as run key"),
        pytest.param({"code": "x", "run_key": "\udfff"}, id="lone surrogate in run key"),
        pytest.param({"code": "x", "run_key": "k\0"}, id="NUL in run key"),
        pytest.param({"code": "x", "run_key": "k", "type": "INITIAL"}, id="INITIAL with run key"),
        pytest.param({"code": "x", "run_key": "", "type": "INITIAL"}, id="INITIAL with empty run key"),
        pytest.param({"code": "x", "run_key": "k", "type": "initial"}, id="type in small letters"),
        pytest.param({"code": "x", "run_key": "k", "type": None}, id="no type"),
        pytest.param({"code": "x", "run_key": "k", "type": 1}, id="number as type"),
    ],
)
def test_ambiguous_identities_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(InvalidJobIdentityOptionsError) as caught:
        RunIdentity.of(**values)  # type: ignore[arg-type]
    assert isinstance(caught.value, LeasedJobError)
    assert isinstance(caught.value, ValueError)


def test_lengths_at_the_limit_after_trimming() -> None:
    identity = RunIdentity.of(code=" " + EMOJI * 32 + " ", run_key="k" * 1024 + "\n")
    assert utf16_length(identity.code) == 64
    assert len(identity.run_key or "") == 1024


def test_every_part_of_the_identity_matters() -> None:
    keys = {
        RunIdentity.of(type=kind, code=code, run_key=run_key).lock_key
        for kind, code, run_key in [
            ("SCHEDULE", "a", "b"),
            ("SCHEDULE", "b", "a"),
            ("SCHEDULE", "a:b", "b"),
            ("SCHEDULE", "a", ":bb"),
            ("INITIAL", "a", None),
        ]
    }
    assert len(keys) == 5


@given(st.text(min_size=1, max_size=60).filter(lambda text: js_trim(text) and "\0" not in text))
def test_a_key_is_forty_six_ascii_characters(code: str) -> None:
    if utf16_length(js_trim(code)) > 64:
        return
    key = RunIdentity.of(code=code, run_key="k").lock_key
    assert re.fullmatch(r"v2:[A-Za-z0-9_-]{43}", key)


def test_control_characters_are_escaped_as_json_stringify_does() -> None:
    # Short escapes where JSON has them, \u00xx for the other control characters, nothing else; U+007F stays as it is.
    text = '{"version":2,"type":"SCHEDULE","code":"a\\u0001\\b\x7f","runKey":"\\"\\\\/é\u2028"}'
    expected = "v2:" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    assert RunIdentity(JobSchedulerType.SCHEDULE, "a\x01\b\x7f", '"\\/é\u2028').lock_key == expected


# --- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(("shop", "sync"), "shop/sync", id="the name"),
        pytest.param(("shop", "sync", "orders"), "shop/orders", id="spec.code"),
        pytest.param(("shop", "sync", " orders "), "shop/orders", id="trimmed"),
        pytest.param(("shop", "sync", "orders", ["orders"]), "orders", id="shared"),
        pytest.param(("shop", "orders", None, ["orders"]), "shop/orders", id="a name is never shared"),
        pytest.param(("shop", "sync", "orders", ["other"]), "shop/orders", id="another is shared"),
    ],
)
def test_job_code(arguments: tuple[object, ...], code: str) -> None:
    assert job_code(*arguments) == code  # type: ignore[arg-type]


def test_a_long_code_is_cut_and_hashed() -> None:
    full = "n" * 40 + "/" + "x" * 24
    assert job_code("n" * 40, "x" * 23) == full[:-1]
    assert job_code("n" * 40, "x" * 24) == full[:47] + "-" + short_hash(full)
    assert len(job_code("n" * 40, "x" * 24)) == 64


def test_a_cut_code_never_ends_in_half_a_character() -> None:
    code = job_code("n" * 45, "x", EMOJI * 30)
    assert utf16_length(code) <= 64
    assert RunIdentity.of(code=code, run_key="k").code == code


def test_codes_of_two_namespaces_never_meet() -> None:
    long = "n" * 63
    assert job_code(long, "a") != job_code(long[:62], "na")
    assert job_code("a", "b/c") != job_code("b", "c")


@pytest.mark.parametrize("code", ["", " ", "x" * 65, "a\0"])
def test_a_spec_code_is_checked(code: str) -> None:
    with pytest.raises(InvalidJobIdentityOptionsError):
        job_code("shop", "sync", code)


# --- run keys --------------------------------------------------------------------------------------------------------


def test_a_run_key_is_the_tick_in_utc() -> None:
    tick = datetime(2026, 7, 20, 5, 0, tzinfo=timezone(timedelta(hours=2)))
    assert run_key_for(tick) == "2026-07-20T03:00:00Z"
    assert run_key_for(tick, 2) == "2026-07-20T03:00:00Z#r2"


@given(
    st.datetimes(timezones=st.just(UTC)).map(lambda d: d.replace(microsecond=0)), st.integers(min_value=0, max_value=99)
)
def test_a_run_key_gives_its_tick_back(tick: datetime, reprocess: int) -> None:
    assert tick_of(run_key_for(tick, reprocess)) == tick


@pytest.mark.parametrize(
    "key",
    [
        None,
        "",
        "manual/shop/again/uid",
        "2026-07-20T03:00:00.000Z",
        "2026-07-20T03:00:00+00:00",
        "2026-07-20T03:00:00Z#r0",
        "2026-07-20T03:00:00Z#r01",
        "2026-07-20T03:00:00Z#r",
        "2026-07-20 03:00:00Z",
        "2026-02-30T03:00:00Z",
        "2026-07-20T24:00:00Z",
        "２026-07-20T03:00:00Z",
        "2026-07-20T03:00:00Z\n",
    ],
)
def test_other_keys_have_no_tick(key: str | None) -> None:
    assert tick_of(key) is None


@pytest.mark.parametrize(
    ("tick", "reprocess"),
    [
        (datetime(2026, 7, 20), 0),  # noqa: DTZ001 - a naive one is the point
        (datetime(2026, 7, 20, microsecond=1, tzinfo=UTC), 0),
        (datetime(2026, 7, 20, tzinfo=UTC), -1),
    ],
)
def test_what_is_no_tick_has_no_key(tick: datetime, reprocess: int) -> None:
    with pytest.raises(ValueError):
        run_key_for(tick, reprocess)


# --- Pod names -------------------------------------------------------------------------------------------------------


@given(
    st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", fullmatch=True),
    st.integers(min_value=1, max_value=2**31 - 1),
)
def test_a_pod_name_is_a_dns_label(name: str, attempt: int) -> None:
    made = pod_name(name, "v2:key", attempt)
    assert DNS_LABEL.fullmatch(made)
    assert len(made) <= 63
    assert made == pod_name(name, "v2:key", attempt)
    assert made.endswith(f"-{attempt}")


def test_pod_names_differ_where_their_inputs_do() -> None:
    inputs = [
        (name, key, attempt)
        for name in ("a.b", "a-b", "x" * 250, "x" * 251, "x" * 250 + "-1")
        for key in ("v2:1", "v2:2")
        for attempt in (1, 2, 11)
    ]
    assert len({pod_name(*values) for values in inputs}) == len(inputs)


def test_a_name_of_nothing_but_dots_still_makes_a_label() -> None:
    assert DNS_LABEL.fullmatch(pod_name("...", "v2:1", 1))


def test_a_bullmq_id_has_no_colon_and_follows_from_the_key() -> None:
    key = RunIdentity.of(code="a", run_key="b").idempotency_key
    assert re.fullmatch(r"[0-9a-f]{64}", bullmq_job_id(key))
    assert bullmq_job_id(key) == bullmq_job_id(key) != bullmq_job_id(key + "x")
