"""Tables without borders, and text that wraps beside a word."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from .output import Console, Text, cell_len, cut_to, wrap

_GAP: Final = "  "
_MAX_ON_TERMINAL: Final = 60
# In a pipe a longer cell does not widen its column: one long message must not push all other lines apart.
_MOST_PADDED: Final = 40
# Columns are not made narrower than this.
_LEAST: Final = 8


class Table:
    def __init__(self, headings: Sequence[str], whole: Collection[str], right: Collection[str]) -> None:
        self.headings = list(headings)
        self.is_whole = [heading in whole for heading in headings]
        self.is_right = [heading in right for heading in headings]
        self.rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        self.rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])


def make_table(*headings: str, whole: Collection[str] = (), right: Collection[str] = ()) -> Table:
    """A table without rows. Where there is not enough room, the columns named in `whole` are the last to be wrapped; those
    in `right` have numbers.
    """
    return Table(headings, whole, right)


def print_table(console: Console, table: Table) -> None:
    """Print the table: on a terminal it fits the width; in a pipe nothing is wrapped or cut."""
    rows = [[Text(heading, "bold") for heading in table.headings], *table.rows]
    natural = [[cell_len(row[index].plain) for row in rows] for index in range(len(table.headings))]
    is_fitted = console.is_terminal
    if is_fitted:
        widths = _fitted([max(column) for column in natural], table.is_whole, console.width)
    else:
        most = max(_MOST_PADDED, *map(cell_len, table.headings))
        widths = [max((width for width in column if width <= most), default=0) for column in natural]
    for row in rows:
        cells = [_lines(cell, width) if is_fitted else [cell] for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            line = [lines[number] if number < len(lines) else Text() for lines in cells]
            console.write(f"{_joined(line, widths, table.is_right, console).rstrip()}\n")


def _joined(line: Sequence[Text], widths: Sequence[int], is_right: Sequence[bool], console: Console) -> str:
    shown = []
    for cell, width, is_number in zip(line, widths, is_right, strict=True):
        pad = " " * (width - cell_len(cell.plain))
        text = cell.rendered(has_colours=console.has_colours)
        shown.append(pad + text if is_number else text + pad)
    return _GAP.join(shown)


def _fitted(widths: list[int], is_whole: Sequence[bool], room: int) -> list[int]:
    """The widths for a line of this length: the widest columns that may be wrapped give most."""
    widths = list(widths)
    for may_shrink in ([not each for each in is_whole], [True] * len(widths)):
        while sum(widths) + len(_GAP) * (len(widths) - 1) > room:
            width, index = max(((width, i) for i, width in enumerate(widths) if may_shrink[i]), default=(0, 0))
            if width <= _LEAST:
                break
            widths[index] -= 1
    return widths


def _lines(cell: Text, width: int) -> list[Text]:
    """The cell in lines of this width; one that must be wrapped has the style of its beginning."""
    if cell_len(cell.plain) <= width:
        return [cell]
    style = cell.parts[0][1] if cell.parts else ""
    if cell.is_line:
        return [Text(cut_to(cell.plain, width), style)]
    return [Text(line, style) for line in wrap(cell.plain, width)]


def show_beside(console: Console, word: Text, text: str) -> None:
    """On a terminal a long text wraps beside the word; elsewhere it is one line, so that it can be searched."""
    indent = cell_len(word.plain)
    lines = wrap(text, max(console.width - indent, _LEAST)) if console.is_terminal else [text]
    console.print(Text().append(word).append(lines[0]))
    for line in lines[1:]:
        console.print(" " * indent + line)


def cut(console: Console, text: str) -> str:
    """The beginning of a long text, such as a command, on a terminal; elsewhere all of it."""
    if not console.is_terminal or len(text) <= _MAX_ON_TERMINAL:
        return text
    return f"{text[: _MAX_ON_TERMINAL - 3]}..."
