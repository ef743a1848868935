"""The boxes that announced themselves to a leader, and the sessions of their agents."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from gpu_worker_pool.core.model.gpu import Reading

# An agent that has said nothing for this long is silent. One that has read no GPU yet has more time.
SILENT_S = 3.0
FIRST_REPORT_S = 30.0

Urls = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class BoxInfo:
    """A box that announced itself in this epoch. `heard_at` is the pool time at which it was last heard. `trouble` is why it
    cannot keep leases.
    """

    url: str
    version: str
    is_candidate: bool
    is_up: bool
    heard_at: float
    trouble: str | None = None


@dataclass(slots=True)
class BoxSession:
    """A connection from an agent, which speaks for its own node and no other."""

    node: str
    heard_at: float
    instance: str = ""
    is_welcome: bool = False
    # The leases of its announcement, with their fences.
    listed: dict[str, int] = field(default_factory=dict)
    # Its last readings, what the last report had heard, and the time of those that the pool has.
    readings: dict[str, Reading] = field(default_factory=dict)
    reported: float = -inf
    observed: float = -inf
    # The URLs that it was told last.
    urls: Urls = ()

    def is_another(self, instance: str, now: float) -> bool:
        """Whether another process than this one is the agent, and lives. One that was killed has lost its connection."""
        return self.instance != instance and now < self.heard_at + SILENT_S

    def is_silent(self, now: float) -> bool:
        return now >= self.heard_at + (FIRST_REPORT_S if self.reported == -inf else SILENT_S)


class BoxList:
    """`infos` by node, and the `urls` of all boxes, which are another tuple after each change of one of them."""

    def __init__(self) -> None:
        self.infos: dict[str, BoxInfo] = {}
        self.urls: Urls = ()

    def put(self, node: str, info: BoxInfo) -> None:
        known = self.infos.get(node)
        self.infos[node] = info
        if known is None or known.url != info.url:
            self._list_urls()

    def change(self, node: str, **changed: Any) -> None:
        self.infos[node] = replace(self.infos[node], **changed)

    def forget(self, node: str) -> None:
        self.infos.pop(node, None)
        self._list_urls()

    def _list_urls(self) -> None:
        self.urls = tuple((node, info.url) for node, info in self.infos.items())
