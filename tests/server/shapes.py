"""Hold an answer against an example: the same keys or more, and of the same kinds."""

from __future__ import annotations

from typing import Any


def misfits(example: Any, answer: Any, place: str = "$") -> list[str]:
    """What of the example the answer lacks or has of another kind. An unknown number may be null."""
    if isinstance(example, dict):
        if not isinstance(answer, dict):
            return [f"{place} is no object"]
        found = [f"{place}.{key} is missing" for key in example if key not in answer]
        for key in example.keys() & answer.keys():
            found += misfits(example[key], answer[key], f"{place}.{key}")
        return found
    if isinstance(example, list):
        if not isinstance(answer, list):
            return [f"{place} is no list"]
        if not example:
            return []
        return [text for index, item in enumerate(answer) for text in misfits(example[0], item, f"{place}[{index}]")]
    if isinstance(example, bool) or not isinstance(example, int | float):
        return [] if isinstance(answer, type(example)) else [f"{place} is {answer!r}, not like {example!r}"]
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return [f"{place} is {answer!r}, not a number"]
    if isinstance(example, int) and not isinstance(answer, int):
        return [f"{place} is {answer!r}, not a whole number"]
    return []
