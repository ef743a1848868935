"""Limits on open files and connections."""

from __future__ import annotations

import resource

ENOUGH = 65536
_MOST_KEPT_FREE = 1024


def raise_limit() -> int:
    """Raise the soft limit to the hard one, or to ENOUGH if that is less; return the soft limit in force.

    Not beyond ENOUGH: some programs that a server may start close every descriptor up to the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            # macOS refuses more than kern.maxfilesperproc; the server then works with what it has.
            return soft
        return wanted
    return soft


def is_scarce(descriptor: int) -> bool:
    """Whether this descriptor is among the last that may be opened; those are kept for connections.

    The system assigns the lowest free number, so a high one means that the lower ones are taken.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(limit // 4, _MOST_KEPT_FREE)
