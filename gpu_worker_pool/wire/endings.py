"""How a lease ended or will end, as a phrase for its holder and for all others."""

from __future__ import annotations

from datetime import datetime

from .bounds import is_printable

_ENDS = {
    "released": "it was given back",
    "expired": "it expired, as no heartbeat of its holder arrived",
    "cancelled": "it left the queue before it was granted",
    "holder_died": "its holder's process died",
    "revoked": "an operator took it away",
    "time_limit": "its time limit is over",
    "preempted": "it was preemptible, and another request needed its GPUs",
    "idle": "its GPUs had computed nothing for too long",
    "unknown": "the server does not know the lease",
}
_WARNINGS = {
    "time_limit": "time limit",
    "preempted": "preempted: another request needs its GPUs",
    "idle": "idle: its GPUs compute nothing",
}
_BY = {
    "released": "it was released by",
    "cancelled": "it was taken out of the queue by",
    "revoked": "it was revoked by",
}


def ending(reason: str, by: str | None = None, note: str | None = None) -> str:
    """How a lease ended: the reason, by whom, and their words. A server may say anything, so it is made printable."""
    said = f"{_BY[reason]} {_plain(by)}" if by and reason in _BY else _ENDS.get(reason, _plain(reason))
    return f"{said}: {_plain(note)}" if note else said


def coming_end(reason: str, ends_at: datetime) -> str:
    """What the holder of a lease is told before the server ends it."""
    return f"the lease ends at {ends_at:%H:%M} ({_WARNINGS.get(reason, _plain(reason))})"


def after_warning(reason: str) -> str:
    """That a lease was over before the server had to end it."""
    return f"after the warning ({_WARNINGS.get(reason, _plain(reason))})"


def _plain(text: str) -> str:
    return "".join(sign if is_printable(sign) else "?" for sign in text)[:300]
