"""One step of a pool: expire what is due, carry out a command, serve the queue. The driver calls only this."""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.state import PoolState

from .decide import decide
from .evolve import replay


def step(
    state: PoolState, command: cmd.Command, now: float, has_time: Callable[[], bool] = lambda: True
) -> list[ev.Event]:
    """Decide and evolve until nothing more follows; return all events in order.

    The queue is served after every command that may free or take GPUs. The state is then ahead of the
    journal. A client must not be told before the durable events are written. If they cannot be written, the state must
    be discarded and replayed from the journal.

    Once it has no time left, it stops, with the queue as it is then. The next step, at any time, goes on: every pass begins
    with the first waiter. The pool is settled (`settled_until`) only when all is done.
    """
    happened: list[ev.Event] = []

    def carry_out(part: cmd.Command) -> bool:
        events = decide(state, part, now)
        if events:
            replay(state, events)
            happened.extend(events)
        return bool(events)

    def settle() -> None:
        while not state.is_settled_at(now) and has_time() and carry_out(cmd.ServeQueue()):
            pass

    if not isinstance(command, (cmd.TakeOver, cmd.Tick, cmd.LoseTime)) and state.has_due(now):
        carry_out(cmd.Tick())
    if isinstance(command, cmd.RequestLease):
        settle()  # a newcomer is granted at once only behind those that wait
    carry_out(command)
    settle()
    return happened
