"""The messages of agents and leaders, and the leases that a box keeps, as JSON text.

A box may be one version ahead: what it says in fields that are not known here is left out.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast, get_args

from gpu_worker_pool.core.fleet.messages import AgentMessage, KeptLease, LeaderMessage, LeaseOver
from gpu_worker_pool.ledger.codec import as_object, encode, parse_object, reader, shortened

from .handshake import Challenge, Hello, Proof

PATH = "/fleet/agent"
# What a box has to say at once: a thousand leases. More is not sent.
MOST_BYTES = 8 * 1024 * 1024
# The code with which a box that does not lead closes; the reason is the URL of the leader, if it knows that.
NOT_LEADING = 4001

HandshakeMessage = Hello | Challenge | Proof
_KINDS: dict[str, type] = {
    kind.__name__: kind for group in (AgentMessage, LeaderMessage, HandshakeMessage) for kind in get_args(group)
}
_MessageT = TypeVar("_MessageT")


def encode_message(message: AgentMessage | LeaderMessage | HandshakeMessage) -> str:
    return encode({"kind": type(message).__name__, **as_object(message)})


def decode_message(text: str, expected: Any) -> Any:
    """Decode a message of one of the `expected` classes; a ValueError says what is wrong with it. None if its kind is not
    known at all: the other side is newer.
    """
    parts = parse_object(text)
    name = str(parts.pop("kind", None))
    kind = _KINDS.get(name)
    if kind is None:
        return None
    if kind not in (get_args(expected) or (expected,)):
        raise ValueError(f"a message of the kind {name} is not expected here: {shortened(text)}")
    return reader(kind, is_tolerant=True)(parts)


def encode_kept(thing: KeptLease | LeaseOver) -> str:
    return encode(thing)


def decode_kept(kind: type[_MessageT], text: str) -> _MessageT:
    any_kind: Any = kind
    return cast("_MessageT", reader(any_kind, is_tolerant=True)(parse_object(text)))
