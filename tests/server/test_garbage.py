"""What collections free, and what they leave alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from gpu_worker_pool.server.garbage import FEW_OBJECTS, TICKS_UNTIL_COUNT, GarbageCollection

Collections = Callable[[int], GarbageCollection]


class Knot:
    """An object that refers to itself: reference counts never free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[Callable[[int], GarbageCollection]]:
    """Makes collections that are undone after the test. The number is that of objects that are few."""
    thresholds, callbacks = gc.get_threshold(), gc.callbacks[:]

    def start(few: int) -> GarbageCollection:
        made = GarbageCollection(few)
        made.start()
        return made

    yield start
    gc.set_threshold(*thresholds)
    gc.callbacks[:] = callbacks
    gc.unfreeze()


def tick(collection: GarbageCollection, times: int) -> None:
    for _ in range(times):
        collection.tick()


def test_a_cycle_that_dies_young_is_freed_at_the_next_tick(collections: Collections) -> None:
    collection = collections(FEW_OBJECTS)
    dead = weakref.ref(Knot())
    collection.tick()
    assert dead() is None


def test_what_lives_is_set_aside_and_no_later_collection_goes_through_it(collections: Collections) -> None:
    collections(FEW_OBJECTS)
    alive = Knot()
    gc.collect(0)
    assert not any(each is alive for each in gc.get_objects())


def test_a_cycle_that_dies_old_is_freed_once_the_objects_have_doubled(collections: Collections) -> None:
    collection = collections(0)
    old = Knot()
    gc.collect(0)
    dead = weakref.ref(old)
    del old
    tick(collection, TICKS_UNTIL_COUNT)
    assert dead() is not None
    alive: list[list[int]] = [[] for _ in range(2 * gc.get_freeze_count())]
    tick(collection, TICKS_UNTIL_COUNT)
    assert dead() is None
    assert not any(each is alive for each in gc.get_objects())
