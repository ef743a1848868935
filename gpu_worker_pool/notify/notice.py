"""What is told: one thing that happened to a lease or to a node, as JSON for programs and in words for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import groupby

SCHEMA = "gpu-pool/notice/1"


class Occasion(StrEnum):
    GRANTED = "granted"
    LOST = "lost"
    """The lease ended, and its holder had not released it."""
    ENDED = "ended"
    """The lease ended, for whatever reason."""
    IDLE = "idle"
    """The GPUs of the lease compute nothing for some time."""
    PREEMPTED = "preempted"
    """The lease will be ended for another request, after a grace time."""
    TIME_LIMIT = "time_limit"
    """The lease will be ended soon, because its time is over."""
    NODE_UNKNOWN = "node_unknown"
    """Nothing is heard of a node any more, or its GPUs cannot be read."""


# The reasons of a coming end that are occasions, by their names.
WARNINGS = {each.value: each for each in (Occasion.PREEMPTED, Occasion.TIME_LIMIT, Occasion.IDLE)}


@dataclass(frozen=True, slots=True)
class NoticeGpu:
    """A GPU of a lease. `index` is what people call it; None where it is not known."""

    node: str
    uuid: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """`at` and `ends_at` are wall-clock times. A field that does not apply is None: a node has no owner. `job` and
    `exit_code` are known of the commands of `gpu-pool run` and `submit`.
    """

    occasion: Occasion
    at: float
    lease_id: str | None = None
    owner: str | None = None
    gpus: tuple[NoticeGpu, ...] = ()
    node: str | None = None
    reason: str | None = None
    by: str | None = None
    why: str | None = None
    ends_at: float | None = None
    labels: tuple[tuple[str, str], ...] = ()
    job: str | None = None
    exit_code: int | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that it concerns."""
        return (self.node,) if self.node is not None else tuple(dict.fromkeys(gpu.node for gpu in self.gpus))

    @property
    def is_bad(self) -> bool:
        """Whether services show it in red, if they know colours."""
        return self.occasion in {Occasion.LOST, Occasion.NODE_UNKNOWN} or bool(self.exit_code)

    def as_json(self) -> bytes:
        """One line: what a program reads from its standard input."""
        facts = asdict(self)
        said = {
            "schema": SCHEMA,
            "on": facts.pop("occasion"),
            **facts,
            "at": _iso(self.at),
            "ends_at": None if self.ends_at is None else _iso(self.ends_at),
            "labels": dict(self.labels),
            "title": self.title(),
            "text": self.text(),
        }
        return json.dumps(said, separators=(",", ":")).encode() + b"\n"

    def title(self) -> str:
        """One line that says what happened."""
        return _printable(self._sentence())

    def text(self) -> str:
        """The details, one a line."""
        details = {
            "GPUs": self._gpu_names(),
            "Reason": self._reason(),
            "Details": self.why,
            "Exit code": self.exit_code,
            "Ends at": None if self.ends_at is None else _local(self.ends_at),
            "Owner": self.owner,
            "Job": self.job,
            "Command": dict(self.labels).get("command"),
            "Lease": self.lease_id,
            "Time": _local(self.at),
        }
        return "\n".join(f"{name}: {_printable(str(value))}" for name, value in details.items() if value is not None)

    def _sentence(self) -> str:
        who, gpus = self._who(), self._gpu_names() or "its GPUs"
        ends_at = "soon" if self.ends_at is None else f"at {_local(self.ends_at)}"
        because = self._reason() or (self.why if self.exit_code is None else None)
        ending = f": {because}" if because else ""
        match self.occasion:
            case Occasion.GRANTED:
                return f"{who} has {gpus}"
            case Occasion.LOST:
                return f"{who} lost {gpus}{ending}"
            case Occasion.ENDED:
                return f"{who} ended{'' if self.exit_code is None else f' with exit code {self.exit_code}'}{ending}"
            case Occasion.IDLE:
                return f"{who} computes nothing on {gpus}{'' if self.ends_at is None else f' and must end {ends_at}'}"
            case Occasion.PREEMPTED:
                return f"{who} must end {ends_at}: another request needs {gpus}"
            case Occasion.TIME_LIMIT:
                return f"{who} must end {ends_at}: its time limit"
            case Occasion.NODE_UNKNOWN:
                return f"Nothing is known of node {self.node}{ending}"

    def _who(self) -> str:
        command = dict(self.labels).get("command")
        what = command or ("command" if self.lease_id is None else f"lease {self.lease_id}")
        if self.job is not None:
            what = f"job {self.job} ({command})" if command else f"job {self.job}"
        return f"{self.owner}'s {what}" if self.owner else f"The {what} of an unknown owner"

    def _reason(self) -> str | None:
        reason = None if self.reason is None else self.reason.replace("_", " ")
        return f"{reason} by {self.by}" if reason and self.by else reason

    def _gpu_names(self) -> str | None:
        """Such as `GPU 0, 1 of gpu-1`."""
        by_node = groupby(sorted(self.gpus, key=lambda gpu: gpu.node), key=lambda gpu: gpu.node)
        names = {node: [gpu.uuid if gpu.index is None else str(gpu.index) for gpu in gpus] for node, gpus in by_node}
        return " and ".join(f"GPU {', '.join(numbers)} of {node}" for node, numbers in names.items()) or None


def _printable(text: str) -> str:
    """A text that stays on its line, whatever a user wrote into a label."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _iso(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _local(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%d %H:%M %Z}"
