"""What the values of settings must be. A rule takes a text, or a value as a program gives it; ValueError says what it must be.

pydantic would do it too, and take a fifth of the memory of an idle server.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Rule = Callable[[Any], Any]
RULE = "rule"
TRUE_WORDS = frozenset({"true", "1", "yes", "on", "t", "y"})
FALSE_WORDS = frozenset({"false", "0", "no", "off", "f", "n"})


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A text that is not shown where its settings are."""

    _text: str

    def get_secret_value(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret('**********')"


def setting(default: Any, rule: Rule) -> Any:
    """A field of a dataclass with a rule; the default may also be a function that makes it."""
    given = {"default_factory": default} if callable(default) else {"default": default}
    return field(**given, metadata={RULE: rule})


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("it must be a text")  # noqa: TRY004 - as every other value that is not usable
    return value


def words(longest: int = 10_000) -> Rule:
    """A text that is not empty."""

    def read(value: Any) -> str:
        if not 0 < len(text(value)) <= longest:
            raise ValueError(f"it must have 1 to {longest} characters")
        return text(value)

    return read


def like(pattern: str, meant: str) -> Rule:
    """A text that matches the whole pattern. `meant` says what that is."""
    compiled = re.compile(pattern)

    def read(value: Any) -> str:
        if compiled.fullmatch(text(value)) is None:
            raise ValueError(f"it must be {meant}")
        return text(value)

    return read


def one_of(*choices: str) -> Rule:
    """One of these words, in any case."""

    def read(value: Any) -> str:
        if (word := text(value).lower()) not in choices:
            raise ValueError(f"it must be one of {', '.join(choices)}")
        return word

    return read


def truth(value: Any) -> bool:
    word = value.lower() if isinstance(value, str) else value
    if isinstance(word, bool):
        return word
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise ValueError("it must be true or false")
    return word in TRUE_WORDS


def number(low: float, high: float) -> Rule:
    def read(value: Any) -> float:
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = float("nan")
        if not low <= found <= high:
            raise ValueError(f"it must be a number from {low:.15g} to {high:.15g}")
        return found

    return read


def whole(low: int, high: int) -> Rule:
    in_range = number(low, high)

    def read(value: Any) -> int:
        try:
            found: float = in_range(value)
        except ValueError:
            found = 0.5
        if found != int(found):
            raise ValueError(f"it must be a whole number from {low} to {high}")
        return int(found)

    return read


def secret(value: Any) -> Secret | None:
    return value if isinstance(value, Secret) else Secret(text(value)) if value else None


def optional(rule: Rule) -> Rule:
    """None, or what the rule says."""
    return lambda value: None if value is None else rule(value)


# By annotation, for settings without a rule of their own.
PLAIN: dict[str, Rule] = {"bool": truth, "str": text, "str | None": optional(text), "Secret | None": secret}
