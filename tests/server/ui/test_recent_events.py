"""The last things that happened, in the order and the words in which a page shows them."""

from __future__ import annotations

from dataclasses import asdict

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.server.ui.recent_events import KEPT, RecentEvents
from tests.core.build import START, WALL_OFFSET_S, Box, key, reading

NOBODY_SAID = {"by": None, "note": None}
BOB_SAID = {"by": "bob", "note": "the demo"}
WHEN = "1970-01-12T13:48:20.000Z"
assert START + WALL_OFFSET_S == 1_000_100.0  # which is that


def of(box: Box) -> RecentEvents:
    return RecentEvents(lambda: box.state)


def gpu(index: int) -> dict[str, object]:
    return {"node": "box", "gpu_id": index, "uuid": key(index).uuid, "name": "NVIDIA A100-SXM4-80GB"}


def test_each_kind_is_told_with_who_what_and_why() -> None:
    box = Box(reading())
    recent_events = of(box)
    request = Request(Wishes(), Holder("w1", "ann"), labels=(("command", "train.py"), ("job", "x")))
    recent_events.follow(box.do(cmd.RequestLease("a", request)))
    recent_events.follow(box.ask("b", worker="w2"))
    recent_events.follow(box.do(cmd.Release("a", by="bob", why="the demo")))
    recent_events.follow(box.observe_now(reading()))
    recent_events.follow(box.do(cmd.Configure("excluded", key(), "dust")))
    recent_events.follow(box.do(cmd.Configure("excluded", key())))
    recent_events.follow(box.renew("b"))

    nobody = {"lease_id": None, "owner": None, "worker_id": None, "label": None}
    a = {"lease_id": "a", "owner": "ann", "worker_id": "w1", "label": "train.py"}
    b = {"lease_id": "b", "owner": None, "worker_id": "w2", "label": None}
    assert [asdict(view) for view in recent_events.views()] == [
        {"at": WHEN, "kind": "in_service", **nobody, "gpus": (gpu(0),), "reason": None, **NOBODY_SAID},
        {"at": WHEN, "kind": "out_of_service", **nobody, "gpus": (gpu(0),), "reason": "dust", **NOBODY_SAID},
        {"at": WHEN, "kind": "granted", **b, "gpus": (gpu(0),), "reason": None, **NOBODY_SAID},
        {"at": WHEN, "kind": "drained", **a, "gpus": (gpu(0),), "reason": None, **NOBODY_SAID},
        {"at": WHEN, "kind": "ended", **a, "gpus": (gpu(0),), "reason": "released", **BOB_SAID},
        {"at": WHEN, "kind": "queued", **b, "gpus": (), "reason": None, **NOBODY_SAID},
        {"at": WHEN, "kind": "granted", **a, "gpus": (gpu(0),), "reason": None, **NOBODY_SAID},
    ]


def test_who_leaves_the_queue_had_no_gpu() -> None:
    box = Box(reading())
    recent_events = of(box)
    box.ask("a")
    recent_events.follow([*box.ask("b"), *box.release("b")])

    assert [(item.kind, item.gpus, item.reason) for item in recent_events.views()] == [
        ("ended", (), "cancelled"),
        ("queued", (), None),
    ]


def test_what_is_known_then_is_told_although_the_lease_is_forgotten_later() -> None:
    box = Box(reading(), remembered_ended_leases=0)
    recent_events = of(box)
    recent_events.follow(box.ask("a", owner="ann"))
    recent_events.follow(box.do(cmd.Release("a", by="bob", why="the demo")))
    recent_events.follow(box.observe_now(reading()))
    assert box.state.find("a") is None

    assert [item.owner for item in recent_events.views() if item.kind in {"granted", "ended"}] == ["ann", "ann"]


def test_so_many_are_kept_and_no_more() -> None:
    box = Box(reading())
    recent_events = of(box)
    for number in range(KEPT):
        recent_events.follow(
            [
                ev.Configured(box.now, "excluded", key(), f"reason {number}"),
                ev.Configured(box.now, "excluded", key(), None),
            ]
        )

    reasons = [item.reason for item in recent_events.views()]
    assert len(reasons) == KEPT
    assert reasons[:2] == [None, f"reason {KEPT - 1}"]
