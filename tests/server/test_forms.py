"""What is sent for a lease is taken literally, within bounds, and every fault is told in words."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.server.forms import LeaseForm, RenewForm
from gpu_worker_pool.server.http.response import Refusal
from gpu_worker_pool.server.http.validation import read_form

FULL = {
    "gpus": 2,
    "memory_mb": 8000,
    "model": "A100",
    "min_memory_mb": 40960,
    "among": ["GPU-8f1c", 2, "0"],
    "exclude": [3],
    "priority": -5,
    "ttl_s": 60,
    "wait_s": 25.5,
    "memory_threshold_percent": 80,
    "utilization_threshold_percent": 90.5,
    "worker_id": "w-1",
    "owner": "alice",
    "host": "box1",
    "pid": 123,
    "pid_started": 456.0,
    "boot_id": "c0ffee",
    "pid_namespace": "4026531836",
    "labels": {"team": "vision", "job": "train/7 ☃"},
}


def request_of(form: LeaseForm, owner: str | None = None) -> Request:
    return form.request(form.holder(owner))


# --- what is taken -------------------------------------------------------------------------------------------------


def test_every_field_arrives_where_it_belongs() -> None:
    form = read_form(LeaseForm, json.dumps(FULL).encode())
    request = request_of(form, "bob")
    assert request == Request(
        wishes=Wishes(2, 8000.0, "A100", 80.0, 90.5, ("0", "2", "GPU-8f1c"), min_memory_mb=40960.0, exclude=("3",)),
        holder=Holder("w-1", "bob", "box1", 123, 456.0, "c0ffee", "4026531836"),
        priority=-5,
        ttl_s=60.0,
        labels=(("job", "train/7 ☃"), ("team", "vision")),
    )
    assert form.wait_s == 25.5


def test_the_order_and_spelling_of_gpus_make_no_other_request() -> None:
    one = read_form(LeaseForm, b'{"among": [10, "2", "GPU-8f"]}')
    other = read_form(LeaseForm, b'{"among": ["GPU-8f", "02", "10", 2]}')
    assert request_of(one) == request_of(other)
    assert one.among == ("2", "10", "GPU-8f")
    assert request_of(read_form(LeaseForm, b'{"among": null}')) == Request()


# --- whatever is sent ----------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5)
# Small ones: the time goes into drawing them.
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.sampled_from([*(field.name for field in fields(LeaseForm)), "ids"]) | st.text(st.characters(), max_size=4),
    JSON,
    max_size=4,
)


def _parse(model: type[LeaseForm | RenewForm], body: bytes) -> LeaseForm | RenewForm | Refusal:
    try:
        return read_form(model, body)
    except Refusal as error:
        return error


def _take_or_refuse(body: bytes) -> None:
    for model in (LeaseForm, RenewForm):
        outcome = _parse(model, body)
        if isinstance(outcome, Refusal):
            assert outcome.status in {400, 422}
            assert 0 < len(outcome.detail.encode()) < 2000
        elif isinstance(outcome, LeaseForm):
            request_of(outcome)  # what passes here is never refused by the core


@given(st.binary(max_size=200))
@example(b'{"\\ud800": 1}')
@example(b'{"gpus": -' + b"9" * 5000 + b"}")
@example(b'{"gpus": ' + b"[" * 900 + b"]" * 900 + b"}")
def test_no_bytes_raise_anything_but_bad_form(body: bytes) -> None:
    _take_or_refuse(body)


@given(JSON | FIELDS)
def test_no_json_raises_anything_but_bad_form(value: Any) -> None:
    _take_or_refuse(json.dumps(value).encode())
