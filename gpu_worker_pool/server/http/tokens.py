"""The tokens that this server accepts: those of its settings, and those that were added while it ran.

Guesses are slowed: the first wrong tokens of an address are answered at once, the next ones late, and few a second. A token that
was right from its address is always checked, and so is the one that was wrong last: a caller that repeats a revoked token does not
guess. Memory is bounded, by address.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Address, ip_network
from ipaddress import ip_address as parse_address
from time import monotonic
from typing import NamedTuple

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import AccessToken, Role, is_name

# The name in the settings whose tokens are an administrator's.
ADMIN = "admin"
MIN_TOKEN_LENGTH = 16
# The characters that every proxy passes on unchanged in an Authorization header.
TOKEN = re.compile(r"[!-~]+")
COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)


class Proven(NamedTuple):
    """What a token proves."""

    name: str
    role: Role


@dataclass
class Tokens:
    """Only digests are kept: what is not stored can neither be shown nor logged.

    The settings have three states: no tokens were configured (`Tokens()`), some were, or they cannot be read
    (`Tokens.broken()`). The last accepts none of them, and grants no more rights than with tokens. `added` are those of the
    pool, by digest.
    """

    _configured: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_broken: bool = False
    # The entries whose token is too short, by position, and their names. These tokens are not accepted.
    too_short: tuple[int, ...] = ()
    _refused_names: frozenset[str] = field(default=frozenset(), repr=False)
    added: Callable[[], Mapping[str, AccessToken]] = field(default=dict, repr=False, compare=False)
    # The calls that wait, by the digest of their token.
    _waiting: dict[str, set[asyncio.Future[None]]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """Parse `name:token` entries, separated by commas, blanks or lines; `#` starts a comment.

        A ValueError names an entry by its position only: in a mistaken `token:name` the name is the secret. A token that is
        too short is left out, and `too_short` has its position; all others are accepted.
        """
        owners: dict[str, tuple[str, int]] = {}
        too_short: dict[int, str] = {}
        for position, entry in enumerate(re.split(r"[,\s]+", COMMENT.sub("", text).strip(", \t\r\n")), start=1):
            if not entry:  # only if the whole text is empty
                continue
            name, token = _parse_entry(entry, position)
            if len(token) < MIN_TOKEN_LENGTH:
                too_short[position] = name
                continue
            owner, earlier = owners.setdefault(digest_of(token), (name, position))
            if owner != name:
                raise ValueError(f"entries {earlier} and {position} have the same token but not the same name")
        accepted = {digest: name for digest, (name, _) in owners.items()}
        return cls(accepted, too_short=tuple(too_short), _refused_names=frozenset(too_short.values()))

    @classmethod
    def broken(cls) -> Tokens:
        return cls(is_broken=True)

    @property
    def is_unset(self) -> bool:
        """Whether there are no tokens. One that is too short counts: the operator meant to have some."""
        return not self._configured and not self.is_broken and not self.too_short and not self.added()

    @property
    def names(self) -> frozenset[str]:
        """The names that have a token."""
        added = (token.name for token in self.added().values())
        return frozenset((*self._configured.values(), *self._refused_names, *added))

    def find_digest(self, digest: str) -> Proven | None:
        """What the token of this digest proves; None if it is unknown. How long a search takes says nothing of any token."""
        if (token := self.added().get(digest)) is not None:
            return Proven(token.name, token.role)
        name = self._configured.get(digest)
        return None if name is None else _configured(name)

    def end_when_revoked(self, digest: str, waiting: asyncio.Future[None]) -> None:
        """Cancel the future of a call that waits when the token of its caller is revoked: at once if it was meanwhile."""
        if self.find_digest(digest) is None:
            waiting.cancel()
        elif digest in self.added():  # one of the settings is valid until the server stops
            self._waiting.setdefault(digest, set()).add(waiting)
            waiting.add_done_callback(lambda done: self._forget(digest, done))

    def note(self, events: Iterable[ev.Event]) -> None:
        """End the calls that wait with a token that these events revoke."""
        if any(isinstance(event, ev.Configured) and event.table == "tokens" for event in events):
            self.end_unknown()

    def end_unknown(self) -> None:
        """End the calls that wait with a token that is not known any more."""
        known = self.added()
        for digest in [digest for digest in self._waiting if digest not in known]:
            for waiting in tuple(self._waiting[digest]):
                waiting.cancel()

    def _forget(self, digest: str, waiting: asyncio.Future[None]) -> None:
        others = self._waiting[digest]
        others.discard(waiting)
        if not others:
            del self._waiting[digest]

    def configured(self) -> list[Proven]:
        """What each token of the settings proves."""
        return [_configured(name) for name in self._configured.values()]

    def __repr__(self) -> str:
        return "Tokens(broken)" if self.is_broken else f"Tokens({', '.join(sorted(self.names))})"


def _configured(name: str) -> Proven:
    return Proven(name, Role.ADMINISTRATOR if name == ADMIN else Role.USER)


def digest_of(token: str) -> str:
    """The SHA-256 of a token, by which it is known."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _parse_entry(entry: str, position: int) -> tuple[str, str]:
    name, colon, token = entry.partition(":")
    if not colon:
        raise ValueError(f"entry {position} has no colon; write name:token, without commas and blanks in either")
    if not name:
        raise ValueError(f"entry {position} has no name before its colon; write name:token")
    if not is_name(name):
        raise ValueError(f"entry {position}: the name must be 1 to 64 letters, digits or signs (. _ @ -)")
    if token and not TOKEN.fullmatch(token):
        raise ValueError(f"entry {position}: the token must be visible ASCII characters only")
    return name, token


