"""Slows guesses of tokens: the first wrong tokens of an address are answered at once, the next ones late, and few a second.

A token that was right from its address is always checked, and so is the one that was wrong last: a caller that repeats a
revoked token does not guess. Memory is bounded, by address.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Address, ip_network
from ipaddress import ip_address as parse_address
from time import monotonic

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
