"""The agents of a fleet learn the URLs of its boxes: all of them at first, and again when one of them has changed."""

from __future__ import annotations

from itertools import count

from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.box_actions import BoxAction, Do, Tell
from gpu_worker_pool.core.fleet.boxes import Boxes
from gpu_worker_pool.core.fleet.custody import Custody
from gpu_worker_pool.core.fleet.messages import LeaderMessage, Orders, Welcome
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.state import PoolState


class Leader:
    def __init__(self) -> None:
        self.state, self.now, self._sessions = PoolState(), 0.0, count(1)
        self.boxes = Boxes(1, "pool")
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


def test_a_box_is_told_all_urls_at_first_and_again_when_one_has_changed() -> None:
    leader = Leader()
    assert leader.join("a", "http://a").boxes == (("a", "http://a"),)
    leader.second()
    both = (("a", "http://a"), ("b", "http://b"))
    assert leader.join("b", "http://b").boxes == both

    # In a fleet that starts, the list changes from second to second: it is told when that is over.
    assert leader.second() == [(1, Orders(1, 2.0)), (2, Orders(1, 2.0))]
    assert leader.second() == [(1, Orders(1, 3.0, boxes=both)), (2, Orders(1, 3.0))]
    assert leader.second() == [(1, Orders(1, 4.0)), (2, Orders(1, 4.0))]

    leader.join("a", "http://elsewhere")
    moved = (("a", "http://elsewhere"), ("b", "http://b"))
    assert leader.second() == [(2, Orders(1, 5.0)), (3, Orders(1, 5.0))]
    assert leader.second() == [(2, Orders(1, 6.0, boxes=moved)), (3, Orders(1, 6.0))]


def test_the_url_of_a_box_that_was_forgotten_is_taken_back() -> None:
    leader = Leader()
    for node in ("a", "b"):
        leader.join(node, f"http://{node}")
    leader.second()
    leader.second()
    leader.told(leader.boxes.closed(2, leader.now))
    leader.do(cmd.ForgetNode("b"))

    leader.second()
    assert leader.second() == [(1, Orders(1, 4.0, boxes=(("a", "http://a"),)))]
    assert leader.second() == [(1, Orders(1, 5.0))]
