"""Rows of text in columns that fit into a width: what matters less gets narrower first, and then goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

# What a cell shows where it has this much room. Bars are drawn to measure, texts are cut.
Cell = Text | Callable[[int], Text]
_BETWEEN = 1


@dataclass(frozen=True, slots=True)
class Column:
    """A column is as wide as its widest cell, but at most `most`; where there is no room, down to `least`, and then the
    columns of the highest `rank` are left out, as is one that says nothing in any row. A drawn cell is as wide as it
    may. The last column takes what is left, and is always there where its rank does not drop it.
    """

    title: str
    least: int
    most: int
    rank: int = 0
    is_number: bool = False
    # Has a long and a short form, and nothing in between.
    is_stepped: bool = False


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> dict[int, int]:
    """The width of each column that is shown, by its index, for a line of this width."""
    wanted = {
        index: min(
            max([cell_len(column.title), column.least, *(_width(row[index], column) for row in rows)]), column.most
        )
        for index, column in enumerate(columns)
    }
    said = [
        index for index in wanted if not rows or index == len(columns) - 1 or any(_is_said(row[index]) for row in rows)
    ]
    widths = {index: wanted[index] for index in said}
    while len(widths) > 1 and _narrowest(columns, widths) > width:
        del widths[max(widths, key=lambda index: (columns[index].rank, index))]
    while (excess := sum(widths.values()) + _BETWEEN * (len(widths) - 1) - width) > 0:
        spare, index = max((widths[index] - columns[index].least, index) for index in widths)
        if spare <= 0:
            break  # one column is left, and even that is too wide: it is cut
        widths[index] -= spare if columns[index].is_stepped else min(max(spare // 4, 1), excess)
    return widths


def line(columns: Sequence[Column], widths: dict[int, int], row: Sequence[Cell]) -> Text:
    """One row. Its last cell is neither cut nor filled up: how it goes on is for whoever shows it."""
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    last = max(widths)
    for index, width in widths.items():
        cell = row[index]
        shown = cell(width) if callable(cell) else cell.copy()
        if index != last:
            shown.truncate(width, overflow="ellipsis")
            missing = width - shown.cell_len
            text.append(" " * missing if columns[index].is_number else "").append_text(shown)
            text.append(" " * (_BETWEEN if columns[index].is_number else missing + _BETWEEN))
        else:
            text.append_text(shown)
    return text


def titles(columns: Sequence[Column]) -> list[Cell]:
    """The row above the others."""
    return [Text(column.title) for column in columns]


def _is_said(cell: Cell) -> bool:
    return callable(cell) or bool(cell.plain)


def _width(cell: Cell, column: Column) -> int:
    return column.most if callable(cell) else cell.cell_len


def _narrowest(columns: Sequence[Column], widths: dict[int, int]) -> int:
    return sum(columns[index].least for index in widths) + _BETWEEN * (len(widths) - 1)
