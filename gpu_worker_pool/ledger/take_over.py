"""What a driver does first: it reads the history and takes charge of the pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState

from .journal import History, JournalDamaged


def restore(state: PoolState, events: Iterable[DurableEvent]) -> None:
    """Apply the events of a journal. JournalDamaged if they contradict each other."""
    try:
        replay(state, events)
    except (KeyError, AssertionError, ValueError) as error:
        raise JournalDamaged(f"the journal's events contradict each other ({error!r})") from error


def restored(history: History, settings: PoolSettings) -> PoolState:
    """The pool that this history adds up to."""
    state = PoolState(settings=settings, ended=OrderedDict((lease.id, lease) for lease in history.ended))
    restore(state, history.events)
    return state


def first_commands(
    state: PoolState, take_over: cmd.TakeOver, node: str | None, fence_seen: int = 0
) -> list[cmd.Command]:
    """The commands of a take-over. `node` is the present name of the driver's machine, if it has GPUs of the pool; the
    only node of a box (epoch 0) is renamed to that. Its fences are above `fence_seen`.
    """
    if node is None:
        return [take_over]
    renamed = [cmd.RenameNode(old, node) for old in state.nodes if old != node]
    is_one_box = take_over.epoch == 0 and len(state.nodes) == 1
    return [
        take_over,
        *(renamed if is_one_box else ()),
        cmd.AnnounceNode(node, take_over.boot_id, fence_seen=fence_seen),
    ]
