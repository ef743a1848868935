"""What travels between two boxes: the handshake, the messages of agents and leaders, and calls with their answers.

A frame is a JSON object, and the bytes of a body after a line break if it has one. A box may be one version ahead: what it says
in fields that are not known here is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_args

from gpu_worker_pool.core.fleet.messages import AgentMessage, KeptLease, LeaderMessage, LeaseOver
from gpu_worker_pool.core.model.configured import AccessToken
from gpu_worker_pool.ledger.codec import as_object, encode, parse_object, reader, shortened

from .handshake import Hello, Proof

PATH = "/fleet/agent"
# A frame before the key is proven, and after it: what a box has to say at once is a thousand leases.
MOST_BYTES_OF_STRANGER = 4096
MOST_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Leads:
    """The answer of a box that does not lead to an announcement: the box at this URL does, as far as it knows; None if it knows
    nobody.
    """

    url: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A call, with its body. `said` is what the box says of the caller, as JSON (http/forwarded.py)."""

    id: int
    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    said: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """The beginning of the answer to a call, with the whole body if `is_whole`. `keeper` is the node that keeps the lease that
    the call is about, if it is about one that has GPUs.
    """

    id: int
    status: int
    headers: tuple[tuple[str, str], ...] = ()
    is_whole: bool = False
    keeper: str | None = None


@dataclass(frozen=True, slots=True)
class BodyPart:
    """The next piece of the body of an answer."""

    id: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The caller is gone: no answer is waited for any more."""

    id: int


HandshakeFrame = Hello | Proof
CallFrame = Ask | Begun | BodyPart | GivenUp
_GROUPS: tuple[Any, ...] = (AgentMessage, LeaderMessage, HandshakeFrame, Leads, CallFrame)
_KINDS: dict[str, type] = {kind.__name__: kind for group in _GROUPS for kind in get_args(group) or (group,)}
_KeptT = TypeVar("_KeptT")


def encode_message(message: object) -> str:
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
        raise ValueError(f"a message of the kind {name} is not expected here: {shortened(repr(text))}")
    return reader(kind, is_tolerant=True)(parts)


def encode_kept(thing: KeptLease | LeaseOver | AccessToken) -> str:
    return encode(thing)


def decode_kept(kind: type[_KeptT], text: str) -> _KeptT:
    any_kind: Any = kind
    return cast("_KeptT", reader(any_kind, is_tolerant=True)(parse_object(text)))
