"""What a box says of a call that it passes on to the leader of its fleet: who made it, and where it came from.

The leader believes it only from a box that shows the key which the leader gave to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.core.model.gpu import ProcessId

from .access import Caller, Denied
from .problems import RETRY_AFTER, Refusal

HEADER = "gpu-pool-forwarded"


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A call that came by another box. `node` is that box.

    `caller` is who called there without a token; None for a call with a token, which the leader checks itself. `denied` is
    why the caller may not write, with the status, if the box knows. `process` is the holder's on that box. `no_process`
    says, with a status, why the call names a process that is none, or that another user has: an administrator may.
    """

    key: str
    node: str
    caller: Caller | None = None
    denied: tuple[int, str] | None = None
    uid: int | None = None
    is_loopback: bool = False
    process: ProcessId | None = None
    no_process: tuple[int, str] | None = None
    host: str | None = None

    def header(self) -> str:
        caller = self.caller
        said = {
            "key": self.key,
            "node": self.node,
            "caller": None
            if caller is None
            else {
                "name": caller.name,
                "is_local": caller.is_local,
                "role": caller.role,
                "is_admin": caller.is_admin,  # for a leader of the version before
            },
            "why_denied": self.denied,
            "uid": self.uid,
            "is_loopback": self.is_loopback,
            "process": self.process,
            "no_process": self.no_process,
            "host": self.host,
        }
        return json.dumps(said, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Forwarded:
        """Read the header; a ValueError if it is not one."""
        said = json.loads(text)
        if not isinstance(said, dict):
            raise ValueError("it is not an object")  # noqa: TRY004 - the text is wrong, not a type
        try:
            return cls(
                key=_text(said["key"]),
                node=_text(said["node"]),
                caller=None if said["caller"] is None else _caller(said["caller"]),
                denied=_refusal(said["why_denied"]),
                uid=None if said["uid"] is None else _whole(said["uid"]),
                is_loopback=said["is_loopback"] is True,
                process=None if said["process"] is None else _process(said["process"]),
                no_process=_refusal(said["no_process"]),
                host=None if said["host"] is None else _text(said["host"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"it has no valid {error}") from error

    def identified(self) -> Caller | None:
        """Who called; None for a call with a token. Denied if the box says so."""
        if self.denied is not None:
            status, detail = self.denied
            raise Denied(401 if status == 401 else 403, detail)
        return self.caller

    def holder_process(self, *, is_admin: bool) -> ProcessId | None:
        """The process of the holder; Refusal if the call names one that it may not."""
        if self.no_process is not None and not (is_admin and self.process is not None):
            raise Refusal(*self.no_process)
        return self.process


def check_forwarded(text: str, *, is_leader: bool, node_of_key: Callable[[str], str | None] | None) -> Forwarded:
    """What a header says, if it is from a box of the fleet that this server leads; Refusal otherwise. No call is passed on
    twice, so there are no loops.
    """
    unproven = Refusal(
        403,
        f"The header {HEADER} is for boxes that pass calls on to the leader of their fleet, with a key of that leader; "
        "leave it out.",
        {HEADER: "unproven"},
    )
    if node_of_key is None:
        raise unproven
    if not is_leader:
        raise Refusal(
            503,
            "This box does not lead its fleet, so it takes no call that another box passes on; ask again. A client leaves the "
            f"header {HEADER} out.",
            RETRY_AFTER,
        )
    try:
        said = Forwarded.read(text)
    except (ValueError, RecursionError):
        raise unproven from None
    if node_of_key(said.key) != said.node:
        raise unproven
    return said


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text: {value!r}")
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"number: {value!r}")
    return value


def _caller(value: Any) -> Caller:
    name = value["name"]
    # A box of the version before knows administrators only.
    role = value.get("role") or (Role.ADMINISTRATOR if value["is_admin"] is True else Role.USER)
    return Caller(None if name is None else _text(name), value["is_local"] is True, Role(_text(role)))


def _process(value: Any) -> ProcessId:
    pid, started = value
    if started is not None and (not isinstance(started, int | float) or isinstance(started, bool)):
        raise TypeError(f"process: {value!r}")
    return ProcessId(_whole(pid), started)


def _refusal(value: Any) -> tuple[int, str] | None:
    if value is None:
        return None
    status, detail = value
    return _whole(status), _text(detail)
