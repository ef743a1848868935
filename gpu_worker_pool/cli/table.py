"""Tables without borders: as narrow as possible, and one line a row in a pipe. Text that wraps beside a word."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Wider than any row: the reader of a pipe needs whole rows.
_UNBOUNDED_CELLS: Final = 100_000
_MAX_ON_TERMINAL: Final = 60


def make_table(*headings: str, whole: Collection[str] = ()) -> Table:
    """A table without rows. Where there is not enough room, the columns named in `whole` are the last to be wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading in whole, overflow="fold")
    return table


def print_table(console: Console, table: Table) -> None:
    """Print the table: on a terminal it fits the width; in a pipe nothing is wrapped, cut or padded at the end."""
    if console.is_terminal:
        console.print(table)
        return
    whole = Console(file=io.StringIO(), width=_UNBOUNDED_CELLS, color_system=None)
    with whole.capture() as captured:
        whole.print(table)
    for line in captured.get().splitlines():
        console.file.write(f"{line.rstrip()}\n")


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
