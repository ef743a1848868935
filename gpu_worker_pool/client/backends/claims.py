"""Which client of this process has which GPU of a statistics-only server. Clients may run in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

# The server's address, and the GPU's UUID.
Claim = tuple[str, str]


class Claims:
    """Each GPU is claimed by at most one client. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[Claim, object] = {}
        self._listeners: dict[object, Callable[[], None]] = {}

    def join(self, client: object, on_change: Callable[[], None]) -> None:
        """Call `on_change`, in any thread, whenever another client gives up a claim."""
        with self._lock:
            self._listeners[client] = on_change

    def take(self, client: object, claims: Iterable[Claim]) -> bool:
        """Claim all of these, or none."""
        wanted = list(claims)
        with self._lock:
            if any(self._owners.get(claim, client) is not client for claim in wanted):
                return False
            self._owners.update(dict.fromkeys(wanted, client))
            return True

    def let_go(self, client: object, claims: Iterable[Claim]) -> None:
        """Give up those of these claims that are the client's own."""
        with self._lock:
            own = [claim for claim in claims if self._owners.get(claim) is client]
            for claim in own:
                del self._owners[claim]
            others = [told for other, told in self._listeners.items() if own and other is not client]
        for told in others:
            told()

    def leave(self, client: object) -> None:
        """Give up all claims, and stop calling `on_change`."""
        with self._lock:
            own = [claim for claim, owner in self._owners.items() if owner is client]
            self._listeners.pop(client, None)
        self.let_go(client, own)

    def is_taken_by_others(self, client: object, claim: Claim) -> bool:
        with self._lock:
            return self._owners.get(claim, client) is not client


OF_THIS_PROCESS = Claims()
