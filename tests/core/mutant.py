"""A copy of the core in which one rule is missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A rule, and the core without it."""

    rule: str
    module: str
    text: str
    instead: str
    also: tuple[str, str, str] | None = None

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        return [(self.module, self.text, self.instead), *([self.also] if self.also else [])]
