"""One step of a pool: expire what is due, do what was asked, serve the queue. The driver calls this and nothing else."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.state import PoolState

from .decide import decide
from .evolve import replay


def step(state: PoolState, command: cmd.Command, now: float) -> list[ev.Event]:
    """Decide and evolve until nothing more follows; returns all that happened, in order.

    The same pass over the queue runs after every command, because every one may free or take something. The state is
    then ahead of the journal: whoever waits must not be told before the durable events among these are written, and
    if they cannot be, the state must be thrown away and replayed from the journal.
    """
    happened: list[ev.Event] = []

    def carry_out(part: cmd.Command) -> bool:
        events = decide(state, part, now)
        replay(state, events)
        happened.extend(events)
        return bool(events)

    if not isinstance(command, cmd.Open | cmd.Tick):
        carry_out(cmd.Tick())
    carry_out(command)
    while carry_out(cmd.ServeQueue()):
        pass
    return happened
