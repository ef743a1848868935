"""Which boxes a leader takes."""

from __future__ import annotations

from collections.abc import Callable, Sized

from gpu_worker_pool.core.model.state import PoolState

from .messages import Announce

# The names of simulated GPUs begin with this.
SIMULATED = "Simulated"


def why_rejected(message: Announce, state: PoolState, epoch: int, leases_of: Callable[[str], Sized]) -> str | None:
    """Why the leader of this epoch does not take a box; None if it does. `leases_of` are the active leases of a node."""
    if message.epoch_seen > epoch:
        return f"this leader has epoch {epoch}, and the box has seen epoch {message.epoch_seen}"
    known = state.nodes.get(message.node)
    if known is not None and known.machine_id not in (None, message.machine_id):
        return (
            f"another machine has the node name {message.node}: its id is {known.machine_id}, and this one's is "
            f"{message.machine_id}; give this box another name, or have an operator forget the node if that machine is gone"
        )
    return _why_under_another_name(message, state, leases_of) or _why_of_another_kind(message, state)


def _why_under_another_name(message: Announce, state: PoolState, leases_of: Callable[[str], Sized]) -> str | None:
    """A box that was renamed while it has leases would have its GPUs granted a second time, under the new name."""
    known = state.nodes.get(message.node)
    if known is not None and known.machine_id == message.machine_id:
        return None
    for name, node in state.nodes.items():
        if node.machine_id == message.machine_id and name != message.node and (leases := len(leases_of(name))):
            return (
                f"this machine is known as {name}, which has {leases} {'lease' if leases == 1 else 'leases'}, and calls itself "
                f"{message.node} now; set GPU_POOL_NODE={name} until they have ended. If it is another machine with a copy of "
                "that state directory, give it a state directory of its own"
            )
    return None


def _why_of_another_kind(message: Announce, state: PoolState) -> str | None:
    """A box with simulated GPUs has no place among boxes with real ones: its GPUs would be granted to real work."""
    own = {gpu.name.startswith(SIMULATED) for gpu in message.gpus or ()}
    others = {
        gpu.name.startswith(SIMULATED)
        for node, known in state.nodes.items()
        for gpu in (known.gpus or ())[:1]  # all of a box are alike in this
        if node != message.node
    }
    if not own or not others or own <= others:
        return None
    kind, other = ("simulated", "real") if True in own else ("real", "simulated")
    return f"this box has {kind} GPUs, and the fleet has {other} ones; give it a pool of its own (GPU_POOL_FLEET_POOL)"
