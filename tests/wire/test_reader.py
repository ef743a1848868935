"""What another server sends is read for all that it does say; what it does not say is None, never 0."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.cli.pools.reading import same_as
from gpu_worker_pool.core.queue.verdicts import SENTENCES
from gpu_worker_pool.wire import accounting, leases, pool, service, statistics
from gpu_worker_pool.wire.leases import (
    LeaseView,
    RenewAnswer,
    VerdictCode,
    VerdictView,
)
from gpu_worker_pool.wire.pool import PoolGpu, PoolView
from gpu_worker_pool.wire.reader import read, read_number, read_time, read_whole

GPU: dict[str, Any] = {"uuid": "GPU-1", "gpu_id": 3, "state": "leased", "memory_used_mb": 12.5, "leases": ["a", 5, "b"]}


@pytest.mark.parametrize("key", ["gpu_id", "memory_used_mb"])
@pytest.mark.parametrize("value", ["3", True, [], {}, None, float("nan"), float("inf"), 1e30, 10**40])
def test_a_number_of_another_kind_is_unknown_and_not_zero(key: str, value: object) -> None:
    found = read(PoolGpu, {**GPU, key: value})
    assert found is not None
    assert getattr(found, key) is None


def test_a_word_that_only_a_newer_server_knows_is_unknown() -> None:
    found = read(PoolGpu, {**GPU, "state": "hibernating", "verdict": {"code": "asleep"}, "new": {"key": [1]}})
    assert found is not None
    assert (found.state, found.verdict) == ("unknown", None)


def test_a_body_without_what_makes_it_one_is_none() -> None:
    assert read(PoolView, {"node": "box"}) is None
    assert read(PoolView, [GPU]) is None
    assert read(LeaseView, {"id": "a", "state": "eaten"}) is None
    assert read(LeaseView, {"state": "active"}) is None


def test_texts_are_cleaned_keys_included() -> None:
    found = read(LeaseView, {"id": "a", "state": "active", "owner": "b\x1b", "labels": {"k\x1b": "v\x1b", "n": 3}},
                 clean=lambda text: text.replace("\x1b", "?"))  # fmt: skip
    assert found is not None
    assert (found.owner, found.labels) == ("b?", {"k?": "v?"})


def test_numbers_and_times_by_themselves() -> None:
    assert (read_number(3), read_number(True), read_number("3"), read_number(1e16)) == (3.0, None, None, None)
    assert (read_whole(3.0), read_whole(3.5), read_whole(2**62), read_whole(2**64)) == (3, None, 2**62, None)
    assert read_time("1970-01-01T00:00:05Z") == read_time("1970-01-01T00:00:05") == 5.0
    assert [read_time(text) for text in (None, "", "soon", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z")] == [
        None
    ] * 5


KINDS = [
    kind
    for module in (accounting, leases, pool, service, statistics)
    for kind in vars(module).values()
    if is_dataclass(kind) and isinstance(kind, type)
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
# Small ones: the time goes into drawing them, and a reader goes no deeper than its types.
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
LISTED = st.lists(st.fixed_dictionaries({"uuid": JSON, "id": JSON}), max_size=3)


@given(st.sampled_from(KINDS), st.data())
def test_nothing_that_is_sent_makes_the_reader_fail(kind: type, data: st.DataObject) -> None:
    names = st.sampled_from([field.name for field in fields(kind)] or ["none"])
    found = read(kind, data.draw(st.dictionaries(names, JSON | LISTED)))
    assert isinstance(found, kind | None)


def test_what_the_server_writes_is_read_back_whole() -> None:
    renewed = {"renewed": [{"id": "a", "expires_in_s": 30.0}], "lost": [{"id": "b", "reason": "expired"}]}
    found = read(RenewAnswer, json.loads(json.dumps(renewed)))
    assert found is not None
    assert (found.renewed[0].expires_in_s, found.lost[0].reason) == (30.0, "expired")


def test_every_verdict_of_the_core_is_in_the_type_with_all_that_its_sentence_says() -> None:
    assert SENTENCES.keys() == set(get_args(VerdictCode))
    known = {field.name for field in fields(VerdictView)}
    facts = {fact for sentence in SENTENCES.values() for fact in signature(sentence).parameters if fact != "_"}
    assert facts <= known


def test_a_server_that_goes_by_two_names_is_found_and_one_without_an_id_is_its_own() -> None:
    seen = [("one", "id-1"), ("two", None), ("three", "id-1"), ("four", "id-2"), ("five", None), ("six", "id-1")]
    assert same_as(seen) == {"three": "one", "six": "one"}
