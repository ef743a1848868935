"""Telling whether two endpoints are one server: it may go by several names, and must not be counted twice."""

from __future__ import annotations

from collections.abc import Iterable


def same_as(servers: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """For each endpoint that is an earlier one by another name, the earlier one; from pairs of endpoint and server id.

    A server that tells no id is taken for one of its own.
    """
    first: dict[str, str] = {}
    found = {}
    for endpoint, server_id in servers:
        other = endpoint if server_id is None else first.setdefault(server_id, endpoint)
        if other != endpoint:
            found[endpoint] = other
    return found
