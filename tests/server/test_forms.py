"""What is sent for a lease is taken literally, within bounds, and every fault is told in words."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S, MAX_TTL_S
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.forms import LeaseForm, RenewForm
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.validation import adapter_of, read_form, read_text
from gpu_worker_pool.server.parameters import LeaseId
from gpu_worker_pool.server.routes.leases import to_request
from gpu_worker_pool.server.settings import ServerSettings

DOCUMENTED = [
    *("gpus", "memory_mb", "model", "among", "priority", "ttl_s", "wait_s", "memory_threshold_percent"),
    *("utilization_threshold_percent", "worker_id", "owner", "host", "pid", "pid_started", "boot_id"),
    *("pid_namespace", "labels", "time_limit_s", "preemptible", "nodes"),
]
FULL = {
    "gpus": 2,
    "memory_mb": 8000,
    "model": "A100",
    "among": ["GPU-8f1c", 2, "0"],
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
    return to_request(form, form.holder(owner))


def described() -> dict[str, Any]:
    """The form as the OpenAPI document has it."""
    document = create_app(ServerSettings(_env_file=None, simulated_gpus="1")).openapi()
    schema: dict[str, Any] = document["components"]["schemas"]["LeaseForm"]
    return schema


def refused(body: bytes | dict[str, Any], model: type[LeaseForm | RenewForm] = LeaseForm) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read_form(model, body if isinstance(body, bytes) else json.dumps(body).encode())
    caught.value.detail.encode()  # whatever was sent, the answer can be
    return caught.value


# --- what is taken -------------------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_design() -> None:
    assert [field.name for field in fields(LeaseForm)] == DOCUMENTED
    schema = described()
    assert "required" not in schema
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("body", [b"", b"{}", b" {} "])
def test_everything_may_be_left_out(body: bytes) -> None:
    form = read_form(LeaseForm, body)
    assert request_of(form) == Request()
    assert (form.wait_s, form.ttl_s) == (0, DEFAULT_TTL_S)


def test_every_field_arrives_where_it_belongs() -> None:
    form = read_form(LeaseForm, json.dumps(FULL).encode())
    request = request_of(form, "bob")
    assert request == Request(
        wishes=Wishes(2, 8000.0, "A100", 80.0, 90.5, ("0", "2", "GPU-8f1c")),
        holder=Holder("w-1", "bob", "box1", 123, 456.0, "c0ffee", "4026531836"),
        priority=-5,
        ttl_s=60.0,
        labels=(("job", "train/7 ☃"), ("team", "vision")),
    )
    assert form.wait_s == 25.5


def test_the_order_of_labels_makes_no_other_request() -> None:
    one = read_form(LeaseForm, b'{"labels": {"a": "1", "b": "2"}}')
    other = read_form(LeaseForm, b'{"labels": {"b": "2", "a": "1"}}')
    assert request_of(one) == request_of(other)


# The ends of each range: taken here and by the core, and a step beyond refused here.
RANGES: list[tuple[str, Any, Any, Any, Any]] = [
    ("gpus", 0, 1, 1024, 1025),
    ("memory_mb", 0.5, 1, 1e9, 1.1e9),
    ("priority", -1_000_001, -1_000_000, 1_000_000, 1_000_001),
    ("ttl_s", 0.09, 0.1, MAX_TTL_S, MAX_TTL_S + 1),
    ("wait_s", -0.1, 0, 300, 300.5),
    ("memory_threshold_percent", -0.1, 0, 100, 100.1),
    ("utilization_threshold_percent", -0.1, 0, 100, 100.1),
    ("pid", 0, 1, 2**23, 2**23 + 1),
    ("pid_started", -1, 0, 1e15, 2e15),
]


@pytest.mark.parametrize(("field", "below", "low", "high", "above"), RANGES)
def test_ranges_end_where_they_say(field: str, below: Any, low: Any, high: Any, above: Any) -> None:
    for value in (low, high):
        form = read_form(LeaseForm, json.dumps({field: value}).encode())
        assert getattr(form, field) == value
        request_of(form)
    for value in (below, above):
        error = refused({field: value})
        assert error.status == 422
        assert f"{field}: {value} is out of range; " in error.detail


@pytest.mark.parametrize("field", [row[0] for row in RANGES])
@pytest.mark.parametrize("value", ["true", '"1"', "NaN", "Infinity", "-Infinity", "1e400", "[]", "{}", "1" + "0" * 400])
def test_only_finite_numbers_are_numbers(field: str, value: str) -> None:
    error = refused(f'{{"{field}": {value}}}'.encode())
    assert error.status == 422
    assert error.detail.startswith(f"{field}: ")


@pytest.mark.parametrize("field", ["gpus", "priority", "pid"])
def test_a_whole_number_is_not_written_as_a_fraction(field: str) -> None:
    assert "is not a whole number" in refused({field: 1.0}).detail


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_not_called_out_of_range(value: str) -> None:
    detail = refused(f'{{"ttl_s": {value}}}'.encode()).detail
    assert detail == f"ttl_s: {value} is not a finite number; it must be 0.1 to 604800."


TEXTS = [("worker_id", 256), ("owner", 256), ("host", 256), ("boot_id", 256), ("pid_namespace", 256), ("model", 128)]


@pytest.mark.parametrize(("field", "longest"), TEXTS)
def test_texts_are_bounded_and_printable(field: str, longest: int) -> None:
    for text in ("x" * longest, "Jürgen ☃ 🐧"):
        form = read_form(LeaseForm, json.dumps({field: text}).encode())
        assert getattr(form, field) == text
    assert (
        f"{field}: {longest + 1} characters are too many; there must be at most {longest}"
        in refused({field: "x" * (longest + 1)}).detail
    )
    for bad in ("a\n", "\x00", "\x1b[2J", "\x7f", "\x85", "\u2028", "\u202eevil", "\ud800"):
        assert f"{field}: {json.dumps(bad)} has characters that cannot be printed" in refused({field: bad}).detail
    assert refused({field: 5}).detail == f"{field}: 5 is not a text."


def test_a_blank_model_is_told_to_be_left_out() -> None:
    assert refused({"model": "  "}).detail == "model: it is blank; leave it out to take any model."


def test_the_order_and_spelling_of_gpus_make_no_other_request() -> None:
    one = read_form(LeaseForm, b'{"among": [10, "2", "GPU-8f"]}')
    other = read_form(LeaseForm, b'{"among": ["GPU-8f", "02", "10", 2]}')
    assert request_of(one) == request_of(other)
    assert one.among == ("2", "10", "GPU-8f")
    assert request_of(read_form(LeaseForm, b'{"among": null}')) == Request()


@pytest.mark.parametrize(
    ("among", "fault"),
    [
        ([], "it is empty; leave it out to take any GPU."),
        (["0"] * 129, "it has more than 128 GPUs; it must be 1 to 128."),
        ("0,1", '"0,1" is not a list.'),
        ({"0": 1}, "an object is not a list."),
        ([-1], "it has -1; each must be a GPU's index, its UUID (GPU-... or MIG-...) or the beginning of that, "),
        ([1.0], "it has 1.0; each must be"),
        ([True], "it has True; each must be"),
        (["0\n"], "it has '0\\n'; each must be"),
        (["\ud800"], "it has '\\ud800'; each must be"),
        (["GPU-" + "a" * 61], "of at most 64 characters."),
    ],
)
def test_gpus_that_are_none(among: Any, fault: str) -> None:
    error = refused({"among": among})
    assert error.status == 422
    assert error.detail.startswith("among: ")
    assert fault in error.detail


def test_what_gpus_may_be_asked_for_is_in_the_schema() -> None:
    (array, _) = described()["properties"]["among"]["anyOf"]
    text, number = array["items"]["anyOf"]
    assert (array["minItems"], array["maxItems"], text["maxLength"], number["minimum"]) == (1, 128, 64, 0)
    for name in ("0", "GPU-8f1c", "mig-8f1c/1/0", "", "-1", "GPU-", "0 ", "A100"):
        is_described = re.search(text["pattern"], name) is not None
        body = json.dumps({"among": [name]}).encode()
        assert isinstance(_parse(LeaseForm, body), LeaseForm) == is_described, name


GOOD_LABELS: list[dict[str, str]] = [
    {},
    {"a" * 64: "v" * 256},
    {"example.org/team-1_x": "☃"},
    {str(n): "" for n in range(32)},
    {f"{n:02}": "v" * 254 for n in range(16)},
]
BAD_LABELS: list[tuple[Any, str]] = [
    ({str(n): "" for n in range(33)}, "33 are too many; there must be at most 32"),
    ({"": "x"}, 'the key "" is not valid'),
    ({"a" * 65: "x"}, "is not valid; it must be 1 to 64 letters"),
    ({"a b": "x"}, 'the key "a b" is not valid'),
    ({"a\n": "x"}, 'the key "a\\n" is not valid'),
    ({"\ud800": "x"}, 'the key "\\ud800" is not valid'),
    ({"a": "v" * 257}, "at most 256 printable characters"),
    ({"a": "x\n"}, 'a is "x\\n"; it must be a text of at most 256 printable characters'),
    ({"a": "\udfff"}, 'a is "\\udfff"; it must be a text of at most'),
    ({"a": 1}, "a is 1; it must be a text of at most"),
    ({"a": None}, "a is null; it must be a text of at most"),
    ([], "a list is not an object"),
    ({f"{n:02}": "v" * 254 + "v" * (n == 3) for n in range(16)}, "together have 4097 bytes of UTF-8; there must be at"),
    ({f"{n:02}": "☃" * 100 for n in range(20)}, "together have 6040 bytes of UTF-8; there must be at most 4096"),
]


@pytest.mark.parametrize("labels", GOOD_LABELS)
def test_labels_that_are_taken(labels: dict[str, str]) -> None:
    form = read_form(LeaseForm, json.dumps({"labels": labels}).encode())
    assert dict(request_of(form).labels) == labels


@pytest.mark.parametrize(("labels", "fault"), BAD_LABELS)
def test_labels_that_are_not(labels: Any, fault: str) -> None:
    error = refused({"labels": labels})
    assert error.status == 422
    assert error.detail.startswith("labels: ")
    assert fault in error.detail


# --- what cannot be read -------------------------------------------------------------------------------------------

UNREADABLE = [
    (b"\xff{}", 400, "not UTF-8, from byte 1 on"),
    (b'{"owner": "\xe9"}', 400, "not UTF-8, from byte 12 on"),
    (b"\xef\xbb\xbf{}", 400, "not JSON (line 1, column 1)"),
    (b" ", 400, "not JSON (line 1, column 2)"),
    (b'{"gpus":\n1,}', 400, "not JSON (line 2, column 3)"),
    (b"{} {}", 400, "not JSON (line 1, column 4)"),
    (b"gpus=1", 400, "not JSON (line 1, column 1)"),
    (b"[]", 422, "The body is a list; send an object"),
    (b"null", 422, "The body is null; send an object"),
    (b"1", 422, "The body is 1; send an object"),
    (b"[" * 60_000, 422, "nested too deeply"),
    (b'{"a":' * 10_000, 422, "nested too deeply"),
    (b'{"gpus": 1, "gpus": 1}', 422, '"gpus" is there twice'),
    (b'{"gpus": 1, "owner": "x", "\\u0067pus": 2}', 422, '"gpus" is there twice'),
    (b'{"labels": {"a": "1", "b": "", "a": "2"}}', 422, '"a" is there twice'),
    (b'{"gpus": ' + b"9" * 60_000 + b"}", 422, "gpus: Infinity is not a whole number; it must be 1 to 1024"),
]


@pytest.mark.parametrize(("body", "status", "fault"), UNREADABLE)
def test_what_cannot_be_read_is_told_where(body: bytes, status: int, fault: str) -> None:
    error = refused(body)
    assert (error.status, fault in error.detail) == (status, True), error.detail


def test_values_at_any_depth_are_refused_without_going_into_them() -> None:
    for depth in range(1, 1000, 37):
        error = refused(b'{"gpus": ' + b"[" * depth + b"]" * depth + b"}")
        assert error.detail.startswith(("gpus: a list is not a whole number", "The body is nested too deeply"))


# --- faults in words -----------------------------------------------------------------------------------------------


def test_a_fault_names_the_field_the_value_and_what_is_possible() -> None:
    assert refused({"gpus": 0}).detail == "gpus: 0 is out of range; it must be 1 to 1024."


def test_an_unknown_field_is_answered_with_those_like_it_or_with_all() -> None:
    assert refused({"gpu": 1}).detail == "gpu: there is no such field; did you mean gpus?"
    assert refused({"zzz": 1}).detail == f"zzz: there is no such field; it must be one of {', '.join(DOCUMENTED)}."
    assert refused({"x" * 60_000: 1}).detail.startswith("x" * 40 + "...: there is no such field; it must be one of")


def test_known_and_unknown_faults_are_told_together() -> None:
    detail = refused({"gpu": 1, "gpus": "two", "ttl_s": -5, "priority": 1}).detail
    assert detail == (
        "gpu: there is no such field; did you mean gpus? "
        'gpus: "two" is not a whole number; it must be 1 to 1024. '
        "ttl_s: -5 is out of range; it must be 0.1 to 604800."
    )


def test_at_most_five_faults_are_told() -> None:
    detail = refused(dict.fromkeys(DOCUMENTED[:6], "\n")).detail
    assert [field for field in DOCUMENTED if f"{field}: " in detail] == DOCUMENTED[:5]
    assert detail.endswith(". And more.")
    assert len(refused({f"gpu{n}": 0 for n in range(5000)}).detail) < 1000


# --- ids -----------------------------------------------------------------------------------------------------------

GOOD_IDS = ["a", "...", ".a", "a..", "-", "~", "x" * 128, "0b5e6a6e-8b1f-4a9e-9d57-6f1d2f0c9f11", "w_1.~-Z"]
BAD_IDS = ["", ".", "..", "x" * 129, "a b", "a/b", "a\n", "ü", "a%20b", "\ud800", "a:b", "٣"]


@pytest.mark.parametrize("text", GOOD_IDS)
def test_ids_that_are_taken(text: str) -> None:
    assert read_text("id", adapter_of(LeaseId), text) == text
    assert read_form(RenewForm, json.dumps({"ids": [text]}).encode()).ids == (text,)


@pytest.mark.parametrize("text", BAD_IDS)
def test_ids_that_are_not(text: str) -> None:
    with pytest.raises(Refusal, match="is not a lease id; it must be 1 to 128 letters") as caught:
        read_text("ids.1", adapter_of(LeaseId), text)
    caught.value.detail.encode()
    assert refused({"ids": ["fine", text]}, RenewForm).detail == caught.value.detail


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({}, "ids is missing; send it."),
        ({"ids": []}, "ids: there are 0; there must be 1 to 1000."),
        ({"ids": ["a"] * 1001}, "ids: there are 1001; there must be 1 to 1000."),
        ({"ids": "abc"}, 'ids: "abc" is not a list.'),
        ({"ids": [1]}, "ids.0: 1 is not a text."),
        ({"ids": ["a"], "id": "b"}, "id: there is no such field; did you mean ids?"),
    ],
)
def test_renewals_that_are_refused(body: dict[str, Any], fault: str) -> None:
    assert refused(body, RenewForm).detail == fault


def test_a_thousand_leases_are_renewed_at_once() -> None:
    ids = [f"lease-{n}" for n in range(1000)]
    assert read_form(RenewForm, json.dumps({"ids": ids}).encode()).ids == tuple(ids)


# --- whatever is sent ----------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5)
# Small ones: the time goes into drawing them.
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from([*DOCUMENTED, "ids"]) | st.text(st.characters(), max_size=4), JSON, max_size=4)


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
def test_no_bytes_raise_anything_but_bad_form(body: bytes) -> None:
    _take_or_refuse(body)


@given(JSON | FIELDS)
def test_no_json_raises_anything_but_bad_form(value: Any) -> None:
    _take_or_refuse(json.dumps(value).encode())
