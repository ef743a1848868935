"""The checker finds each violation in a history made by hand, and nothing in one that is in order.

A history is a script of what happens (`tests/e2e/scribe.py`): `took a 0.2 1` says that the worker `a` took a GPU at 0.2 s with the
fence 1. A worker's name is its lease's; what the nemesis notes is about outsiders, servers and the end.
"""

from __future__ import annotations

import pytest

from tests.e2e.scribe import Scribe

IN_ORDER = {
    "one after another": """
        asks a 0.0; took a 0.2 1; asks b 0.3; answer b 0.4 queued status=202; wrote a 0.5 1 until=2.1;
        gave_back a 1.0; took b 1.3 2; wrote b 1.4 2 until=3.2; gave_back b 2.0;
        nemesis final 9.0 leases=[] gpus=[free]
    """,
    # The server released what it had granted in the meantime.
    "told 503 and did not come back in time": """
        asks a 0.0; answer a 0.2 queued;
        answer a 9.0 ended call=PUT fence=1 end_reason=released ended_by='the server'
    """,
    # It still has its lock at 5.0, and writes when it wakes up at 6.0; its lease is over, and it says so.
    "stopped holder overstays": """
        asks a 0.0; took a 0.2 1; asks b 0.3; took b 5.0 2; say witness_busy 5.0 b uuid=gpu0;
        wrote b 5.1 2 until=7.0; wrote a 6.0 1 until=2.1; left a 6.1;
        answer a 6.3 ended call=DELETE sent=6.2 end_reason=expired; gave_back b 6.5
    """,
    "dead holder is replaced": "asks a 0.0; took a 0.2 1; killed a 0.5; asks b 0.3; took b 0.6 2; gave_back b 1.0",
    "sharers fit": """
        asks a 0.0 memory_mb=50.0; took a 0.2 1; asks b 0.0 memory_mb=50.0; took b 1.2 2; gave_back a 1.5;
        gave_back b 1.5
    """,
    "important ones pass": """
        asks a 0.0; answer a 0.2 queued; asks b 1.0 priority=5; took b 1.2 1; gave_back b 1.4; took a 1.8 2
    """,
    # Its heartbeat came too late, so it lost its place.
    "it left the queue": """
        asks a 0.0; answer a 0.2 queued; asks b 1.0; answer a 4.0 ended end_reason=expired; took b 5.0 1
    """,
    # The call by which it would have taken the GPU up had no answer.
    "a waiter that was not there is passed over": """
        asks a 0.0; answer a 0.2 queued; asks b 0.3; say failed 6.0 a lease=a call=GET sent=0.3 error='timed out';
        granted b 6.5 2 gpu0; granted a 7.0 3 gpu1
    """,
    "a stopped waiter is passed over": "asks a 0.0; answer a 0.2 queued; asks b 0.3; granted b 6.5 2 gpu0; granted a 7.0 3 gpu1",
    # The first grant may rest on a reading from before, the last comes when the outsider has left.
    "an outsider came to a holder": """
        nemesis outsider_came 0.1 uuid=gpu0; nemesis outsider_left 20.0 uuid=gpu0; asks a 0.0; took a 0.2 1;
        gave_back a 1.0; asks b 1.0; answer b 9.0 queued; took b 20.1 2
    """,
    "an outage in which only remote holders give up": """
        asks local 0.0; answer local 0.2 active fence=1 uuids=[gpu0];
        say took 0.2 local uuids=[gpu0] gpu_ids=[0] fence=1; asks remote 0.0; took remote 0.2 2 gpu1;
        nemesis server_away 1.0; say left 2.1 remote left_at=2.1 why='gave up'; gave_back local 90.0
    """,
    "an outsider is elsewhere": """
        nemesis outsider_came 0.0 uuid=gpu0; nemesis outsider_left 20.0 uuid=gpu0; asks a 9.0; took a 9.2 1 gpu1;
        asks b 9.0 memory_mb=10.0; took b 9.3 2
    """,
}

