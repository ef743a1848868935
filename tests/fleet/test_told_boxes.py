"""The agents of a fleet learn the URLs of its boxes: all of them at first, then those that are new or gone."""

from __future__ import annotations

from itertools import count

from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.box_actions import BoxAction, Do, Tell
from gpu_worker_pool.core.fleet.boxes import MOST_TOLD, SIGN_OF_LIFE_S, Boxes
from gpu_worker_pool.core.fleet.custody import Custody
from gpu_worker_pool.core.fleet.messages import LeaderMessage, Orders, Welcome
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.state import PoolState


class Leader:
    def __init__(self) -> None:
        self.state, self.now, self._sessions = PoolState(), 0.0, count(1)
        keys = map(str, count(1))
        self.boxes = Boxes(1, "pool", lambda: next(keys))
        self.do(cmd.TakeOver(1, "boot"))

    def do(self, command: cmd.Command) -> list[tuple[int, LeaderMessage]]:
        events = step(self.state, command, self.now)
        return self.told(self.boxes.written(events, self.state, self.now))

    def told(self, actions: list[BoxAction]) -> list[tuple[int, LeaderMessage]]:
        told: list[tuple[int, LeaderMessage]] = []
        for action in actions:
            if isinstance(action, Tell):
                told.append((action.session, action.message))
            elif isinstance(action, Do):
                told += self.do(action.command)
        return told

    def join(self, node: str, url: str) -> Welcome:
        custody = Custody(node, f"machine of {node}", "boot", 0.0)
        announced = custody.announce(url, "1", False, ())
        told = self.told(self.boxes.receive(next(self._sessions), announced, self.state, self.now))
        (welcome,) = [message for _, message in told if isinstance(message, Welcome)]
        return welcome

    def second(self) -> list[tuple[int, LeaderMessage]]:
        self.now += 1.0
        return self.told(self.boxes.tick(self.state, self.now))


def test_a_box_is_told_all_urls_at_first_and_later_only_those_that_are_new() -> None:
    leader = Leader()
    assert leader.join("a", "http://a").boxes == (("a", "http://a"),)
    leader.second()
    assert leader.join("b", "http://b").boxes == (("a", "http://a"), ("b", "http://b"))

    assert leader.second() == [(1, Orders(1, 2.0, boxes=(("b", "http://b"),))), (2, Orders(1, 2.0))]
    same = Orders(1, 3.0)
    assert leader.second() == [(1, same), (2, same)]


def test_the_url_of_a_box_that_was_forgotten_is_taken_back() -> None:
    leader = Leader()
    for node in ("a", "b"):
        leader.join(node, f"http://{node}")
    leader.second()
    leader.told(leader.boxes.closed(2, leader.now))
    leader.do(cmd.ForgetNode("b"))

    assert leader.second() == [(1, Orders(1, 2.0, forgotten=("b",)))]
    assert leader.second() == [(1, Orders(1, 3.0))]
    leader.told(leader.boxes.closed(1, leader.now))
    assert leader.join("c", "http://c").boxes == (("a", "http://a"), ("c", "http://c"))
    leader.do(cmd.ForgetNode("a"))
    # It is back before the others were told.
    leader.join("a", "http://a")
    assert leader.second()[0][1] == Orders(1, 4.0, boxes=(("a", "http://a"),))


def test_a_box_that_moved_is_told_again() -> None:
    leader = Leader()
    leader.join("a", "http://a")
    leader.join("b", "http://b")
    leader.second()
    leader.join("a", "http://elsewhere")

    moved = Orders(1, 2.0, boxes=(("a", "http://elsewhere"),))
    assert leader.second() == [(2, moved), (3, Orders(1, 2.0))]


def test_boxes_that_move_again_and_again_are_told_of_all_boxes_at_times() -> None:
    leader = Leader()
    leader.join("a", "http://a")
    for number in range(3 * MOST_TOLD):
        leader.join("b", f"http://b{number}")
    ((_, told), _) = leader.second()

    assert isinstance(told, Orders)
    assert ("b", f"http://b{3 * MOST_TOLD - 1}") in (told.boxes or ())


def test_a_large_fleet_is_told_the_time_part_by_part_and_every_box_once_a_second() -> None:
    leader = Leader()
    number = 3 * MOST_TOLD + 1
    for each in range(number):
        leader.join(f"box-{each}", f"http://box-{each}")

    for _ in range(3):
        leader.now += SIGN_OF_LIFE_S
        began, told = leader.now, []
        while leader.now < began + SIGN_OF_LIFE_S / 2:
            part = leader.told(leader.boxes.tick(leader.state, leader.now))
            assert len(part) <= MOST_TOLD
            told += [session for session, _ in part]
            leader.now = leader.boxes.next_due_at()
        leader.now = began
        assert sorted(told) == list(range(1, number + 1))
