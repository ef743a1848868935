"""A client of GET /events over a real connection."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gpu_worker_pool.testing import ServerProcess


@dataclass(frozen=True)
class Event:
    name: str
    data: Any


class Stream:
    """Follows what happens. Once it is made, nothing that happens is missed."""

    def __init__(
        self,
        server: ServerProcess,
        path: str = "/events",
        token: str | None = None,
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connection.request("GET", path, headers=headers)
        self.response = self._connection.getresponse()
        if self.response.status == 200:
            assert self._line().startswith("retry: ")
            assert list(iter(self._line, "")) == [": connected"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.response.close()
        self._connection.close()

    def next(self) -> Event:
        """The next event; comments are passed over."""
        fields: dict[str, str] = {}
        while True:
            line = self._line()
            if line.startswith(":"):
                continue
            if not line:
                if fields:
                    return Event(fields["event"], json.loads(fields["data"]))
                continue
            name, _, value = line.partition(": ")
            assert name not in fields, "one line a field"
            fields[name] = value

    def until(self, name: str, lease_id: str | None = None) -> list[Event]:
        """All events up to the first one of this name (about this lease)."""
        seen = [self.next()]
        while seen[-1].name != name or (lease_id is not None and seen[-1].data["lease_id"] != lease_id):
            seen.append(self.next())
        return seen

    def _line(self) -> str:
        line = self.response.readline()
        assert line.endswith(b"\n"), f"the stream ended: {line!r}"
        return line.decode().rstrip("\n")
