"""The messages of agents and leaders, and the leases that a box keeps, as JSON text.

A box may be one version ahead: what it says in fields that are not known here is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast, get_args

from gpu_worker_pool.core.fleet.messages import (
    AgentMessage,
    ComingEnd,
    KeptLease,
    LeaderMessage,
    LeaseOver,
    WatchOrder,
)
from gpu_worker_pool.core.model.gpu import Gpu, GpuProcess, InventoryGpu, Reading
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.ledger.codec import LATER
from gpu_worker_pool.ledger.records import RecordCodec, parse_object, shortened

from .handshake import Challenge, Hello, Proof

PATH = "/fleet/agent"
# What a box has to say at once: a thousand leases. More is not sent.
MOST_BYTES = 8 * 1024 * 1024
# The code with which a box that does not lead closes; the reason is the URL of the leader, if it knows that.
NOT_LEADING = 4001

HandshakeMessage = Hello | Challenge | Proof
_MESSAGES: tuple[type, ...] = (*get_args(AgentMessage), *get_args(LeaderMessage), *get_args(HandshakeMessage))
_PARTS: tuple[type, ...] = (KeptLease, LeaseOver, WatchOrder, ComingEnd, InventoryGpu, Reading, Gpu, GpuProcess)
_KINDS = {kind.__name__: kind for kind in _MESSAGES}
_MessageT = TypeVar("_MessageT")


def _defaults(kind: type) -> Mapping[str, object]:
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


_codec = RecordCodec(
    {*_MESSAGES, *_PARTS, Request, Wishes, Holder},
    {**LATER, **{kind: _defaults(kind) for kind in (*_MESSAGES, *_PARTS)}},
    "a message",
    is_tolerant=True,
)


def encode_message(message: AgentMessage | LeaderMessage | HandshakeMessage) -> str:
    return _codec.encode({"kind": type(message).__name__, **_codec.as_object(message)})


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
    return _codec.reader(kind)(parts, name)


def encode_kept(thing: KeptLease | LeaseOver) -> str:
    return _codec.encode(_codec.as_object(thing))


def decode_kept(kind: type[_MessageT], text: str) -> _MessageT:
    return cast("_MessageT", _codec.reader(kind)(parse_object(text), kind.__name__))
