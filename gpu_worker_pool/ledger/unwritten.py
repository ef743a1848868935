"""What can be done while the journal cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.state import PoolState


def renew(state: PoolState, command: cmd.Renew, now: float, is_written: Callable[[str], bool]) -> list[ev.Event]:
    """Take a heartbeat, so that no holder loses a GPU because of a full disk. A lease that is not written is not known to
    its client, so it cannot be renewed.
    """
    events = decide(state, replace(command, lease_ids=tuple(filter(is_written, command.lease_ids))), now)
    replay(state, events)
    return events + [ev.LeaseUnknown(now, lease_id) for lease_id in command.lease_ids if not is_written(lease_id)]


def show(state: PoolState, command: cmd.Observe, now: float) -> None:
    """Take in readings of GPUs before the history is known."""
    for node in sorted({reading.gpu.key.node for reading in command.readings}):
        replay(state, decide(state, cmd.AnnounceNode(node, ""), now))
    replay(state, decide(state, command, now))
