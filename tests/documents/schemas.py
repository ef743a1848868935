"""Hold the output of a command against the example that documents its schema."""

from __future__ import annotations

from typing import Any

from tests.server.shapes import misfits


def unlike(example: Any, answer: Any, place: str = "$") -> list[str]:
    """What differs: a key that only one of them has, or a value of another kind. Null is of any kind: what is not known
    here may be known elsewhere.
    """
    if example is None or answer is None:
        return []
    if isinstance(example, dict) and isinstance(answer, dict):
        found = [f"{place}.{key} is missing" for key in example if key not in answer]
        found += [f"{place}.{key} is not documented" for key in answer if key not in example]
        return found + [
            text for key in example if key in answer for text in unlike(example[key], answer[key], f"{place}.{key}")
        ]
    if isinstance(example, list) and isinstance(answer, list):
        # The first of a list stands for all of them.
        return [
            text
            for index, item in enumerate(answer if example else [])
            for text in unlike(example[0], item, f"{place}[{index}]")
        ]
    return misfits(example, answer, place)
