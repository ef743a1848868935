"""Tables without borders, text that wraps beside a word, and rows in columns that fit into a width."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Column as TableColumn
from rich.table import Table
from rich.text import Text

_MAX_ON_TERMINAL: Final = 60
# A text, which is cut to the width of its column; or a function from that width to the text, for bars.
Cell = Text | Callable[[int], Text]
_GAP = 1


def make_table(*headings: str, whole: Collection[str] = ()) -> Table:
    """A table without rows. Where there is not enough room, the columns named in `whole` are the last to be wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading in whole, overflow="fold")
    return table


def print_table(console: Console, table: Table, *, is_whole: bool = False) -> None:
    """Print the table: on a terminal it fits the width, unless it `is_whole`; in a pipe nothing is wrapped, cut or padded
    at the end.
    """
    if console.is_terminal and not is_whole:
        console.print(table)
        return
    # As Rich would print it, in a tenth of the time: a fleet has thousands of rows.
    columns = [_padded(console, column) for column in table.columns]
    for row in zip(*columns, strict=True):
        console.file.write(f"{'  '.join(row).rstrip()}\n")


def _padded(console: Console, column: TableColumn) -> list[str]:
    """The heading and the cells of a column, all of the same width."""
    cells = [_shown(console, cell) for cell in (column.header, *column.cells)]
    width, is_right = max(map(cell_len, cells)), column.justify == "right"
    pads = [" " * (width - cell_len(cell)) for cell in cells]
    return [pad + cell if is_right else cell + pad for pad, cell in zip(pads, cells, strict=True)]


def _shown(console: Console, cell: RenderableType) -> str:
    if isinstance(cell, str):
        return console.render_str(cell).plain if cell else ""
    assert isinstance(cell, Text), cell  # noqa: S101 - rows have nothing else
    return cell.plain


def show_beside(console: Console, word: Text, text: Text) -> None:
    """On a terminal a long text wraps beside the word; elsewhere it is one line, so that it can be searched."""
    if not console.is_terminal:
        console.print(word + text)
        return
    row = Table.grid()
    row.add_column(min_width=word.cell_len, max_width=word.cell_len, no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(word, text)
    console.print(row)


def cut(console: Console, text: str) -> str:
    """The beginning of a long text, such as a command, on a terminal; elsewhere all of it."""
    if not console.is_terminal or len(text) <= _MAX_ON_TERMINAL:
        return text
    return f"{text[: _MAX_ON_TERMINAL - 3]}..."


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
