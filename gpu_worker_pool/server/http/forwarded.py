"""What a box says of a call that it passes on to the leader of its fleet: who made it, and where it came from.

The leader believes it only from a box that shows the key which the leader gave to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

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
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Forwarded:
        """Read the header; a ValueError if it is not one."""
        return _READER.validate_json(text, strict=True)

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
    except ValueError:
        raise unproven from None
    if node_of_key(said.key) != said.node:
        raise unproven
    return said


_READER = TypeAdapter(Forwarded)
