"""Rows of text in columns that fit into a width: columns that matter less are narrowed first, and then left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

# A text, which is cut to the width of its column; or a function from that width to the text, for bars.
Cell = Text | Callable[[int], Text]
_GAP = 1


@dataclass(frozen=True, slots=True)
class Column:
    """A column is as wide as its widest cell, but at most `most`. A cell that is a function takes `most`.

    Where there is not enough room, columns are narrowed down to `least`; then those of the highest `rank` are left out.
    A column that is empty in every row is left out too, unless it is the last one, which takes the rest of the line.
    """

    title: str
    least: int
    most: int
    rank: int = 0
    is_number: bool = False
    # It has a long form (`most`) and a short form (`least`), and nothing in between.
    is_stepped: bool = False


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> dict[int, int]:
    """The width of each column that is shown, by its index, for a line of this width."""
    widths = {}
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows]
        is_empty = rows and not any(callable(cell) or cell.plain for cell in cells)
        if not is_empty or index == len(columns) - 1:
            needed = (column.most if callable(cell) else cell.cell_len for cell in cells)
            widths[index] = min(max([cell_len(column.title), column.least, *needed]), column.most)
    while len(widths) > 1 and sum(columns[index].least + _GAP for index in widths) - _GAP > width:
        del widths[max(widths, key=lambda index: (columns[index].rank, index))]
    while (excess := sum(widths.values()) + _GAP * (len(widths) - 1) - width) > 0:
        spare, index = max((widths[index] - columns[index].least, index) for index in widths)
        if spare <= 0:
            break  # one column is left, and it is still too wide: it is cut
        widths[index] -= spare if columns[index].is_stepped else min(max(spare // 4, 1), excess)
    return widths


def line(columns: Sequence[Column], widths: dict[int, int], row: Sequence[Cell]) -> Text:
    """One row. Its last cell is neither cut nor padded: the caller decides how the line continues."""
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    last = max(widths)
    for index, width in widths.items():
        cell = row[index]
        shown = cell(width) if callable(cell) else cell.copy()
        if index != last:
            shown.truncate(width, overflow="ellipsis")
            missing = width - shown.cell_len
            text.append(" " * missing if columns[index].is_number else "").append_text(shown)
            text.append(" " * (_GAP if columns[index].is_number else missing + _GAP))
        else:
            text.append_text(shown)
    return text
