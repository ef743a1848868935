"""The URL of a fleet's database. It holds a password, which no message may show."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from gpu_worker_pool.ledger.journal import JournalError

FORM = "postgresql://user:password@host:5432/database"
HIDDEN = "postgresql://..."

# One of the hosts, with a port or without; an address of IPv6 stands in brackets.
_HOST = re.compile(r"([\w.%-]*|\[[0-9A-Fa-f:.%]+\])(:\d{1,5})?", re.ASCII)
_USER = re.compile(r"[\w.%+-]*", re.ASCII)
_DATABASE = re.compile(r"/?[\w.%+ -]*", re.ASCII)

# Parameters that asyncpg does not take from a URL, and would send to the server as settings.
_NOT_FOR_THE_SERVER = frozenset(
    {
        "statement_cache_size",
        *("connect_timeout", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
        *("tcp_user_timeout", "channel_binding", "gssencmode", "load_balance_hosts", "require_auth"),
    }
)


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """A URL that was checked. `by_host` is the same for each of its hosts alone, with the password; `shown` is without.

    `has_cache`: statements are prepared once for each connection, which an old PgBouncer in transaction mode cannot follow.
    """

    shown: str
    by_host: tuple[str, ...] = field(repr=False)
    connect_timeout_s: float | None = None
    has_target: bool = False
    has_name: bool = False
    has_cache: bool = True

    def __str__(self) -> str:
        return self.shown


def redacted(url: str) -> str:
    """The URL without its password and its parameters, for messages. What could hide a password is left out as well: a
    password with a character that is not escaped divides the URL at other places than its author meant.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return HIDDEN
    login, at, hosts = parts.netloc.rpartition("@")
    user = login.partition(":")[0]
    is_clear = (
        parts.scheme in {"postgresql", "postgres"}
        and not parts.fragment
        and (at or "@" not in parts.query)
        and _USER.fullmatch(user)
        and all(_HOST.fullmatch(host) for host in hosts.split(","))
        and _DATABASE.fullmatch(parts.path)
    )
    return f"postgresql://{user}{at}{hosts}{parts.path}" if is_clear else HIDDEN


def parse_url(url: str) -> DatabaseUrl:
    """Check a URL. A JournalError says what is wrong with it, without the password."""
    shown = redacted(url)
    if shown == HIDDEN:
        raise JournalError(
            f"the URL of the fleet's database is not of the form {FORM}; write @ : / ? # and % in a user name or password "
            "as %40 %3A %2F %3F %23 and %25 (the URL is not shown here, because it may contain a password)"
        )
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    try:
        parameters = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        timeout = parameters.get("connect_timeout")
        timeout_s = float(timeout) if timeout is not None and float(timeout) > 0 else None
    except ValueError:
        raise JournalError(
            f"the parameters of the URL {shown} cannot be read; they must be name=value pairs divided by &, such as "
            "?sslmode=verify-full&target_session_attrs=read-write"
        ) from None
    query = "&".join(
        pair for pair in parts.query.split("&") if pair and pair.partition("=")[0] not in _NOT_FOR_THE_SERVER
    )
    by_host = tuple(
        f"{parts.scheme}://{login.replace('@', '%40')}{at}{host}{parts.path}{'?' if query else ''}{query}"
        for host in hosts.split(",")
    )
    return DatabaseUrl(
        shown,
        by_host,
        timeout_s,
        has_target="target_session_attrs" in parameters,
        has_name="application_name" in parameters,
        has_cache=parameters.get("statement_cache_size") != "0",
    )
