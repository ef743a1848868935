"""Keeps garbage collections short: while one lasts, the event loop stands still.

The objects of a pool live long, and are not garbage in cycles: leases, readings, connections that wait. A collection that
goes through all of them takes a third of a second in a large fleet. So a collection goes through the new objects only, and
what it finds alive is set aside (`gc.freeze`), where no later collection looks. Reference counts still free it. A cycle
that becomes garbage after that is freed by a full collection, which is rare.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

# Objects that replace others are not counted as new, so a collection is also due at every tick.
OBJECTS_UNTIL_COLLECTION = 5_000
# A full collection takes long. It is made only if the objects have doubled, which is looked at this often.
TICKS_UNTIL_COUNT = 6_000
FEW_OBJECTS = 100_000


class GarbageCollection:
    """`tick` is to be called ten times a second. Below `few_objects`, nothing is worth a full collection."""

    def __init__(self, few_objects: int = FEW_OBJECTS) -> None:
        self._few_objects = few_objects
        self._ticks = 0
        self._after_full = 0

    def start(self) -> None:
        """Set aside what is loaded now."""
        gc.set_threshold(OBJECTS_UNTIL_COLLECTION)
        gc.freeze()
        if _set_aside not in gc.callbacks:
            gc.callbacks.append(_set_aside)
        self._after_full = gc.get_freeze_count()

    def tick(self) -> None:
        self._ticks += 1
        gc.collect(0)
        if self._ticks % TICKS_UNTIL_COUNT == 0:
            self.collect_all_if_doubled()

    def collect_all_if_doubled(self) -> bool:
        """Go through all objects if there are twice as many as after the last time; return whether that was so."""
        if gc.get_freeze_count() < 2 * self._after_full + self._few_objects:
            return False
        gc.unfreeze()
        gc.collect()
        self._after_full = gc.get_freeze_count()
        return True


def _set_aside(phase: str, _: Mapping[str, Any]) -> None:
    if phase == "stop":
        gc.freeze()
