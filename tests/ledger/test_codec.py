"""The format on disk: exact, pinned, and strict about what it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.ledger.codec import EVENT_KINDS, decode_ended, decode_event, encode, encode_event
from tests.ledger import examples
from tests.ledger.examples import ENDED, EVENTS

REQUEST_LINE = (
    '{"wishes":{"gpus":2,"memory_mb":8000,"model":"A100","memory_threshold_percent":50.5},'
    '"holder":{"worker_id":"w1","owner":"alice","host":"box","pid":4711,"pid_started":12.25,"boot_id":"boot1",'
    '"pid_namespace":"pid:[1]","process":[4711,12.25]},'
    '"priority":-3,"ttl_s":30.0,"labels":[["job","train"],["lang","\\u00dcn\\u00efcode"]]}'
)
# Journals in the field read like this: a line that changes needs a new version of the tables.
GOLDEN = (
    '{"kind":"TakenOver","at":1.5,"epoch":3,"boot_id":"boot1","clock_base":-0.5,"wall_offset_s":1700000000.0}',
    '{"kind":"HistoryCondensed","at":2.0,"fences":[["box",7],["other",1]],"next_seq":12}',
    '{"kind":"LeaseQueued","at":3.0,"lease_id":"a","request":'
    + REQUEST_LINE
    + ',"seq":12,"requested_at":1700000003.125}',
    '{"kind":"LeaseGranted","at":4.0,"lease_id":"a","gpus":[["box","GPU-0"],["box","GPU-1"]],"fence":8,"granted_at":4.5}',
    '{"kind":"ProcessesAttributed","at":5.0,"lease_id":"a","gpu":["box","GPU-0"],"processes":[[4711,12.25],[4712,null]]}',
    '{"kind":"LeaseEnded","at":6.0,"lease_id":"a","reason":"holder_died","draining":[["box","GPU-0"]],"ended_at":6.5}',
    '{"kind":"GpuDrained","at":7.0,"lease_id":"a","gpu":["box","GPU-0"]}',
    '{"kind":"Configured","at":8.0,"table":"excluded","key":["box","GPU-1"],"value":"repair"}',
    '{"kind":"Configured","at":9.0,"table":"excluded","key":["box","GPU-1"],"value":null}',
    '{"kind":"Configured","at":10.0,"table":"ignored_processes","key":["Xorg"],"value":"root"}',
    '{"kind":"Configured","at":11.0,"table":"new_gpus","key":[""],"value":"restored"}',
    '{"kind":"LeaseWarned","at":12.0,"lease_id":"a","reason":"time_limit","ends":72.0}',
    (
        '{"kind":"Configured","at":13.0,"table":"quotas","key":["alice"],"value":{"gpus":2,"weight":1.5,"max_priority":10,'
        '"max_time_limit_s":7200.0,"max_queued":50}}'
    ),
    '{"kind":"UseCounted","at":14.0,"owner":"alice","used":1234.5,"as_of":13.5,"recent":[60.0,90.25]}',
    (
        '{"kind":"Configured","at":15.0,"table":"bookings","key":["b1"],"value":{"id":"b1",'
        '"gpus":[["box","GPU-0"],["box","GPU-1"]],"starts_at":1700000000.0,"ends_at":1700014400.0,"owner":"alice",'
        '"reason":"a course","by":"root"}}'
    ),
    (
        '{"kind":"NodeJoined","at":17.0,"node":"box","boot_id":"boot1","gpus":[{"uuid":"GPU-0","index":0,"name":"A100",'
        '"memory_total_mb":81920.0},{"uuid":"GPU-1","index":1,"name":"T4","memory_total_mb":null}]}'
    ),
    '{"kind":"GrantWithdrawn","at":16.0,"lease_id":"a"}',
    '{"kind":"NodeRebooted","at":18.0,"node":"box","boot_id":"boot2"}',
    '{"kind":"NodeForgotten","at":20.0,"node":"box"}',
    '{"kind":"LeaseExtended","at":21.0,"lease_id":"a","gpus":[["box","GPU-1"]],"weight":1000}',
    (
        '{"kind":"Configured","at":22.0,"table":"tokens","key":["'
        + "ab" * 32
        + '"],"value":{"digest":"'
        + "ab" * 32
        + '",'
        '"name":"alice","role":"operator","added_at":1700000000.0,"added_by":"root","note":"her laptop"}}'
    ),
    '{"kind":"WallTimeSet","at":1.75,"offset_s":1700000000.0}',
    '{"kind":"LeasesMeasured","at":23.0,"uses":[["a",30720.5,1234.5,20],["b",null,97.0,1]]}',
    (
        '{"kind":"LeaseGranted","at":23.0,"lease_id":"b","gpus":[["box","GPU-0"]],"fence":9,"granted_at":23.5,"limit":83.0,'
        '"weight":250,"take_up_s":5.0,"request":' + REQUEST_LINE + ',"seq":13,"requested_at":22.5}'
    ),
)
GOLDEN_ENDED = (
    '{"id":"a","request":' + REQUEST_LINE + ',"gpus":[["box","GPU-0"],["box","GPU-1"]],"fence":8,'
    '"requested_at":1700000003.125,"granted_at":1700000004.0,"ended_at":1700000006.0,"reason":"holder_died"}'
)


def exact(value: Any) -> str:
    """Types and all fields told apart, those that equality leaves out as well: 1 from 1.0, a key from a tuple."""
    return repr(value)


def test_every_kind_of_durable_event_is_covered_here() -> None:
    assert set(examples.BY_KIND) == set(EVENT_KINDS.values()) == {type(event) for event in EVENTS}


@given(examples.events)
def test_every_event_comes_back_exactly(event: ev.DurableEvent) -> None:
    text = encode_event(event)

    assert text.isascii()
    assert exact(decode_event(text)) == exact(event)


@given(examples.ended_leases)
def test_every_ended_lease_comes_back_exactly(lease: EndedLease) -> None:
    text = encode(lease)

    assert text.isascii()
    assert exact(decode_ended(text)) == exact(lease)


@pytest.mark.parametrize(("event", "line"), list(zip(EVENTS, GOLDEN, strict=True)), ids=lambda x: type(x).__name__)
def test_the_format_of_events_has_not_changed(event: ev.DurableEvent, line: str) -> None:
    assert encode_event(event) == line
    assert exact(decode_event(line)) == exact(event)


def test_the_format_of_ended_leases_has_not_changed() -> None:
    assert encode(ENDED) == GOLDEN_ENDED
    assert exact(decode_ended(GOLDEN_ENDED)) == exact(ENDED)


def test_a_field_with_its_default_is_not_written_and_what_equality_leaves_out_is() -> None:
    plain = ev.LeaseQueued(1.0, "a", Request(), 1, 2.0)
    assert (
        encode_event(plain) == '{"kind":"LeaseQueued","at":1.0,"lease_id":"a","request":{},"seq":1,"requested_at":2.0}'
    )
    assert exact(decode_event(encode_event(plain))) == exact(plain)

    local = replace(plain, request=Request(holder=Holder(process=ProcessId(7))))
    assert local == plain, "a process is not part of the comparison"
    assert '"request":{"holder":{"process":[7,null]}}' in encode_event(local)
    assert exact(decode_event(encode_event(local))) == exact(local)

    gang = replace(plain, request=Request(Wishes(nodes=4)))
    assert '"request":{"wishes":{"nodes":4}}' in encode_event(gang)


def test_the_process_of_a_holder_comes_back_although_equality_leaves_it_out() -> None:
    queued = decode_event(encode_event(EVENTS[2]))
    assert isinstance(queued, ev.LeaseQueued)
    for request in (queued.request, decode_ended(encode(ENDED)).request):
        assert request.holder.process == ProcessId(4711, 12.25)
        assert isinstance(request.holder.process, ProcessId)


def test_keys_and_reasons_come_back_as_what_they_were() -> None:
    lease = decode_ended(encode(ENDED))

    assert isinstance(lease.gpus[0], GpuKey)
    assert lease.reason is EndReason.HOLDER_DIED


def altered(line: str, **changes: Any) -> str:
    """The line with these fields set; None of a kind that cannot be confused: ... removes one."""
    parts = json.loads(line)
    for name, value in changes.items():
        *way, last = name.split("__")
        inner = parts
        for step in way:
            inner = inner[step]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    return json.dumps(parts)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        ("[1", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "known kind"),
        ('{"kind":"LeaseLost","at":1.0}', "known kind"),
        ('{"kind":"GpusObserved","at":1.0,"readings":[]}', "known kind"),
        ('{"kind":"DurableEvent","at":1.0}', "known kind"),
        ('{"kind":["TakenOver"],"at":1.0}', "known kind"),
        (altered(GOLDEN[0], boot_id=...), "missing 1 required positional argument: 'boot_id'"),
        (altered(GOLDEN[0], extra=1), "TakenOver.extra is not a field that is known here"),
        (altered(GOLDEN[0], at="1.5"), "TakenOver.at is '1.5', not of type float"),
        (altered(GOLDEN[0], at=True), "TakenOver.at is True"),
        (altered(GOLDEN[1], next_seq=1.0), "HistoryCondensed.next_seq is 1.0, not of type int"),
        (altered(GOLDEN[1], fences=[["box", 7, 8]]), "HistoryCondensed.fences is .*, not an array of 2"),
        (altered(GOLDEN[1], fences={"box": 7}), "HistoryCondensed.fences is .*, not of type list"),
        (altered(GOLDEN[2], request="all"), "LeaseQueued.request is 'all', not of type dict"),
        (altered(GOLDEN[2], request__holder__process=[1]), "Holder.process is .*, not an array of 2"),
        (altered(GOLDEN[2], request__wishes__gpus=0), "gpus is 0"),
        (altered(GOLDEN[2], request__wishes__colour="red"), "Wishes.colour is not a field that is known here"),
        (altered(GOLDEN[5], reason="bored"), "LeaseEnded.reason 'bored' is not a valid EndReason"),
        (altered(GOLDEN[7], table="colours"), "'colours' is not a table that is known here"),
        (altered(GOLDEN[12], value__colour="red"), "Quota.colour is not a field that is known here"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        decode_event(text)


@pytest.mark.parametrize("event", [ev.GpusObserved(1.0, ()), ev.DurableEvent(1.0)])
def test_what_is_not_durable_is_not_written(event: Any) -> None:
    with pytest.raises(ValueError, match="not a durable event"):
        encode_event(event)


def test_what_is_no_part_of_the_format_is_not_written() -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        encode_event(ev.NodeForgotten(1.0, object()))  # type: ignore[arg-type]
