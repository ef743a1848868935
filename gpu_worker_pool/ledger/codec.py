"""Durable events and ended leases as JSON text, with an exact round trip.

The data classes are the format: what a field may hold follows from its type, so a new kind of event cannot be forgotten
here. Golden lines in the tests pin the format on disk; a change to it needs a migration.
"""

from __future__ import annotations

from typing import cast

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import AccessToken, Booking, Quota
from gpu_worker_pool.core.model.gpu import GpuKey, InventoryGpu
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.core.model.request import Holder, Request, Wishes

from .records import RecordCodec, parse_object, shortened

# A class with slots leaves its first draft in __subclasses__(), so the module's names are used.
EVENT_KINDS: dict[str, type] = {
    name: kind
    for name, kind in vars(ev).items()
    if isinstance(kind, type) and issubclass(kind, ev.DurableEvent) and kind is not ev.DurableEvent
}

# Fields added later, with their former meaning. A field with that value is not written: then old journals can be read,
# and older programs can read journals that do not use the field.
LATER: dict[type, dict[str, object]] = {
    Wishes: {"among": None, "nodes": 1, "node": None},
    Holder: {"node": None},
    Request: {"parent": None, "time_limit_s": None, "preemptible": False},
    ev.NodeJoined: {"machine_id": None},
    ev.HistoryCondensed: {"recent": ()},
    ev.LeaseGranted: {"limit": None, "weight": None},
    ev.LeaseEnded: {"by": None, "why": None},
    EndedLease: {"by": None, "why": None, "warned": None},
}

_codec = RecordCodec(
    (*EVENT_KINDS.values(), InventoryGpu, EndedLease, Request, Wishes, Holder, Quota, AccessToken, Booking),
    LATER,
    "a journal",
)


# A text in JSON cannot contain a key with its quotes, so this is found only where it is.
_NO_REQUEST = '"request":null'
_MOST_REQUESTS = 256


class _RequestTexts:
    """The texts of the last requests. One that is granted and released at once is written twice, and a worker asks for the
    same again and again. By identity: of equal requests, the processes may differ.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Request, str]] = {}

    def of(self, request: Request) -> str:
        kept = self._kept.get(id(request))
        if kept is None:
            if len(self._kept) >= _MOST_REQUESTS:
                self._kept.clear()
            kept = self._kept[id(request)] = request, _codec.encode(_codec.as_object(request))
        return kept[1]


_request_texts = _RequestTexts()


def encode_event(event: ev.DurableEvent) -> str:
    """Encode as one line of ASCII, with kind and time."""
    kind = type(event)
    if kind.__name__ not in EVENT_KINDS:
        raise ValueError(f"{kind.__name__} is not a durable event; it does not belong in a journal")
    return _encode({"kind": kind.__name__, **_codec.as_object(event)})


def _encode(parts: dict[str, object]) -> str:
    request = parts.get("request")
    if not isinstance(request, Request):
        return _codec.encode(parts)
    parts["request"] = None
    return _codec.encode(parts).replace(_NO_REQUEST, f'"request":{_request_texts.of(request)}', 1)


def decode_event(text: str) -> ev.DurableEvent:
    """Decode one line; a ValueError says what is wrong with it."""
    parts = parse_object(text)
    kind = EVENT_KINDS.get(str(parts.pop("kind", None)))
    if kind is None:
        raise ValueError(f"not an event of a known kind: {shortened(text)}")
    return cast("ev.DurableEvent", _codec.reader(kind)(parts, kind.__name__))


def encode_ended(lease: EndedLease) -> str:
    return _encode(_codec.as_object(lease))


def encode_gpus(gpus: tuple[GpuKey, ...]) -> str:
    return _codec.encode(gpus)


def decode_ended(text: str) -> EndedLease:
    return cast("EndedLease", _codec.reader(EndedLease)(parse_object(text), "EndedLease"))
