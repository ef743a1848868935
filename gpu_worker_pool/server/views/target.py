"""What a call means: the box that was asked, or the whole fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A call with a `node` means the GPUs of that node; without one, all that there are. A server without a fleet has only
    those of its own box, also under a name that the box had before.
    """

    node: str | None = None
    is_fleet: bool = False

    def name(self, own: str) -> str | None:
        """The node as an answer names it, on a box of this name; None for a whole fleet."""
        return None if self.is_fleet else self.node or own


EVERYTHING = Target()
FLEET = Target(is_fleet=True)
