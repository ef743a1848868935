"""Why a request still waits, as data and in one sentence; many explained at once are told what each would be told alone."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.queue.explain import MOST_GPUS, Explainer, explain
from gpu_worker_pool.core.queue.verdicts import verdict
from tests.core.build import START, T4, WALL_OFFSET_S, Box, key, process, reading


def test_a_waiter_is_told_position_reason_and_who_has_what_it_wants() -> None:
    box = Box(reading())
    box.ask("a", owner="ann", worker="w1")
    box.ask("b")

    assert str(box.explain("b")) == "Position 1 of 1, waiting for 1 GPU: 1 leased by ann"


def test_a_verdict_is_given_for_every_gpu_by_node_and_index() -> None:
    box = Box(reading(1), reading(0, utilization=95), reading(0, node="another", name=T4))
    box.ask("a", model="A100")
    box.ask("b", model="A100")

    explanation = box.explain("b")

    assert [item.key for item in explanation.verdicts] == [key(0, "another"), key(0), key(1)]
    assert [item.verdict.code for item in explanation.verdicts] == [
        "wrong_model",
        "over_utilization",
        "leased",
    ]
    assert [item.gpu.index for item in explanation.verdicts if item.gpu] == [0, 0, 1]


def test_gpus_with_the_same_matter_are_told_together() -> None:
    box = Box(*(reading(index) for index in range(4)), reading(4, utilization=95))
    for name in ("ann", "ben", "cy"):
        box.ask(name)
    box.ask("ann too", worker="ann")
    box.ask("b")

    assert str(box.explain("b")) == (
        "Position 1 of 1, waiting for 1 GPU: 4 leased by ann, ben, cy; 1 utilization at 95 %, threshold 90 %"
    )


def test_a_long_list_of_names_is_cut() -> None:
    box = Box(*(reading(index) for index in range(5)))
    for name in ("ann", "ben", "cy", "di", "ed"):
        box.ask(name)
    box.ask("b")

    assert str(box.explain("b")).endswith("5 leased by ann, ben, cy and 2 more")


def test_a_free_gpu_kept_for_somebody_ahead_says_for_whom() -> None:
    box = Box(reading(0), reading(1), reserve_after_s=0.0)
    box.ask("a", time_limit_s=3600.0)
    box.ask("wide", gpus=2, owner="wilma", worker=None)
    box.ask("b")

    explanation = box.explain("b")

    date = START + 3600.0 + WALL_OFFSET_S
    assert explanation.verdicts[1].verdict == verdict("held", for_lease_id="wide", for_holder="wilma", from_at=date)
    assert "1 reserved for wilma, who is ahead in the queue" in str(explanation)


def test_a_shared_gpu_kept_for_the_first_in_the_line_says_for_whom() -> None:
    box = Box(reading(), reserve_after_s=0.0)
    box.ask("a", memory_mb=8_000, time_limit_s=3600.0)
    box.ask("alone")
    box.ask("b", memory_mb=8_000)

    date = START + 3600.0 + WALL_OFFSET_S
    assert box.explain("b").verdicts[0].verdict == verdict(
        "held", for_lease_id="alone", for_holder="alone", from_at=date
    )


def test_gpus_for_which_waiting_is_of_no_use_are_named_last() -> None:
    box = Box(reading(0, name="A100"), reading(1, name="T4"))
    box.ask("a", model="T4")
    box.ask("b", model="T4")

    assert str(box.explain("b")).endswith("of model T4: 1 leased by a; 1 A100, not T4")


def test_what_a_waiter_holds_itself_is_available_to_it() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")
    box.ask("wide", gpus=2)

    assert box.explain("wide").verdicts[1].verdict == verdict("eligible", score=0.0)
    assert str(box.explain("wide")).endswith("waiting for 2 GPUs on one node: 1 leased by a; 1 available")


def test_what_is_reserved_for_a_waiter_behind_is_not_told_as_kept() -> None:
    box = Box(reading(0), reading(1), reading(2), reserve_after_s=0.0)
    box.ask("declared", among=("0",), time_limit_s=3600.0)
    box.ask("endless", among=("2",))
    box.ask("behind", gpus=2, among=("0", "1"))
    box.ask("first", gpus=2, among=("1", "2"), priority=1)
    assert box.state.reservation is not None
    assert box.state.reservation.lease_id == "behind"

    verdicts = {item.key: item.verdict for item in box.explain("first").verdicts}

    assert verdicts[key(1)] == verdict("eligible", score=0.0)


def test_a_gpu_that_a_process_took_back_is_told_by_who_has_it_and_not_by_what_drained() -> None:
    box = Box(reading())
    box.ask("a", pid=123)
    box.observe_now(reading(used_mb=9_420.8, processes=(process(123, 9_420.8),)))
    box.release("a")
    box.ask("again", pid=123)
    assert box.gpus_of("again") == (key(),)
    box.ask("b")

    assert str(box.explain("b")).endswith(": 1 leased by again")


def test_who_would_share_beside_those_who_do_is_told_of_what_drains() -> None:
    box = Box(reading())
    box.ask("a", pid=123, memory_mb=8_000)
    box.ask("stays", memory_mb=8_000)
    box.observe_now(reading(used_mb=9_420.8, processes=(process(123, 9_420.8),)))
    box.release("a")
    box.ask("b", memory_mb=8_000)
    box.ask("alone")

    assert str(box.explain("b")).endswith(": 1 draining: pid 123 still holds 9.2 GiB")
    assert str(box.explain("alone")).endswith(": 1 leased by stays")


def test_before_the_first_look_it_says_that_no_gpu_has_been_seen() -> None:
    box = Box()
    box.ask("a", model="A100")

    assert str(box.explain("a")) == ("Position 1 of 1, waiting for 1 GPU of model A100: no GPU has been seen yet")


def test_a_gpu_that_was_not_looked_at_since_a_restart_has_a_verdict_and_its_name() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")
    box.ask("b", gpus=2)
    box.restart()
    box.observe_now(reading(1))

    verdicts = box.explain("b").verdicts

    assert [(item.key, item.gpu and item.gpu.index) for item in verdicts] == [(key(0), 0), (key(1), 1)]


def test_an_explanation_does_not_follow_a_clock_that_goes_back() -> None:
    box = Box(reading())
    box.pass_time(20)
    box.ask("a")

    assert explain(box.state, "a", START) == explain(box.state, "a", box.now)


def test_explaining_changes_nothing() -> None:
    box = Box(reading(), reading(1))
    box.ask("a")
    box.ask("b", gpus=2)
    box.explain("b")

    assert box.do(cmd.Tick()) == []


def assert_told_as_alone(box: Box) -> None:
    explainer = Explainer(box.state, box.now)
    waiting = [lease for lease in box.state.leases.values() if isinstance(lease, QueuedLease)]
    assert len(waiting) > 2
    for lease in waiting:
        assert explainer.explain(lease) == explain(box.state, lease.id, box.now)


def test_those_who_wish_for_the_same_and_those_who_do_not() -> None:
    box = Box(reading(0), reading(1, name=T4), reading(2, utilization=95))
    for lease_id, model in (("a", None), ("b", None), ("c", None), ("d", "T4"), ("e", None), ("f", "A100")):
        box.ask(lease_id, model=model)

    assert_told_as_alone(box)


def test_those_who_are_kept_out_by_somebody_ahead_of_them() -> None:
    """A GPU that is reserved is free for the waiter that has it, and for none behind."""
    box = Box(reading(0), reading(1), reserve_after_s=0.0)
    box.ask("a", time_limit_s=3600.0)
    for lease_id in ("wide", "wide too"):
        box.ask(lease_id, gpus=2)
    for lease_id in ("b", "c"):
        box.ask(lease_id)

    assert box.state.reservation
    assert_told_as_alone(box)


def test_only_so_many_verdicts_are_made_for_one_list() -> None:
    box = Box(reading(0, utilization=100), reading(1, utilization=100))
    for number, memory_mb in enumerate((1_000, 2_000, 3_000, 1_000)):
        box.ask(f"w{number}", memory_mb=memory_mb)
    explainer = Explainer(box.state, box.now, most_verdicts=4)
    afforded = []
    for number in range(4):
        lease = box.state.queued(f"w{number}")
        afforded.append(explainer.can_afford(lease))
        if afforded[-1]:
            explainer.explain(lease)
    assert afforded == [True, True, False, True], "equal wishes share their verdicts"


def test_a_waiter_is_told_of_a_hundred_gpus_and_how_many_more_there_are() -> None:
    box = Box(*(reading(index, utilization=100) for index in range(MOST_GPUS + 7)))
    box.ask("waits")

    told = explain(box.state, "waits", box.now)

    assert told is not None
    assert len(told.verdicts) == MOST_GPUS
    assert str(told).endswith("; and 7 more GPUs")


def test_gpus_of_a_box_that_is_not_heard_of_are_counted_in_a_sentence() -> None:
    box = Box(*(reading(index, node="gpu-03") for index in range(3)))
    box.do(cmd.TakeOver(1, "boot"))
    box.ask("waits")

    told = explain(box.state, "waits", box.now)

    assert told is not None
    assert told.obstacles == "3 whose box, gpu-03, is not heard of, so its state is unknown"
