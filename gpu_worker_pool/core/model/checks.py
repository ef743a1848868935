"""Checks of arguments. Their errors say what was given and what is allowed."""

from __future__ import annotations


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise a ValueError that names the parameter, the value and the range, unless low <= value <= high."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must be a number from {low:.15g} to {high:.15g}")


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """As check_number, for whole numbers."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
