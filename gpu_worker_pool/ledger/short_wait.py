"""A wait that the driver ends soon: for a turn, or for a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ShortWait(asyncio.Future[None]):
    """A call that has no task sets `go_on`: it goes on as soon as the wait ends. A task goes on in the next turn of the
    event loop, as after any other future.
    """

    go_on: Callable[[], None] | None = None


def goes_on_at_once(waiting: asyncio.Future[None]) -> bool:
    return isinstance(waiting, ShortWait) and waiting.go_on is not None


def wake(waiting: asyncio.Future[None], error: Exception | None = None) -> None:
    """End a wait, unless it has ended; the call gets the error, if there is one."""
    if waiting.done():
        return
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)
        waiting.exception()  # retrieved: the caller may be gone
    if isinstance(waiting, ShortWait) and waiting.go_on is not None:
        waiting.go_on()
