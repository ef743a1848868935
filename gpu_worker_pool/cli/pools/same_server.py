"""Finds endpoints that are the same server: a server may have several names, and must not be counted twice."""

from __future__ import annotations

from collections.abc import Iterable


def pool_key(server_id: str | None, node: str | None) -> str | None:
    """What tells a pool from others. One server of a fleet answers for all its boxes, and for the fleet without a node."""
    return None if server_id is None else f"{server_id} {node or ''}"


def same_as(servers: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Map each endpoint that repeats a server to the server's first endpoint; one without a server id repeats none."""
    first: dict[str, str] = {}
    found = {}
    for endpoint, server_id in servers:
        other = endpoint if server_id is None else first.setdefault(server_id, endpoint)
        if other != endpoint:
            found[endpoint] = other
    return found


def same_pool(endpoint: str, node: str | None) -> str:
    """What an endpoint is that repeats another one; without a node it was asked for its fleet."""
    return f"the same server as {endpoint}" if node is not None else f"a box of the same fleet as {endpoint}"
