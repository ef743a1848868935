"""Markdown: tables, and text that Markdown takes as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks.shared.results import NOT_KNOWN, show

Data: TypeAlias = Mapping[str, Any]


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield the lines of a table. Columns of numbers are aligned right, except for the first, which names the row."""
    texts = [[show(cell) for cell in row] for row in rows]
    yield _row(columns)
    sides = (
        "---:" if number and _is_numbers([row[number] for row in texts]) else "---" for number in range(len(columns))
    )
    yield f"| {' | '.join(sides)} |"
    yield from (_row(row) for row in texts)


def plain(text: str) -> str:
    """Return the text as one line in which Markdown finds no tag."""
    text = " ".join(text.split())
    return text.replace("<=", "≤").replace(">=", "≥").replace("->", "→").replace("<", "&lt;")


def _is_numbers(cells: Sequence[str]) -> bool:
    return all(cell == NOT_KNOWN or cell[:1].isdigit() or cell[:2].strip("-")[:1].isdigit() for cell in cells)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(cell).replace("|", "\\|") for cell in cells) + " |"