# The kind of violation, and histories that have it.
BROKEN = {
    "held_twice: overlap": "asks a 0.0; took a 0.2 1; asks b 0.3; took b 2.0 2",
    "held_twice: overlap after renewal": "asks a 0.0; took a 0.2 1; renewed a 1.3; asks b 0.3; took b 3.0 2",
    "held_twice: overlap of exclusive and shared": "asks a 0.0 memory_mb=10.0; took a 0.2 1; asks b 0.3; took b 1.0 2",
    "overfull: overfull": """
        asks a 0.0 memory_mb=50.0; took a 0.2 1; asks b 0.0 memory_mb=50.0; took b 0.3 2;
        asks c 0.0 memory_mb=50.0; took c 0.4 3
    """,
    "lock: witness": """
        asks a 0.0; took a 0.2 1; gave_back a 0.5; asks b 0.6; took b 1.0 2; say witness_busy 1.0 b uuid=gpu0
    """,
    "stale_write: stale write": "asks a 0.0; asks b 0.0; wrote b 1.0 2 until=3.0; wrote a 1.1 1 until=3.0",
    "fence: same fence": "asks a 0.0; granted a 0.2 1 gpu0; asks b 0.0; granted b 0.2 1 gpu1",
    # After a restart that forgot.
    "fence: fence went back": "asks a 0.0; took a 0.2 7; gave_back a 0.5; asks b 1.0; granted b 1.2 3 gpu1",
    "fence: fence went back on a gpu": "asks a 0.0; asks b 0.0; took a 0.2 7; gave_back a 0.5; took b 1.2 3",
    "lost: second grant": "asks a 0.0; granted a 0.2 1 gpu0; granted a 0.4 2 gpu1",
    "lost: grant forgotten": "asks a 0.0; took a 0.2 1; say lost 0.8 a sent=0.7 reason=unknown",
    "lost: grant forgotten by the time it is given back": """
        asks a 0.0; took a 0.2 1; left a 0.5; say answered 0.7 a call=DELETE sent=0.6 status=404 uuids=[]
    """,
    "lost: place forgotten": "asks a 0.0; answer a 0.2 queued; say answered 9.0 a call=GET sent=8.9 status=404 uuids=[]",
    "lost: ended before its time": "asks a 0.0; took a 0.2 1; say lost 2.0 a sent=1.9 reason=holder_died",
    "lost: queued again": "asks a 0.0; took a 0.2 1; answer a 0.5 queued",
    "lost: left the queue before its time": "asks a 0.0; answer a 0.2 queued; answer a 1.0 ended end_reason=expired",
    "lost: released by somebody else": "asks a 0.0; took a 0.2 1; say lost 5.0 a sent=4.9 reason=released",
    "lost: released by the server within its time": """
        asks a 0.0; answer a 0.2 queued;
        answer a 2.0 ended call=PUT fence=1 end_reason=released ended_by='the server'
    """,
    "order: served out of order": "asks a 0.0; answer a 0.2 queued; asks b 0.3; granted b 0.5 1 gpu0; granted a 0.6 2 gpu1",
    "order: important one served later": """
        asks a 0.0 priority=5; answer a 0.2 queued; asks b 0.3; granted b 0.5 1 gpu0; granted a 0.6 2 gpu1
    """,
    # It came first, and still waited when the important one came.
    "order: less important one served earlier": """
        asks b 0.0; answer b 0.2 queued; asks a 0.3 priority=5; answer a 0.5 queued;
        answer b 0.8 queued sent=0.6; granted b 1.0 1 gpu0; granted a 1.1 2 gpu1
    """,
    "order: passed over and never served": """
        asks a 0.0; answer a 0.2 queued; asks b 0.3; granted b 0.5 1; answer a 0.8 queued sent=0.6
    """,
    "resurrected: resurrected": "asks a 0.0; took a 0.2 1; gave_back a 0.5; granted a 1.5 1",
    "resurrected: queued after its end": "asks a 0.0; took a 0.2 1; gave_back a 0.5; answer a 1.5 queued call=PUT",
    "short: renewed for less": "asks a 0.0; took a 0.2 1; renewed a 1.0 1.5",
    "dead_holder: not reused": "asks a 0.0; took a 0.2 1; killed a 0.5; asks b 0.3; took b 1.0 2 gpu1",
    "death_unnoticed: death unnoticed": """
        asks a 0.0; took a 0.2 1; killed a 0.5; asks b 0.3; took b 0.6 2; gave_back b 1.0;
        nemesis death_unnoticed 2.0 lease=a state=active after_s=1.5
    """,
    "left_over: left over": "nemesis final 9.0 leases=[a] gpus=[leased]",
    "left_over: end not read": "nemesis final 9.0 leases=[] gpus=[] is_read=false",
    "answer: refused": "asks a 0.0; say answered 0.2 a call=PUT sent=0.1 status=409 uuids=[] detail='other wishes'",
    "answer: server error": "asks a 0.0; say answered 0.2 a call=PUT sent=0.1 status=500 uuids=[]",
    "outsider: granted beside an outsider": """
        nemesis outsider_came 0.0 uuid=gpu0; nemesis outsider_left 20.0 uuid=gpu0; asks a 9.0; took a 9.2 1
    """,
    "outsider: granted beside an outsider after waiting": """
        nemesis outsider_came 1.0 uuid=gpu0; nemesis outsider_left 20.0 uuid=gpu0; asks a 0.0;
        answer a 9.0 queued; took a 9.2 1
    """,
    "second_server: granted by another server": "nemesis second_server 1.0 granted=[gpu0]",
    "lost_by_outage: lost by outage": """
        asks a 0.0; answer a 0.2 active fence=1 uuids=[gpu0];
        say took 0.2 a uuids=[gpu0] gpu_ids=[0] fence=1; nemesis server_away 1.0;
        say lost 61.0 a sent=60.9 reason=expired
    """,
    "lost_by_outage: given up by a local holder": """
        asks a 0.0; answer a 0.2 active fence=1 uuids=[gpu0];
        say took 0.2 a uuids=[gpu0] gpu_ids=[0] fence=1; nemesis server_away 1.0;
        say left 5.0 a left_at=5.0 why='gave up'
    """,
    "starved: starved": "nemesis starved 1.0 lease=a",
}


@pytest.mark.parametrize("script", IN_ORDER.values(), ids=IN_ORDER)
def test_a_history_in_order_has_no_violation(script: str) -> None:
    assert Scribe().play(script).found() == []


@pytest.mark.parametrize(("name", "script"), BROKEN.items(), ids=BROKEN)
def test_each_violation_is_found(name: str, script: str) -> None:
    kind, _, _ = name.partition(":")
    assert kind in Scribe().play(script).found()
