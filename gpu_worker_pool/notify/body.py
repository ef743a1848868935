"""A notice as it is sent: JSON, and in words."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from .notice import Notice, Occasion
from .pending import Delivery

SCHEMA = "gpu-pool/notice/1"


def as_json(delivery: Delivery) -> bytes:
    """The body of a webhook, and what a program reads from its standard input."""
    notice = delivery.notice
    said: dict[str, Any] = {
        "schema": SCHEMA,
        "id": delivery.id,
        "on": notice.occasion.value,
        "at": _iso(notice.at),
        "lease_id": notice.lease_id,
        "owner": notice.owner,
        "gpus": [{"node": key.node, "uuid": key.uuid} for key in notice.gpus],
        "node": notice.node,
        "reason": notice.reason,
        "by": notice.by,
        "why": notice.why,
        "ends_at": None if notice.ends_at is None else _iso(notice.ends_at),
        "labels": dict(notice.labels),
        "job": notice.job,
        "exit_code": notice.exit_code,
    }
    return json.dumps(said, separators=(",", ":")).encode()


def in_words(notice: Notice) -> str:
    """One line, as the subject of a mail is."""
    return "".join(sign if sign.isprintable() else " " for sign in _sentence(notice))


def _sentence(notice: Notice) -> str:
    gpus = "a GPU" if len(notice.gpus) == 1 else f"{len(notice.gpus)} GPUs"
    whose = _whose(notice)
    on = f"on {', '.join(notice.nodes)}" if notice.nodes else ""
    match notice.occasion:
        case Occasion.GRANTED:
            return f"{whose} has {gpus} {on}".strip()
        case Occasion.LOST | Occasion.ENDED:
            told = notice.reason or (notice.why if notice.exit_code is None else None)
            because = f": {told}" if told else ""
            verb = "was lost" if notice.occasion is Occasion.LOST else "has ended"
            code = "" if notice.exit_code is None else f" with exit code {notice.exit_code}"
            return f"{whose} {verb}{code}{because}{f', by {notice.by}' if notice.by else ''}"
        case Occasion.IDLE:
            return f"{whose} computes nothing {on}".strip()
        case Occasion.PREEMPTED:
            return f"{whose} ends at {_iso(notice.ends_at)}, because another request needs its GPUs"
        case Occasion.TIME_LIMIT:
            return f"{whose} ends at {_iso(notice.ends_at)}, because its time is over"
        case Occasion.NODE_UNKNOWN:
            return f"nothing is known of the node {notice.node}{f': {notice.why}' if notice.why else ''}"


def _whose(notice: Notice) -> str:
    owner, command = notice.owner or "a caller without a name", dict(notice.labels).get("command")
    if notice.job is not None:
        return f"the job {notice.job}{f' ({command})' if command else ''} of {owner}"
    if notice.lease_id is None:
        return f"the command{f' {command}' if command else ''} of {owner}"
    return f"the lease {notice.lease_id} of {owner}"


def _iso(at: float | None) -> str:
    return "a time that is not known" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"