# Wrong tokens of an address that are answered at once, and how many are forgotten each second.
FREE_GUESSES = 20
FORGOTTEN_PER_S = 10.0
# From there on an answer is held back, in proportion, at most this long.
MOST_HELD_S = 2.0
# With this many more in a short time, which takes many connections, tokens that were never right from there are not checked.
MOST_GUESSES = FREE_GUESSES + 100
MOST_ADDRESSES = 4096
MOST_PROVEN = 256
MOST_WRONG = 8


@dataclass(slots=True)
class _Address:
    """What came from one address: the guesses that are not forgotten yet, at `at`, and tokens by their digests."""

    guesses: float = 0.0
    at: float = 0.0
    proven: OrderedDict[str, None] = field(default_factory=OrderedDict)
    wrong: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_WRONG))


class Guesses:
    """Counts wrong tokens by address. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()

    def must_wait_s(self, host: str | None, digest: str) -> float | None:
        """How long a caller must wait until this token is checked; None if it is checked now."""
        address = self._find(host)
        over = address.guesses - MOST_GUESSES
        if over < 0 or digest in address.proven or digest in address.wrong:
            return None
        return max(1.0, over / FORGOTTEN_PER_S)

    def note_right(self, host: str | None, digest: str) -> None:
        """Note that a token was right."""
        address = self._find(host)
        address.proven[digest] = None
        address.proven.move_to_end(digest)
        if len(address.proven) > MOST_PROVEN:
            address.proven.popitem(last=False)

    def note_wrong(self, host: str | None, digest: str) -> float:
        """Note that a token was wrong; how long its answer must be held back, in seconds."""
        address = self._find(host)
        address.proven.pop(digest, None)
        if digest in address.wrong:
            return 0.0
        address.wrong.append(digest)
        address.guesses += 1.0
        return min(max(address.guesses - FREE_GUESSES, 0.0) / FORGOTTEN_PER_S, MOST_HELD_S)

    def __len__(self) -> int:
        return len(self._addresses)

    def _find(self, host: str | None) -> _Address:
        name, now = _network(host), self._clock()
        address = self._addresses.setdefault(name, _Address(at=now))
        self._addresses.move_to_end(name)
        if len(self._addresses) > MOST_ADDRESSES:
            self._addresses.popitem(last=False)
        address.guesses = max(address.guesses - (now - address.at) * FORGOTTEN_PER_S, 0.0)
        address.at = now
        return address


@lru_cache(maxsize=1024)
def _network(host: str | None) -> str:
    """The address; of IPv6 its network of 64 bits, because one machine may have all addresses in it."""
    try:
        address = parse_address((host or "").partition("%")[0])
    except ValueError:
        return host or ""
    if not isinstance(address, IPv6Address):
        return str(address)
    return str(address.ipv4_mapped or ip_network((address, 64), strict=False))
