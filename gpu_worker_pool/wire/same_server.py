"""Finds endpoints that are the same server: a server may have several names, and must not be counted twice."""

from __future__ import annotations

from collections.abc import Iterable


def same_as(servers: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Map each endpoint that repeats a server to the server's first endpoint; one without a server id repeats none."""
    first: dict[str, str] = {}
    found = {}
    for endpoint, server_id in servers:
        other = endpoint if server_id is None else first.setdefault(server_id, endpoint)
        if other != endpoint:
            found[endpoint] = other
    return found
