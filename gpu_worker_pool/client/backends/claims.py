"""Which GPU of a statistics-only server is whose, among all clients of this process: they may run in several threads, each
with an event loop of its own, and the server keeps none of them apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

# The server's address, and the GPU's UUID.
Claim = tuple[str, str]


class Claims:
    """A GPU is claimed by one client at a time. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[Claim, object] = {}
        self._listeners: dict[object, Callable[[], None]] = {}

    def join(self, client: object, on_change: Callable[[], None]) -> None:
        """Be told, in whichever thread, when somebody else lets go of something."""
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
        """Let go of what is one's own."""
        with self._lock:
            own = [claim for claim in claims if self._owners.get(claim) is client]
            for claim in own:
                del self._owners[claim]
            others = [told for other, told in self._listeners.items() if own and other is not client]
        for told in others:
            told()

    def leave(self, client: object) -> None:
        """Let go of everything, and hear no more."""
        with self._lock:
            own = [claim for claim, owner in self._owners.items() if owner is client]
            self._listeners.pop(client, None)
        self.let_go(client, own)

    def is_taken_by_others(self, client: object, claim: Claim) -> bool:
        """Whether another client has it."""
        with self._lock:
            return self._owners.get(claim, client) is not client


OF_THIS_PROCESS = Claims()
